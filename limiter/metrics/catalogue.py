"""Every metric that there is. Labels are from closed sets, or names that operators gave; never text from clients.

docs/metrics.md says the same; a test compares the two, and both with what a running node shows.
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
    """What a gauge of several processes comes to. Counters and histograms add up."""

    @property
    def family(self) -> str:
        """The name without what every counter ends with."""
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
    "Acquires by what was decided: granted, refused or undecided (503), and why.",
    "decision",
    "reason",
)
DEGRADED = _counter(
    "headgate_degraded_decisions_total", "Those of them that were decided without the store.", "decision"
)
UNCOVERED = _counter(
    "headgate_uncovered_requests_total",
    "Acquires that no policy covers, by whether their namespace is declared or has policies (true, false).",
    "namespace_known",
)
SHADOW_DENIED = _counter(
    "headgate_shadow_denied_total", "Acquires that a policy with `deny` and `shadow` would have refused."
)
DRY_RUNS = _counter("headgate_dry_runs_total", "Acquires that only asked what would be.")
REPLAYED = _counter("headgate_replayed_decisions_total", "Acquires answered again under their Idempotency-Key.")
WORK_ADMITTED = _counter("headgate_work_admitted_total", "Work units that granted acquires were charged.")

# Settles

SETTLES = _counter(
    "headgate_settles_total", "Settles by what they were: settled, late, progress or duplicate.", "outcome"
)
WORK_SETTLED = _counter("headgate_work_settled_total", "Work units that finished requests really took.")
WORK_CORRECTED = _counter(
    "headgate_work_corrected_total",
    "Work units by which estimates were off: debited (charged too little) and refunded (too much).",
    "direction",
)
WORK_UNCOLLECTED = _counter(
    "headgate_work_uncollected_total", "Work units beyond max_debt, which no bucket was charged for."
)

RESERVATIONS_DUE = _counter(
    "headgate_reservations_due_total",
    "Deadlines of reservations that are over for good: one for each acquire, and one for each renewal by progress.",
    "namespace",
    "policy",
)
RESERVATIONS_DUE_SETTLED = _counter(
    "headgate_reservations_due_settled_total",
    "Deadlines among those due whose reservation was settled, on whichever node.",
    "namespace",
    "policy",
)
RESERVATIONS_DUE_RENEWED = _counter(
    "headgate_reservations_due_renewed_total",
    "Deadlines among those due that progress had moved to a later time.",
    "namespace",
    "policy",
)

# The store

CALL_OPERATIONS = _histogram("headgate_store_call_operations", "Operations in one call to the store.", "operation")
CALL_SECONDS = _histogram(
    "headgate_store_call_seconds", "Time until a call was answered, repeats included.", "operation"
)
UNANSWERED = _counter(
    "headgate_store_unanswered_total",
    "Operations without an answer of the store: deadline (missed), busy (too many waiting), breaker, out_of_memory.",
    "operation",
    "reason",
)
STORE_UP = _gauge("headgate_store_up", "1 if the store answered when it was last asked how it is.", together="min")
STORE_LOSS = _gauge("headgate_store_loss", "1 since the store lost its policies, until somebody acknowledges that.")
STORE_OUT_OF_MEMORY = _gauge(
    "headgate_store_out_of_memory", "1 while the store has no memory for acquires; it still takes settles."
)
QUOTA_OWED = _gauge(
    "headgate_quota_owed_buckets",
    "Quota buckets with grants made without the store that it has not debited yet.",
    together="sum",
)
BREAKER_OPEN = _gauge("headgate_breaker_open", "1 while the store failed so often that it is only probed.")

# The node

INFO = _gauge("headgate_info", "1; which version runs.", "version")
READY = _gauge("headgate_ready", "1 if the node has all that it needs to decide.", together="min")
NODES = _gauge("headgate_nodes", "API processes that this one knows of, itself included.")
POLICIES = _gauge("headgate_policies", "Policies in force.")
POLICIES_REVISION = _gauge("headgate_policies_revision", "Revision of the policies in force.", together="min")
HTTP_REQUESTS = _counter(
    "headgate_http_requests_total",
    "HTTP answers by route and status; route is `none` where the path is unknown or the request was not understood.",
    "route",
    "status",
)
BUSY_BATCHES = _counter("headgate_busy_batches_total", "Batches refused because too many operations were in progress.")

# Policies without `per`: one bucket each

POLICY_BALANCE = _gauge("headgate_policy_balance", "Tokens in the bucket; below 0: debt.", "namespace", "policy")
POLICY_CAPACITY = _gauge("headgate_policy_capacity", "Most tokens that the bucket may hold.", "namespace", "policy")
POLICY_COMMITTED = _gauge(
    "headgate_policy_committed_work_per_second", "The committed rate; none of a quota.", "namespace", "policy"
)
POLICY_CAP = _gauge(
    "headgate_policy_cap_requests_per_second", "The cap, where requests are counted.", "namespace", "policy"
)
POLICY_CHARGE = _gauge(
    "headgate_policy_learned_charge_work", "The learned charge, once there is one.", "namespace", "policy"
)
POLICY_CHARGE_ERROR = _gauge(
    "headgate_policy_charge_error_ratio",
    "(work − learned charge) / learned charge, smoothed: 0.5 is half as much again as charged.",
    "namespace",
    "policy",
)
POLICY_UNCOLLECTED = _gauge(
    "headgate_policy_uncollected_work", "Work beyond max_debt since the bucket began.", "namespace", "policy"
)
POLICY_THROTTLE = _gauge(
    "headgate_policy_throttle_multiplier",
    "M: a request of rank P is refused with probability M·P %, where callers' expectations count.",
    "namespace",
    "policy",
)
POLICY_REFUSED_SHARE = _gauge(
    "headgate_policy_refused_share_ratio",
    "The share of a class's requests that overload control refuses: by the throttle or by reported load.",
    "namespace",
    "policy",
    "criticality",
)
POLICY_CLASS_RATE = _gauge(
    "headgate_policy_class_rate_requests_per_second",
    "Requests of a class that response times allow; none of a class that is not limited.",
    "namespace",
    "policy",
    "criticality",
)
POLICY_QUALITY = _gauge("headgate_policy_quality_ratio", "How good answers should be, 0 to 1.", "namespace", "policy")
POLICY_OVERLOADED = _gauge(
    "headgate_policy_overloaded", "1 while callers are told to slow down.", "namespace", "policy"
)
POLICIES_NOT_SHOWN = _gauge("headgate_policies_not_shown", "Policies without `per` beyond as many as are shown.")
UNSTEERED = _gauge("headgate_unsteered_partitions", "Partitions with something to steer that no controller owns.")

# The controller

CYCLE_SECONDS = _histogram("headgate_controller_cycle_seconds", "Time that a cycle over one partition took.")
CYCLE_BUCKETS = _counter("headgate_controller_buckets_total", "Buckets looked at, each once a cycle.")
CYCLE_SLIPS = _counter("headgate_controller_slips_total", "Cycles that ended after the next should have begun.")
CYCLE_FAILURES = _counter("headgate_controller_failures_total", "Cycles that the store did not let finish.")
LEASES = _counter("headgate_controller_leases_total", "Leases of partitions, taken and lost.", "change")
OWNED = _gauge("headgate_controller_owned_partitions", "Partitions that the controller owns now.", together="sum")
STEERED = _gauge("headgate_controller_partitions", "Partitions with something to steer, whoever owns them.")

ALL: tuple[Definition, ...] = tuple(found for found in list(globals().values()) if isinstance(found, Definition))
