"""How busy a process is, by clocks that the test moves (G7)."""

from limiter.runtime.busyness import Busyness


class Clock:
    """Shows what it is set to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_the_share_is_that_of_the_last_whole_second() -> None:
    clock, cpu = Clock(), Clock()
    busyness = Busyness(clock, cpu)
    clock.now_s, cpu.now_s = 1.0, 0.25
    assert busyness.share() == 0.25
    clock.now_s, cpu.now_s = 1.5, 0.75
    assert busyness.share() == 0.25
    clock.now_s, cpu.now_s = 2.0, 1.2
    assert busyness.share() == 0.95


def test_a_process_that_just_started_says_what_it_used_so_far() -> None:
    clock, cpu = Clock(), Clock()
    busyness = Busyness(clock, cpu)
    assert busyness.share() == 0.0
    clock.now_s, cpu.now_s = 0.1, 0.05
    assert busyness.share() == 0.5


def test_more_than_one_processor_is_all_that_a_loop_can_use() -> None:
    clock, cpu = Clock(), Clock()
    busyness = Busyness(clock, cpu)
    clock.now_s, cpu.now_s = 1.0, 1.7
    assert busyness.share() == 1.0
