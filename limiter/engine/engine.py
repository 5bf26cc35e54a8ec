"""One node's engine: the decider, and its supply of policies, the shared secret and the node count from the store.

A node starts without its store, and recovers by itself once the store is there (F-S2, F-S3). Until then it uses the
policies of its file, if one is given, and lists in `troubles` what it waits for.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from os import urandom

from redis.exceptions import ResponseError

from limiter.engine.decider import Decider
from limiter.engine.policy_file import load_policy_file
from limiter.engine.request_errors import NotDecided, UnfitField
from limiter.engine.shape import Rule
from limiter.model.bucket.contract import SignalRequest, SignalsTaken
from limiter.model.bucket.reservation import Signer
from limiter.model.overload.overload_block import is_signal_name
from limiter.model.policy.limit import Limit
from limiter.model.policy.policy_set import PolicySet
from limiter.model.tally import CallTally
from limiter.runtime.busyness import Busyness
from limiter.runtime.pauses import with_pauses
from limiter.settings import Settings
from limiter.store.buckets import Buckets
from limiter.store.keys import EVERY_BUCKET, Slot
from limiter.store.leases.lease_store import LeaseStore
from limiter.store.link.connect import Link, ServerFacts, open_link, probe
from limiter.store.policies import losses
from limiter.store.policies.losses import Loss
from limiter.store.policies.policy_entries import policy_place
from limiter.store.policies.policy_sets import Foreign, foreign_steps
from limiter.store.policies.policy_store import PolicyMissing, PolicyStore, StoredPolicies
from limiter.store.registry import NodeRegistry, controllers_seen
from limiter.store.secret import shared_secret
from limiter.store.signal_reports import Signals, TooManyReports
from limiter.store.store_errors import StoreError, without_address

log = logging.getLogger(__name__)

RETRY_S = 0.25
WATCH_S = 1.0
START_WAIT_S = 2.0
STORE_TIMEOUT_S = 2.0
POST_PAUSE_S = 0.05
FILE_AUTHOR = "policy file"
FOREIGN_LOGGED_MAX = 100
UNSTEERED_S = 10.0
"""Without a controller for so long, throttles have ended (`limiter.model.overload.shedding`): operators are told."""


class Engine:
    """The decider, with background tasks that keep it up to date."""

    def __init__(self, settings: Settings, link: Link) -> None:
        self.link = link
        self.store = PolicyStore(link)
        self._secret = settings.secret.get_secret_value().encode() if settings.secret else None
        self._path = settings.policies
        self._file = load_policy_file(settings.policies) if settings.policies else PolicySet()
        """The file's policies as last read: at the start, and whenever they are put back."""
        self._file_owner, self._file_takes_over = settings.policies_owner, settings.policies_take_over
        self._file_prunes = settings.policies is not None and settings.policies_prune
        self._foreign: list[Foreign] = []
        """Entries of the file that differ from the store, because another owner holds them there."""
        buckets = Buckets(link)
        self._buckets = buckets
        self._signals = Signals(link)
        self._registry = NodeRegistry(link, buckets.clock)
        # Until the shared secret is known this node signs with a secret of its own, which stays valid.
        self._decider = Decider(
            buckets,
            Signer(self._secret or urandom(32)),
            deadline_s=settings.deadline_ms / 1000,
            late_us=settings.late_ms * 1000,
            repeat_s=settings.repeat_refusals_ms / 1000,
            default_criticality=settings.default_criticality,
            refuse_uncovered=settings.uncovered == "refuse",
            nodes=lambda: self._registry.count,
        )
        self.lease_store = LeaseStore(link, buckets.clock)
        self.lender = self._decider.lend_from(self.lease_store, buckets.clock)
        self._decider.enforce(self._file)
        self._facts: ServerFacts | None = None
        self._waiting_for: str | None = "the store has not been reached yet"
        self._was_away = False
        """True if the store could not be reached when this node started."""
        self._ready = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._stored = StoredPolicies(0, PolicySet())
        self.busyness = Busyness()
        self.store_is_up = True
        """True if the store answered the last check."""
        self.loss: Loss | None = None
        """The loss of policies in the store, until somebody acknowledges it."""
        self._unsteered_since_s: float | None = None
        """The time since which policies need a controller and none lives; None if one lives, or if that is unknown."""
        self._is_unusable = False
        """True if the store's policies could not be put in force; the log says why."""

    async def report(self, request: SignalRequest) -> SignalsTaken:
        """Store a service's report of its load, for the controller (G5)."""
        planner = self._decider.planner
        if request.policy is None:
            return await self._report_for_all(request)
        rule = planner.rule(request.namespace, request.policy)
        if rule is None:
            raise PolicyMissing(policy_place(request.namespace, request.policy))
        limit = _check_report(request, rule)
        slots, bucket = planner.places(request.namespace, limit, request.key)
        return await self._write_report(request, slots, bucket)

    async def _report_for_all(self, request: SignalRequest) -> SignalsTaken:
        """Store a report for every policy of the namespace that goes by reported load."""
        _check_names(request)
        if request.key is not None:
            allowed = "a key beside policy, or neither: without a policy the report is for the whole namespace"
            raise UnfitField("key", found="a key without a policy", allowed=allowed)
        planner = self._decider.planner
        if not any(space == request.namespace and limit.listens for space, limit in planner.limits()):
            allowed = "a namespace with a policy that has overload.utilisation; reports to others have no effect"
            raise UnfitField("namespace", found=f"{request.namespace!a}", allowed=allowed)
        return await self._write_report(request, planner.slots(request.namespace), EVERY_BUCKET)

    async def _write_report(self, request: SignalRequest, slots: Sequence[Slot], bucket: str) -> SignalsTaken:
        try:
            await self._signals.report(slots, bucket, request.source, request.signals)
        except TooManyReports as error:
            raise NotDecided("node_busy", f"this report was not taken: {error}; report again in a moment") from None
        return SignalsTaken(bucket, len(slots), request.signals)

    @property
    def policies(self) -> PolicySet:
        """The policies in force on this node."""
        return self._decider.policies

    @property
    def decider(self) -> Decider:
        """The decider, with its counters."""
        return self._decider

    @property
    def call_tallies(self) -> dict[str, CallTally]:
        """Calls to the store, by operation."""
        return self._buckets.call_tallies

    @property
    def nodes(self) -> int:
        """Number of API processes, as far as this one knows."""
        return self._registry.count

    @property
    def waiting(self) -> int:
        """Number of operations that wait for the store."""
        return self._buckets.acquires.waiting + self._buckets.settles.waiting

    @property
    def revision(self) -> int:
        """Revision of the policies in force; 0 until the store was asked."""
        return self._stored.revision

    def now_us(self) -> int:
        """The store's time, or this node's before the first reply."""
        return self._buckets.clock.guess_us()

    def troubles(self) -> list[str]:
        """Return the reasons why this node should get no traffic yet; none if it is ready."""
        return [] if self._waiting_for is None else [self._waiting_for]

    def warnings(self) -> list[str]:
        """Return what an operator should know or change (F-S3, F-S9).

        A store that is away is no reason to refuse traffic: policies say what applies then (B3), and if every node sent
        its callers away, nothing would. Anybody may read warnings, so they contain no name of a policy or a namespace
        and no text of an error: those are in the log.
        """
        found = []
        if self._decider.store_is_shunned or not self.store_is_up:
            found.append("the store does not answer in time: decisions are made without it, as each policy says")
        elif self.store_is_out_of_memory:
            found.append(
                "the store is out of memory: acquires are decided without it, as each policy says, and settles still "
                "work; raise its maxmemory, or find the policy with too many buckets"
            )
        policy = self._facts.maxmemory_policy if self._facts else "noeviction"
        if policy != "noeviction":
            found.append(f"the store's maxmemory-policy is {policy}: it may evict buckets; set it to noeviction")
        if self._is_unusable:
            found.append(
                "the store's policies cannot be used and older ones stay in force; the log of the node says why"
            )
        if self._foreign:
            found.append(_told_foreign(len(self._foreign)))
        if self.is_unsteered:
            found.append(
                f"policies need steering, and no controller has been heard of for {UNSTEERED_S:.0f} s: caps, learned "
                "charges and limits stay as they are, and throttles have ended; start `headgate controller`"
            )
        if self.loss is not None:
            found.append(_told_loss(self.loss))
        return found

    @property
    def is_unsteered(self) -> bool:
        """True if policies need a controller and none has been heard of lately (Q11)."""
        since_s = self._unsteered_since_s
        return since_s is not None and time.monotonic() - since_s >= UNSTEERED_S

    @property
    def store_is_out_of_memory(self) -> bool:
        """True if the store refused writes that need memory at the last check."""
        return self._facts is not None and self._facts.is_out_of_memory

    async def start(self) -> None:
        """Start, and wait a moment for the store; without it, start all the same."""
        self._tasks.append(asyncio.create_task(self._supply()))
        with suppress(TimeoutError):
            async with asyncio.timeout(START_WAIT_S):
                await self._ready.wait()
        for warning in self.warnings():
            log.warning("%s", warning)

    async def stop(self) -> None:
        """Finish the calls in flight, then stop."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._decider.remainders.owing:
            await self._decider.post()
        if lost := self._decider.remainders.owing:
            log.error("the store is still away: grants of %d quota buckets without it will not be debited", lost)
        self._decider.repeater.stop()
        await self._buckets.drain()
        await self.link.aclose()

    async def _supply(self) -> None:
        """Load everything from the store, then keep it up to date until the node stops, whatever goes wrong."""
        while True:
            try:
                if not self._ready.is_set():
                    await self._fetch()
                async with asyncio.TaskGroup() as group:
                    group.create_task(self.store.watch(self._take))
                    group.create_task(self._registry.run())
                    group.create_task(self._look_after())
                    group.create_task(self._post())
            except StoreError as error:
                reason = without_address(error)
                if not self._was_away or reason != self._waiting_for:
                    log.warning("waiting for the store: %s", error)
                if not self._was_away:
                    self._decider.remainders.lose()
                self._waiting_for, self._was_away = reason, True
            except Exception:
                log.exception("the store's data cannot be used; trying again")
                if not self._ready.is_set():
                    self._waiting_for = "the store's data cannot be used; the log of the node says why"
            await asyncio.sleep(RETRY_S)

    async def _fetch(self) -> None:
        self._facts = await probe(self.link, timeout_s=STORE_TIMEOUT_S)
        self.store_is_up = True
        if self._secret is None:
            self._secret = await shared_secret(self.link, None, timeout_s=STORE_TIMEOUT_S)
            self._decider.sign_with(Signer(self._secret))
        moved = await self.store.move_old_names()
        if moved:
            log.warning("%d policies of an older version are now stored under their namespace and name", moved)
        await self._apply_file()
        await self._take(await self.store.load())
        await self._look_for_loss()
        if self._was_away:
            self._decider.remainders.hold(has_just_started=True)
        self._waiting_for = None
        self._ready.set()

    async def _take(self, stored: StoredPolicies) -> None:
        """Put the store's policies in force; put back those that it lost (F-S10)."""
        if _has_lost(self._stored, stored):
            self._notice(self._stored, stored)
            if self._path is not None:
                self._tasks.append(asyncio.create_task(self._put_back()))
        try:
            await self._decider.enforce_with_pauses(stored.policies)
            await self._compare_file(stored)
        except Exception:  # the caller logs it
            self._is_unusable = True
            raise
        self._stored, self._is_unusable = stored, False

    async def _compare_file(self, stored: StoredPolicies) -> None:
        """Find the entries of the file that differ from the store; the log names each difference once."""
        found = await with_pauses(foreign_steps(self._file, stored.kept, self._file_owner))
        known = set(self._foreign)
        new = [one for one in found if one not in known]
        for one in new[:FOREIGN_LOGGED_MAX]:
            log.warning(
                "%s in the file differs from the store, where %s; the store's version is in force", one.place, one.how
            )
        if len(new) > FOREIGN_LOGGED_MAX:
            log.warning("%d more entries of the file differ from the store", len(new) - FOREIGN_LOGGED_MAX)
        self._foreign = found

    async def _apply_file(self) -> None:
        """Apply the file's policies as their owner; entries of other owners stay, and are reported (P12)."""
        if not (self._file.policies or self._file.namespaces or self._file_prunes):
            return
        applied = await self.store.apply(
            self._file,
            who=FILE_AUTHOR,
            owner=self._file_owner,
            prune=self._file_prunes,
            foreign="take_over" if self._file_takes_over else "keep",
        )
        for place in applied.removed:
            log.warning("%s was removed: the file that applied it no longer contains it", place)

    async def _put_back(self) -> None:
        """Apply the file again in its present form, until that succeeds."""
        await self._read_file_again()
        while True:
            try:
                await self._apply_file()
            except StoreError as error:
                log.warning("the policies of the file could not be restored yet: %s", error)
                await asyncio.sleep(RETRY_S)
            else:
                log.warning("the policies of the file were put back")
                return

    async def _read_file_again(self) -> None:
        """Read the file again: it may have been edited and applied since, and an old copy would undo that (F-S10)."""
        assert self._path is not None
        try:
            self._file = await asyncio.to_thread(load_policy_file, self._path)
        except Exception as error:  # whatever it is, the policies must be put back
            log.warning(
                "the policy file cannot be used in its present form; its last usable content is put back: %s", error
            )

    def _notice(self, before: StoredPolicies, after: StoredPolicies) -> None:
        """Log that the store has older policies than before, or another life, and record it in the store."""
        went_back = _life(after) == _life(before)
        gone = losses.gone(before.kept, after.kept)
        new = losses.noticed(
            self.now_us(), _life(before), before.revision, after.revision, gone, went_back=went_back
        )  # fmt: skip
        self.loss = new if self.loss is None else self.loss.with_(new)
        log.error(
            "the store lost its policies: it is at revision %d, after %d; lost policies made over the API: %s",
            after.revision, before.revision, ", ".join(f"{space}/{name}" for space, name in new.policies) or "none",
        )  # fmt: skip

    async def _look_for_loss(self) -> None:
        """Read losses that other nodes noticed, write this node's own, and see whether they were acknowledged."""
        try:
            kept, seen = await losses.read(self.link)
            mine = self.loss
            if mine is not None and not (seen is not None and seen.covers(mine)):
                whole = mine if kept is None else kept.with_(mine)
                if whole != kept:
                    await losses.write(self.link, whole, replace=kept is not None)
                kept = whole
        except StoreError as error:
            log.debug("the record of lost policies cannot be read for now: %s", error)
            return
        if kept is not None and mine is None:
            log.error("%s", _told_loss(kept))
        if self.loss is mine:  # otherwise another loss was noticed meanwhile, and the next look merges it
            self.loss = kept

    async def acknowledge_loss(self, who: str) -> Loss | None:
        """Acknowledge the loss of policies, and return it."""
        found = await losses.acknowledge(self.link, who, self.now_us())
        await self._look_for_loss()  # losses noticed since the record was written were not shown yet
        return found

    async def _post(self) -> None:
        """Debit in the store what quotas granted without it, as soon as it answers (F-S14)."""
        decider = self._decider
        while True:
            await decider.remainders.wakes.wait()
            if not decider.store_is_shunned:
                await decider.post()
            await asyncio.sleep(POST_PAUSE_S)

    async def _look_after(self) -> None:
        """Check the store regularly: without traffic nothing else would notice that it is gone, or back."""
        while True:
            await asyncio.sleep(WATCH_S)
            try:
                self._facts = await probe(self.link, timeout_s=STORE_TIMEOUT_S)
            except StoreError as error:
                if self.store_is_up:
                    log.warning("the store does not answer: %s", error)
                    self._decider.remainders.lose()
                self.store_is_up = False
            else:
                if not self.store_is_up:
                    log.warning("the store answers again")
                    self._decider.remainders.hold()
                self.store_is_up = True
                self._decider.store_answered()
                await self._look_for_loss()
                await self._look_for_controller()

    async def _look_for_controller(self) -> None:
        """See whether anybody steers what has to be steered."""
        policies = self._stored.policies
        if not any(map(policies.is_steered, policies.policies)):
            self._unsteered_since_s = None
            return
        try:
            seen = await controllers_seen(self.link, self.now_us(), within_s=UNSTEERED_S)
        except (StoreError, ResponseError) as error:
            log.debug("whether there is a controller cannot be seen: %s", error)
            return
        if seen:
            self._unsteered_since_s = None
        elif self._unsteered_since_s is None:
            self._unsteered_since_s = time.monotonic()


