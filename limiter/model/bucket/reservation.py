"""Reservations are signed, not stored: the token itself says what was charged where.

    token = base64url(payload ‖ BLAKE2b(payload, key = secret, 16 bytes))

Nobody without the secret can make one. A token of another installation, a truncated or a forged one are all the
same to us: no reservation of ours (F-R6).
"""

from __future__ import annotations

import math
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as BinasciiError
from binascii import b2a_base64
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
_URL_SAFE = bytes.maketrans(b"+/", b"-_")
_TAG_SIZE = 16
_HEAD = Struct(f"<B{ID_SIZE}sQQdBHBH")
_CHARGE = Struct("<ddBB")
_MORE = Struct("<d")
_IN_REQUESTS, _EXPECTS, _UNPAID = 1, 2, 4
_NAN = math.nan
_LATE = Struct("<Q")

Taken = tuple[str, float, float, int, float, float]
"""What was taken from one bucket: its name, the charge, the weight of work there, 1 if the charge counts requests, how
soon (ms) its policy expects an answer (NaN: it has no word on that), and what it could not pay."""


class Reservation(msgspec.Struct, frozen=True, gc=False):
    """What a granted acquire took, and until when it may be settled without ado."""

    id: bytes
    namespace: str
    partition: int
    acquired_us: int
    deadline_us: int
    expected_ms: float
    taken: tuple[Taken, ...]
    class_number: int = 0
    """Of the request's class, for whichever of its buckets has overload control (`limiter.model.overload.shedding`)."""
    late_us: int = LATE_US
    """How long after its deadline it may be settled. In the token, so that nodes that are set differently agree."""

    @property
    def name(self) -> str:
        """The id as text, for keys."""
        return urlsafe_b64encode(self.id).decode()


class Signer:
    """Turns reservations into tokens and back."""

    def __init__(self, secret: bytes) -> None:
        key = blake2b(secret, digest_size=32, person=b"hg-reservation").digest()
        # Keyed once: a copy costs less than a new start.
        self._keyed = blake2b(key=key, digest_size=_TAG_SIZE)

    def sign(self, reservation: Reservation) -> str:
        """The token to hand to the caller."""
        return self.seal(_pack(reservation)).decode()

    def seal(self, payload: bytes) -> bytes:
        """A packed reservation with its tag, as text."""
        keyed = self._keyed.copy()
        keyed.update(payload)
        return b2a_base64(payload + keyed.digest(), newline=False).translate(_URL_SAFE, b"=")

    def open(self, token: str) -> Reservation | None:
        """The reservation in a token of ours; None for anything else."""
        if len(token) > TOKEN_MAX:
            return None
        try:
            raw = urlsafe_b64decode(token.encode("ascii") + b"=" * (-len(token) % 4))
        except (UnicodeEncodeError, BinasciiError):
            return None
        payload, tag = raw[:-_TAG_SIZE], raw[-_TAG_SIZE:]
        if not compare_digest(self._tag(payload), tag) or _encode(raw) != token:
            return None  # the second test: one reservation has one spelling
        return _unpack(payload)

    def _tag(self, payload: bytes) -> bytes:
        keyed = self._keyed.copy()
        keyed.update(payload)
        return keyed.digest()


class Keyring:
    """Signs with the newest secret, and knows what was signed with the ones before."""

    def __init__(self, signer: Signer) -> None:
        self._signers = [signer]
        self.seal = signer.seal

    def sign_with(self, signer: Signer) -> None:
        """Sign with another from now on."""
        self._signers.insert(0, signer)
        self.seal = signer.seal

    def open(self, token: str) -> Reservation | None:
        """The reservation in a token of ours; None for anything else."""
        for signer in self._signers:
            if (found := signer.open(token)) is not None:
                return found
        return None


def _encode(raw: bytes) -> str:
    return b2a_base64(raw, newline=False).translate(_URL_SAFE, b"=").decode()


def taken_by(charge: Charge) -> Taken:
    """The same as a tuple."""
    return charge.bucket, charge.charge, charge.weight, charge.in_requests, charge.expected_ms, charge.uncollected


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
    """A reservation as bytes, from what a decision knows: no object is made for it."""
    packed = _HEAD.pack(
        VERSION, id_, acquired_us, deadline_us, expected_ms, class_number, partition, len(taken), len(namespace)
    ) + namespace  # fmt: skip
    for bucket, charge, weight, bits, expected_of_its_own_ms, uncollected in taken:
        raw = bucket.encode()
        if expected_of_its_own_ms != expected_of_its_own_ms and not uncollected:  # by far the most
            packed += _CHARGE.pack(charge, weight, bits, len(raw)) + raw
            continue
        more = b""
        if expected_of_its_own_ms == expected_of_its_own_ms:
            bits, more = bits + _EXPECTS, _MORE.pack(expected_of_its_own_ms)
        if uncollected:
            bits, more = bits + _UNPAID, more + _MORE.pack(uncollected)
        packed += _CHARGE.pack(charge, weight, bits, len(raw)) + raw + more
    return packed + pack_late(late_us)


def lone(namespace_size: int, bucket_size: int) -> Struct:
    """What packs a reservation of one bucket in one go: VERSION, id, times, expected latency, class, partition, 1, the
    namespace's size and the namespace, then charge, weight, bits, the name's size and the name; as `pack` does."""
    return Struct(f"{_HEAD.format}{namespace_size}s{_CHARGE.format[1:]}{bucket_size}s")


def pack_late(late_us: int) -> bytes:
    """What stands at the end where a settle may come for another time than usual after the deadline."""
    return b"" if late_us == LATE_US else _LATE.pack(late_us)


def _pack(reservation: Reservation) -> bytes:
    return pack(
        reservation.id,
        reservation.namespace.encode("utf-8", "surrogatepass"),
        reservation.partition,
        reservation.acquired_us,
        reservation.deadline_us,
        reservation.expected_ms,
        reservation.class_number,
        reservation.late_us,
        reservation.taken,
    )


def _unpack(payload: bytes) -> Reservation | None:
    """None for a layout of another version, signed by a node that is newer or older."""
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
        its_expected_ms, uncollected = _NAN, 0.0
        if bits & _EXPECTS:
            (its_expected_ms,), at = _MORE.unpack_from(payload, at), at + _MORE.size
        if bits & _UNPAID:
            (uncollected,), at = _MORE.unpack_from(payload, at), at + _MORE.size
        taken.append((bucket, charge, weight, bits & _IN_REQUESTS, its_expected_ms, uncollected))
    return Reservation(
        id=id_,
        namespace=namespace,
        partition=partition,
        acquired_us=acquired_us,
        deadline_us=deadline_us,
        expected_ms=expected_ms,
        taken=tuple(taken),
        class_number=class_number,
        late_us=_LATE.unpack_from(payload, at)[0] if len(payload) > at else LATE_US,
    )
