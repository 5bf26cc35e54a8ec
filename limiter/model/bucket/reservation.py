"""Reservations are signed, not stored: the token itself says what was charged where.

    token = base64url(payload ‖ BLAKE2b(payload, key = secret, 16 bytes))

Only a holder of the secret can make one. A token of another installation, a truncated one and a forged one are treated
alike: as unknown (F-R6).
"""

from __future__ import annotations

import math
from binascii import Error as BinasciiError
from binascii import a2b_base64, b2a_base64
from collections.abc import Sequence
from hashlib import blake2b
from hmac import compare_digest
from struct import Struct
from struct import error as struct_error

import msgspec

from limiter.model.bucket.operations import LATE_US, Charge

ID_SIZE = 12
TOKEN_MAX = 131_072

VERSION = 2
UNCOUNTED = 4
"""Added to the number of the class in a token that was granted without the store."""

_URL_SAFE, _STANDARD = bytes.maketrans(b"+/", b"-_"), bytes.maketrans(b"-_", b"+/")
_PADDING = (b"", b"=", b"==", b"===")
_TAG_SIZE = 16
_HEAD = Struct(f"<B{ID_SIZE}sQQdBHBH")
_CHARGE = Struct("<ddBB")
_MORE = Struct("<d")
_LEARN_ID = Struct("<I")
_IN_REQUESTS, _EXPECTS, _UNPAID, _KEYED = 1, 2, 4, 8
_NAN = math.nan
_LATE = Struct("<Q")

Taken = tuple[str, float, float, int, float, float, int]
"""The charge in one bucket: its name, the charge, the weight of work there, 1 if the charge counts requests, the
latency (ms) that its policy expects (NaN: none), the part that it could not pay, and the id of its values of `learn_by`
(0: none)."""


class Reservation(msgspec.Struct, frozen=True, gc=False):
    """The charges of a granted acquire, and the deadline for settling it."""

    id: bytes
    namespace: str
    partition: int
    acquired_us: int
    deadline_us: int
    expected_ms: float
    taken: tuple[Taken, ...]
    class_number: int = 0
    """Number of the request's class, for those of its buckets that have overload control
    (`limiter.model.overload.shedding`)."""
    late_us: int = LATE_US
    """How long after its deadline it may be settled. In the token, so that nodes that are set differently agree."""
    is_uncounted: bool = False
    """True if it was granted without the store, where it was never counted as in flight."""

    @property
    def name(self) -> str:
        """The id as text, for keys."""
        return _encode(self.id).decode()


class Signer:
    """Converts reservations to tokens and back."""

    def __init__(self, secret: bytes) -> None:
        key = blake2b(secret, digest_size=32, person=b"hg-reservation").digest()
        # Keyed once: a copy costs less than a new start.
        self._keyed = blake2b(key=key, digest_size=_TAG_SIZE)

    def sign(self, reservation: Reservation) -> str:
        """Return the token for the caller."""
        return self.seal(_pack(reservation)).decode()

    def seal(self, payload: bytes) -> bytes:
        """Return a packed reservation with its tag, as text."""
        keyed = self._keyed.copy()
        keyed.update(payload)
        return _encode(payload + keyed.digest())

    def open(self, token: str) -> Reservation | None:
        """Return the reservation in a valid token; None for anything else."""
        payload = self.unseal(token)
        return None if payload is None else _unpack(payload)

    def unseal(self, token: str) -> bytes | None:
        """Return the payload of a valid token; None for anything else."""
        if len(token) > TOKEN_MAX:
            return None
        try:
            text = token.encode("ascii")
            raw = a2b_base64(text.translate(_STANDARD) + _PADDING[-len(text) % 4])
        except (UnicodeEncodeError, BinasciiError):
            return None
        payload = raw[:-_TAG_SIZE]
        if not compare_digest(self._tag(payload), raw[-_TAG_SIZE:]) or _encode(raw) != text:
            return None  # the second test: one reservation has only one valid spelling
        return payload

    def _tag(self, payload: bytes) -> bytes:
        keyed = self._keyed.copy()
        keyed.update(payload)
        return keyed.digest()


class Keyring:
    """Signs with the newest secret, and accepts signatures of the former ones."""

    def __init__(self, signer: Signer) -> None:
        self._signers = [signer]
        self.seal = signer.seal

    def sign_with(self, signer: Signer) -> None:
        """Sign with another secret from now on."""
        self._signers.insert(0, signer)
        self.seal = signer.seal

    def open(self, token: str) -> Reservation | None:
        """Return the reservation in a valid token; None for anything else."""
        for signer in self._signers:
            if (found := signer.open(token)) is not None:
                return found
        return None

    def unseal(self, token: str) -> bytes | None:
        """Return the payload of a valid token of another kind; None for anything else."""
        for signer in self._signers:
            if (found := signer.unseal(token)) is not None:
                return found
        return None


