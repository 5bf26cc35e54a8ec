"""That the store lost its policies: kept in the store itself, until somebody says that it was seen (S10).

Every node that notices writes the same record unless there is one, every other node reads it, and what a second loss
wiped out is written again by whoever knew of it. An acknowledgement takes it away, and is remembered for a day, so that
a node that was cut off meanwhile does not bring it back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from redis.exceptions import ResponseError

from limiter.store import keys
from limiter.store.connect import Link
from limiter.store.errors import StoreError
from limiter.store.policy_entries import API, Kept, Place

POLICIES_MAX = 100
"""Policies that a record names."""

ACKNOWLEDGED_S = 86_400
TIMEOUT_S = 2.0


class Loss(msgspec.Struct, frozen=True, array_like=True):
    """What was lost, and when it was noticed, by the store's time."""

    when_us: int
    life: str
    """Of the store, before: each time that it is emptied it begins another."""
    before: int
    """The revision of the policies before, and after."""
    after: int
    policies: tuple[tuple[str, str], ...] = ()
    """Namespace and name of those that were made over the API and are gone; no file puts them back."""
    more: int = 0
    """How many beside those that are named."""

    @property
    def gone(self) -> int:
        """How many policies are gone."""
        return len(self.policies) + self.more


class Acknowledged(msgspec.Struct, frozen=True, array_like=True):
    """Who has seen which loss."""

    who: str
    when_us: int
    loss: Loss

    def covers(self, loss: Loss) -> bool:
        """Whether it is the same: nodes may have known an older revision when they noticed."""
        return loss.life == self.loss.life and loss.before <= self.loss.before


def gone(before: Mapping[Place, Kept], after: Mapping[Place, Kept]) -> tuple[tuple[tuple[str, str], ...], int]:
    """The policies that were made over the API and are not there any more: some of them, and how many others."""
    places = sorted(
        (place.namespace, place.name)
        for place, kept in before.items()
        if place.kind == "policy" and place not in after and (kept.owner or API) == API
    )
    return tuple(places[:POLICIES_MAX]), max(0, len(places) - POLICIES_MAX)


async def read(link: Link) -> tuple[Loss | None, Acknowledged | None]:
    """The loss that nobody has acknowledged, and the last one that somebody has."""
    found: list[bytes | None] = await _call(link, "MGET", keys.POLICIES_LOSS, keys.POLICIES_LOSS_SEEN)
    return _decode(found[0], Loss), _decode(found[1], Acknowledged)


async def write(link: Link, loss: Loss) -> None:
    """Keep a loss, unless one is kept already."""
    await _call(link, "SET", keys.POLICIES_LOSS, msgspec.json.encode(loss), "NX")


async def acknowledge(link: Link, who: str, now_us: int) -> Loss | None:
    """Take the loss away; which it was, None if there was none."""
    loss, _ = await read(link)
    if loss is None:
        return None
    seen = msgspec.json.encode(Acknowledged(who, now_us, loss))
    await _call(link, "SET", keys.POLICIES_LOSS_SEEN, seen, "EX", ACKNOWLEDGED_S)
    await _call(link, "DEL", keys.POLICIES_LOSS)
    return loss


def _decode(raw: bytes | None, kind: type[Any]) -> Any:
    """What is damaged counts as not there."""
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
        raise StoreError(f"what is known of a loss cannot be read or kept: {error}") from error
