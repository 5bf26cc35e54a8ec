"""Loads and backends that response-time control is judged on. Each owes one of:

hold     steady p90 0.9 to 1.1 of the target, 97 % of what is possible served, first peak at most 3 (FIFO, 0.5 s up)
leave    at most 0.1 % refused: the load can be served
end      at most 0.1 % refused once the overload is over
slow     at most 2 % refused after the first minute: load is not the cause
show     nothing: pauses longer than the target, targets out of reach
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, sin, tau
from typing import Literal

from loadtest.simulation.backends import Backend, Delay, Fifo, Sharing, Speed, every
from loadtest.simulation.distributions import Draw, bimodal, constant, exponential, spread, tailed
from loadtest.simulation.service import Again, Closed, Rates, Traffic

Owed = Literal["hold", "leave", "slow", "end", "show"]

Make = Callable[[int], Backend]
"""A backend from a seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One scenario."""

    target_s: float
    possible: float
    """Answers per second that the backend could give of what is asked, in the seconds that count."""
    backend: Make
    traffic: Traffic
    owes: Owed = "hold"
    seconds: int = 300
    from_s: int = 100
    to_s: int = 0
    """The seconds that count; 0: to the end."""
    is_fifo: bool = True
    """True if the first peak is owed, too."""
    classes: tuple[int, ...] = (1,)
    partitions: int = 1


def at(rate: float) -> Traffic:
    """A steady load of `critical` requests."""
    return Traffic(rates=lambda _: (0.0, rate, 0.0, 0.0))


def by(rate: Callable[[float], float]) -> Traffic:
    """A load of `critical` requests over time."""
    return Traffic(rates=lambda now_s: (0.0, rate(now_s), 0.0, 0.0))


def stepped(before: float, after: float, at_s: float, until_s: float = inf) -> Callable[[float], float]:
    """One load, another from a time on, and the first again."""
    return lambda now_s: after if at_s <= now_s < until_s else before


def fifo(workers: int, service: Draw, *, speed: Speed | None = None) -> Make:
    """Workers with a queue."""
    return lambda seed: Fifo(workers, service, seed, speed=speed)


def pausing(workers: int, service: Draw, period_s: float, length_s: float, seconds: int) -> Make:
    """Workers that stop now and then."""
    return lambda seed: Fifo(workers, service, seed, pauses=every(period_s, length_s, seconds))


def sharing(processors: int, service: Draw) -> Make:
    """Shared processors."""
    return lambda seed: Sharing(processors, service, seed)


def delay(
    service: Draw, *, longer: Callable[[float], float] | None = None, outliers: float = 0.0, times: float = 10.0
) -> Make:
    """Endless capacity."""
    return lambda seed: Delay(service, seed, longer=longer, outliers=outliers, outlier_times=times)


TEN = fifo(10, exponential(0.2))
"""Ten workers, 50 per second."""
SIXTY = fifo(60, exponential(0.02))
"""Sixty workers, 3000 per second."""


def _spike(users: int) -> Traffic:
    return Traffic(closed=Closed(users=lambda now_s: 3 if now_s < 5 else users))


def _two_classes(high: float, low: float) -> Traffic:
    return Traffic(rates=lambda _: (0.0, high, 0.0, low))


def _scenes() -> dict[str, Scene]:
    scenes: dict[str, Scene] = {}
    for target_s in (0.5, 1.0, 2.0, 5.0, 10.0):
        scenes[f"spike to 1000 users, constant, T {target_s:g} s"] = Scene(
            target_s=target_s,
            possible=50,
            backend=fifo(1, constant(0.02)),
            traffic=_spike(1000),
            from_s=200,
            seconds=400,
        )
    for target_s in (0.5, 2.0, 10.0):
        scenes[f"spike to 1000 users, exponential, T {target_s:g} s"] = Scene(
            target_s=target_s,
            possible=50,
            backend=fifo(1, exponential(0.02)),
            traffic=_spike(1000),
            from_s=200,
            seconds=400,
        )
    for times in (0.5, 0.8):
        scenes[f"{times}×, 50/s, T 1 s"] = Scene(
            target_s=1, possible=50 * times, backend=TEN, traffic=at(50 * times), owes="leave", from_s=0
        )
        scenes[f"{times}×, 3000/s, T 1 s"] = Scene(
            target_s=1,
            possible=3000 * times,
            backend=SIXTY,
            traffic=at(3000 * times),
            owes="leave",
            from_s=0,
            seconds=30,
        )
        scenes[f"{times}×, 5/s, T 5 s"] = Scene(
            target_s=5,
            possible=5 * times,
            backend=fifo(1, exponential(0.2)),
            traffic=at(5 * times),
            owes="leave",
            from_s=0,
            seconds=600,
        )
    for times in (2, 10):
        scenes |= _overloads(times)
    scenes |= _lived_through()
    scenes |= _changing()
    scenes |= _in_trouble()
    scenes |= _not_the_load()
    return scenes  # fmt: skip


def _overloads(times: int) -> dict[str, Scene]:
    """Steady overloads on backends of all kinds."""
    long = 300 if times == 2 else 200
    return {
        f"{times}×, 50/s, T 1 s": Scene(target_s=1, possible=50, backend=TEN, traffic=at(50 * times), seconds=long),
        f"{times}×, 3000/s, T 0.5 s": Scene(
            target_s=0.5, possible=3000, backend=SIXTY, traffic=at(3000 * times), seconds=40, from_s=20
        ),
        f"{times}×, 5/s, T 5 s": Scene(
            target_s=5, possible=5, backend=fifo(1, exponential(0.2)), traffic=at(5 * times), seconds=600, from_s=200
        ),
        f"{times}×, Pareto, 50/s, T 2 s": Scene(
            target_s=2, possible=50, backend=fifo(10, tailed(0.2)), traffic=at(50 * times), seconds=long
        ),
        f"{times}×, processor sharing, 50/s, T 2 s": Scene(
            target_s=2,
            possible=50,
            backend=sharing(10, exponential(0.2)),
            traffic=at(50 * times),
            is_fifo=False,
            seconds=long,
        ),
        f"{times}×, one shared processor, constant, T 1 s": Scene(
            target_s=1,
            possible=50,
            backend=sharing(1, constant(0.02)),
            traffic=at(50 * times),
            is_fifo=False,
            seconds=long,
        ),
    }


def _lived_through() -> dict[str, Scene]:
    """Overloads drawn up after the law's form was fixed."""
    return {
        "lognormal, 30 workers, 100/s, T 2 s, 2.5×": Scene(
            target_s=2, possible=100, backend=fifo(30, spread(0.3, 1.0)), traffic=at(250)
        ),
        "constant, one worker, 100/s, T 0.1 s, 5×": Scene(
            target_s=0.1, possible=100, backend=fifo(1, constant(0.01)), traffic=at(500), seconds=120, from_s=40
        ),
        "50 workers, 25/s, T 10 s, 2×": Scene(
            target_s=10, possible=25, backend=fifo(50, exponential(2.0)), traffic=at(50), seconds=500, from_s=200
        ),
        "4 workers, 80/s, T 0.2 s, 3×": Scene(
            target_s=0.2, possible=80, backend=fifo(4, exponential(0.05)), traffic=at(240), seconds=160, from_s=60
        ),
        "200 workers, 2000/s, T 0.4 s, 3×": Scene(
            target_s=0.4, possible=2000, backend=fifo(200, exponential(0.1)), traffic=at(6000), seconds=40, from_s=20
        ),
        "16 workers, 4000/s, T 50 ms, 2×": Scene(
            target_s=0.05, possible=4000, backend=fifo(16, exponential(0.004)), traffic=at(8000), seconds=30, from_s=15
        ),
        "lognormal 2, 2 workers, 2/s, T 30 s, 4×": Scene(
            target_s=30, possible=2, backend=fifo(2, spread(1.0, 2.0)), traffic=at(8), seconds=2400, from_s=600
        ),
        "3 workers, 0.6/s, T 30 s, 3×": Scene(
            target_s=30, possible=0.6, backend=fifo(3, exponential(5.0)), traffic=at(1.8), seconds=3000, from_s=900
        ),
        "99 % 5 ms, 1 % 2 s, 20 workers, T 1 s, 2×": Scene(
            target_s=1, possible=20 / 0.02495, backend=fifo(20, bimodal(0.02495, low=0.2004, share=0.99)),
            traffic=at(2 * 20 / 0.02495), seconds=120, from_s=50,
        ),
        "20 or 500 ms, 10 workers, T 1 s, 3×": Scene(
            target_s=1, possible=10 / 0.068, backend=fifo(10, bimodal(0.068, low=0.2941, share=0.9)),
            traffic=at(30 / 0.068), seconds=160, from_s=60,
        ),
        "shared, 8 processors, 80/s, T 0.6 s, 4×": Scene(
            target_s=0.6, possible=80, backend=sharing(8, exponential(0.1)), traffic=at(320), is_fifo=False, seconds=200
        ),
        "shared, Pareto, 50/s, T 3 s, 3×": Scene(
            target_s=3, possible=50, backend=sharing(10, tailed(0.2)), traffic=at(150), is_fifo=False
        ),
        "2000 users, 200/s, T 0.5 s": Scene(
            target_s=0.5, possible=200, backend=fifo(20, exponential(0.1)), traffic=_spike(2000), seconds=160, from_s=60
        ),
        "200 users, constant, 50/s, T 0.8 s": Scene(
            target_s=0.8, possible=50, backend=fifo(1, constant(0.02)), traffic=_spike(200), seconds=300
        ),
    }  # fmt: skip


