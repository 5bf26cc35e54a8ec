"""A run as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from loadtest.locust.draws import CLASSES
from loadtest.locust.limits import WorkLimit
from loadtest.locust.run_tally import Tally
from loadtest.locust.thresholds import Check
from loadtest.probe import Times


def report(title: str, tally: Tally, checks: Sequence[Check], limit: WorkLimit, probed: Times) -> str:
    """Return the whole document."""
    seconds = sorted(tally.seconds.items())
    first = seconds[0][0] if seconds else 0
    by_second = [
        (at - first, f"{s.demanded:.0f}", f"{s.admitted:.0f}", f"{s.admitted / limit.rate:.0%}",
         s.granted, s.refused, s.failed)
        for at, s in seconds
    ]  # fmt: skip
    parts = [
        f"# {title}",
        table(("check", "found", "allowed", ""), [checked(check) for check in checks]),
        table(("figure", "value"), _figures(tally, limit)),
        table(TIMES_HEAD, [times("the probe, which does nothing else", probed)]),
        table(("refusals by reason", "count"), _counts(tally.refusals)),
        table(("class", "asked", "refused"), [_class(tally, name) for name in CLASSES]),
        table(("failed attempts by kind", "count"), _counts(tally.failures)),
        table(("second", "demanded", "admitted", "of the limit", "granted", "refused", "failed"), by_second),
    ]
    return "\n\n".join(parts) + "\n"


def checked(check: Check) -> tuple[str, str, str, str]:
    """Return a row of a table of checks."""
    return check.name, check.found, check.allowed, "holds" if check.holds else "**broken**"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def _figures(tally: Tally, limit: WorkLimit) -> list[tuple[str, str]]:
    seconds = max(1, len(tally.seconds))
    return [
        ("decisions", f"{tally.decisions} ({tally.decisions / seconds:.0f} a second)"),
        ("work admitted", f"{tally.admitted / seconds:.0f} a second, limit {limit.rate:g}"),
        ("acquire p50, p99, as users read it", f"{tally.acquire_p_ms(50):.1f} ms, {tally.acquire_p_ms(99):.1f} ms"),
        ("settle lag p50, p99", f"{tally.settle_lag_p_ms(50):.1f} ms, {tally.settle_lag_p_ms(99):.1f} ms"),
        ("retries after a refusal", str(tally.retries)),
        ("decided without the store", str(tally.degraded)),
        ("answers that users read late", str(tally.read_late)),
    ]


TIMES_HEAD = ("measured by", "calls", "p50", "p99", "p99.9", "slowest", "late")


def times(by: str, found: Times) -> tuple[str, ...]:
    """Return a row of a table of answer times."""
    shown = [f"{ms:.1f} ms" for ms in (*found.percentiles_ms.values(), found.slowest_ms)]
    return by, str(found.count), *shown, str(found.late)


def _counts(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda row: -row[1]) or [("none", 0)]


def _class(tally: Tally, name: str) -> tuple[str, int, str]:
    return name, tally.asked_by_class.get(name, 0), f"{tally.refused_share(name):.1%}"
