"""Buckets in this node, for when the store is away: the code of the model, with this node's share of each limit (B3).

    share = 1 / nodes known        so that all nodes together admit the limit, and at most one capacity more

A quota continues from its last balance instead (`remainders.py`), unless its policy says otherwise.

Overload control does not apply here: its state is in the store, and no controller steers these buckets. A node on its
own neither refuses requests by class nor asks for cheaper answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from limiter.engine.fallback.remainders import Remainders
from limiter.model.bucket.bucket import Params
from limiter.model.bucket.operations import Acquire, BucketAnswer, Verdict, Want
from limiter.model.ledger.ledger import Ledger
from limiter.model.policy.choices import OnStoreFailure
from limiter.model.policy.limit import Limit, scaled
from limiter.store.keys import Slot

BUCKETS_MAX = 20_000


class LocalBuckets:
    """The buckets of policies with `on_store_failure: local` or `known`; those with `open` grant everything."""

    def __init__(self, nodes: Callable[[], int], remainders: Remainders) -> None:
        self._nodes = nodes
        self._remainders = remainders
        self._ledger = Ledger()
        self._scaled: dict[tuple[Params, int], Params] = {}

    def acquire(
        self, slot: Slot, limits: Sequence[Limit], wants: Sequence[Want], *, now_us: int, dry_run: bool
    ) -> list[BucketAnswer]:
        """Return every limit's answer to a request, all or nothing."""
        asked = [self._asked(slot, limit, want, now_us) for limit, want in zip(limits, wants, strict=True)]
        found = iter(self._decide([one for one in asked if one is not None], now_us, dry_run=dry_run))
        answers = []
        for limit, want, one in zip(limits, wants, asked, strict=True):
            if one is None:
                answers.append(_let_pass(want, charged=limit.on_store_failure is OnStoreFailure.OPEN))
                continue
            answer = next(found)
            if limit.is_known:
                record = self._ledger.records.pop(one.bucket)
                self._remainders.keep(slot, want.bucket, record, answer, requests=1.0)
            answers.append(answer)
        self._trim()
        return answers

    def _asked(self, slot: Slot, limit: Limit, want: Want, now_us: int) -> Want | None:
        """Return what to ask of a bucket here; None if there is no bucket and the limit grants."""
        if limit.is_known:
            lent = self._remainders.lend(slot, want, now_us)
            if lent is None:  # a limit in shadow that nothing is known of refuses nothing
                return None
            nodes, record = lent
            share = self._share(slot, want, nodes)
            self._ledger.records[share.bucket] = record
            return share
        if limit.on_store_failure is OnStoreFailure.LOCAL:
            return self._share(slot, want, max(1, self._nodes()))
        return None

    def _decide(self, asked: list[Want], now_us: int, *, dry_run: bool) -> Sequence[BucketAnswer]:
        if not asked:
            return ()
        (answer,) = self._ledger.acquire([Acquire(tuple(asked), dry_run=dry_run)], now_us)
        return answer.buckets

    def _trim(self) -> None:
        self._ledger.touched.clear()
        records = self._ledger.records
        while len(records) > BUCKETS_MAX:
            del records[next(iter(records))]

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
    """Scale the minimum with the share: a small share could never reach the whole minimum."""
    return minimum / nodes


def _let_pass(want: Want, *, charged: bool) -> BucketAnswer:
    params, charge = want.params, want.charge if charged else 0.0
    rate, capacity = params.cap if params.counts_requests else params.committed, params.whole_capacity
    return BucketAnswer(Verdict.DEBITED, capacity, charge, rate, capacity, params.counts_requests)
