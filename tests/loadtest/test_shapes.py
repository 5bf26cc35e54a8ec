"""The number of users at a time, for each shape."""

import pytest

from loadtest.locust.shapes import SHAPES, users_at


def users(shape: str, *at_s: float, duration_s: float = 30) -> list[int | None]:
    return [users_at(SHAPES[shape], at, duration_s=duration_s, nominal_users=40) for at in at_s]


def test_shapes_go_as_they_are_called() -> None:
    assert users("steady", 0, 15, 29.9) == [40, 40, 40]
    assert users("ramp", 0, 12, 24, 29) == [4, 42, 80, 80]
    assert users("spike", 0, 8.9, 9.1, 20.9, 21.1) == [16, 16, 120, 120, 16]
    assert users("soak", 0, 30, 599, duration_s=600) == [4, 40, 40]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_covers_its_time_and_ends(shape: str) -> None:
    assert sum(stretch.share for stretch in SHAPES[shape].stretches) == pytest.approx(1.0)
    at_last, over = users(shape, 29.99, 30.01)
    assert at_last is not None
    assert over is None
