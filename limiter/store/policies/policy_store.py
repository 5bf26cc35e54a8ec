"""Policies in the store: revisions, an audit log, and a notification to every node when they change (P6).

Policies are validated before they are put. They are validated again when they are loaded: an invalid entry is reported
and left out, so that one damaged policy does not take the others with it.
"""

from __future__ import annotations

import asyncio
import logging
import re
from binascii import b2a_base64
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from itertools import islice
from os import urandom
from typing import Any, NamedTuple

from redis.exceptions import ResponseError

from limiter.model.policy.policy import Policy
from limiter.model.policy.policy_log import ANY, CHANGES_MAX, ENTRIES_MAX, Action, Applied, ApplyStatus, Call, Change
from limiter.model.policy.policy_set import Namespace, PolicySet
from limiter.model.policy.problems import PolicyError
from limiter.model.policy.reading import read_policy
from limiter.model.steps import Steps
from limiter.runtime.pauses import with_pauses
from limiter.store import keys
from limiter.store.batcher import CALL_LIFETIME_US
from limiter.store.call_layout import CallExpired
from limiter.store.clock import time_us
from limiter.store.inspect import CursorError
from limiter.store.link.connect import Link
from limiter.store.link.script_calls import run_script
from limiter.store.policies.policy_entries import (
    API,
    ENTRIES_AT_ONCE,
    AuditEntry,
    Kept,
    Place,
    audit_entry,
    is_old,
    moved,
    namespace_place,
    old_entry,
    place_of,
    policy_place,
    read_entry,
    text_of,
)
from limiter.store.policies.policy_layout import REVISION, unpack_logged
from limiter.store.policies.policy_sets import AppliedSet, OnForeign, OwnedByOthers, plan_set, texts_of
from limiter.store.scripts import PoliciesScript
from limiter.store.store_errors import StoreError, StoreOutOfMemory, StoreUnavailable

log = logging.getLogger(__name__)

TIMEOUT_S = 2.0
PAUSE_S = 0.02
"""Pause between attempts to apply a change."""

APPLY_ATTEMPTS = 10
"""For a whole set while others change its entries, too."""

POLL_S = 0.5
"""How often a node polls: even if the notification is lost, a change is in force within a second."""

POLL_TIMEOUT_S = 1.0
RELISTEN_S = 0.5
NAME_SHOWN_MAX = 64

AUDIT_AT_ONCE = 16
AUDIT_PAGE_BYTES = 1_048_576
"""Changes that are read first, and how many bytes of them a page takes: a change may hold two long policies."""

MOVER = "upgrade"
MOVED_AT_ONCE = 5_000
"""Entries that one call moves to their new names; each takes two changes."""


class RevisionConflict(Exception):
    """The entry has changed since the revision that was read (F-P6): 412."""

    def __init__(self, place: Place, found: int) -> None:
        super().__init__(f"{place} is at revision {found}" if found else f"there is no {place}")
        self.place = place
        self.found = found


class PolicyMissing(Exception):
    """The policy or namespace does not exist, or has no such revision: 404."""

    def __init__(self, place: Place, revision: int | None = None) -> None:
        of = "" if revision is None else f"revision {revision} of "
        super().__init__(f"there is no {of}{_shown(place)}")
        self.place = place
        self.revision = revision


@dataclass(frozen=True)
class StoredPolicies:
    """All that the store holds. `revision` is of the whole, 0 if nothing was ever put; each entry has its own, too."""

    revision: int
    policies: PolicySet
    kept: Mapping[Place, Kept] = field(default_factory=dict)
    """Every policy and namespace in force, with its revision and its owner."""
    damaged: Mapping[Place, Kept] = field(default_factory=dict)
    """Entries that had to be left out; `part` says what is wrong with each."""
    stamp: bytes | None = None
    """Changes whenever anything differs, even if the store was emptied and filled again meanwhile."""

    def policy(self, namespace: str, name: str) -> Policy | None:
        """Return one policy; None if there is none."""
        found = self.kept.get(policy_place(namespace, name))
        return found.part if found is not None and isinstance(found.part, Policy) else None

    def revision_of(self, place: Place) -> int:
        """Return the revision of a policy or a namespace, even a damaged one; 0 if there is none."""
        found = self.kept.get(place) or self.damaged.get(place)
        return 0 if found is None else found.revision


