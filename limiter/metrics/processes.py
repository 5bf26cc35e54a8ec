"""The processes of one machine, scraped as one: each writes its numbers to a directory, the scraped one adds them up.

    numbers ── about once a second ──► <kind>_<pid>.db ──► added up by the scraped process

The files and their merging are prometheus-client's own multi-process format. That library writes at each increment;
here absolute values are written once a second: a request costs nothing more, and other processes' numbers are up to a
second old.

The counters of a process that has ended must stay, otherwise totals would go back and look like a restart: they are
added to those of all ended processes, in one file, so that files do not accumulate. Its gauges are removed.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

from prometheus_client import Metric
from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.utils import floatToGoString

from limiter.metrics.catalogue import Definition
from limiter.metrics.readings import Labels, Reading
from limiter.model.tally import Histogram
from limiter.settings import Settings

FLUSH_S = 1.0
GONE = "gone"
KEPT_KINDS = ("counter", "histogram")


class Shelf:
    """The files of one process's numbers."""

    def __init__(self, directory: Path, read: Callable[[], Iterable[Reading]], *, pid: int | None = None) -> None:
        self.directory = directory
        self._read = read
        self._pid = os.getpid() if pid is None else pid
        self._files: dict[str, MmapedDict] = {}

    async def run(self) -> None:
        """Write the numbers about once a second, until cancelled, and then a last time."""
        try:
            while True:
                self.flush()
                await asyncio.sleep(FLUSH_S)
        finally:
            self.flush()
            self.close()

    def close(self) -> None:
        """Close the files; they stay."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def flush(self) -> None:
        """Write the numbers now."""
        for definition, values in self._read():
            file = self._file(definition)
            for labels, value in values.items():
                if isinstance(value, Histogram):
                    _write_histogram(file, definition, labels, value)
                else:
                    file.write_value(_key(definition, definition.name, labels), float(value), 0.0)

    def _file(self, definition: Definition) -> MmapedDict:
        kind = f"gauge_live{definition.together}" if definition.kind == "gauge" else definition.kind
        if kind not in self._files:
            self._files[kind] = MmapedDict(str(self.directory / f"{kind}_{self._pid}.db"))
        return self._files[kind]


def _write_histogram(file: MmapedDict, definition: Definition, labels: Labels, histogram: Histogram) -> None:
    """Write each bucket's own count: they are made cumulative when they are read."""
    file.write_value(_key(definition, f"{definition.name}_sum", labels), histogram.sum, 0.0)
    for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        le = floatToGoString(float(bound))
        file.write_value(_key(definition, f"{definition.name}_bucket", labels, le), float(count), 0.0)


@lru_cache(maxsize=4096)
def _key(definition: Definition, sample: str, labels: Labels, le: str | None = None) -> str:
    names, values = [*definition.labels], [*labels]
    if le is not None:
        names, values = [*names, "le"], [*values, le]
    return mmap_key(definition.family, sample, names, values, definition.help)


def merged(directory: Path) -> list[Metric]:
    """Return the numbers of all processes, added up."""
    with _locked(directory, fcntl.LOCK_SH):
        return list(MultiProcessCollector(None, str(directory)).collect())


def bury(directory: Path, pid: int) -> None:
    """Keep the counters of a process that has ended, and remove its other files."""
    with _locked(directory, fcntl.LOCK_EX):
        mark_process_dead(pid, str(directory))
        for kind in KEPT_KINDS:
            left = directory / f"{kind}_{pid}.db"
            if left.exists():
                _add(left, directory / f"{kind}_{GONE}.db")
                left.unlink()


def _add(left: Path, gone: Path) -> None:
    files = [str(path) for path in (left, gone) if path.exists()]
    sums = MultiProcessCollector.merge(files, accumulate=False)
    kept = MmapedDict(str(gone))
    for metric in sums:
        for sample in metric.samples:
            key = mmap_key(metric.name, sample.name, [*sample.labels], [*sample.labels.values()], metric.documentation)
            kept.write_value(key, sample.value, 0.0)
    kept.close()


@contextmanager
def shared(settings: Settings) -> Iterator[Settings]:
    """Yield the settings with a directory that all processes of this machine share; it is removed at the end."""
    if settings.metrics_dir is not None:
        yield settings
        return
    with TemporaryDirectory(prefix="headgate-metrics-") as made:
        yield settings.model_copy(update={"metrics_dir": Path(made)})


@contextmanager
def _locked(directory: Path, how: int) -> Iterator[None]:
    """Lock the directory: a scrape while counters are moved would count them twice, or not at all."""
    held = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(held, how)
        yield
    finally:
        os.close(held)
