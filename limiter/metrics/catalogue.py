"""All metrics. Labels are from closed sets, or names that operators gave; never text from clients.

docs/metrics.md describes the same; a test compares the two, and both with the metrics of a running node.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["counter", "gauge", "histogram"]
Together = Literal["sum", "max", "min"]


class Definition(NamedTuple):
    """One metric."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    together: Together = "sum"
    """How a gauge of several processes is combined. Counters and histograms add up."""

    @property
    def family(self) -> str:
        """The name without the suffix of counters."""
        return self.name.removesuffix("_total")


def _counter(name: str, text: str, *labels: str) -> Definition:
    assert name.endswith("_total")
    return Definition(name, "counter", text, labels)


def _gauge(name: str, text: str, *labels: str, together: Together = "max") -> Definition:
    return Definition(name, "gauge", text, labels, together)


def _histogram(name: str, text: str, *labels: str) -> Definition:
    return Definition(name, "histogram", text, labels)


# Decisions

DECISIONS = _counter(
    "headgate_decisions_total",
    "Acquires by decision (granted, refused, undecided) and reason. Undecided ones were answered 503.",
    "decision",
    "reason",
)
DEGRADED = _counter("headgate_degraded_decisions_total", "Acquires that were decided without the store.", "decision")
UNCOVERED = _counter(
    "headgate_uncovered_requests_total",
    "Acquires that no policy covers. namespace_known is false if the namespace is neither declared nor has policies.",
    "namespace_known",
)
SHADOW_DENIED = _counter(
    "headgate_shadow_denied_total", "Acquires that a policy with `deny` and `shadow` would have refused."
)
REPEATED = _counter(
    "headgate_repeated_refusals_total",
    "Acquires that a node refused by itself because the store had just refused the same; counted as refused, too.",
)
RETRIES = _counter(
    "headgate_retried_requests_total",
    "Acquires that said they were tried before, by attempt: 2, or 3+ for the third and later ones.",
    "attempt",
)
DRY_RUNS = _counter("headgate_dry_runs_total", "Dry runs.")
REPLAYED = _counter(
    "headgate_replayed_decisions_total", "Acquires that repeated an Idempotency-Key and got the first decision again."
)
WORK_ADMITTED = _counter("headgate_work_admitted_total", "Work units charged by granted acquires.")

# Leases

LEASE_REQUESTS = _counter(
    "headgate_lease_requests_total",
    "Requests for leases, renewals and returns by outcome. empty: nothing could be lent. not_allowed: a policy lends "
    "nothing. closed: the lease was given back or revoked. unanswered: the store did not answer.",
    "outcome",
)

# Settles

SETTLES = _counter("headgate_settles_total", "Settles by outcome: settled, late, progress or duplicate.", "outcome")
WORK_SETTLED = _counter("headgate_work_settled_total", "Work units reported by final settles.")
WORK_CORRECTED = _counter(
    "headgate_work_corrected_total",
    "Work units by which settles corrected charges: debited (charged too little) or refunded (charged too much).",
    "direction",
)
WORK_UNCOLLECTED = _counter(
    "headgate_work_uncollected_total", "Work units beyond max_debt that no bucket was charged for."
)

RESERVATIONS_DUE = _counter(
    "headgate_reservations_due_total",
    "Deadlines of reservations that passed for good: one for each acquire and one for each renewal by progress.",
    "namespace",
    "policy",
)
RESERVATIONS_DUE_SETTLED = _counter(
    "headgate_reservations_due_settled_total",
    "Passed deadlines whose reservation was settled, on any node.",
    "namespace",
    "policy",
)
RESERVATIONS_DUE_RENEWED = _counter(
    "headgate_reservations_due_renewed_total",
    "Passed deadlines that progress had renewed.",
    "namespace",
    "policy",
)

# The store

CALL_OPERATIONS = _histogram("headgate_store_call_operations", "Operations per call to the store.", "operation")
CALL_SECONDS = _histogram(
    "headgate_store_call_seconds", "Seconds until a call to the store was answered, repeats included.", "operation"
)
UNANSWERED = _counter(
    "headgate_store_unanswered_total",
    "Operations that the store did not answer, by reason: deadline, busy (too many waiting), breaker, out_of_memory.",
    "operation",
    "reason",
)
STORE_UP = _gauge("headgate_store_up", "1 if the store answered the last health check.", together="min")
STORE_LOSS = _gauge("headgate_store_loss", "1 from a loss of the store's policies until somebody acknowledges it.")
STORE_OUT_OF_MEMORY = _gauge(
    "headgate_store_out_of_memory",
    "1 while the store is out of memory: acquires are decided without it, settles still work.",
)
QUOTA_OWED = _gauge(
    "headgate_quota_owed_buckets",
    "Quota buckets whose grants without the store have not been debited there yet.",
    together="sum",
)
BREAKER_OPEN = _gauge(
    "headgate_breaker_open", "1 while the circuit breaker is open: the store failed repeatedly and is only probed."
)

# The node

