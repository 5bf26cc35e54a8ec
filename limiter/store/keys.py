"""All keys of Headgate in the store. No other module spells one.

    hg:{<namespace>/<partition>}:b:<policy>:<value>,<value>…    a bucket; a quota's: <policy>+quota:…
    hg:{…}:r:<id>    tombstone of a reservation       hg:{…}:i:<digest>   decision under an idempotency key
    hg:{…}:f:<id>    reply of a batched call          hg:{…}:sampling, hg:{…}:touched   for the controller
    hg:{…}:lease     which controller owns the slot   hg:{…}:fence    how often it was taken
    hg:{…}:s:<bucket>   the controller's state of a bucket
    hg:{…}:u:<bucket>   load reported by services; with a policy's name alone: for all its buckets
    hg:secret        the key that signs reservations
    hg:{policies}:…  current: the policies, audit: who changed what, h:<entry>: the history of an entry;
                     loss: a record of lost policies, loss-seen: who acknowledged it;
                     entries are p:<namespace>/<name>, a policy, and n:<namespace>, its partitions
    hg:{nodes}       when each node was last seen     hg:{controllers}   when each controller was

The braces are a hash tag: everything that one acquire touches lives in one slot. Client text is written with letters,
digits and `._-`; every other character is percent-encoded, long text becomes a digest behind a `~`, and an absent value
a `!`: so no two descriptors share a key, and no text can change the slot (F-N1 to F-N6).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple
from urllib.parse import quote

from limiter.model.policy.limit import QUOTA_MARK, Limit

SECRET = b"hg:secret"
PROBE = b"hg:{probe}"
"""Holds nothing: it only selects the server that a probe asks."""

POLICIES = b"hg:{policies}:"
"""Prefix of all keys of the policy store; no namespace's slot has this name."""

POLICIES_CURRENT = POLICIES + b"current"
"""All policies and namespaces in force, and the revision of the whole."""

POLICIES_AUDIT = POLICIES + b"audit"
"""The changes to all of them, newest first."""

POLICIES_LOSS = POLICIES + b"loss"
"""The record of lost policies, until somebody acknowledges it."""

POLICIES_LOSS_SEEN = POLICIES + b"loss-seen"
"""The last acknowledgement of a loss, for a day."""

POLICIES_CHANNEL = POLICIES + b"changed"
"""The channel on which each new revision is published."""

NODES = b"hg:{nodes}"
"""The live nodes, with the store's time (us) at which each was last seen."""

CONTROLLERS = b"hg:{controllers}"
"""The live controllers, likewise."""

ACL = "~hg:* &hg:*"
"""The keys and channels that a store user must be allowed to touch."""

EVERY_BUCKET = "*"
"""Stands for every bucket of a namespace where load is reported: no policy can be called so."""

TEXT_MAX = 64
"""Encoded text up to this length is written into a key as it is; longer text as a digest."""

SOURCE_SIZE = 8
"""Size of the digest that stands for the name of a source of signals."""

NAME_MAX = 200
"""Bucket names up to this length are written as they are; longer ones as a digest."""

_ABSENT = "!"
_PLAIN = re.compile(rf"[A-Za-z0-9._-]{{0,{TEXT_MAX}}}")


def encode(text: str | None) -> str:
    """Encode client text so that it cannot end early, reach into a neighbour or grow without bound."""
    if text is None:
        return _ABSENT
    # Most text needs no encoding, and most of that is only letters and digits.
    if (len(text) <= TEXT_MAX and text.isalnum() and text.isascii()) or _PLAIN.fullmatch(text):
        return text
    raw = text.encode("utf-8", "surrogatepass")
    # quote() leaves "~" as it is, but in a key it announces a digest.
    encoded = quote(raw, safe="").replace("~", "%7E")
    return encoded if len(encoded) <= TEXT_MAX else "~" + _digest(raw)


@lru_cache(maxsize=4096)
def _encoded_limit(limit: str) -> str:
    """Keep the mark of a quota unencoded: no policy's name can contain it."""
    stem = limit.removesuffix(QUOTA_MARK)
    return encode(stem) + limit[len(stem) :]