def _changing() -> dict[str, Scene]:
    """Loads and capacities that change."""
    half = fifo(10, exponential(0.2), speed=lambda now_s: 1.0 if now_s < 100 else 0.5)
    double = fifo(10, exponential(0.2), speed=lambda now_s: 0.5 if now_s < 100 else 1.0)
    by_turns = fifo(10, exponential(0.1), speed=lambda now_s: 1.0 if now_s % 60 < 30 else 0.5)
    return {
        "0.1× to 0.8× at 60 s, 3000/s": Scene(
            target_s=0.5, possible=2400, backend=SIXTY, traffic=by(stepped(300, 2400, 60)), owes="leave", from_s=55,
            seconds=90,
        ),
        "0.5× to 10× at 30 s, 3000/s": Scene(
            target_s=0.5, possible=3000, backend=SIXTY, traffic=by(stepped(1500, 30000, 30)), from_s=40, seconds=55
        ),
        "0.5× to 2× at 100 s": Scene(
            target_s=1, possible=50, backend=TEN, traffic=by(stepped(25, 100, 100, 200)), from_s=110, to_s=200
        ),
        "2×, then 0.5×": Scene(
            target_s=1, possible=25, backend=TEN, traffic=by(stepped(25, 100, 100, 200)), owes="end", from_s=205
        ),
        "capacity halves at 100 s, 1.6× of it": Scene(
            target_s=1, possible=25, backend=half, traffic=at(40), from_s=160, owes="show"
        ),
        "capacity doubles at 100 s, 2× of it": Scene(
            target_s=1, possible=50, backend=double, traffic=at(100), from_s=130
        ),
        "capacity 1 and 0.5 by turns of 30 s, 1.5×": Scene(
            target_s=1, possible=75, backend=by_turns, traffic=at(150), from_s=60
        ),
        "load 0.3× and 3× by turns of 20 s": Scene(
            target_s=1, possible=32.5, backend=TEN, traffic=by(lambda now_s: 15 if now_s % 40 < 20 else 150), from_s=60,
        ),
        "bursts of 6× for 1 s in 3": Scene(
            target_s=1, possible=50 * 0.6, backend=TEN, traffic=by(lambda now_s: 300 if now_s % 3 < 1 else 0), from_s=60
        ),
        "load in waves 0.2× to 2.2×, 60 s, T 0.5 s": Scene(
            target_s=0.5, possible=50 * 0.79, backend=fifo(5, exponential(0.1)),
            traffic=by(lambda now_s: 50 * (1.2 + sin(tau * now_s / 60))), from_s=60,
        ),
        "capacity drifts 1–0.3–1, 1.2×": Scene(
            target_s=2, possible=50 * 0.65, owes="show", seconds=400, from_s=60, traffic=at(60),
            backend=fifo(10, exponential(0.2), speed=lambda now_s: 0.65 + 0.35 * sin(tau * now_s / 200)),
        ),
    }  # fmt: skip


