"""The Lua scripts: loading them, and one typed face for each, the only code that knows its argument order."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from hashlib import sha1
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple, Protocol

from limiter.model.bucket.leases import LeaseAnswer, LeaseAsk
from limiter.model.bucket.operations import Acquire, AcquireAnswer, Settle, SettleAnswer
from limiter.model.control.stewardship import Lease, Steer, SteerStatus
from limiter.model.policy.policy_log import Applied, Call
from limiter.store import keys
from limiter.store.call_layout import (
    REPLY_SIZE,
    kept_lease_us,
    pack_head,
    pack_loads,
    pack_steers,
    pack_token,
    unpack_acquire,
    unpack_acquires,
    unpack_settle,
    unpack_settles,
    unpack_steers,
)
from limiter.store.flush import Asking, Batch, Settling, WaitT, take_acquires, take_settles
from limiter.store.leases.lease_layout import pack_ask, unpack_answer
from limiter.store.policies import policy_layout
from limiter.store.policies.policy_layout import pack_changes, pack_origin, unpack_applied

_INCLUDE = re.compile(r"^-- #include (lib/\w+\.lua)$", re.MULTILINE)
_CONSTANTS = re.compile(r"^local ([A-Z_]+(?:, [A-Z_]+)*) = (-?\d+(?:, -?\d+)*)(?: *--.*)?$", re.MULTILINE)
_WORD = re.compile(r"\b[A-Z_]+\b")


def scripts_directory() -> Path:
    """The folder of the scripts: inside the installed package, or at the top of a source checkout."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "lua"
    return installed if installed.is_dir() else package.parent / "lua"


def load_source(name: str) -> bytes:
    """Return a script with its included parts spliced in."""
    directory = scripts_directory()
    source = (directory / f"{name}.lua").read_text(encoding="utf-8")
    return _INCLUDE.sub(lambda match: (directory / match[1]).read_text(encoding="utf-8"), source).encode()


def load_script(name: str) -> bytes:
    """Return a script as it is sent: with numeric constants written where they are used.

    Every call runs the whole script, and each local that a function refers to costs time then and at every use: with
     literals a call of one operation takes a fifth less of the server's time, a hot bucket a tenth less.
    """
    source = load_source(name).decode()
    constants: dict[str, str] = {}
    for names, values in _CONSTANTS.findall(source):
        constants |= {name: f"({value})" for name, value in zip(names.split(", "), values.split(", "), strict=True)}
    # A declaration leaves its line empty, so that errors name the lines of the source.
    body = _CONSTANTS.sub("", source)
    return _WORD.sub(lambda word: constants.get(word[0], word[0]), body).encode()


class Script(Protocol[WaitT]):
    """A script that takes batches, as the batcher uses it."""

    name: str
    source: bytes
    sha: bytes

    def take(self, queue: deque[WaitT]) -> Batch[WaitT]:
        """Take the next batch from the queue and pack it; empty if all operations in it gave up."""

    def tell(self, batch: Sequence[WaitT], reply: bytes, now_us: int) -> None:
        """Give each operation of a batch its answer."""


class AcquireScript:
    """Typed face of lua/acquire.lua."""

    name = "acquire"

    def __init__(self) -> None:
        self.source = load_script(self.name)
        self.sha = _sha(self.source)

    def take(self, queue: deque[Asking]) -> Batch[Asking]:
        return take_acquires(queue)

    def tell(self, batch: Sequence[Asking], reply: bytes, now_us: int) -> None:
        """Give each acquire its answer, in the form of the model."""
        at = REPLY_SIZE
        for asking in batch:
            answer, at = unpack_acquire(reply, at, len(asking.buckets), now_us)
            asking.tell(answer)

    def call(
        self, prefix: bytes, flush_id: bytes, operations: Sequence[Acquire], *, now_us: int = 0, expires_us: int = 0
    ) -> list[bytes | int]:
        """Return key count, KEYS and ARGV of one call for these operations."""
        asking = [Asking(0.0) for _ in operations]
        for one, operation in zip(asking, operations, strict=True):
            one.take_over(operation)
        return _whole(prefix, flush_id, take_acquires(deque(asking)), len(operations), now_us, expires_us)

    def answers(self, reply: bytes, operations: Sequence[Acquire]) -> list[AcquireAnswer]:
        return unpack_acquires(reply, operations)


