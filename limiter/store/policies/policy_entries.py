"""Entries of the policy store: their names, their contents, and their owners.

p:<namespace>/<name>    a policy            7@file {"name":"reads",…}     revision, owner, JSON
n:<namespace>           a namespace         8@api {"partitions":4,…}
p:<name>                a policy under its old name: older versions had unique names in the whole store
"""

from __future__ import annotations

import json
from typing import Any, Literal, NamedTuple

from limiter.model.policy.fields.kinds import is_name
from limiter.model.policy.policy import Policy
from limiter.model.policy.policy_log import ENTRY_BYTES_MAX, Action, Entry, Logged
from limiter.model.policy.policy_set import Namespace
from limiter.model.policy.problems import PolicyError
from limiter.model.policy.reading import dump, read_namespace, read_policy
from limiter.store.policies.policy_layout import unpack_entry

API = "api"
"""Owner of everything changed over HTTP or by hand, and of entries from before there were owners."""

DEFAULT = "default"
"""The namespace of policies that name none."""

ENTRIES_AT_ONCE = 20
"""Entries to read or write before other tasks get their turn: about a millisecond."""

Kind = Literal["policy", "namespace"]


class Place(NamedTuple):
    """The subject of an entry: a policy of a namespace, or a namespace, whose name stands in both fields."""

    kind: Kind
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"policy {self.title}" if self.kind == "policy" else self.title

    @property
    def title(self) -> str:
        """`default/reads`, or `namespace orders`."""
        return f"{self.namespace}/{self.name}" if self.kind == "policy" else f"namespace {self.name}"

    @property
    def entry(self) -> str:
        """The entry's name in the store."""
        return f"p:{self.namespace}/{self.name}" if self.kind == "policy" else f"n:{self.name}"

    @property
    def is_possible(self) -> bool:
        """True if the names are valid; no other text may become a key (F-N3)."""
        return is_name(self.namespace) and is_name(self.name)


def policy_place(namespace: str, name: str) -> Place:
    return Place("policy", namespace, name)


def namespace_place(name: str) -> Place:
    """The place of a namespace's settings."""
    return Place("namespace", name, name)


def place_of(entry: str) -> Place:
    """Return the subject of an entry; one by an old name belongs to the default namespace."""
    kind, _, rest = entry.partition(":")
    if kind == "n":
        return namespace_place(rest)
    namespace, slash, name = rest.partition("/")
    return policy_place(namespace, name) if slash else policy_place(DEFAULT, rest)


def is_old(entry: str) -> bool:
    """True if a policy still has the name that an older version gave it."""
    return entry.startswith("p:") and "/" not in entry and is_name(entry[2:])


def old_entry(name: str) -> str:
    """Return the name that older versions gave a policy."""
    return f"p:{name}"


class Kept(NamedTuple):
    """An entry, read. Where `part` is text, it says what is wrong."""

    place: Place
    part: Policy | Namespace | str
    revision: int
    owner: str


def read_entry(entry: str, raw: bytes) -> Kept:
    """Read an entry; a damaged one gets its fault as `part`."""
    place, kept = place_of(entry), Entry(0, raw)
    try:
        kept = unpack_entry(raw)
        document = json.loads(kept.text)
        if place.kind == "namespace":
            return Kept(place, read_namespace(place.name, document), kept.revision, kept.owner)
        policy = read_policy(document, stored=True)
        named = policy_place(policy.namespace, policy.name)
        if entry in (named.entry, old_entry(policy.name)):
            return Kept(named, policy, kept.revision, kept.owner)
        problem = f"it calls itself {named.namespace}/{named.name}"
    except PolicyError as error:
        problem = "; ".join(error.problems)
    except (ValueError, RecursionError) as error:
        problem = f"it is not a readable entry ({error})"
    return Kept(place, problem, kept.revision, kept.owner)


def moved(entry: str, raw: bytes) -> tuple[str, bytes]:
    """Return the new name of an entry by an old name, and its text, which stays unread if it is damaged."""
    text = standing(raw).text
    document = document_of(text)
    namespace = document.get("namespace", DEFAULT) if isinstance(document, dict) else DEFAULT
    known = isinstance(namespace, str) and is_name(namespace)
    return policy_place(namespace if known else DEFAULT, entry[2:]).entry, text


def text_of(part: Policy | Namespace, place: Place) -> bytes:
    """Return a policy or a namespace as JSON; raise PolicyError if it is too long."""
    text = json.dumps(dump(part), separators=(",", ":")).encode()
    if len(text) > ENTRY_BYTES_MAX:
        raise PolicyError([f"{place}: found {len(text)} bytes; allowed: at most {ENTRY_BYTES_MAX} bytes of JSON"])
    return text


def differs(raw: bytes, text: bytes) -> bool:
    """True if the stored entry differs from the wanted text; the order of fields does not matter."""
    try:
        kept = unpack_entry(raw).text
        return kept != text and bool(json.loads(kept) != json.loads(text))
    except (ValueError, RecursionError):
        return True


def standing(raw: bytes) -> Entry:
    """Split a stored entry; a damaged one has revision 0 and no owner."""
    try:
        return unpack_entry(raw)
    except ValueError:
        return Entry(0, raw)


class AuditEntry(NamedTuple):
    """One change: who, when (the store's time), the action, and the entry before and after; None if there was none."""

    revision: int
    when_us: int
    who: str
    action: Action
    kind: Kind
    namespace: str
    """Empty if a policy moved from one namespace to another, which older versions allowed."""
    name: str
    before: Any
    after: Any
    owner: str | None
    """The owner since then, or at the removal; None if it was not recorded."""

    def concerns(self, namespace: str) -> bool:
        """True if it concerns a policy of this namespace, or the namespace itself."""
        if self.kind == "namespace" or self.namespace:
            return namespace == self.namespace
        return namespace in _namespaces(self.before, self.after)


def audit_entry(logged: Logged) -> AuditEntry:
    """Convert a logged change to the form that people see."""
    place, owner = place_of(logged.entry), logged.owner or None
    before, after = document_of(logged.before), document_of(logged.after)
    namespace = place.namespace
    if is_old(logged.entry):
        found = _namespaces(before, after)
        namespace = found.pop() if len(found) == 1 else ""
    seen = (logged.revision, logged.when_us, logged.who, logged.action, place.kind)
    return AuditEntry(*seen, namespace, place.name, before, after, owner)


def _namespaces(*documents: Any) -> set[str]:
    """Return the namespaces of policies, as far as they can be read."""
    found = (document.get("namespace", DEFAULT) for document in documents if isinstance(document, dict))
    return {namespace for namespace in found if isinstance(namespace, str)}


def document_of(text: bytes) -> Any:
    """Parse stored JSON as plain data; the text itself if it is not JSON, None if it is empty."""
    if not text:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text.decode("utf-8", "replace")
