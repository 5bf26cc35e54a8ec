"""The answers of management routes as types: the routes build these, and the OpenAPI document describes them."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from limiter.model.bucket.contract import StateName

Json = dict[str, Any]


class PolicyList(TypedDict):
    """Policies and namespaces, with the revision of the whole."""

    revision: int
    namespaces: dict[str, Json]
    policies: list[Json]
    revisions: dict[str, int]
    owners: dict[str, str]
    damaged: dict[str, Any]
    warnings: list[str]


class Entry(TypedDict):
    """A policy or a namespace, by name."""

    kind: str
    namespace: str
    name: str


class KeptEntry(Entry):
    """A policy or a namespace of another owner, which was left as it is."""

    owner: str
    revision: int


class AppliedSet(TypedDict):
    """The changes that applying a set made, or would make."""

    revision: int
    dry_run: bool
    made: list[Entry]
    changed: list[Entry]
    removed: list[Entry]
    kept: list[KeptEntry]


class CheckedSet(TypedDict):
    """The set is valid."""

    ok: bool
    warnings: list[str]


class Revision(TypedDict):
    """One change of a policy or a namespace."""

    revision: int
    when: str
    who: str
    action: str
    owner: str | None
    before: Json | None
    after: Json | None


class Change(Revision):
    """One entry of the audit log."""

    kind: str
    namespace: str | None
    name: str


class PolicyHistory(TypedDict):
    """The changes of one policy, newest first."""

    policy: str
    namespace: str
    history: list[Revision]


class AuditPage(TypedDict):
    """A page of the audit log, newest first."""

    changes: list[Change]
    cursor: str


class NamespaceList(TypedDict):
    """Declared namespaces, with the revision of all policies and namespaces."""

    revision: int
    namespaces: dict[str, Json]
    revisions: dict[str, int]
    owners: dict[str, str]


class LostPolicy(TypedDict):
    """A policy that the store lost."""

    namespace: str
    name: str


class Loss(TypedDict):
    """One or several losses that were not acknowledged in between."""

    when: str
    last: str
    times: int
    revision_before: int
    revision_after: int
    policies: list[LostPolicy]
    more: int


class AcknowledgedLoss(TypedDict):
    """The last loss that somebody acknowledged."""

    who: str
    when: str
    loss: Loss


class LossStatus(TypedDict):
    """Losses of policies: the one that is not acknowledged, and the last one that is."""

    lost: bool
    loss: NotRequired[Loss]
    acknowledged: NotRequired[AcknowledgedLoss]


class LossAcknowledged(TypedDict):
    """The result of acknowledging a loss."""

    acknowledged: bool


class ClassState(TypedDict):
    """One class of requests under overload control."""

    refused_share: float
    rate: float
    limit: float
    asked: float
    refused: float
    timed: float
    late: float


class OverloadState(TypedDict):
    """The state of overload control for a bucket."""

    quality: float
    overloaded: bool
    state: StateName
    classes: dict[str, ClassState]


class Bucket(TypedDict):
    """A live bucket."""

    namespace: str
    bucket: str
    policy: str
    mechanism: Literal["work", "requests", "quota"]
    balance: float
    capacity: float
    rate: float
    updated_ms: float
    requests: float
    admitted: float
    refused: float
    work_charged: float
    work_settled: float
    settles: float
    uncollected: float
    second_attempts: int
    further_attempts: int
    in_flight: NotRequired[float]
    overload: NotRequired[OverloadState]


class BucketPage(TypedDict):
    """A page of the live buckets in one partition."""

    buckets: list[Bucket]
    cursor: str
    unreadable: list[str]


class Owner(TypedDict):
    """The controller that owns a partition."""

    controller: str
    fence: int
    expires_in_ms: float


class CapCycle(TypedDict):
    """One cycle of the controller for a cap."""

    at_ms: float
    committed: float
    work_rate: float | None
    work_per_request: float | None
    rejection_rate: float | None
    rule: str
    before: float | None
    after: float | None
    sentence: str


class OverloadStep(TypedDict):
    """One step of overload control."""

    at_ms: float
    controller: str
    rule: str
    before: float | None
    after: float | None
    sentence: str


class OverloadReasoning(TypedDict):
    """The state of overload control for a bucket, and why."""

    state: Literal["calm", "degraded", "recovering", "overloaded"]
    overloaded: bool
    quality: float
    in_flight: float | None
    limits: dict[str, float | None]
    target_ms: float | None
    late_share: float | None
    percentile_ms: float | None
    refused_shares: dict[str, float]
    rates: dict[str, float | None]
    steps: list[OverloadStep]


class SteeredBucket(TypedDict):
    """A bucket as the controller steers it, and why."""

    namespace: str
    bucket: str
    policy: str
    mechanism: str
    mechanism_reason: str
    committed: float | None
    cap: float | None
    charge: float | None
    charge_error: float | None
    share: float | None
    share_ends_in_ms: float | None
    cycles: list[CapCycle]
    overload: OverloadReasoning | None


class ControllerPage(TypedDict):
    """A page of the steered buckets in one partition, and who owns it."""

    owner: Owner | None
    buckets: list[SteeredBucket]
    cursor: str
    unreadable: list[str]


class UncoveredRequests(TypedDict):
    """Requests of one shape that no policy covers."""

    namespace: str
    namespace_known: bool
    dimensions: list[str]
    nearest: dict[str, str]
    count: int
    count_error: int
    first_seen_ms: float
    last_seen_ms: float
    examples: list[dict[str, str]]


class UncoveredList(TypedDict):
    """The most frequent requests that no policy covers."""

    uncovered: list[UncoveredRequests]


class Health(TypedDict):
    """The process is alive."""

    status: str


class Load(TypedDict):
    """How busy a process is."""

    load: float
    waiting: int


class Readiness(TypedDict):
    """The node is ready for traffic."""

    status: str
    warnings: list[str]


class NotReady(TypedDict):
    """Why the node should get no traffic (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str
    reason: str
    reasons: list[str]
    warnings: list[str]


ANSWERS: list[Any] = [
    PolicyList, AppliedSet, CheckedSet, PolicyHistory, AuditPage, NamespaceList, LossStatus, LossAcknowledged,
    BucketPage, ControllerPage, UncoveredList, Health, Load, Readiness, NotReady,
]  # fmt: skip