class SettleScript:
    """Typed face of lua/settle.lua."""

    name = "settle"

    def __init__(self) -> None:
        self.source = load_script(self.name)
        self.sha = _sha(self.source)

    def take(self, queue: deque[Settling]) -> Batch[Settling]:
        return take_settles(queue)

    def tell(self, batch: Sequence[Settling], reply: bytes, now_us: int) -> None:
        """Give each settle its answer, in the form of the model."""
        at = REPLY_SIZE
        for settling in batch:
            answer, at = unpack_settle(reply, at, len(settling.buckets), now_us)
            settling.tell(answer)

    def call(
        self, prefix: bytes, flush_id: bytes, operations: Sequence[Settle], *, now_us: int = 0, expires_us: int = 0
    ) -> list[bytes | int]:
        """Return key count, KEYS and ARGV of one call for these operations."""
        settling = [Settling(0.0) for _ in operations]
        for one, operation in zip(settling, operations, strict=True):
            one.take_over(operation)
        return _whole(prefix, flush_id, take_settles(deque(settling)), len(operations), now_us, expires_us)

    def answers(self, reply: bytes, operations: Sequence[Settle]) -> list[SettleAnswer]:
        return unpack_settles(reply, operations)


class PoliciesScript:
    """Typed face of lua/policies.lua."""

    name = "policies"

    def __init__(self) -> None:
        self.source = load_script(self.name)
        self.sha = _sha(self.source)

    def call(self, call_id: bytes, call: Call, *, now_us: int = 0, expires_us: int = 0) -> list[bytes | int]:
        """Return key count, KEYS and ARGV."""
        return [
            3 + len(call.changes),
            keys.reply(keys.POLICIES, call_id),
            keys.POLICIES_CURRENT,
            keys.POLICIES_AUDIT,
            *(keys.policy_history(change.entry) for change in call.changes),
            policy_layout.pack_head(call, now_us=now_us, expires_us=expires_us),
            pack_origin(call),
            pack_changes(call.changes),
            keys.POLICIES_CHANNEL,
        ]

    def answer(self, reply: bytes) -> Applied:
        return unpack_applied(reply)


class LeaseScript:
    """Typed face of lua/lease.lua."""

    name = "lease"

    def __init__(self) -> None:
        self.source = load_script(self.name)
        self.sha = _sha(self.source)

    def call(self, prefix: bytes, owner: bytes, *, ttl_ms: int) -> list[bytes | int]:
        """Return key count, KEYS and ARGV. A `ttl_ms` of 0 gives the lease back."""
        return [2, keys.lease(prefix), keys.fence(prefix), owner, ttl_ms]

    def answer(self, reply: list[int], owner: bytes) -> Lease | None:
        """Return the owner's lease; None if another owns the slot."""
        fence, left_ms = reply
        return Lease(owner, fence, left_ms) if fence else None


class Sampled(NamedTuple):
    """The store's time, and the buckets that changed."""

    now_us: int
    names: list[str]


class SampleScript:
    """Typed face of lua/sample.lua."""

    name = "sample"

    def __init__(self) -> None:
        self.source = load_script(self.name)
        self.sha = _sha(self.source)

    def call(self, prefix: bytes, lease: Lease, *, ttl_ms: int, count: int) -> list[bytes | int]:
        """Return key count, KEYS and ARGV."""
        return [
            3,
            keys.lease(prefix),
            keys.sampling(prefix),
            keys.touched(prefix),
            pack_token(lease),
            ttl_ms,
            count,
        ]

    def answer(self, reply: list[bytes], prefix: bytes) -> Sampled:
        """Return the names, each once; raise LeaseLost if another controller owns the slot now."""
        head, *found = reply
        bucket_prefix = keys.bucket(prefix, "")
        # A key of another form in the list is no bucket.
        ours = (key[len(bucket_prefix) :] for key in found if key.startswith(bucket_prefix) and key.isascii())
        return Sampled(kept_lease_us(head), [name.decode() for name in dict.fromkeys(ours)])