def _encode(raw: bytes) -> bytes:
    return b2a_base64(raw, newline=False).translate(_URL_SAFE, b"=")


def taken_by(charge: Charge) -> Taken:
    """Return the same as a tuple."""
    return (
        charge.bucket, charge.charge, charge.weight, charge.in_requests, charge.expected_ms, charge.uncollected,
        charge.learn_id,
    )  # fmt: skip


def pack(
    id_: bytes,
    namespace: bytes,
    partition: int,
    acquired_us: int,
    deadline_us: int,
    expected_ms: float,
    class_number: int,
    late_us: int,
    taken: Sequence[Taken],
) -> bytes:
    """Pack a reservation from the parts of a decision, without making an object."""
    packed = _HEAD.pack(
        VERSION, id_, acquired_us, deadline_us, expected_ms, class_number, partition, len(taken), len(namespace)
    ) + namespace  # fmt: skip
    for bucket, charge, weight, bits, expected_of_its_own_ms, uncollected, learn_id in taken:
        raw = bucket.encode()
        if expected_of_its_own_ms != expected_of_its_own_ms and not uncollected and not learn_id:  # nearly all
            packed += _CHARGE.pack(charge, weight, bits, len(raw)) + raw
            continue
        announced, more = optional_fields(expected_of_its_own_ms, uncollected, learn_id)
        packed += _CHARGE.pack(charge, weight, bits + announced, len(raw)) + raw + more
    return packed + pack_late(late_us)


def optional_fields(expected_ms: float, uncollected: float, learn_id: int) -> tuple[int, bytes]:
    """Pack the fields of a charge that few have; return the bits that announce them, and the fields."""
    bits, more = 0, b""
    if expected_ms == expected_ms:
        bits, more = _EXPECTS, _MORE.pack(expected_ms)
    if uncollected:
        bits, more = bits + _UNPAID, more + _MORE.pack(uncollected)
    if learn_id:
        bits, more = bits + _KEYED, more + _LEARN_ID.pack(learn_id)
    return bits, more


def lone(namespace_size: int, bucket_size: int) -> Struct:
    """Return a struct that packs a reservation of one bucket at once: VERSION, id, times, expected latency, class,
    partition, 1, the namespace's size and the namespace, then charge, weight, bits, the name's size and the name; as
    `pack` does."""
    return Struct(f"{_HEAD.format}{namespace_size}s{_CHARGE.format[1:]}{bucket_size}s")


def pack_late(late_us: int) -> bytes:
    """Return the trailer of a token whose `late_us` differs from the default; empty otherwise."""
    return b"" if late_us == LATE_US else _LATE.pack(late_us)


def _pack(reservation: Reservation) -> bytes:
    return pack(
        reservation.id,
        reservation.namespace.encode("utf-8", "surrogatepass"),
        reservation.partition,
        reservation.acquired_us,
        reservation.deadline_us,
        reservation.expected_ms,
        reservation.class_number + UNCOUNTED * reservation.is_uncounted,
        reservation.late_us,
        reservation.taken,
    )


def _unpack(payload: bytes) -> Reservation | None:
    """Unpack a reservation; None for the layout of a newer or older version."""
    try:
        version, id_, acquired_us, deadline_us, expected_ms, class_number, partition, count, size = _HEAD.unpack_from(
            payload
        )
    except struct_error:
        return None
    if version != VERSION:
        return None
    at = _HEAD.size + size
    namespace = payload[_HEAD.size : at].decode("utf-8", "surrogatepass")
    taken: list[Taken] = []
    for _ in range(count):
        charge, weight, bits, size = _CHARGE.unpack_from(payload, at)
        at += _CHARGE.size
        bucket, at = payload[at : at + size].decode(), at + size
        if bits <= _IN_REQUESTS:  # nearly all
            taken.append((bucket, charge, weight, bits, _NAN, 0.0, 0))
            continue
        its_expected_ms, uncollected, learn_id = _NAN, 0.0, 0
        if bits & _EXPECTS:
            (its_expected_ms,), at = _MORE.unpack_from(payload, at), at + _MORE.size
        if bits & _UNPAID:
            (uncollected,), at = _MORE.unpack_from(payload, at), at + _MORE.size
        if bits & _KEYED:
            (learn_id,), at = _LEARN_ID.unpack_from(payload, at), at + _LEARN_ID.size
        taken.append((bucket, charge, weight, bits & _IN_REQUESTS, its_expected_ms, uncollected, learn_id))
    late_us = _LATE.unpack_from(payload, at)[0] if len(payload) > at else LATE_US
    return Reservation(
        id_, namespace, partition, acquired_us, deadline_us, expected_ms, tuple(taken), class_number % UNCOUNTED,
        late_us, class_number >= UNCOUNTED,
    )  # fmt: skip
