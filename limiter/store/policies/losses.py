"""Losses of policies, when the store was emptied or restored from an older copy: kept until acknowledged (F-S10).

Every node that notices a loss writes a record, and every other node reads it. A record that a second loss wiped out is
written again by any node that knew it. Losses that nobody has acknowledged are merged into one record, so that an
acknowledgement covers what was shown, and no more. Acknowledging removes the record. The acknowledgement is kept for a
day, so that a node that was cut off meanwhile does not bring the record back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from redis.exceptions import ResponseError

from limiter.store import keys
from limiter.store.link.connect import Link
from limiter.store.policies.policy_entries import API, Kept, Place
from limiter.store.store_errors import StoreError

POLICIES_MAX = 100
"""Policies that a record lists by name."""

TIMES_MAX = 100
"""Losses that a record keeps; older ones are dropped."""

Gone = tuple[tuple[tuple[str, str], ...], int]
"""Lost policies: some by namespace and name, and the number of others."""

ACKNOWLEDGED_S = 86_400
TIMEOUT_S = 2.0


class Time(msgspec.Struct, frozen=True, array_like=True):
    """One occasion on which the store lost its policies."""

    when_us: int
    life: str
    before: int
    after: int
    went_back: bool
    """True if the store's life goes on from an older copy."""
    gone: int

    @property
    def key(self) -> tuple[str, int]:
        """Identifies it, whichever node noticed: a life ends once, but may go back more than once."""
        return self.life, self.before if self.went_back else 0


class Loss(msgspec.Struct, frozen=True, array_like=True):
    """The policies that were lost, and when that was noticed, by the store's time."""

    when_us: int
    """The first occasion."""
    life: str
    """The life of the store before the last occasion; it begins another each time it is emptied."""
    before: int
    """Revision of the policies before the last occasion, and after it."""
    after: int
    policies: tuple[tuple[str, str], ...] = ()
    """Namespace and name of lost policies that were made over the API: no file puts them back."""
    more: int = 0
    """Number of lost policies beyond those listed."""
    merged: tuple[Time, ...] = ()
    """Each occasion, oldest first; empty in the record of an older version."""

    @property
    def gone(self) -> int:
        """Number of lost policies."""
        return len(self.policies) + self.more

    @property
    def times(self) -> tuple[Time, ...]:
        """Each occasion, oldest first."""
        return self.merged or (Time(self.when_us, self.life, self.before, self.after, False, self.gone),)

    @property
    def last_us(self) -> int:
        """When the last occasion was noticed."""
        return self.times[-1].when_us

    def tells(self, other: Loss) -> bool:
        """True if this includes each occasion of another; nodes may have known an older revision when they noticed."""
        known = {time.key: time.before for time in self.times}
        return all(known.get(time.key, -1) >= time.before for time in other.times)

    def with_(self, other: Loss | None) -> Loss:
        """Merge this with another. The result stays bounded; merging the same again changes nothing."""
        if other is None or self.tells(other):
            return self
        times = {time.key: time for time in other.times} | {time.key: time for time in self.times}
        for time in other.times:
            if time.before > times[time.key].before:
                times[time.key] = msgspec.structs.replace(time, when_us=times[time.key].when_us)
        merged = tuple(sorted(times.values(), key=lambda time: (time.when_us, time.key)))[-TIMES_MAX:]
        named = sorted({*self.policies, *other.policies})
        policies = tuple(named[:POLICIES_MAX])
        is_cut = len(named) > POLICIES_MAX or self.more > 0 or other.more > 0
        more = max(0, sum(time.gone for time in merged) - len(policies)) if is_cut else 0
        last = merged[-1]
        return Loss(min(self.when_us, other.when_us), last.life, last.before, last.after, policies, more, merged)


def noticed(when_us: int, life: str, before: int, after: int, gone: Gone, *, went_back: bool) -> Loss:
    """Return the loss that a node notices itself."""
    named, more = gone
    time = Time(when_us, life, before, after, went_back, len(named) + more)
    return Loss(when_us, life, before, after, named, more, (time,))


class Acknowledged(msgspec.Struct, frozen=True, array_like=True):
    """An acknowledgement: who has seen which loss."""

    who: str
    when_us: int
    loss: Loss

    def covers(self, loss: Loss) -> bool:
        """True if each occasion of a loss was acknowledged; nodes may have known an older revision when they
        noticed."""
        return all(
            any(time.life == seen.life and time.before <= seen.before for seen in self.loss.times)
            for time in loss.times
        )


def gone(before: Mapping[Place, Kept], after: Mapping[Place, Kept]) -> Gone:
    """Return the policies that were made over the API and are missing now: some by name, and the number of others."""
    places = sorted(
        (place.namespace, place.name)
        for place, kept in before.items()
        if place.kind == "policy" and place not in after and (kept.owner or API) == API
    )
    return tuple(places[:POLICIES_MAX]), max(0, len(places) - POLICIES_MAX)


async def read(link: Link) -> tuple[Loss | None, Acknowledged | None]:
    """Return the loss that is not acknowledged yet, and the last acknowledgement."""
    found: list[bytes | None] = await _call(link, "MGET", keys.POLICIES_LOSS, keys.POLICIES_LOSS_SEEN)
    return _decode(found[0], Loss), _decode(found[1], Acknowledged)


async def write(link: Link, loss: Loss, *, replace: bool) -> None:
    """Write a loss; unless it replaces one that was read before, only where there is none.

    Of two nodes that replace it at once one is overwritten; it merges its own at its next look.
    """
    await _call(link, "SET", keys.POLICIES_LOSS, msgspec.json.encode(loss), *(() if replace else ("NX",)))


async def acknowledge(link: Link, who: str, now_us: int) -> Loss | None:
    """Remove the loss and return it; None if there was none."""
    loss, _ = await read(link)
    if loss is None:
        return None
    seen = msgspec.json.encode(Acknowledged(who, now_us, loss))
    await _call(link, "SET", keys.POLICIES_LOSS_SEEN, seen, "EX", ACKNOWLEDGED_S)
    await _call(link, "DEL", keys.POLICIES_LOSS)
    return loss


def _decode(raw: bytes | None, kind: type[Any]) -> Any:
    """Decode a record; a damaged one counts as absent."""
    if raw is None:
        return None
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


async def _call(link: Link, *command: bytes | str | int) -> Any:
    try:
        return await link.call(keys.POLICIES, *command, timeout_s=TIMEOUT_S)
    except ResponseError as error:
        raise StoreError(f"the record of lost policies cannot be read or written: {error}") from error
