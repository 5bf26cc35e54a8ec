"""Counts of one client, as plain numbers and, with prometheus-client, as metrics `headgate_client_…`.

    gate.counts()             {"granted": 12, "leases": 1, …}
    headgate.metrics(gate)    registers a collector, and returns it

Names that end in `_total` in the metrics are counts since the client was made or, for what its connections did, since
it was opened; the others are what is the case now.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from limiter.client.request_context import raises

if TYPE_CHECKING:
    from limiter.client.gate import Parts
    from limiter.client.retry_budget import RetryBudget

TOTALS = {
    "granted": "Requests that the service granted.",
    "refused": "Requests that the service or a lease refused.",
    "rejected": "Requests that adaptive throttling rejected without asking the service.",
    "decided_locally": "Requests that a lease granted or refused without asking the service.",
    "undecided": "Requests that were decided without the service because no node decided in time.",
    "requests": "Requests for admission, without repeats and without those that a lease decided.",
    "retries": "Repeats of requests, as far as the retry budget allowed them.",
    "retries_refused": "Repeats that were not made because the retry budget was spent.",
    "calls": "HTTP requests sent to nodes.",
    "call_failures": "HTTP requests that no node answered.",
    "acquires": "Acquires sent, alone or in batches.",
    "settles": "Settles and progress reports sent.",
    "settles_repeated": "Settles sent again because they were not answered.",
    "settles_refused": "Settles that the service did not take.",
}
GAUGES = {
    "settles_waiting": "Settles that are not answered yet.",
    "leases": "Leases that decide at present.",
}


class Counted(Protocol):
    """A client, sync or not."""

    def counts(self) -> dict[str, float]: ...

    def probabilities(self) -> dict[str | None, float]: ...


class HasCounters(Protocol):
    """The counters of a client itself."""

    granted: int
    refused: int
    rejected: int
    decided_locally: int
    undecided: int


def count(gate: HasCounters, parts: Parts | None, retries: RetryBudget) -> dict[str, float]:
    """Return all counts of a client by their names."""
    found: dict[str, float] = dict.fromkeys((*TOTALS, *GAUGES), 0)
    found |= {
        "granted": gate.granted,
        "refused": gate.refused,
        "rejected": gate.rejected,
        "decided_locally": gate.decided_locally,
        "undecided": gate.undecided,
        "requests": retries.requests,
        "retries": retries.retries,
        "retries_refused": retries.refused,
    }
    if parts is not None:
        calls, pool = parts.calls, parts.pool
        found |= {
            "calls": pool.calls,
            "call_failures": pool.failures,
            "acquires": calls.acquires,
            "settles": calls.settles,
            "settles_repeated": calls.settles_repeated,
            "settles_refused": calls.settles_refused,
            "settles_waiting": calls.unsettled,
            "leases": parts.leasing.live,
        }
    return found


class ClientCollector:
    """Collector of prometheus-client for one client."""

    def __init__(self, gate: Counted, labels: dict[str, str] | None = None) -> None:
        self._gate = gate
        self._labels = labels or {}

    def collect(self) -> Iterator[Any]:
        """Yield the families of metrics, with the values of now."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        names, values = list(self._labels), list(self._labels.values())
        counts = self._gate.counts()
        for kind, texts in ((CounterMetricFamily, TOTALS), (GaugeMetricFamily, GAUGES)):
            for name, text in texts.items():
                family = kind(f"headgate_client_{name}", text, labels=names)
                family.add_metric(values, counts[name])
                yield family
        text = "Highest probability with which a request of this class is rejected without asking."
        labels = [*names, "criticality"]
        rejection = GaugeMetricFamily("headgate_client_rejection_probability", text, labels=labels)
        for class_, probability in self._gate.probabilities().items():
            rejection.add_metric([*values, class_ or "default"], probability)
        yield rejection
        text = "Requests whose criticality was raised explicitly."
        raised = CounterMetricFamily("headgate_client_raises", text, labels=[*names, "before", "after"])
        for (before, after), number in raises.counts().items():
            raised.add_metric([*values, before or "none", after], number)
        yield raised


def metrics(gate: Counted, *, registry: Any = None, **labels: str) -> ClientCollector:
    """Register the counts of a client with prometheus-client, and return the collector. Name each of several clients by
    a label: `metrics(gate, client="orders")`."""
    from prometheus_client import REGISTRY

    collector = ClientCollector(gate, labels)
    (REGISTRY if registry is None else registry).register(collector)
    return collector
