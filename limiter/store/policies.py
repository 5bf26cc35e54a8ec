"""Policies as the store keeps them: with revisions, an audit log, and word to every node when they change (P6).

What is put has been validated; what is loaded is validated again, and an entry that does not stand the test is
reported and left out, so that one damaged policy does not take the others with it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from binascii import b2a_base64
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from os import urandom
from typing import Any, Literal, NamedTuple

from redis.exceptions import NoScriptError, ResponseError

from limiter.model.policy import Namespace, Policy, PolicyError, PolicySet, dump, is_name, read_namespace, read_policy
from limiter.model.policy_log import (
    ANY,
    CHANGES_MAX,
    ENTRIES_MAX,
    ENTRY_BYTES_MAX,
    Action,
    Applied,
    ApplyStatus,
    Call,
    Change,
    Logged,
)
from limiter.store import keys
from limiter.store.batcher import CALL_LIFETIME_US
from limiter.store.connect import Link
from limiter.store.errors import StoreError, StoreOutOfMemory, StoreUnavailable
from limiter.store.inspect import CursorError
from limiter.store.layout import CallExpired
from limiter.store.policy_layout import REVISION, unpack_entry, unpack_logged
from limiter.store.scripts import PoliciesScript

log = logging.getLogger(__name__)

TIMEOUT_S = 2.0
PAUSE_S = 0.02
"""Between attempts to have a change applied."""

APPLY_ATTEMPTS = 10
"""For a whole set while others change it too."""

POLL_S = 0.5
"""How often a node looks for itself: with the notification lost, a change is still in force within a second."""

POLL_TIMEOUT_S = 1.0
ENTRIES_AT_ONCE = 20
"""Entries to read before others have their turn: about a millisecond."""

RELISTEN_S = 0.5
NAME_SHOWN_MAX = 64

Kind = Literal["policy", "namespace"]


class RevisionConflict(Exception):
    """Somebody else was faster (P6): 412."""

    def __init__(self, name: str, found: int, *, kind: Kind = "policy") -> None:
        super().__init__(f"{kind} {name!r} is at revision {found}" if found else f"there is no {kind} {name!r}")
        self.name = name
        self.found = found


class PolicyMissing(Exception):
    """There is no such policy or namespace, or no such revision of it: 404."""

    def __init__(self, name: str, revision: int | None = None, *, kind: Kind = "policy") -> None:
        what = kind if revision is None else f"revision {revision} of {kind}"
        super().__init__(f"there is no {what} {name[:NAME_SHOWN_MAX]!a}")
        self.name = name
        self.revision = revision
        self.kind: Kind = kind


@dataclass(frozen=True)
class StoredPolicies:
    """What the store holds. `revision` is of the whole, 0 if nothing was ever put; each entry has its own too."""

    revision: int
    policies: PolicySet
    revisions: Mapping[str, int]
    """Of the policies."""
    namespace_revisions: Mapping[str, int] = field(default_factory=dict)
    damaged: Mapping[str, str] = field(default_factory=dict)
    """What had to be left out, and why."""
    stamp: bytes | None = None
    """Another one whenever anything is different, even if the store was emptied and filled again meanwhile."""

    def get(self, name: str) -> Policy | None:
        """One of the policies."""
        return next((policy for policy in self.policies.policies if policy.name == name), None)


OnChange = Callable[[StoredPolicies], Awaitable[None]]
"""Takes over what is in force now; the next change waits until it has."""


class AppliedSet(NamedTuple):
    """What applying a set came to: the revision of the whole, and the entries that were made, changed or removed."""

    revision: int
    made: list[str]
    changed: list[str]
    removed: list[str]


class AuditEntry(NamedTuple):
    """One change: who, when (the store's time), what, and the entry before and after; None where there was none."""

    revision: int
    when_us: int
    who: str
    action: Action
    kind: Kind
    name: str
    before: Any
    after: Any


class AuditPage(NamedTuple):
    """Some of the audit log, newest first, and where to go on; empty: there is no more."""

    entries: list[AuditEntry]
    cursor: str


class _AuditPlace(NamedTuple):
    """Where a page of the audit log begins: behind so many entries of a revision. New entries do not move it."""

    revision: int
    behind: int

    @classmethod
    def read(cls, cursor: str) -> _AuditPlace:
        match = _AUDIT_CURSOR.fullmatch(cursor)
        if match is None:
            raise CursorError(f"found {cursor[:80]!a}; allowed: a cursor that the page before came with")
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
        self._read: dict[str, tuple[bytes, Policy | Namespace | str]] = {}

    async def load(self) -> StoredPolicies:
        """All that is in force; what is damaged is told and left out."""
        stamp, raws = await self._fetch()
        read = await self._read_all(raws)
        policies = {name: part for name, (_, part) in read.items() if isinstance(part, Policy)}
        namespaces = {_name(name): part for name, (_, part) in read.items() if isinstance(part, Namespace)}
        return StoredPolicies(
            revision=_revision(stamp),
            policies=PolicySet.model_construct(
                namespaces=namespaces, policies=[policies[name] for name in sorted(policies)]
            ),
            revisions={policy.name: unpack_entry(raws[name]).revision for name, policy in policies.items()},
            namespace_revisions={name: unpack_entry(raws[f"n:{name}"]).revision for name in namespaces},
            damaged={_title(name): part for name, (_, part) in read.items() if isinstance(part, str)},
            stamp=stamp,
        )

    async def _read_all(self, raws: Mapping[str, bytes]) -> dict[str, tuple[bytes, Policy | Namespace | str]]:
        """Every entry, read: what has not changed since the last time is known, and requests go on meanwhile."""
        known, read = self._read, {}
        for number, (entry, raw) in enumerate(raws.items()):
            found = known.get(entry)
            read[entry] = found if found and found[0] == raw else (raw, _read_entry(entry, raw))
            if number % ENTRIES_AT_ONCE == 0:
                await asyncio.sleep(0)
        self._read = read
        return read

    async def put(self, policy: Policy, *, who: str, expected: int | None = None) -> int:
        """Put one policy; its revision. `expected` is the revision it replaces: 0 for none, None for any."""
        entry = _entry(policy.name)
        return await self._change_one(entry, _text(policy), who=who, action="put", expected=expected)

    async def delete(self, name: str, *, who: str, expected: int | None = None) -> int:
        """Remove one policy; the revision of the removal."""
        return await self._change_one(_entry(name), b"", who=who, action="delete", expected=expected)

    async def put_namespace(self, name: str, namespace: Namespace, *, who: str, expected: int | None = None) -> int:
        """Say how a namespace is spread; the revision of that, expected as for a policy."""
        entry, text = _entry(name, "namespace"), _text(namespace, name)
        return await self._change_one(entry, text, who=who, action="put", expected=expected)

    async def delete_namespace(self, name: str, *, who: str, expected: int | None = None) -> int:
        """Forget how a namespace is spread: it is no more, then."""
        return await self._change_one(_entry(name, "namespace"), b"", who=who, action="delete", expected=expected)

    async def rollback(self, name: str, revision: int, *, who: str, expected: int | None = None) -> int:
        """Put a policy back to what it was at a revision; its new revision. PolicyError if it is valid no more."""
        for entry in await self.history(name):
            if entry.revision == revision and entry.after is not None:
                text = _text(read_policy(entry.after))
                return await self._change_one(_entry(name), text, who=who, action="rollback", expected=expected)
        raise PolicyMissing(name, revision)

    async def apply(self, policy_set: PolicySet, *, who: str, prune: bool = False) -> AppliedSet:
        """Put all that differ, in one step; with `prune` remove all others. What is the same is not touched."""
        wanted = {f"p:{policy.name}": _text(policy) for policy in policy_set.policies}
        wanted |= {f"n:{name}": _text(namespace, name) for name, namespace in policy_set.namespaces.items()}
        for _ in range(APPLY_ATTEMPTS):
            stamp, raws = await self._fetch()
            puts = [Change(entry, text) for entry, text in wanted.items() if _differs(raws.get(entry), text)]
            removals = [Change(entry, b"") for entry in raws if prune and entry not in wanted]
            changes = [*puts, *removals]
            if len(changes) > CHANGES_MAX:
                raise PolicyError([f"found {len(changes)} changes at once; allowed: at most {CHANGES_MAX}"])
            if not changes:
                return AppliedSet(_revision(stamp), [], [], [])
            applied = await self._send(changes, who=who, action="apply", expected=_revision(stamp))
            if applied.status is not ApplyStatus.STALE:
                _check(applied, changes)
                made = [change for change in puts if change.entry not in raws]
                changed = [change for change in puts if change.entry in raws]
                return AppliedSet(applied.revision, _names(made), _names(changed), _names(removals))
        raise StoreUnavailable("the policies are being changed faster than they can be applied")

    async def history(self, name: str) -> list[AuditEntry]:
        """What was done to one policy, newest first; PolicyMissing if nothing is known of it."""
        found = await self._logged(keys.policy_history(_entry(name)), 0, -1)
        if not found:
            raise PolicyMissing(name)
        return found

    async def audit(self, limit: int = 100) -> list[AuditEntry]:
        """What was done to any of them, newest first."""
        return await self._logged(keys.POLICIES_AUDIT, 0, limit - 1) if limit > 0 else []

    async def audit_page(self, *, cursor: str = "", limit: int) -> AuditPage:
        """The same page by page: the first, or the one that a cursor stands for; CursorError if it is none of ours."""
        assert limit > 0
        place = _AuditPlace.read(cursor) if cursor else None
        first = 0 if place is None else await self._where_audited(place.revision) + place.behind
        entries = await self._logged(keys.POLICIES_AUDIT, first, first + limit - 1)
        if not entries or first + limit >= await self._audited():
            return AuditPage(entries, "")
        revision = entries[-1].revision
        behind = sum(entry.revision == revision for entry in entries)
        if place is not None and place.revision == revision:
            behind += place.behind
        return AuditPage(entries, str(_AuditPlace(revision, behind)))

    async def _audited(self) -> int:
        count: int = await self._ask("LLEN", keys.POLICIES_AUDIT, timeout_s=self._timeout_s)
        return count

    async def _where_audited(self, revision: int) -> int:
        """Where the entries of a revision, or older ones, begin; revisions only fall from the first to the last."""
        low, high = 0, await self._audited()
        while low < high:
            middle = (low + high) // 2
            found = await self._logged(keys.POLICIES_AUDIT, middle, middle)
            if found and found[0].revision > revision:
                low = middle + 1
            else:  # a damaged one brings some of the others again, and hides none
                high = middle
        return low

    async def watch(self, on_change: OnChange) -> None:
        """Tell what is in force, now and whenever that changes, until cancelled; one change after the other.

        A store that is away is waited for. One that lost its policies (S10) is told of like any other change: its
        revision is lower than before, or 0.
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
        """What tells whether anything has changed; cheap to ask for."""
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
        """The stamp, and every entry as it is kept."""
        flat: list[bytes] = await self._ask("HGETALL", keys.POLICIES_CURRENT, timeout_s=self._timeout_s)
        found = dict(zip(flat[::2], flat[1::2], strict=True))
        stamp = found.pop(REVISION, None)
        return stamp, {entry.decode("utf-8", "replace"): raw for entry, raw in found.items()}

    async def _logged(self, key: bytes, first: int, last: int) -> list[AuditEntry]:
        raws: list[bytes] = await self._ask("LRANGE", key, first, last, timeout_s=self._timeout_s)
        entries = []
        for raw in raws:
            with suppress(ValueError):  # damaged: the others still tell something
                entries.append(_audit_entry(unpack_logged(raw)))
        return entries

    async def _ask(self, name: str, key: bytes, *arguments: bytes | int, timeout_s: float) -> Any:
        try:
            return await self._link.call(keys.POLICIES, name, key, *arguments, timeout_s=timeout_s)
        except ResponseError as error:
            raise _not_ours(error) from error

    async def _change_one(self, entry: str, text: bytes, *, who: str, action: Action, expected: int | None) -> int:
        change = Change(entry, text, ANY if expected is None else expected)
        applied = await self._send([change], who=who, action=action)
        _check(applied, [change])
        return applied.found or applied.revision

    async def _send(self, changes: list[Change], *, who: str, action: Action, expected: int = ANY) -> Applied:
        """Have changes applied once, however often it takes to get the answer (S4)."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._timeout_s
        call_id = b2a_base64(urandom(12), newline=False)
        call = Call(changes, who, action, life=call_id[:8], expected=expected)
        command: tuple[bytes | str, bytes] = ("EVALSHA", self._script.sha)
        arguments: list[bytes | int] | None = None
        while True:
            left_s = max(0.0, deadline_s - loop.time())
            try:
                if arguments is None:
                    arguments = await self._arguments(call_id, call, timeout_s=left_s)
                reply = await self._link.call(keys.POLICIES, *command, *arguments, timeout_s=left_s / 2)
                return self._script.answer(reply)
            except NoScriptError:
                command = ("EVAL", self._script.source)
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
        """KEYS and ARGV, with an expiry by the store's clock: a copy that comes late must do nothing."""
        seconds, microseconds = await self._link.call(keys.POLICIES, "TIME", timeout_s=timeout_s)
        expires_us = int(seconds) * 1_000_000 + int(microseconds) + CALL_LIFETIME_US
        return self._script.call(call_id, call, expires_us=expires_us)


class _Watcher:
    """Knows what was told last, and tells what is new."""

    def __init__(self, store: PolicyStore, on_change: OnChange) -> None:
        self._store = store
        self._on_change = on_change
        self._told: StoredPolicies | None = None
        self._away = False

    async def look(self) -> None:
        """Look once; a store that does not answer is left for the next time."""
        try:
            if self._told is not None and await self._store.stamp() == self._told.stamp:
                stored = self._told
            else:
                stored = await self._store.load()
        except StoreError as error:
            if not self._away:
                log.warning("policies stay as they are while the store does not tell them: %s", error)
            self._away = True
            return
        self._away = False
        if stored is not self._told:
            self._told = stored
            await self._tell(stored)

    async def _tell(self, stored: StoredPolicies) -> None:
        for name, problem in stored.damaged.items():
            log.error("the store's %s is damaged and left out: %s", name, problem)
        try:
            await self._on_change(stored)
        except Exception:  # whatever it is, the next change must still be told
            log.exception("policies of revision %d could not be taken over", stored.revision)


def _text(part: Policy | Namespace, name: str = "") -> bytes:
    """How an entry is kept."""
    text = json.dumps(dump(part), separators=(",", ":")).encode()
    if len(text) > ENTRY_BYTES_MAX:
        title = f"policy {part.name!r}" if isinstance(part, Policy) else f"namespace {name!r}"
        raise PolicyError([f"{title}: found {len(text)} bytes; allowed: at most {ENTRY_BYTES_MAX} bytes of JSON"])
    return text


def _differs(raw: bytes | None, text: bytes) -> bool:
    """Whether what is kept is not what is wanted; the order of fields does not matter."""
    if raw is None:
        return True
    try:
        kept = unpack_entry(raw).text
        return kept != text and bool(json.loads(kept) != json.loads(text))
    except (ValueError, RecursionError):
        return True


def _read_entry(entry: str, raw: bytes) -> Policy | Namespace | str:
    """An entry as it is in force, or what is wrong with it."""
    try:
        document = json.loads(unpack_entry(raw).text)
        if entry.startswith("n:"):
            return read_namespace(_name(entry), document)
        policy = read_policy(document)
        return policy if entry == f"p:{policy.name}" else f"it calls itself {policy.name!r}"
    except PolicyError as error:
        return "; ".join(error.problems)
    except (ValueError, RecursionError) as error:
        return f"it is no entry of ours ({error})"


def _revision(stamp: bytes | None) -> int:
    """The number at the start of a stamp; what is damaged counts as none, as it does in the script."""
    number = (stamp or b"").partition(b" ")[0]
    return int(number) if number.isdigit() else 0


def _entry(name: str, kind: Kind = "policy") -> str:
    """The entry of what has a name. Nothing is called what cannot be one, and no such text becomes a key (N3)."""
    if not is_name(name):
        raise PolicyMissing(name, kind=kind)
    return f"{kind[0]}:{name}"


def _kind(entry: str) -> Kind:
    return "namespace" if entry.startswith("n:") else "policy"


def _name(entry: str) -> str:
    return entry.partition(":")[2]


def _title(entry: str) -> str:
    return f"{_kind(entry)} {_name(entry)!r}"


def _names(changes: list[Change]) -> list[str]:
    """Policies by their names, namespaces with their kind."""
    return [_name(entry) if _kind(entry) == "policy" else _title(entry) for entry, _, _ in changes]


def _audit_entry(logged: Logged) -> AuditEntry:
    kind, name = _kind(logged.entry), _name(logged.entry)
    before, after = _document(logged.before), _document(logged.after)
    return AuditEntry(logged.revision, logged.when_us, logged.who, logged.action, kind, name, before, after)


def _document(text: bytes) -> Any:
    if not text:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text.decode("utf-8", "replace")


def _check(applied: Applied, changes: list[Change]) -> None:
    """Raise what a call that was not applied means."""
    match applied.status:
        case ApplyStatus.CONFLICT:
            entry = changes[applied.at].entry
            raise RevisionConflict(_name(entry), applied.found, kind=_kind(entry))
        case ApplyStatus.MISSING:
            entry = changes[applied.at].entry
            raise PolicyMissing(_name(entry), kind=_kind(entry))
        case ApplyStatus.FULL:
            raise PolicyError([f"found more policies than the store holds; allowed: at most {ENTRIES_MAX}"])
        case _:
            assert applied.status is ApplyStatus.APPLIED


def _not_ours(error: ResponseError) -> StoreError:
    where = keys.POLICIES_CURRENT.decode()
    return StoreError(f"the store cannot serve policies ({error}); look at what stands at {where}")
