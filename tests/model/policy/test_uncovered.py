"""P7: what no policy covers is counted by shape, in bounded memory, and known names are suggested."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limiter.model.policy.uncovered import EXAMPLES_MAX, SHAPES_KEPT_MAX, TEXT_KEPT_MAX, Nearest, Shapes, UncoveredTally


def test_requests_are_counted_by_namespace_and_dimensions_not_by_values() -> None:
    shapes = Shapes()
    for number in range(5):
        shapes.count("default", {"costumer": f"c{number}", "service": "orders"}, 1000 + number)
    shapes.count("default", {"service": "orders"}, 2000)
    first, second = shapes.most_frequent()
    assert first[0] == ("default", ("costumer", "service"))
    assert (first[1].count, first[1].count_error, first[1].first_us, first[1].last_us) == (5, 0, 1000, 1004)
    assert first[1].examples == [{"costumer": f"c{number}", "service": "orders"} for number in range(EXAMPLES_MAX)]
    assert second[1].count == 1


def test_a_flood_of_distinct_shapes_stays_bounded_and_does_not_displace_the_frequent() -> None:
    shapes, draw = Shapes(), random.Random(1)
    for number in range(20_000):
        shapes.count("default", {f"hostile-{number}": "x" * 1000, "y" * 60: "\0" * 1000}, number)
        if number % 50 == 0:
            shapes.count("default", {"costumer": draw.choice("abc")}, number)
    assert len(shapes) == SHAPES_KEPT_MAX
    shape, seen = shapes.most_frequent()[0]
    assert shape.dimensions == ("costumer",)
    assert seen.count - seen.count_error <= 400 <= seen.count
    assert all(
        len(value) <= TEXT_KEPT_MAX
        for _, seen in shapes.most_frequent()
        for example in seen.examples
        for value in example.values()
    )


@given(st.lists(st.sampled_from("abcdefgh"), max_size=200), st.integers(min_value=1, max_value=5))
def test_no_count_is_too_low_nor_further_off_than_it_says(asked: list[str], kept_max: int) -> None:
    """The promise of space-saving, on every history."""
    shapes, true = Shapes(kept_max), Counter(asked)
    for number, name in enumerate(asked):
        shapes.count("n", {name: "v"}, number)
    kept = {shape.dimensions[0]: seen for shape, seen in shapes.most_frequent()}
    assert len(kept) == min(kept_max, len(true))
    for name, seen in kept.items():
        assert seen.count - seen.count_error <= true[name] <= seen.count
    assert {name for name, count in true.items() if count * kept_max > len(asked)} <= kept.keys()


def test_namespaces_that_nobody_declared_displace_nothing_in_declared_ones() -> None:
    tally = UncoveredTally()
    tally.count("default", {"costumer": "c1"}, 1, declared=True)
    for number in range(10_000):
        tally.count(f"made-up-{number}", {"a": "b"}, number, declared=False)
    assert [shape.namespace for shape, _ in tally.most_frequent()].count("default") == 1


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("costumer", "customer"),
        ("custmer", "customer"),
        ("customers", "customer"),
        ("Customer", "customer"),
        ("cusotmer", "customer"),
        ("operatoin", "operation"),
        ("customer", None),
        ("tenant", None),
        ("x", None),
        ("ip", None),
        ("z" * 64, None),
    ],
)
def test_the_known_name_that_was_probably_meant(name: str, meant: str | None) -> None:
    assert Nearest(["customer", "operation", "service", "id"]).of(name) == meant