OnChange = Callable[[StoredPolicies], Awaitable[None]]
"""Receives the policies in force. The next change waits until it returns."""


class AuditPage(NamedTuple):
    """Some of the audit log, newest first, and the cursor of the next page; empty: this is the last."""

    entries: list[AuditEntry]
    cursor: str


class _AuditPlace(NamedTuple):
    """Where a page of the audit log begins: after this many entries of a revision. New entries do not move it."""

    revision: int
    behind: int

    @classmethod
    def read(cls, cursor: str) -> _AuditPlace:
        match = _AUDIT_CURSOR.fullmatch(cursor)
        if match is None:
            raise CursorError(f"found {cursor[:80]!a}; allowed: the cursor of the previous page")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.revision}.{self.behind}"


_AUDIT_CURSOR = re.compile(r"([0-9]{1,15})\.([0-9]{1,5})", re.ASCII)


class PolicyStore:
    """The policies and namespaces of one store."""

    def __init__(self, link: Link, *, timeout_s: float = TIMEOUT_S) -> None:
        self._link = link
        self._timeout_s = timeout_s
        self._script = PoliciesScript()
        self._read: dict[str, tuple[bytes, Kept]] = {}
        self._has_old_names: bool | None = None
        """True if entries by old names existed at the last look; None before the first."""

    async def load(self) -> StoredPolicies:
        """Load everything in force. Damaged entries are logged and left out."""
        stamp, raws = await self._fetch()
        return await with_pauses(self._assemble(stamp, raws))

    def _assemble(self, stamp: bytes | None, raws: Mapping[str, bytes]) -> Steps[StoredPolicies]:
        """Read every entry, in steps; unchanged ones are taken from the last time."""
        known, read = self._read, dict[str, tuple[bytes, Kept]]()
        kept, damaged = dict[Place, Kept](), dict[Place, Kept]()
        policies, namespaces = list[Policy](), dict[str, Namespace]()
        has_old_names = False
        for number, entry in enumerate(sorted(raws)):
            if number % ENTRIES_AT_ONCE == 0:
                yield
            raw, before = raws[entry], known.get(entry)
            found = before[1] if before and before[0] == raw else read_entry(entry, raw)
            read[entry] = raw, found
            is_by_old_name = is_old(entry)
            has_old_names |= is_by_old_name
            if isinstance(found.part, str):
                damaged[found.place] = found
            elif not is_by_old_name or found.place.entry not in raws:  # if both exist, the new name counts
                kept[found.place] = found
        for number, one in enumerate(kept.values()):
            if number % ENTRIES_AT_ONCE == 0:
                yield
            if isinstance(one.part, Policy):
                policies.append(one.part)
            elif isinstance(one.part, Namespace):
                namespaces[one.place.name] = one.part
        self._read, self._has_old_names = read, has_old_names
        policy_set = PolicySet.model_construct(namespaces=namespaces, policies=policies)
        return StoredPolicies(_revision(stamp), policy_set, kept, damaged, stamp)

    async def put(
        self, policy: Policy, *, who: str, owner: str = API, action: Action = "put", expected: int | None = None
    ) -> int:
        """Put one policy; return its revision. `expected` is the revision that it replaces: 0 for none, None for
        any."""
        place = policy_place(policy.namespace, policy.name)
        return await self._change_one(place, text_of(policy, place), who, action, expected, owner=owner)

    async def delete(self, namespace: str, name: str, *, who: str, expected: int | None = None) -> int:
        """Remove one policy and return the revision of the removal."""
        return await self._change_one(policy_place(namespace, name), b"", who, "delete", expected)

    async def put_namespace(self, name: str, namespace: Namespace, *, who: str, expected: int | None = None) -> int:
        """Set how a namespace is partitioned and return the revision; `expected` as for a policy."""
        place = namespace_place(name)
        return await self._change_one(place, text_of(namespace, place), who, "put", expected)

    async def delete_namespace(self, name: str, *, who: str, expected: int | None = None) -> int:
        """Remove a namespace's settings and return the revision of the removal."""
        return await self._change_one(namespace_place(name), b"", who, "delete", expected)

    async def rollback(
        self, namespace: str, name: str, revision: int, *, who: str, expected: int | None = None
    ) -> tuple[Policy, int]:
        """Restore a policy of an earlier revision; return it and its new revision. PolicyError if it is not valid
        now."""
        place = policy_place(namespace, name)
        for entry in await self.history(namespace, name):
            if entry.revision == revision and entry.after is not None and entry.namespace == namespace:
                policy = read_policy(entry.after)
                text = text_of(policy, place)
                return policy, await self._change_one(place, text, who, "rollback", expected)
        raise PolicyMissing(place, revision)

    async def apply(
        self,
        policy_set: PolicySet,
        *,
        who: str,
        owner: str = API,
        prune: bool = False,
        foreign: OnForeign = "refuse",
        within: str | None = None,
        dry_run: bool = False,
    ) -> AppliedSet:
        """Bring a whole set into force for an owner, in one step; with `prune`, remove its other entries.

        `within` restricts all of it to one namespace. A dry run changes nothing and returns what would be done.
        """
        await self._move_if_needed()
        wanted = await with_pauses(texts_of(policy_set))
        for _ in range(APPLY_ATTEMPTS):
            stamp, raws = await self._fetch()
            take_over = foreign == "take_over"
            plan = await with_pauses(
                plan_set(wanted, raws, owner=owner, prune=prune, take_over=take_over, within=within)
            )
            changes, applied = plan.changes, plan.applied(_revision(stamp))
            if len(changes) > CHANGES_MAX:
                raise PolicyError([f"found {len(changes)} changes at once; allowed: at most {CHANGES_MAX}"])
            if applied.foreign and foreign == "refuse" and not dry_run:
                raise OwnedByOthers(applied.foreign)
            if dry_run or not changes:
                return applied
            # By the revisions of these entries, not of the whole: what others change elsewhere must not hold it up.
            sent = await self._send(changes, who=who, action="apply", owner=owner)
            if sent.status is not ApplyStatus.CONFLICT:
                _check(sent, changes)
                return applied._replace(revision=sent.revision)
        raise StoreUnavailable("the policies are changing too fast for the set to be applied; try again")

    async def move_old_names(self) -> int:
        """Move policies from the names that older versions gave them to namespace and name; return how many there were.

        Nothing else about them changes, and they have no owner yet. Their history stays under the old name and is
        shown for 90 days.
        """
        moved_so_far, attempts = 0, APPLY_ATTEMPTS
        while attempts:
            stamp, raws = await self._fetch()
            old = list(islice(filter(is_old, raws), MOVED_AT_ONCE))
            self._has_old_names = bool(old)
            if not old:
                return moved_so_far
            changes = [change for entry in old for change in _move(entry, raws)]
            sent = await self._send(changes, who=MOVER, action="move", expected=_revision(stamp))
            if sent.status is ApplyStatus.STALE:
                attempts -= 1
            else:
                _check(sent, changes)
                moved_so_far += len(old)
        raise StoreUnavailable("the policies are changing too fast to be moved to their new names; try again")

    async def _move_if_needed(self) -> None:
        """Move old names before any change: a policy with two names could be removed and still be there."""
        if self._has_old_names is not False:
            await self.move_old_names()

    async def history(self, namespace: str, name: str) -> list[AuditEntry]:
        """Return the changes of one policy, newest first; raise PolicyMissing if none are known."""
        place = policy_place(namespace, name)
        if not place.is_possible:
            raise PolicyMissing(place)
        found = await self._logged(keys.policy_history(place.entry), 0, -1)
        older = await self._logged(keys.policy_history(old_entry(name)), 0, -1)
        found += [entry for entry in older if entry.concerns(namespace)]
        if not found:
            raise PolicyMissing(place)
        return found

    async def audit(self, limit: int = 100) -> list[AuditEntry]:
        """Return the changes of all entries, newest first."""
        return await self._logged(keys.POLICIES_AUDIT, 0, limit - 1) if limit > 0 else []

    async def audit_page(self, *, cursor: str = "", limit: int) -> AuditPage:
        """Return a page of the audit log: the first, or that of a cursor; raise CursorError for an unknown cursor."""
        assert limit > 0
        place = _AuditPlace.read(cursor) if cursor else None
        first = 0 if place is None else await self._where_audited(place.revision) + place.behind
        entries, upto = await self._some_audited(first, limit)
        if not entries or upto >= await self._audited():
            return AuditPage(entries, "")
        revision = entries[-1].revision
        behind = sum(entry.revision == revision for entry in entries)
        if place is not None and place.revision == revision:
            behind += place.behind
        return AuditPage(entries, str(_AuditPlace(revision, behind)))

    async def _some_audited(self, first: int, limit: int) -> tuple[list[AuditEntry], int]:
        """Return the changes from the first place on, as many as a page may be long, and the place after the last."""
        entries, at, size = list[AuditEntry](), first, 0
        asked = AUDIT_AT_ONCE
        while at < first + limit and size < AUDIT_PAGE_BYTES:
            raws = await self._raws(keys.POLICIES_AUDIT, at, min(at + asked, first + limit) - 1)
            if not raws:
                break
            entries += await with_pauses(_read_logged(raws))
            at, size = at + len(raws), size + sum(map(len, raws))
            asked = max(
                1, (AUDIT_PAGE_BYTES - size) * (at - first) // max(1, size)
            )  # if they are as long as those before
        return entries, at

    async def _audited(self) -> int:
        count: int = await self._ask("LLEN", keys.POLICIES_AUDIT, timeout_s=self._timeout_s)
        return count

    async def _where_audited(self, revision: int) -> int:
        """Find where the entries of a revision, or older ones, begin; revisions only fall from first to last."""
        low, high = 0, await self._audited()
        while low < high:
            middle = (low + high) // 2
            found = await self._logged(keys.POLICIES_AUDIT, middle, middle)
            if found and found[0].revision > revision:
                low = middle + 1
            else:  # a damaged entry makes some others appear again, and hides none
                high = middle
        return low

    async def watch(self, on_change: OnChange) -> None:
        """Call `on_change` with what is in force, now and after every change, one at a time, until cancelled.

        A store that is away is waited for. A store that lost its policies (F-S10) counts as a change: its revision is
        lower than before, or 0.
        """
        notified = asyncio.Event()
        listener = asyncio.create_task(self._listen(notified))
        watcher = _Watcher(self, on_change)
        try:
            while True:
                notified.clear()
                await watcher.look()
                with suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S):
                        await notified.wait()
        finally:
            listener.cancel()
            await asyncio.gather(listener, return_exceptions=True)

    async def stamp(self) -> bytes | None:
        """Return a value that differs after any change, by a call that costs little."""
        stamp: bytes | None = await self._ask("HGET", keys.POLICIES_CURRENT, REVISION, timeout_s=POLL_TIMEOUT_S)
        return stamp

    async def _listen(self, notified: asyncio.Event) -> None:
        while True:
            try:
                async with aclosing(self._link.listen(keys.POLICIES_CHANNEL)) as messages:
                    async for _ in messages:
                        notified.set()
            except (StoreError, ResponseError) as error:
                log.debug("not notified of policy changes for now: %s", error)
            await asyncio.sleep(RELISTEN_S)

    async def _fetch(self) -> tuple[bytes | None, dict[str, bytes]]:
        """Return the stamp and all stored entries."""
        flat: list[bytes] = await self._ask("HGETALL", keys.POLICIES_CURRENT, timeout_s=self._timeout_s)
        found = dict(zip(flat[::2], flat[1::2], strict=True))
        stamp = found.pop(REVISION, None)
        return stamp, {entry.decode("utf-8", "replace"): raw for entry, raw in found.items()}

    async def _logged(self, key: bytes, first: int, last: int) -> list[AuditEntry]:
        return await with_pauses(_read_logged(await self._raws(key, first, last)))

    async def _raws(self, key: bytes, first: int, last: int) -> list[bytes]:
        raws: list[bytes] = await self._ask("LRANGE", key, first, last, timeout_s=self._timeout_s)
        return raws

    async def _ask(self, name: str, key: bytes, *arguments: bytes | int, timeout_s: float) -> Any:
        try:
            return await self._link.call(keys.POLICIES, name, key, *arguments, timeout_s=timeout_s)
        except ResponseError as error:
            raise _not_ours(error) from error

    async def _change_one(
        self, place: Place, text: bytes, who: str, action: Action, expected: int | None, *, owner: str = API
    ) -> int:
        if not place.is_possible:
            raise PolicyMissing(place)
        await self._move_if_needed()
        change = Change(place.entry, text, ANY if expected is None else expected)
        applied = await self._send([change], who=who, action=action, owner=owner)
        _check(applied, [change])
        return applied.found or applied.revision

    async def _send(
        self, changes: list[Change], *, who: str, action: Action, expected: int = ANY, owner: str = ""
    ) -> Applied:
        """Apply changes exactly once, with as many attempts as the answer takes (F-S4)."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._timeout_s
        call_id = b2a_base64(urandom(12), newline=False)
        call = Call(changes, who, action, life=call_id[:8], expected=expected, owner=owner)
        arguments: list[bytes | int] | None = None
        while True:
            left_s = max(0.0, deadline_s - loop.time())
            try:
                if arguments is None:
                    arguments = await self._arguments(call_id, call, timeout_s=left_s)
                reply = await run_script(self._link, keys.POLICIES, self._script, arguments, timeout_s=left_s / 2)
                return self._script.answer(reply)
            except CallExpired:
                arguments = None
            except StoreOutOfMemory:
                raise
            except StoreUnavailable:
                if deadline_s - loop.time() < PAUSE_S:
                    raise
                await asyncio.sleep(PAUSE_S)
            except ResponseError as error:
                raise _not_ours(error) from error

    async def _arguments(self, call_id: bytes, call: Call, *, timeout_s: float) -> list[bytes | int]:
        """Return KEYS and ARGV, with an expiry by the store's clock: a copy that arrives late must do nothing."""
        now_us = time_us(await self._link.call(keys.POLICIES, "TIME", timeout_s=timeout_s))
        expires_us = now_us + CALL_LIFETIME_US
        return self._script.call(call_id, call, expires_us=expires_us)


