"""The stored policies and their history: the reference for `lua/policies.lua`.

A list of changes is applied whole or not at all. Every change that alters something has the revision of its call, one
above the last; so no revision ever occurs twice, not even when an entry is deleted and made again. Time is an argument,
and so is the name of the store's life, which distinguishes a store that was emptied and filled again (F-S10) from one
that merely has few revisions.

An entry belongs to an owner: `api`, or the name under which somebody applies a file (P12). An entry without one is
from a version before owners. A change of the owner alone is a change, too. Moving entries to other names is not
logged: it is no change that people made, and would push theirs out of the log.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal, NamedTuple

AUDIT_MAX = 10_000
"""Changes in the audit log."""

HISTORY_MAX = 50
"""Changes in the history of one entry."""

ENTRIES_MAX = 20_000
"""Policies and namespaces in the store."""

CHANGES_MAX = 20_000
"""Changes in one call."""

ENTRY_BYTES_MAX = 65_536

Action = Literal["put", "delete", "apply", "rollback", "patch", "move"]
ACTIONS: tuple[Action, ...] = ("put", "delete", "apply", "rollback", "patch", "move")
"""Stored by their numbers: new ones come last."""

ANY = -1
"""The expected revision of a change without a condition."""


class ApplyStatus(IntEnum):
    """The result of a call."""

    APPLIED = 1
    CONFLICT = 2
    """An entry has another revision than was expected."""
    MISSING = 3
    """An entry to be deleted does not exist."""
    FULL = 4
    """There would be too many entries."""
    STALE = 5
    """The whole has another revision than was expected."""


class Change(NamedTuple):
    """One entry to be put (as text), or deleted (no text)."""

    entry: str
    text: bytes
    expected: int = ANY
    """The entry's revision; 0 = it must not exist."""


class Call(NamedTuple):
    """Changes that belong together, with their author and action."""

    changes: Sequence[Change]
    who: str
    action: Action
    life: bytes
    """The name of the store's life, in case this call begins it."""
    expected: int = ANY
    """The revision of the whole."""
    owner: str = ""
    """The owner of the entries from now on."""


class Applied(NamedTuple):
    """The result of a call: for a conflict, the change that met it and the revision that it found.

    If nothing had to change, `found` is the revision of the last entry.
    """

    status: ApplyStatus
    revision: int
    at: int = 0
    found: int = 0


class Entry(NamedTuple):
    """One entry as it stands."""

    revision: int
    text: bytes
    owner: str = ""


class Logged(NamedTuple):
    """One logged change; the text is empty if there was no entry, or is none any more."""

    revision: int
    when_us: int
    action: Action
    who: str
    entry: str
    before: bytes
    after: bytes
    owner: str = ""
    """The owner since then; of a removed entry, its last owner."""


@dataclass(slots=True)
class PolicyLog:
    """The whole content of the policy store."""

    revision: int = 0
    life: bytes = b""
    entries: dict[str, Entry] = field(default_factory=dict)
    audit: list[Logged] = field(default_factory=list)
    """Newest first."""
    histories: dict[str, list[Logged]] = field(default_factory=dict)

    def apply(self, call: Call, now_us: int) -> Applied:
        """Apply all changes or none."""
        assert len({change.entry for change in call.changes}) == len(call.changes), "an entry changes once a call"
        refused = self._refusal(call)
        if refused is not None:
            return refused
        altered = [change for change in call.changes if self._alters(change, call)]
        if altered:
            self.revision += 1
            self.life = self.life or call.life
        for change in altered:
            self._alter(change, call, now_us)
        kept = 0 if altered or not call.changes else self.entries[call.changes[-1].entry].revision
        return Applied(ApplyStatus.APPLIED, self.revision, found=kept)

    def _refusal(self, call: Call) -> Applied | None:
        if call.expected not in (ANY, self.revision):
            return Applied(ApplyStatus.STALE, self.revision)
        count = len(self.entries)
        for at, change in enumerate(call.changes):
            standing = self.entries.get(change.entry)
            found = standing.revision if standing else 0
            if change.expected not in (ANY, found):
                return Applied(ApplyStatus.CONFLICT, self.revision, at, found)
            if standing is None and not change.text:
                return Applied(ApplyStatus.MISSING, self.revision, at)
            count += (standing is None) - (not change.text)
        return Applied(ApplyStatus.FULL, self.revision) if count > ENTRIES_MAX else None

    def _text(self, entry: str) -> bytes:
        standing = self.entries.get(entry)
        return standing.text if standing else b""

    def _alters(self, change: Change, call: Call) -> bool:
        standing = self.entries.get(change.entry)
        if standing is None or not change.text:
            return True
        return (standing.text, standing.owner) != (change.text, call.owner)

    def _alter(self, change: Change, call: Call, now_us: int) -> None:
        before, owner = self._text(change.entry), call.owner
        if change.text:
            self.entries[change.entry] = Entry(self.revision, change.text, owner)
        else:
            owner = self.entries.pop(change.entry).owner
        if call.action != "move":
            self._remember(
                Logged(self.revision, now_us, call.action, call.who, change.entry, before, change.text, owner)
            )

    def _remember(self, logged: Logged) -> None:
        self.audit.insert(0, logged)
        del self.audit[AUDIT_MAX:]
        history = self.histories.setdefault(logged.entry, [])
        history.insert(0, logged)
        del history[HISTORY_MAX:]