class SteerScript:
    """Typed face of lua/steer.lua."""

    name = "steer"

    def __init__(self) -> None:
        self.source = load_script(self.name)
        self.sha = _sha(self.source)

    def call(self, prefix: bytes, lease: Lease, rows: Sequence[Steer], *, now_us: int = 0) -> list[bytes | int]:
        """Return key count, KEYS and ARGV."""
        bucket_prefix = keys.bucket(prefix, "")
        buckets = [bucket_prefix + row.bucket.encode() for row in rows]
        states = [keys.state(prefix, row.bucket) for row in rows if row.state is not None]
        return [
            1 + len(buckets) + len(states),
            keys.lease(prefix),
            *buckets,
            *states,
            *pack_steers(rows, lease, now_us=now_us),
        ]

    def answers(self, reply: bytes, rows: Sequence[Steer]) -> list[SteerStatus]:
        """Return one status per row; raise LeaseLost if another controller owns the slot now."""
        return unpack_steers(reply, rows)


class LendScript:
    """Typed face of lua/lend.lua."""

    name = "lend"

    def __init__(self) -> None:
        self.source = load_script(self.name)
        self.sha = _sha(self.source)

    def call(
        self, prefix: bytes, ask: LeaseAsk, *, entry: bytes = b"", now_us: int = 0, expires_us: int = 0
    ) -> list[bytes | int]:
        """Return key count, KEYS and ARGV. `entry` stands in the index of the slot's leases; without one the lease."""
        bucket_prefix = keys.bucket(prefix, "")
        return [
            4 + len(ask.wants),
            keys.lease_row(prefix, ask.lease),
            keys.sampling(prefix),
            keys.touched(prefix),
            *(bucket_prefix + want.bucket.encode() for want in ask.wants),
            keys.leases(prefix),
            *pack_ask(ask, now_us=now_us, expires_us=expires_us),
            entry or ask.lease.encode(),
        ]

    def answer(self, reply: bytes, ask: LeaseAsk) -> LeaseAnswer:
        """Return the answer of the store."""
        return unpack_answer(reply, ask.wants)


class SignalScript:
    """Typed face of lua/signal.lua."""

    name = "signal"

    def __init__(self) -> None:
        self.source = load_script(self.name)
        self.sha = _sha(self.source)

    def call(
        self, prefix: bytes, bucket: str, source: str, loads: Mapping[str, float], *, now_us: int = 0
    ) -> list[bytes | int]:
        """Return key count, KEYS and ARGV."""
        return [1, keys.signals(prefix, bucket), _TIME.pack(now_us), keys.source_digest(source), pack_loads(loads)]


_TIME = Struct("<d")


def arguments(
    prefix: bytes, flush_id: bytes, batch: Batch[Any], *, now_us: int = 0, expires_us: int = 0
) -> list[bytes | int]:
    """Return key count, KEYS and ARGV of a script that takes batches: its buckets, its other keys, its operations."""
    buckets = batch.buckets
    bucket_prefix = keys.bucket(prefix, "")
    return [
        3 + len(buckets) + len(batch.others),
        keys.reply(prefix, flush_id),
        keys.sampling(prefix),
        keys.touched(prefix),
        *[bucket_prefix + name.encode() for name in buckets],
        *[prefix + other for other in batch.others],
        pack_head(now_us, expires_us, len(buckets)),
        batch.params,
        batch.terms,
        batch.packed,
    ]


def _whole(
    prefix: bytes, flush_id: bytes, batch: Batch[Any], count: int, now_us: int, expires_us: int
) -> list[bytes | int]:
    assert len(batch.operations) == count, "one call holds them all"
    return arguments(prefix, flush_id, batch, now_us=now_us, expires_us=expires_us)


def _sha(source: bytes) -> bytes:
    return sha1(source, usedforsecurity=False).hexdigest().encode()
