"""The Lua scripts: loading them, and one typed face for each, the only code that knows its argument order."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from hashlib import sha1
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from limiter.model.bucket import Params
from limiter.model.operations import Acquire, AcquireAnswer, Settle, SettleAnswer
from limiter.model.policy_log import Applied, Call
from limiter.store import keys
from limiter.store.layout import Terms, pack_acquires, pack_settles, unpack_acquires, unpack_settles
from limiter.store.policy_layout import pack_changes, pack_head, pack_origin, unpack_applied

_INCLUDE = re.compile(r"^-- #include (lib/\w+\.lua)$", re.MULTILINE)


def scripts_directory() -> Path:
    """Where the scripts are: inside the installed package, or at the top of a source checkout."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "lua"
    return installed if installed.is_dir() else package.parent / "lua"


def load_source(name: str) -> bytes:
    """A script with the parts it includes spliced in."""
    directory = scripts_directory()
    source = (directory / f"{name}.lua").read_text(encoding="utf-8")
    return _INCLUDE.sub(lambda match: (directory / match[1]).read_text(encoding="utf-8"), source).encode()


OpT = TypeVar("OpT", contravariant=True)
AnswerT = TypeVar("AnswerT", covariant=True)


class Script(Protocol, Generic[OpT, AnswerT]):
    """What the batcher needs to know of a script that takes batches."""

    name: str
    source: bytes
    sha: bytes

    def demands(self, operation: OpT) -> Iterable[tuple[str, Params | None]]:
        """The buckets of an operation, each with the parameters it goes by."""

    def call(
        self,
        prefix: bytes,
        flush_id: bytes,
        operations: Sequence[OpT],
        *,
        now_us: int = 0,
        expires_us: int = 0,
    ) -> list[bytes | int]:
        """What follows the script's name in EVAL or EVALSHA: key count, KEYS, ARGV."""

    def answers(self, reply: bytes, operations: Sequence[OpT]) -> Sequence[AnswerT]:
        """One answer per operation, in order."""


class AcquireScript:
    """Typed face of lua/acquire.lua."""

    name = "acquire"

    def __init__(self) -> None:
        self.source = load_source(self.name)
        self.sha = _sha(self.source)

    def demands(self, operation: Acquire) -> Iterable[tuple[str, Params | None]]:
        """The buckets of an acquire."""
        return [(want.bucket, want.params) for want in operation.wants]

    def call(
        self,
        prefix: bytes,
        flush_id: bytes,
        operations: Sequence[Acquire],
        *,
        now_us: int = 0,
        expires_us: int = 0,
    ) -> list[bytes | int]:
        """Key count, KEYS and ARGV."""
        terms, numbered = Terms(), dict[str, int]()
        packed = pack_acquires(operations, terms, numbered)
        return [
            *_keys(prefix, flush_id, terms, [keys.idempotency(prefix, key) for key in numbered]),
            *terms.arguments(now_us=now_us, expires_us=expires_us),
            packed,
        ]

    def answers(self, reply: bytes, operations: Sequence[Acquire]) -> list[AcquireAnswer]:
        """One answer per acquire."""
        return unpack_acquires(reply, operations)


class SettleScript:
    """Typed face of lua/settle.lua."""

    name = "settle"

    def __init__(self) -> None:
        self.source = load_source(self.name)
        self.sha = _sha(self.source)

    def demands(self, operation: Settle) -> Iterable[tuple[str, Params | None]]:
        """The buckets of a settle."""
        return [(charge.bucket, charge.params) for charge in operation.charges]

    def call(
        self,
        prefix: bytes,
        flush_id: bytes,
        operations: Sequence[Settle],
        *,
        now_us: int = 0,
        expires_us: int = 0,
    ) -> list[bytes | int]:
        """Key count, KEYS and ARGV."""
        terms, numbered = Terms(), dict[str, int]()
        packed = pack_settles(operations, terms, numbered)
        return [
            *_keys(prefix, flush_id, terms, [keys.tombstone(prefix, reservation) for reservation in numbered]),
            *terms.arguments(now_us=now_us, expires_us=expires_us),
            packed,
        ]

    def answers(self, reply: bytes, operations: Sequence[Settle]) -> list[SettleAnswer]:
        """One answer per settle."""
        return unpack_settles(reply, operations)


class PoliciesScript:
    """Typed face of lua/policies.lua."""

    name = "policies"

    def __init__(self) -> None:
        self.source = load_source(self.name)
        self.sha = _sha(self.source)

    def call(self, call_id: bytes, call: Call, *, now_us: int = 0, expires_us: int = 0) -> list[bytes | int]:
        """Key count, KEYS and ARGV."""
        return [
            3 + len(call.changes),
            keys.reply(keys.POLICIES, call_id),
            keys.POLICIES_CURRENT,
            keys.POLICIES_AUDIT,
            *(keys.policy_history(change.entry) for change in call.changes),
            pack_head(call, now_us=now_us, expires_us=expires_us),
            pack_origin(call),
            pack_changes(call.changes),
            keys.POLICIES_CHANNEL,
        ]

    def answer(self, reply: bytes) -> Applied:
        """What came of it."""
        return unpack_applied(reply)


def _keys(prefix: bytes, flush_id: bytes, terms: Terms, others: list[bytes]) -> list[bytes | int]:
    """The key count and the KEYS that both scripts begin with."""
    bucket_prefix = keys.bucket(prefix, "")
    buckets = [bucket_prefix + name.encode() for name in terms.buckets]
    return [
        3 + len(buckets) + len(others),
        keys.reply(prefix, flush_id),
        keys.sampling(prefix),
        keys.touched(prefix),
        *buckets,
        *others,
    ]


def _sha(source: bytes) -> bytes:
    return sha1(source, usedforsecurity=False).hexdigest().encode()
