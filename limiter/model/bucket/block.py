"""Blocking a key for a time after too many refusals (W17): the reference for `lua/lib/record.lua`.

    block: {after: 100, in: 1m, for: 10m}

    first refusal       the count begins, and ends a minute later
    100th within it     the key is denied for ten minutes, whatever its balance; then the count begins again

Only refusals by the policy's own limit count: not those by another policy, by overload control, or while blocked.
A clock that steps back never makes a block longer than the policy says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

AFTER_MAX = 1_000_000
IN_MAX_S = 86_400.0
FOR_MAX_S = 30 * 86_400.0


class BlockTerms(NamedTuple):
    """A policy's terms of blocking."""

    after: float
    """Refusals that lead to a block."""
    in_us: float
    """The time within which they have to occur."""
    for_us: float
    """Duration of the block."""


@dataclass(slots=True)
class Block:
    """The refusals and the block of one bucket."""

    counted_until_us: float = 0.0
    """When the current count ends; 0 before the first refusal."""
    refused: float = 0.0
    until_us: float = 0.0
    """When the block ends; 0 before the first."""


def left_us(block: Block, terms: BlockTerms, now_us: int) -> float:
    """Return the time for which the key is still blocked; 0 if it is not."""
    return max(0.0, min(block.until_us - now_us, terms.for_us))


def count_refusal(block: Block, terms: BlockTerms, requests: float, now_us: int) -> None:
    """Count a refusal by the policy's own limit, and begin a block if there were too many."""
    left = block.counted_until_us - now_us
    if not 0 < left <= terms.in_us:
        block.counted_until_us, block.refused = now_us + terms.in_us, 0.0
    block.refused += requests
    if block.refused >= terms.after:
        block.counted_until_us, block.refused, block.until_us = 0.0, 0.0, now_us + terms.for_us