class _Watcher:
    """Calls `on_change` with everything that is new since the last call."""

    def __init__(self, store: PolicyStore, on_change: OnChange) -> None:
        self._store = store
        self._on_change = on_change
        self._told: StoredPolicies | None = None
        self._away = False

    async def look(self) -> None:
        """Look once; a store that does not answer is tried again the next time."""
        try:
            if self._told is not None and await self._store.stamp() == self._told.stamp:
                stored = self._told
            else:
                stored = await self._store.load()
        except StoreError as error:
            if not self._away:
                log.warning("the policies cannot be read from the store, and the last ones stay in force: %s", error)
            self._away = True
            return
        self._away = False
        if stored is not self._told:
            self._told = stored
            await self._tell(stored)

    async def _tell(self, stored: StoredPolicies) -> None:
        for place, kept in stored.damaged.items():
            log.error("the store's %s is damaged and left out: %s", _shown(place), kept.part)
        try:
            await self._on_change(stored)
        except Exception:  # whatever it is, the next change must still be passed on
            log.exception("policies of revision %d could not be taken over", stored.revision)


def _read_logged(raws: Iterable[bytes]) -> Steps[list[AuditEntry]]:
    """Remembered changes, one in a step: each may hold two long policies."""
    entries = []
    for raw in raws:
        yield
        with suppress(ValueError):  # damaged: the others still tell something
            entries.append(audit_entry(unpack_logged(raw)))
    return entries