def _in_trouble() -> dict[str, Scene]:
    """Retries, lost settles, controllers that sleep, hangs, classes."""
    doubled = (0.0, 100.0, 0.0, 0.0)
    each_ten_s = tuple(range(10, 300, 10))
    surge: Rates = lambda now_s: (0.0, 150.0 if 50 <= now_s < 80 else 40.0, 0.0, 0.0)  # noqa: E731
    return {
        "retries ×3, 2×": Scene(
            target_s=1, possible=50, backend=TEN, traffic=Traffic(rates=lambda _: doubled, again=Again())
        ),
        "retries ×3, budget 10 %, 2×": Scene(
            target_s=1, possible=50, backend=TEN, traffic=Traffic(rates=lambda _: doubled, again=Again(budget=0.1))
        ),
        "retries ×3, 0.8× after a surge of 3×": Scene(
            target_s=1, possible=40, backend=TEN, traffic=Traffic(rates=surge, again=Again()), owes="end", seconds=200
        ),
        "2 % never settle, 2×": Scene(
            target_s=1, possible=50, backend=TEN, traffic=Traffic(rates=lambda _: doubled, lost=0.02), seconds=400
        ),
        "2 % never settle, 0.8×": Scene(
            target_s=1,
            possible=40,
            backend=TEN,
            traffic=Traffic(rates=lambda _: (0, 40, 0, 0), lost=0.02),
            owes="leave",
            seconds=400,
            from_s=0,
        ),
        "settles told every 0.5 s, 2×": Scene(
            target_s=1, possible=50, backend=TEN, traffic=Traffic(rates=lambda _: doubled, told_s=0.5)
        ),
        "settles told every 2 s, 2×": Scene(
            target_s=1, possible=50, backend=TEN, traffic=Traffic(rates=lambda _: doubled, told_s=2.0), owes="show"
        ),
        "controller every 1 s, 2×": Scene(
            target_s=1, possible=50, backend=TEN, traffic=Traffic(rates=lambda _: doubled, every=10)
        ),
        "controller away 5 s in 20, 2×": Scene(
            target_s=1,
            possible=50,
            backend=TEN,
            traffic=Traffic(rates=lambda _: doubled, paused=lambda now_s: now_s % 20 < 5),
        ),
        "controller gone from 60 s on, 2×": Scene(
            target_s=1,
            possible=50,
            backend=TEN,
            traffic=Traffic(rates=lambda _: doubled, paused=lambda now_s: now_s > 60),
        ),
        "controller away as a surge comes": Scene(
            target_s=1,
            possible=50,
            backend=TEN,
            owes="show",
            from_s=50,
            to_s=80,
            seconds=100,
            traffic=Traffic(rates=surge, paused=lambda now_s: 50 <= now_s < 55),
        ),
        "controller replaced every 10 s, 2×": Scene(
            target_s=1, possible=50, backend=TEN, traffic=Traffic(rates=lambda _: doubled, stops=each_ten_s)
        ),
        "controller crashes every 10 s, 2×": Scene(
            target_s=1, possible=50, backend=TEN, traffic=Traffic(rates=lambda _: doubled, crashes=each_ten_s)
        ),
        "store emptied at 150 s, 2×": Scene(
            target_s=1, possible=50, backend=TEN, traffic=Traffic(rates=lambda _: doubled, emptied=(150.0,)),
            owes="show",
        ),
        "limit divided over four partitions, 2×": Scene(
            target_s=1, possible=50, backend=TEN, traffic=at(100), partitions=4
        ),
        "two classes alike, 2×": Scene(
            target_s=1, possible=50, backend=TEN, traffic=_two_classes(50, 50), classes=(1, 3)
        ),
        "two classes 1 : 3, 2×": Scene(
            target_s=1, possible=50, backend=TEN, traffic=_two_classes(25, 75), classes=(1, 3)
        ),
        "two classes alike, 10×": Scene(
            target_s=1, possible=50, backend=TEN, traffic=_two_classes(250, 250), classes=(1, 3), seconds=200
        ),
        "four classes alike, 2×": Scene(
            target_s=1,
            possible=50,
            backend=TEN,
            traffic=Traffic(rates=lambda _: (25, 25, 25, 25)),
            classes=(0, 1, 2, 3),
        ),
        "a class that asks once a minute, 2×": Scene(
            target_s=1,
            possible=50,
            backend=TEN,
            classes=(0, 1),
            traffic=Traffic(rates=lambda now_s: (1.0 if now_s % 60 < 1 else 0.0, 100, 0, 0)),
        ),
        "hangs 10 s, 0.5×": Scene(
            target_s=1,
            possible=25,
            owes="end",
            from_s=130,
            traffic=at(25),
            backend=lambda seed: Fifo(10, exponential(0.2), seed, pauses=((100.0, 110.0),)),
        ),
        "hangs 10 s, 2×": Scene(
            target_s=1,
            possible=50,
            from_s=130,
            traffic=at(100),
            backend=lambda seed: Fifo(10, exponential(0.2), seed, pauses=((100.0, 110.0),)),
            is_fifo=False,
        ),
        "pauses 0.3 s in 10, T 1 s, 2×": Scene(
            target_s=1, possible=48.5, backend=pausing(10, exponential(0.2), 10, 0.3, 300), traffic=at(100)
        ),
        "pauses 0.3 s in 10, T 1 s, 0.7×": Scene(
            target_s=1,
            possible=35,
            backend=pausing(10, exponential(0.2), 10, 0.3, 300),
            traffic=at(35),
            owes="leave",
            from_s=0,
        ),
        "pauses 1 s in 15, T 0.5 s, 0.6×": Scene(
            target_s=0.5, possible=30, backend=pausing(5, exponential(0.1), 15, 1.0, 300), traffic=at(30), owes="show"
        ),
    }  # fmt: skip


