"""Every key that Headgate uses is spelled here, and nowhere else.

    hg:{<namespace>/<partition>}:b:<policy>:<value>,<value>…    a bucket; a quota's: <policy>+quota:…
    hg:{…}:r:<id>    tombstone of a reservation       hg:{…}:i:<digest>   decision under an idempotency key
    hg:{…}:f:<id>    reply of a batched call          hg:{…}:sampling, hg:{…}:touched   for the controller
    hg:{…}:lease     which controller owns the slot   hg:{…}:fence    how often it was taken
    hg:{…}:s:<bucket>   what the controller knows of a bucket
    hg:{…}:u:<bucket>   what services report of their load; of a policy's name alone: for all its buckets
    hg:secret        what reservations are signed with
    hg:{policies}:…  current: the policies, audit: who changed what, h:<entry>: what an entry was before;
                     loss: that policies were lost, loss-seen: who acknowledged that;
                     entries are p:<namespace>/<name>, a policy, and n:<namespace>, its spread
    hg:{nodes}       when each node was last seen     hg:{controllers}   when each controller was

The braces are a hash tag: all that one acquire touches lives in one slot. Text from clients is written with the
letters, digits and `._-`; everything else is percent-encoded, what is long becomes a digest behind a `~`, and what
is absent a `!`: so no two descriptors share a key, and none can move a slot (F-N1 to F-N6).
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
"""Nothing is kept here: it only chooses whom a probe asks."""

POLICIES = b"hg:{policies}:"
"""What every key of the policy store begins with; no namespace's slot is called so."""

POLICIES_CURRENT = POLICIES + b"current"
"""All policies and namespaces in force, and the revision of the whole."""

POLICIES_AUDIT = POLICIES + b"audit"
"""Who changed which of them, newest first."""

POLICIES_LOSS = POLICIES + b"loss"
"""That policies were lost, until somebody acknowledges it."""

POLICIES_LOSS_SEEN = POLICIES + b"loss-seen"
"""Who acknowledged the last loss, for a day."""

POLICIES_CHANNEL = POLICIES + b"changed"
"""Where each new revision is published."""

NODES = b"hg:{nodes}"
"""The nodes that live, by the store's time (us) when they were last seen."""

CONTROLLERS = b"hg:{controllers}"
"""The controllers that live, likewise."""

ACL = "~hg:* &hg:*"
"""What a store user must be allowed to touch."""

TEXT_MAX = 64
"""Longest encoded text that stands in a key as it is."""

SOURCE_SIZE = 8
"""Bytes that stand for the name of a source of signals."""

NAME_MAX = 200
"""Longest bucket name that stands as it is."""

_ABSENT = "!"
_PLAIN = re.compile(rf"[A-Za-z0-9._-]{{0,{TEXT_MAX}}}")


def encode(text: str | None) -> str:
    """Write client text so that it cannot end early, reach into a neighbour or grow without bound."""
    if text is None:
        return _ABSENT
    # Most text is plain, and most of that is only letters and digits.
    if (len(text) <= TEXT_MAX and text.isalnum() and text.isascii()) or _PLAIN.fullmatch(text):
        return text
    raw = text.encode("utf-8", "surrogatepass")
    # quote() leaves "~" alone, but here it announces a digest.
    encoded = quote(raw, safe="").replace("~", "%7E")
    return encoded if len(encoded) <= TEXT_MAX else "~" + _digest(raw)


@lru_cache(maxsize=4096)
def _encoded_limit(limit: str) -> str:
    """The mark of a quota stands as it is: no policy can be called so."""
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
    """The limit that holds for one bucket: a key with a rate of its own has its own (P12)."""
    if limit.rated_by is None:
        return limit
    if limit.rated_codes is None:
        limit.rated_codes = {encode(value): found for value, found in limit.rated.items()}
    codes = name.partition(":")[2].split(",")
    if len(codes) != len(limit.per):
        return limit  # too long a name stands as a digest, which tells no key
    return limit.rated_codes.get(codes[limit.per.index(limit.rated_by)], limit)


class Slot(NamedTuple):
    """One partition of a namespace: what one script call can reach."""

    namespace: str = "default"
    partition: int = 0

    @property
    def prefix(self) -> bytes:
        """What every key of this slot begins with."""
        return f"hg:{{{encode(self.namespace)}/{self.partition}}}:".encode()


def bucket(prefix: bytes, name: str) -> bytes:
    """The record of a bucket."""
    return prefix + b"b:" + name.encode()


def tombstone(prefix: bytes, reservation: str) -> bytes:
    """What is left of a reservation once it was settled."""
    return prefix + b"r:" + reservation.encode()


def idempotency(prefix: bytes, key: str) -> bytes:
    """The decision taken under a caller's idempotency key."""
    return prefix + b"i:" + _digest(key.encode("utf-8", "surrogatepass")).encode()


def reply(prefix: bytes, flush_id: bytes) -> bytes:
    """The reply of a batched call, for when the call is sent again."""
    return prefix + b"f:" + flush_id


def sampling(prefix: bytes) -> bytes:
    """The number of the sampling epoch."""
    return prefix + b"sampling"


def touched(prefix: bytes) -> bytes:
    """The buckets changed since the last sampling."""
    return prefix + b"touched"


def lease(prefix: bytes) -> bytes:
    """Who steers the slot, and under which fence number."""
    return prefix + b"lease"


def fence(prefix: bytes) -> bytes:
    """How often the slot was taken: the last fence number."""
    return prefix + b"fence"


def state(prefix: bytes, name: str) -> bytes:
    """What the controller keeps of a bucket from cycle to cycle."""
    return prefix + b"s:" + name.encode()


def signals(prefix: bytes, name: str) -> bytes:
    """What services report of their load to a bucket, or to all of a policy's."""
    return prefix + b"u:" + name.encode()


def source_digest(source: str) -> bytes:
    """A source's name as it stands among the signals."""
    return blake2b(source.encode("utf-8", "surrogatepass"), digest_size=SOURCE_SIZE).digest()


def policy_history(entry: str) -> bytes:
    """What one entry of the policy store was before, newest first."""
    return POLICIES + b"h:" + entry.encode()


def _digest(raw: bytes) -> str:
    return blake2b(raw, digest_size=16).hexdigest()