def _move(entry: str, raws: Mapping[str, bytes]) -> Iterator[Change]:
    """Put an entry under its new name, unless that is taken, and remove the old one."""
    new, text = moved(entry, raws[entry])
    if text and new not in raws:
        yield Change(new, text)
    yield Change(entry, b"")


def _revision(stamp: bytes | None) -> int:
    """Return the number at the start of a stamp; 0 if it is damaged, as in the script."""
    number = (stamp or b"").partition(b" ")[0]
    return int(number) if number.isdigit() else 0


def _shown(place: Place) -> str:
    """Return a place for display; its names may be any text."""
    if place.is_possible:
        return str(place)
    return f"{place.kind} {place.name[:NAME_SHOWN_MAX]!a}"


def _check(applied: Applied, changes: list[Change]) -> None:
    """Raise the exception for a call that was not applied."""
    match applied.status:
        case ApplyStatus.CONFLICT:
            raise RevisionConflict(place_of(changes[applied.at].entry), applied.found)
        case ApplyStatus.MISSING:
            raise PolicyMissing(place_of(changes[applied.at].entry))
        case ApplyStatus.FULL:
            raise PolicyError([f"found more policies than the store holds; allowed: at most {ENTRIES_MAX}"])
        case _:
            assert applied.status is ApplyStatus.APPLIED


def _not_ours(error: ResponseError) -> StoreError:
    where = keys.POLICIES_CURRENT.decode()
    return StoreError(f"the store cannot serve policies ({error}); look at what stands at {where}")
