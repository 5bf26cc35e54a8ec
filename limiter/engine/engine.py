"""One node's engine: the decider, and what keeps it supplied: the store, the shared secret, policies, the node count.

A node starts without its store and gets along by itself once the store is there (F-S2, F-S3): until then it knows the
policies of its file, if one is given, and says in `troubles` what it waits for.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from datetime import UTC, datetime
from os import urandom

from limiter.engine.decider import Decider
from limiter.engine.errors import NotDecided, UnfitField
from limiter.engine.policy_file import load_policy_file
from limiter.engine.shape import Rule
from limiter.model.bucket.contract import SignalRequest, SignalsTaken
from limiter.model.bucket.reservation import Signer
from limiter.model.overload.overload_block import is_signal_name
from limiter.model.policy.limit import Limit
from limiter.model.policy.policy_set import PolicySet
from limiter.model.tally import CallTally
from limiter.runtime.pauses import with_pauses
from limiter.settings import Settings
from limiter.store.buckets import Buckets
from limiter.store.errors import StoreError, without_address
from limiter.store.link.connect import Link, ServerFacts, open_link, probe
from limiter.store.policies import losses
from limiter.store.policies.losses import Loss
from limiter.store.policies.policies import PolicyMissing, PolicyStore, StoredPolicies
from limiter.store.policies.policy_entries import policy_place
from limiter.store.policies.policy_sets import Foreign, foreign_steps
from limiter.store.registry import NodeRegistry
from limiter.store.secret import shared_secret
from limiter.store.signals import Signals, TooManyReports

log = logging.getLogger(__name__)

RETRY_S = 0.25
WATCH_S = 1.0
START_WAIT_S = 2.0
STORE_TIMEOUT_S = 2.0
POST_PAUSE_S = 0.05
FILE_AUTHOR = "policy file"
FOREIGN_LOGGED_MAX = 100


class Engine:
    """Decides, and keeps itself up to date in the background."""

    def __init__(self, settings: Settings, link: Link) -> None:
        self.link = link
        self.store = PolicyStore(link)
        self._secret = settings.secret.get_secret_value().encode() if settings.secret else None
        self._path = settings.policies
        self._file = load_policy_file(settings.policies) if settings.policies else PolicySet()
        """What the file held when it was last read: at the start, and whenever it is put back."""
        self._file_owner, self._file_takes_over = settings.policies_owner, settings.policies_take_over
        self._file_prunes = settings.policies is not None and settings.policies_prune
        self._foreign: list[Foreign] = []
        """What the file has otherwise than the store, because another owns it there."""
        buckets = Buckets(link)
        self._buckets = buckets
        self._signals = Signals(link)
        self._registry = NodeRegistry(link, buckets.clock)
        # Until the shared secret is known this node signs with its own, and knows what it signed.
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
        self._decider.enforce(self._file)
        self._facts: ServerFacts | None = None
        self._waiting_for: str | None = "the store has not been reached yet"
        self._was_away = False
        """Whether the store was asked for in vain when this node started."""
        self._ready = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._stored = StoredPolicies(0, PolicySet())
        self.store_is_up = True
        """Whether it answered when it was last asked how it is."""
        self.loss: Loss | None = None
        """That the store lost its policies, until somebody acknowledges it."""
        self._is_unusable = False
        """Whether the store's policies could not be put in force; the log says why."""

    async def report(self, request: SignalRequest) -> SignalsTaken:
        """Take in how busy a service is, for the controller to go by (G5)."""
        planner = self._decider.planner
        rule = planner.rule(request.namespace, request.policy)
        if rule is None:
            raise PolicyMissing(policy_place(request.namespace, request.policy))
        limit = _check_report(request, rule)
        slots, bucket = planner.places(request.namespace, limit, request.key)
        try:
            await self._signals.report(slots, bucket, request.source, request.signals)
        except TooManyReports as error:
            raise NotDecided("node_busy", f"this report was not taken: {error}; report again in a moment") from None
        return SignalsTaken(bucket, len(slots), request.signals)

    @property
    def policies(self) -> PolicySet:
        """What is in force here."""
        return self._decider.policies

    @property
    def decider(self) -> Decider:
        """Who decides here, and counts what it decides."""
        return self._decider

    @property
    def call_tallies(self) -> dict[str, CallTally]:
        """Calls to the store, by operation."""
        return self._buckets.call_tallies

    @property
    def nodes(self) -> int:
        """How many API processes there are, as far as this one knows."""
        return self._registry.count

    @property
    def revision(self) -> int:
        """Of the policies in force; 0 until the store was asked."""
        return self._stored.revision

    def now_us(self) -> int:
        """The store's time as far as it is known."""
        return self._buckets.clock.guess_us()

    def troubles(self) -> list[str]:
        """Why this node should get no traffic yet; nothing if it may."""
        return [] if self._waiting_for is None else [self._waiting_for]

    def warnings(self) -> list[str]:
        """What an operator should know or change (F-S3, F-S9).

        A store that is away is no reason to be given no traffic: policies say what holds then (B3), and if every
        node sent its callers away, nothing would. Anybody may read warnings, so they hold no name of a policy or a
        namespace and no text of an error: those are in the log.
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
        if self.loss is not None:
            found.append(_told_loss(self.loss))
        return found

    @property
    def store_is_out_of_memory(self) -> bool:
        """Whether the store refused what needs memory when it was last asked how it is."""
        return self._facts is not None and self._facts.is_out_of_memory

    async def start(self) -> None:
        """Begin, and wait a moment for the store; without it start all the same."""
        self._tasks.append(asyncio.create_task(self._supply()))
        with suppress(TimeoutError):
            async with asyncio.timeout(START_WAIT_S):
                await self._ready.wait()
        for warning in self.warnings():
            log.warning("%s", warning)

    async def stop(self) -> None:
        """Finish what is in flight, then end."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._decider.remainders.owing:
            await self._decider.post()
        if lost := self._decider.remainders.owing:
            log.error("the store is still away: what %d quotas granted without it will not be debited", lost)
        self._decider.repeater.stop()
        await self._buckets.drain()
        await self.link.aclose()

    async def _supply(self) -> None:
        """Get everything from the store, then keep it fresh: for as long as the node lives, whatever goes wrong."""
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
                log.exception("what the store says cannot be used; trying again")
                if not self._ready.is_set():
                    self._waiting_for = "what the store says cannot be used; the log of the node says why"
            await asyncio.sleep(RETRY_S)

    async def _fetch(self) -> None:
        self._facts = await probe(self.link, timeout_s=STORE_TIMEOUT_S)
        self.store_is_up = True
        if self._secret is None:
            self._secret = await shared_secret(self.link, None, timeout_s=STORE_TIMEOUT_S)
            self._decider.sign_with(Signer(self._secret))
        moved = await self.store.move_old_names()
        if moved:
            log.warning("%d policies of an older version are now kept by their namespace and name", moved)
        await self._apply_file()
        await self._take(await self.store.load())
        await self._look_for_loss()
        if self._was_away:
            self._decider.remainders.hold(has_just_started=True)
        self._waiting_for = None
        self._ready.set()

    async def _take(self, stored: StoredPolicies) -> None:
        """Let what the store holds be in force; put back what it lost (F-S10)."""
        if _has_lost(self._stored, stored):
            self._notice(self._stored, stored)
            if self._path is not None:
                self._tasks.append(asyncio.create_task(self._put_back()))
        try:
            await self._decider.enforce_with_pauses(stored.policies)
            await self._compare_file(stored)
        except Exception:  # whoever told of the change logs it
            self._is_unusable = True
            raise
        self._stored, self._is_unusable = stored, False

    async def _compare_file(self, stored: StoredPolicies) -> None:
        """Find what the file has otherwise than the store; the log names each difference once."""
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
        """Put the file's policies in force, as their owner; what another owns stays as it is, and is told (P12)."""
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
        """Apply the file again as it is now, until it is done."""
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
        """It may have been edited and applied since this node started: its copy would undo that (F-S10)."""
        assert self._path is not None
        try:
            self._file = await asyncio.to_thread(load_policy_file, self._path)
        except Exception as error:  # whatever it is, the policies must be put back
            log.warning(
                "the policy file cannot be used as it is now; what it held when it was last read is put back: %s", error
            )

    def _notice(self, before: StoredPolicies, after: StoredPolicies) -> None:
        """The store has older policies than before, or another life: say so, and have it kept."""
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
        """Learn what other nodes noticed, keep what this one did, and see whether it was acknowledged."""
        try:
            kept, seen = await losses.read(self.link)
            mine = self.loss
            if mine is not None and not (seen is not None and seen.covers(mine)):
                whole = mine if kept is None else kept.with_(mine)
                if whole != kept:
                    await losses.write(self.link, whole, replace=kept is not None)
                kept = whole
        except StoreError as error:
            log.debug("whether the store lost anything cannot be read for now: %s", error)
            return
        if kept is not None and mine is None:
            log.error("%s", _told_loss(kept))
        if self.loss is mine:  # otherwise another was noticed meanwhile, and the next look merges it
            self.loss = kept

    async def acknowledge_loss(self, who: str) -> Loss | None:
        """Somebody has seen that the store lost its policies; which loss it was."""
        found = await losses.acknowledge(self.link, who, self.now_us())
        await self._look_for_loss()  # what was noticed since the record was written has not been seen
        return found

    async def _post(self) -> None:
        """Have the store debit what quotas granted without it, as soon as it answers (F-S14)."""
        decider = self._decider
        while True:
            await decider.remainders.wakes.wait()
            if not decider.store_is_shunned:
                await decider.post()
            await asyncio.sleep(POST_PAUSE_S)

    async def _look_after(self) -> None:
        """Ask the store how it is. With no traffic nobody else would find out that it is gone, or back."""
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