def _told_foreign(count: int) -> str:
    """Return the warning that the store differs from the file, with what to do about it."""
    differ = "1 entry of the policy file differs" if count == 1 else f"{count} entries of the policy file differ"
    return (
        f"{differ} from the store, where others own what is in force; `headgate policies diff` with the file and the "
        "log of the node name them: change the file, or run `headgate policies apply --take-over` with it"
    )


def _life(stored: StoredPolicies) -> str:
    """Return the name of the store's life, which it has had since it was empty; '' while it is empty."""
    return (stored.stamp or b"").partition(b" ")[2].decode("ascii", "replace")


def _has_lost(before: StoredPolicies, after: StoredPolicies) -> bool:
    """True if the store has gone back: an older revision, or one of another life."""
    return before.revision > 0 and (after.revision < before.revision or _life(after) != _life(before))


def _told_loss(loss: Loss) -> str:
    """Return the warning of a loss, without names: anybody may read warnings."""
    when, count = _shown_time(loss.when_us), len(loss.times)
    when = f"at {when}" if count == 1 else f"{count} times, first at {when} and last at {_shown_time(loss.last_us)}"
    return (
        f"the store lost its policies {when}: revision {loss.before} before, {loss.after} after; "
        f"{loss.gone} made over the API are gone and buckets began full. GET /v1/store/loss names them; put them back, "
        "then POST /v1/store/loss/acknowledge"
    )


