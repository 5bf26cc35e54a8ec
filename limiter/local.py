"""Buckets in this node, for when the store is away: the model's own code, each holding this node's share (B3).

share = 1 / nodes known        so that all nodes together admit the limit, and at most one capacity more

Overload control does not apply here: what it goes by is in the store, and no controller steers these buckets. A node
on its own neither turns requests away by class nor asks for cheaper answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from limiter.model.bucket import Params
from limiter.model.ledger import Ledger
from limiter.model.limit import Limit, scaled
from limiter.model.operations import Acquire, BucketAnswer, Verdict, Want
from limiter.model.policy import OnStoreFailure
from limiter.store.keys import Slot

BUCKETS_MAX = 20_000


class LocalBuckets:
    """What policies with `on_store_failure: local` go by without the store; those with `open` let everything pass."""

    def __init__(self, nodes: Callable[[], int]) -> None:
        self._nodes = nodes
        self._ledger = Ledger()
        self._scaled: dict[tuple[Params, int], Params] = {}

    def acquire(
        self, slot: Slot, limits: Sequence[Limit], wants: Sequence[Want], *, now_us: int, dry_run: bool
    ) -> list[BucketAnswer]:
        """Every limit's word on a request, all or nothing."""
        nodes = max(1, self._nodes())
        asked = [
            self._share(slot, want, nodes)
            for limit, want in zip(limits, wants, strict=True)
            if limit.on_store_failure is OnStoreFailure.LOCAL
        ]
        found = iter(self._decide(asked, now_us, dry_run=dry_run))
        return [
            next(found) if limit.on_store_failure is OnStoreFailure.LOCAL else _let_pass(want)
            for limit, want in zip(limits, wants, strict=True)
        ]

    def _decide(self, asked: list[Want], now_us: int, *, dry_run: bool) -> Sequence[BucketAnswer]:
        if not asked:
            return ()
        (answer,) = self._ledger.acquire([Acquire(tuple(asked), dry_run=dry_run)], now_us)
        self._ledger.touched.clear()
        records = self._ledger.records
        while len(records) > BUCKETS_MAX:
            del records[next(iter(records))]
        return answer.buckets

    def _share(self, slot: Slot, want: Want, nodes: int) -> Want:
        key = (want.params, nodes)
        params = self._scaled.get(key)
        if params is None:
            if len(self._scaled) >= BUCKETS_MAX:
                self._scaled.clear()
            self._scaled[key] = params = scaled(want.params, 1.0 / nodes)
        bucket = f"{slot.namespace}/{slot.partition}/{want.bucket}"
        return want.but(bucket=bucket, params=params, minimum=_share_of(want.minimum, nodes))


def _share_of(minimum: float, nodes: int) -> float:
    """A minimum in proportion, lest a small share could never hold it."""
    return minimum / nodes


def _let_pass(want: Want) -> BucketAnswer:
    params = want.params
    rate, capacity = params.cap if params.counts_requests else params.committed, params.whole_capacity
    return BucketAnswer(Verdict.DEBITED, capacity, want.charge, rate, capacity, params.counts_requests)