def _told_foreign(count: int) -> str:
    """That the store does not follow the file, and what to do about it."""
    differ = "1 entry of the policy file differs" if count == 1 else f"{count} entries of the policy file differ"
    return (
        f"{differ} from the store, where others own what is in force; `headgate policies diff` with the file and the "
        "log of the node name them: change the file, or run `headgate policies apply --take-over` with it"
    )


def _life(stored: StoredPolicies) -> str:
    """What the store calls the life that it has had since it was empty; nothing while it is."""
    return (stored.stamp or b"").partition(b" ")[2].decode("ascii", "replace")


def _has_lost(before: StoredPolicies, after: StoredPolicies) -> bool:
    """Whether the store has gone back: an older revision, or one of another life."""
    return before.revision > 0 and (after.revision < before.revision or _life(after) != _life(before))


def _told_loss(loss: Loss) -> str:
    """Without names: anybody may read warnings."""
    when, count = _shown_time(loss.when_us), len(loss.times)
    when = f"at {when}" if count == 1 else f"{count} times, first at {when} and last at {_shown_time(loss.last_us)}"
    return (
        f"the store lost its policies {when}: revision {loss.before} before, {loss.after} after; "
        f"{loss.gone} made over the API are gone and buckets began full. GET /v1/store/loss names them; put them back, "
        "then POST /v1/store/loss/acknowledge"
    )


def _shown_time(us: int) -> str:
    return f"{datetime.fromtimestamp(us // 1_000_000, UTC):%Y-%m-%d %H:%M:%S}Z"


def _check_report(request: SignalRequest, rule: Rule) -> Limit:
    """Who listens to a report. That nobody would is refused: else it goes unnoticed until the day it matters."""
    for name in request.signals:
        if not is_signal_name(name):
            allowed = "names of letters, digits, '_', '.' or '-', not beginning with a digit"
            raise UnfitField("signals", found=f"the name {name!a}", allowed=allowed)
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
    """An engine on the store at a URL; PolicyError if the policy file cannot be used (F-P1)."""
    return Engine(settings, await open_link(url))