def _shown_time(us: int) -> str:
    return f"{datetime.fromtimestamp(us // 1_000_000, UTC):%Y-%m-%d %H:%M:%S}Z"


def _check_names(request: SignalRequest) -> None:
    for name in request.signals:
        if not is_signal_name(name):
            allowed = "names of letters, digits, '_', '.' or '-', not beginning with a digit"
            raise UnfitField("signals", found=f"the name {name!a}", allowed=allowed)


def _check_report(request: SignalRequest, rule: Rule) -> Limit:
    """Return the limit that uses a report; refuse one that nothing uses, which would go unnoticed until it matters."""
    _check_names(request)
    limit = next((limit for limit in rule.limits if limit.listens), None)
    if limit is None:
        raise UnfitField(
            "policy", found=rule.name, allowed="a policy with overload.utilisation; reports to others have no effect"
        )
    if request.key is not None and set(request.key) != set(limit.per):
        found = ", ".join(f"{name!a}" for name in sorted(request.key)) or "no dimension"
        allowed = (
            f"the policy's per dimensions: {', '.join(limit.per)}" if limit.per else "no key: the policy has no per"
        )
        raise UnfitField("key", found=found, allowed=allowed)
    return limit


async def open_engine(settings: Settings, url: str) -> Engine:
    """Return an engine on the store of a URL; raise PolicyError if the policy file cannot be used (F-P1)."""
    return Engine(settings, await open_link(url))
