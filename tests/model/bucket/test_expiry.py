"""Reservations that nobody settled, counted by policy (W14)."""

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from limiter.model.bucket.expiry import NARROW_US, WIDE_US, Expiries, Key

READS, WRITES = ("default", "reads"), ("default", "writes")
LIFE_US = 120_000_000
START_US = 1_790_000_000_000_000


def unsettled(nodes: list[Expiries], now_us: float) -> Mapping[Key, int]:
    """The reservations that were never settled, as a query over all nodes counts them."""
    found: dict[Key, int] = {}
    for node in nodes:
        due, settled, renewed = node.totals(now_us)
        for key in {*due, *settled, *renewed}:
            found[key] = found.get(key, 0) + due.get(key, 0) - settled.get(key, 0) - renewed.get(key, 0)
    return {key: count for key, count in found.items() if count}


def test_a_reservation_is_counted_as_unsettled_once_its_time_is_over() -> None:
    node = Expiries()
    for key in (READS, READS, WRITES):
        node.granted(key, START_US + LIFE_US, LIFE_US)
    node.settled(READS, START_US + LIFE_US, LIFE_US)
    assert unsettled([node], START_US + LIFE_US - 1) == {}
    assert unsettled([node], START_US + LIFE_US + NARROW_US) == {READS: 1, WRITES: 1}


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.booleans(), st.integers(0, 5)), max_size=30))
def test_it_does_not_matter_which_node_settles_or_renews(
    reservations: list[tuple[int, int, bool, int]],
) -> None:
    nodes = [Expiries() for _ in range(3)]
    lost = 0
    for number, (granted_by, settled_by, is_settled, renewals) in enumerate(reservations):
        over_us = START_US + number * 1_000_003 + LIFE_US
        nodes[granted_by].granted(READS, over_us, LIFE_US)
        for _ in range(renewals):
            nodes[settled_by].renewed(READS, over_us, over_us + 7_000_001, LIFE_US)
            over_us += 7_000_001
        if is_settled:
            nodes[settled_by].settled(READS, over_us, LIFE_US)
        lost += not is_settled
    assert unsettled(nodes, START_US + 10 * LIFE_US) == ({READS: lost} if lost else {})


def test_counts_only_grow() -> None:
    node = Expiries()
    node.granted(READS, START_US, LIFE_US)
    first = dict(node.totals(START_US + NARROW_US)[0])
    node.settled(READS, START_US, LIFE_US)  # by a node whose clock is behind
    due, settled, renewed = node.totals(START_US + NARROW_US)
    assert (first, due, settled, renewed) == ({READS: 1}, {READS: 1}, {READS: 1}, {READS: 0})


def test_memory_does_not_grow_with_reservations() -> None:
    node = Expiries()
    for number in range(20_000):
        life_us = 1_000 * (1 + number * 4_001 % 86_400_000)
        node.granted(READS, START_US + life_us, life_us)
    assert len(node._open) <= WIDE_US // NARROW_US + 86_400_000_000 // WIDE_US + 2
