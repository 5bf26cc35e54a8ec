"""A tenant's bucket under a mechanism, as nodes and the controller see it: the model of the scripts, and nothing else.

acquire, settle    limiter.model.bucket.ledger
steer              limiter.model.control.stewardship
"""

from __future__ import annotations

from limiter.model.bucket.bucket import Record
from limiter.model.bucket.ledger import Ledger
from limiter.model.bucket.operations import Acquire, BucketAnswer, Charge, Settle, Want
from limiter.model.control.cycle import ControlParams, Moved, control_params
from limiter.model.control.stewardship import Steer, steer_bucket
from limiter.model.policy.choices import Mechanism
from limiter.model.policy.criticality import Criticality
from limiter.model.policy.limit import Limit
from limiter.model.policy.policy import Policy
from limiter.model.policy.reading import read_policy

TTL_US = 60_000_000


def policy_of(mechanism: Mechanism, committed: float) -> Policy:
    """The policy that is simulated; all but the mechanism is the same."""
    # A second's worth may gather by either mechanism: neither is better for being let do more.
    gathers = {} if mechanism is Mechanism.REQUESTS else {"capacity": "1s"}
    gathers |= {} if mechanism is Mechanism.WORK else {"burst": "1s"}
    document = {"name": "simulated", "rate": committed, "charge": "learned", "mechanism": str(mechanism)}
    return read_policy(document | gathers)


class Bucket:
    """One bucket and the terms it is under."""

    def __init__(self, mechanism: Mechanism, committed: float) -> None:
        policy = policy_of(mechanism, committed)
        self.control: ControlParams = control_params(policy)
        self._limit = Limit(policy)
        self._ledger = Ledger()
        self._reservations = 0

    @property
    def record(self) -> Record | None:
        """The record, once anybody has asked."""
        return self._ledger.records.get("b")

    @property
    def counts_requests(self) -> bool:
        """How it counts now."""
        record = self.record
        return self._limit.params(0).counts_requests if record is None else record.counts_requests

    def acquire(self, now_us: int) -> BucketAnswer | None:
        """What was charged, or None for a refusal."""
        limit = self._limit
        want = Want("b", limit.params(now_us), limit.minimums[Criticality.CRITICAL], limit.charge, limit.how_unsaid)
        (answer,) = self._ledger.acquire([Acquire((want,))], now_us)
        return answer.buckets[0] if answer.granted else None

    def settle(self, charged: float, *, in_requests: bool, work: float, now_us: int) -> None:
        """Report what a request did."""
        self._reservations += 1
        charges = (Charge("b", charged, in_requests=in_requests),)
        reservation = str(self._reservations)
        settle = Settle(
            reservation=reservation, charges=charges, work=work, acquired_us=now_us, deadline_us=now_us + TTL_US
        )
        self._ledger.settle([settle], now_us)
        del self._ledger.tombstones[reservation]

    def was_touched(self) -> bool:
        """Whether anybody has used the bucket since this was asked last."""
        touched = bool(self._ledger.touched)
        self._ledger.touched.clear()
        self._ledger.epoch += touched
        return touched

    def steer(self, moved: Moved, now_us: int) -> None:
        """Write what the controller decided."""
        record = self.record
        assert record is not None
        params = self._limit.params(now_us)
        steer = Steer("b", params, cap=moved.cap, charge=moved.charge, requests_for=moved.requests_for)
        steer_bucket(record, steer, now_us)
