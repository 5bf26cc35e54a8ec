"""Settles as tests of the middlewares see them."""

from typing import NamedTuple


class Settled(NamedTuple):
    """A grant's last word."""

    work: float
    outcome: str
    latency_ms: float
