"""The policy store as bytes: the Python side of the arguments, entries and replies of `lua/policies.lua`."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from struct import Struct

from limiter.model.policy.policy_log import ACTIONS, Applied, ApplyStatus, Call, Change, Entry, Logged
from limiter.store.call_layout import reply_time_us

REVISION = b"revision"
"""The field of the current policies that holds the revision of the whole."""

WHO_BYTES_MAX = 256

_HEAD = Struct("<ddH")
_ORIGIN = Struct("<dBB")
_TEXT = Struct("<H")
_LONG_TEXT = Struct("<I")
_EXPECTED = Struct("<d")
_ANSWER = Struct("<BdHd")
_LOGGED = Struct("<ddB")
_REPLY_SIZE = Struct("<Bd").size


def pack_head(call: Call, *, now_us: int, expires_us: int) -> bytes:
    """Return ARGV[1]."""
    return _HEAD.pack(now_us, expires_us, len(call.changes))


def pack_origin(call: Call) -> bytes:
    """Return ARGV[2]."""
    who = call.who.encode("utf-8", "backslashreplace")[:WHO_BYTES_MAX]
    head = _ORIGIN.pack(call.expected, ACTIONS.index(call.action), len(call.life))
    return head + call.life + _sized(_TEXT, who) + _sized(_TEXT, call.owner.encode())


def pack_changes(changes: Sequence[Change]) -> bytes:
    """Return ARGV[3]."""
    return b"".join(
        _EXPECTED.pack(change.expected) + _sized(_TEXT, change.entry.encode()) + _sized(_LONG_TEXT, change.text)
        for change in changes
    )


def unpack_applied(reply: bytes) -> Applied:
    """Read the script's reply; raise CallExpired if nothing was done."""
    reply_time_us(reply)
    status, revision, at, found = _ANSWER.unpack_from(reply, _REPLY_SIZE)
    return Applied(ApplyStatus(status), int(revision), at, int(found))


def pack_entry(entry: Entry) -> bytes:
    """Return an entry as the script writes it: `7@file {…}`, and without an owner `7 {…}`."""
    owner = b"@" + entry.owner.encode() if entry.owner else b""
    return b"%d%b %b" % (entry.revision, owner, entry.text)


def unpack_entry(raw: bytes) -> Entry:
    """Read an entry that the script wrote; raise ValueError for other bytes."""
    match = _ENTRY.match(raw)
    if match is None:
        raise ValueError("not an entry of the policy store")
    return Entry(int(match[1]), raw[match.end() :], (match[2] or b"").decode())


_ENTRY = re.compile(rb"([0-9]+)(?:@([A-Za-z0-9._-]+))? ")


def pack_logged(logged: Logged) -> bytes:
    """Return a logged change as the script writes it."""
    return (
        _LOGGED.pack(logged.revision, logged.when_us, ACTIONS.index(logged.action))
        + _sized(_TEXT, logged.who.encode())
        + _sized(_TEXT, logged.entry.encode())
        + _sized(_LONG_TEXT, logged.before)
        + _sized(_LONG_TEXT, logged.after)
        + _sized(_TEXT, logged.owner.encode())
    )


def unpack_logged(raw: bytes) -> Logged:
    """Read a logged change that the script wrote; raise ValueError for other bytes."""
    try:
        revision, when_us, action = _LOGGED.unpack_from(raw)
        at = _LOGGED.size
        who, at = _unsized(_TEXT, raw, at)
        entry, at = _unsized(_TEXT, raw, at)
        before, at = _unsized(_LONG_TEXT, raw, at)
        after, at = _unsized(_LONG_TEXT, raw, at)
        owner = _unsized(_TEXT, raw, at)[0] if at < len(raw) else b""  # older versions wrote none
        # `who` is cut to a size in bytes, which may have split a letter.
        told = who.decode("utf-8", "replace"), entry.decode()
        return Logged(int(revision), int(when_us), ACTIONS[action], *told, before, after, owner.decode())
    except (struct.error, IndexError, OverflowError) as error:
        raise ValueError(f"not a remembered change: {error}") from None


def _sized(size: Struct, text: bytes) -> bytes:
    return size.pack(len(text)) + text


def _unsized(size: Struct, raw: bytes, at: int) -> tuple[bytes, int]:
    (length,) = size.unpack_from(raw, at)
    at += size.size
    return raw[at : at + length], at + length
