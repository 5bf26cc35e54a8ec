"""The proxy's metrics, in a registry of its own; docs/proxy.md describes the same, and a test compares them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.metadata import version

from limiter.cli.proxy_plane import ProxyPlane
from limiter.client.node_pool import NodePool
from limiter.metrics.catalogue import Definition
from limiter.metrics.exposition import encode as encode_families
from limiter.metrics.exposition import families
from limiter.metrics.readings import Reading, labelled, plain

INFO = Definition("headgate_proxy_info", "gauge", "Always 1; the label has the version.", ("version",))
ACQUIRES = Definition(
    "headgate_proxy_acquires_total",
    "counter",
    "Acquires by where they were decided (service, lease, known, adaptive, proxy) and how.",
    ("where", "decision"),
)
WAITING = Definition(
    "headgate_proxy_waiting_operations", "gauge", "Operations of clients that wait for an answer of the service."
)
LOAD = Definition(
    "headgate_proxy_load_ratio", "gauge", "How busy the proxy is, from 0 to 1: its processor or its queue."
)
CALLS = Definition("headgate_proxy_upstream_calls_total", "counter", "Calls to nodes of the service.")
FAILURES = Definition(
    "headgate_proxy_upstream_failures_total", "counter", "Calls that a node did not answer, or not in time."
)
BATCHES = Definition(
    "headgate_proxy_batches_total", "counter", "Batches sent to the service; each carries many operations."
)
OPERATIONS = Definition("headgate_proxy_batched_operations_total", "counter", "Operations that the batches carried.")
RETRIES = Definition(
    "headgate_proxy_retries_total", "counter", "Acquires that the proxy asked again after an answer without a decision."
)
LEASES = Definition("headgate_proxy_leases", "gauge", "Leases that decide at present.")
RESERVATIONS = Definition(
    "headgate_proxy_reservations", "gauge", "Reservations granted from leases that can still be settled."
)
HTTP = Definition(
    "headgate_proxy_http_requests_total",
    "counter",
    "HTTP answers to clients by route and status. The route is `none` for unknown paths and malformed requests.",
    ("route", "status"),
)
ALL = (
    INFO, ACQUIRES, WAITING, LOAD, CALLS, FAILURES, BATCHES, OPERATIONS, RETRIES, LEASES, RESERVATIONS, HTTP,
)  # fmt: skip


def readings(plane: ProxyPlane, pool: NodePool, load: float) -> Iterator[Reading]:
    """Return the proxy's figures at this moment."""
    desk = plane.desk
    yield labelled(INFO, {version("headgate"): 1})
    yield Reading(ACQUIRES, {labels: float(number) for labels, number in desk.decided.items()})
    yield plain(WAITING, desk.waiting)
    yield plain(LOAD, load)
    yield plain(CALLS, pool.calls)
    yield plain(FAILURES, pool.failures)
    yield plain(BATCHES, desk.calls.batches)
    yield plain(OPERATIONS, desk.calls.acquires + desk.calls.settles)
    yield plain(RETRIES, desk.retries.retries)
    yield plain(LEASES, desk.leasing.live)
    yield plain(RESERVATIONS, len(desk.reservations))
    yield Reading(HTTP, {(route.decode(), str(status)): count for (route, status), count in plane.requests.items()})


def encode(shown: Iterable[Reading], accept: str) -> tuple[bytes, str]:
    """Return the answer to a scrape and its content type."""
    return encode_families(families(shown), accept)