def bucket_name(limit: str, values: Sequence[str | None]) -> str:
    """Name the bucket of a limit (`Limit.bucket`) for one combination of key values, within its slot."""
    prefix = _encoded_limit(limit)
    if not values:
        return prefix
    suffix = encode(values[0]) if len(values) == 1 else ",".join(map(encode, values))
    if len(prefix) + len(suffix) > NAME_MAX:
        suffix = "~~" + _digest(suffix.encode())
    return f"{prefix}:{suffix}"


def limit_at(limit: Limit, name: str) -> Limit:
    """Return the limit of one bucket: a key may have a rate of its own (P12)."""
    if limit.rated_by is None:
        return limit
    if limit.rated_codes is None:
        limit.rated_codes = {encode(value): found for value, found in limit.rated.items()}
    codes = name.partition(":")[2].split(",")
    if len(codes) != len(limit.per):
        return limit  # a name that became a digest does not contain the key
    return limit.rated_codes.get(codes[limit.per.index(limit.rated_by)], limit)


class Slot(NamedTuple):
    """One partition of a namespace: the keys that one script call can reach."""

    namespace: str = "default"
    partition: int = 0

    @property
    def prefix(self) -> bytes:
        """Prefix of all keys of this slot."""
        return f"hg:{{{encode(self.namespace)}/{self.partition}}}:".encode()


def bucket(prefix: bytes, name: str) -> bytes:
    """The record of a bucket."""
    return prefix + b"b:" + name.encode()


def tombstone(prefix: bytes, reservation: str) -> bytes:
    """The key of a reservation's tombstone, written by its first settle or progress."""
    return prefix + b"r:" + reservation.encode()


def idempotency(prefix: bytes, key: str) -> bytes:
    """The key of the decision under a caller's idempotency key."""
    return prefix + b"i:" + _digest(key.encode("utf-8", "surrogatepass")).encode()


def reply(prefix: bytes, flush_id: bytes) -> bytes:
    """The key of the reply to a batched call, for when the call is sent again."""
    return prefix + b"f:" + flush_id


def sampling(prefix: bytes) -> bytes:
    """The number of the sampling epoch."""
    return prefix + b"sampling"


def touched(prefix: bytes) -> bytes:
    """The buckets changed since the last sampling."""
    return prefix + b"touched"


def lease(prefix: bytes) -> bytes:
    """The key of the slot's lease: which controller steers it, under which fence number."""
    return prefix + b"lease"


def lease_row(prefix: bytes, lease: str) -> bytes:
    """The key of a lease's row: the last answer to its holder."""
    return prefix + b"l:" + lease.encode()


def leases(prefix: bytes) -> bytes:
    """The key of the slot's leases, by when they end."""
    return prefix + b"leases"


def fence(prefix: bytes) -> bytes:
    """The key of the last fence number: how often the slot was taken."""
    return prefix + b"fence"


def memory(prefix: bytes, name: str) -> bytes:
    """The key of what the buckets of a limit have taught, for its new keys; `name` is what their names begin with."""
    return prefix + b"l:" + name.encode()


def state(prefix: bytes, name: str) -> bytes:
    """The key of the controller's state of a bucket, kept from cycle to cycle."""
    return prefix + b"s:" + name.encode()


def signals(prefix: bytes, name: str) -> bytes:
    """The key of the load that services report for a bucket, or for all of a policy's."""
    return prefix + b"u:" + name.encode()


def source_digest(source: str) -> bytes:
    """Return the digest that stands for a source's name among the signals."""
    return blake2b(source.encode("utf-8", "surrogatepass"), digest_size=SOURCE_SIZE).digest()


def policy_history(entry: str) -> bytes:
    """The key of the former values of one entry of the policy store, newest first."""
    return POLICIES + b"h:" + entry.encode()


def _digest(raw: bytes) -> str:
    return blake2b(raw, digest_size=16).hexdigest()