def _not_the_load() -> dict[str, Scene]:
    """Slow, but not overloaded (S12); few requests, some of them late."""
    return {
        "delay 0.9 of the target": Scene(
            target_s=1, possible=20, backend=delay(spread(0.8, 0.08)), traffic=at(20), owes="leave", from_s=0
        ),
        "delay 1.3 of the target": Scene(
            target_s=1, possible=20, backend=delay(spread(1.3, 0.1)), traffic=at(20), owes="slow", from_s=60
        ),
        "delay 0.3 of the target, then twice it": Scene(
            target_s=1, possible=20, backend=delay(spread(0.3, 0.1), longer=lambda now_s: 1.7 if now_s >= 100 else 0.0),
            traffic=at(20), owes="slow", from_s=160,
        ),
        "3 s more for 100 s, 50/s, T 2 s": Scene(
            target_s=2, possible=50, traffic=at(50), owes="slow", from_s=160,
            backend=delay(spread(0.5, 0.1), longer=lambda now_s: 3.0 if 100 <= now_s < 200 else 0.0),
        ),
        "delay exponential, p90 1.4 of the target": Scene(
            target_s=1, possible=20, backend=delay(exponential(0.608)), traffic=at(20), owes="slow", from_s=60
        ),
        "0.2/s, 2 % take 5 targets": Scene(
            target_s=1, possible=0.2, backend=delay(spread(0.5, 0.1), outliers=0.02), traffic=at(0.2), owes="leave",
            from_s=0, seconds=3000,
        ),
    }  # fmt: skip


SCENES = _scenes()
