"""Readings in the format that Prometheus asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from limiter.metrics import catalogue
from limiter.metrics.readings import Reading, labelled
from limiter.model.tally import Histogram

Families = Iterable[Metric]


def info() -> Reading:
    """Return the version of Headgate that runs."""
    return labelled(catalogue.INFO, {version("headgate"): 1})


def families(readings: Iterable[Reading]) -> Iterator[Metric]:
    """Convert each reading to a family of samples."""
    for definition, values in readings:
        family = Metric(definition.family, definition.help, definition.kind)
        for label_values, value in values.items():
            labels = dict(zip(definition.labels, label_values, strict=True))
            if isinstance(value, Histogram):
                _add_histogram(family, labels, value)
            else:
                family.add_sample(definition.name, labels, float(value))
        yield family


def _add_histogram(family: Metric, labels: dict[str, str], histogram: Histogram) -> None:
    bounds = [*map(float, histogram.bounds), float("inf")]
    count = 0
    for bound, count in zip(bounds, histogram.cumulative, strict=True):
        family.add_sample(f"{family.name}_bucket", {**labels, "le": floatToGoString(bound)}, count)
    family.add_sample(f"{family.name}_count", labels, count)
    family.add_sample(f"{family.name}_sum", labels, histogram.sum)


def encode(shown: Families, accept: str) -> tuple[bytes, str]:
    """Return the answer to a scrape and its content type; `accept` is the request's header."""
    listed = list(shown)
    encoder, content_type = choose_encoder(accept)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Scraped(lambda: listed))
    return encoder(registry), content_type


class Scraped(Collector):
    """Calls a function for its readings at every scrape."""

    def __init__(self, collect: Callable[[], Families]) -> None:
        self._collect = collect

    def collect(self) -> Families:
        return self._collect()