INFO = _gauge("headgate_info", "Always 1; the label has the version.", "version")
READY = _gauge("headgate_ready", "1 if the node is ready for traffic.", together="min")
NODES = _gauge("headgate_nodes", "API processes on this store that this one knows, itself included.")
POLICIES = _gauge("headgate_policies", "Policies in force.")
POLICIES_REVISION = _gauge("headgate_policies_revision", "Revision of the policies in force.", together="min")
HTTP_REQUESTS = _counter(
    "headgate_http_requests_total",
    "HTTP answers by route and status. The route is `none` for unknown paths and malformed requests.",
    "route",
    "status",
)
BUSY_BATCHES = _counter(
    "headgate_busy_batches_total", "Batches that a node refused, whole or in part, because it had too much to do."
)

# Policies without `per`: one bucket each

POLICY_BALANCE = _gauge("headgate_policy_balance", "Units in the bucket; below 0 it is debt.", "namespace", "policy")
POLICY_CAPACITY = _gauge("headgate_policy_capacity", "The most units that the bucket holds.", "namespace", "policy")
POLICY_COMMITTED = _gauge(
    "headgate_policy_committed_work_per_second",
    "The committed rate in units per second; absent for a quota.",
    "namespace",
    "policy",
)
POLICY_CAP = _gauge(
    "headgate_policy_cap_requests_per_second",
    "The cap of a bucket that counts requests, in requests per second.",
    "namespace",
    "policy",
)
POLICY_CHARGE = _gauge(
    "headgate_policy_learned_charge_work",
    "The learned charge in units; absent until something was learned.",
    "namespace",
    "policy",
)
POLICY_CHARGE_ERROR = _gauge(
    "headgate_policy_charge_error_ratio",
    "Smoothed error of the learned charge: 0.5 means that requests cost 50 % more than charged.",
    "namespace",
    "policy",
)
POLICY_UNCOLLECTED = _gauge(
    "headgate_policy_uncollected_work", "Work units beyond max_debt since the bucket began.", "namespace", "policy"
)
POLICY_THROTTLE = _gauge(
    "headgate_policy_throttle_multiplier",
    "The throttle M of expectations: a request of rank P is refused with probability M·P %.",
    "namespace",
    "policy",
)
POLICY_REFUSED_SHARE = _gauge(
    "headgate_policy_refused_share_ratio",
    "The share of a class's requests that overload control refuses, from 0 to 1.",
    "namespace",
    "policy",
    "criticality",
)
POLICY_CLASS_RATE = _gauge(
    "headgate_policy_class_rate_requests_per_second",
    "Requests per second that a class may send under response-time control; absent if it is not limited.",
    "namespace",
    "policy",
    "criticality",
)
POLICY_CLASS_LIMIT = _gauge(
    "headgate_policy_class_limit_requests",
    "Requests of all classes that may be in flight before a class is refused; absent if it is not limited.",
    "namespace",
    "policy",
    "criticality",
)
POLICY_IN_FLIGHT = _gauge(
    "headgate_policy_in_flight_requests",
    "Requests that were granted and are not settled, where they are counted.",
    "namespace",
    "policy",
)
POLICY_LATE_SHARE = _gauge(
    "headgate_policy_late_share_ratio",
    "The share of recent answers that were late and count, from 0 to 1.",
    "namespace",
    "policy",
)
POLICY_TARGET = _gauge(
    "headgate_policy_target_seconds",
    "The target of response times: the shortest of the classes that ask.",
    "namespace",
    "policy",
)
POLICY_PERCENTILE = _gauge(
    "headgate_policy_percentile_seconds",
    "The percentile of recent response times, where the policy keeps a histogram.",
    "namespace",
    "policy",
)
POLICY_QUALITY = _gauge(
    "headgate_policy_quality_ratio", "The quality that answers ask services for, from 0 to 1.", "namespace", "policy"
)
POLICY_OVERLOADED = _gauge(
    "headgate_policy_overloaded", "1 while answers ask callers to slow down.", "namespace", "policy"
)
POLICY_STATE = _gauge(
    "headgate_policy_overload_state",
    "How a bucket fares: 0 calm, 1 degraded, 2 recovering, 3 overloaded.",
    "namespace",
    "policy",
)
POLICY_HOLDERS = _gauge(
    "headgate_policy_lease_holders",
    "Holders of leases, each by its weight; only of policies that lend.",
    "namespace",
    "policy",
)
POLICIES_NOT_SHOWN = _gauge(
    "headgate_policies_not_shown", "Policies without `per` that were left out because the display limit was reached."
)
UNSTEERED = _gauge("headgate_unsteered_partitions", "Partitions with something to steer that no controller owns.")

# The controller

CYCLE_SECONDS = _histogram(
    "headgate_controller_cycle_seconds", "Seconds that a controller cycle over one partition took."
)
CYCLE_BUCKETS = _counter(
    "headgate_controller_buckets_total", "Buckets that the controller sampled, each once per cycle."
)
CYCLE_SLIPS = _counter("headgate_controller_slips_total", "Cycles that took longer than the time between two cycles.")
CYCLE_FAILURES = _counter("headgate_controller_failures_total", "Cycles that failed because of the store.")
LEASES = _counter(
    "headgate_controller_leases_total", "Leases of partitions that the controller took or lost.", "change"
)
OWNED = _gauge("headgate_controller_owned_partitions", "Partitions that this controller owns.", together="sum")
STEERED = _gauge("headgate_controller_partitions", "Partitions with something to steer, owned or not.")

ALL: tuple[Definition, ...] = tuple(found for found in list(globals().values()) if isinstance(found, Definition))
