"""Distributions that the world draws from: what a request costs, how long a backend works on it.

Each is scaled to a mean, so that a capacity or a limit stays what it is whatever the shape.

constant    every draw is the mean
uniform     0 to twice the mean, coefficient of variation 0.58
halves      half to one and a half of the mean
bimodal     nine of ten at a tenth of the mean, one at 9.1 times it
pareto      shape 1.5, cut at 104 times the mean, coefficient of variation 2.6
exponential coefficient of variation 1
tailed      Pareto with shape 2.2, never cut
spread      lognormal with a given coefficient of variation
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

Draw = Callable[[Random], float]
"""One value, from a source of chance."""

PARETO_SHAPE = 1.5
PARETO_CUT = 300.0
TAILED_SHAPE = 2.2
FEW_MEAN = 60.0
"""Up to here a Poisson count is drawn exactly; beyond, as a rounded normal."""


def constant(mean: float) -> Draw:
    """Every draw is the same."""
    return lambda _: mean


def uniform(mean: float) -> Draw:
    """From nothing to twice the mean."""
    return lambda chance: 2.0 * mean * chance.random()


def halves(mean: float) -> Draw:
    """From half to one and a half of the mean."""
    return lambda chance: mean * (0.5 + chance.random())


def bimodal(mean: float, *, low: float = 0.1, share: float = 0.9) -> Draw:
    """A share of the draws at `low` times the mean, the others so much above that the mean holds."""
    high = (1.0 - share * low) / (1.0 - share)
    return lambda chance: mean * (low if chance.random() < share else high)


def pareto(mean: float) -> Draw:
    """Heavy-tailed costs; the cut keeps the variance finite, so that a number of admissions says something."""
    # E[min(X, cut)] of a Pareto from 1 on with shape a: (a − cut^(1 − a)) / (a − 1).
    whole = (PARETO_SHAPE - PARETO_CUT ** (1.0 - PARETO_SHAPE)) / (PARETO_SHAPE - 1.0)
    power, scale = -1.0 / PARETO_SHAPE, mean / whole
    return lambda chance: scale * min((1.0 - chance.random()) ** power, PARETO_CUT)


def exponential(mean: float) -> Draw:
    """Memoryless."""
    return lambda chance: chance.expovariate(1.0) * mean


def tailed(mean: float) -> Draw:
    """Heavy-tailed service times."""
    scale = mean * (TAILED_SHAPE - 1.0) / TAILED_SHAPE
    return lambda chance: scale * chance.paretovariate(TAILED_SHAPE)


def spread(mean: float, variation: float) -> Draw:
    """Lognormal: one peak, a tail to the right."""
    squared = math.log(1.0 + variation * variation)
    middle, deviation = math.log(mean) - squared / 2, math.sqrt(squared)
    return lambda chance: math.exp(chance.gauss(middle, deviation))


COSTS: dict[str, Callable[[float], Draw]] = {
    "constant": constant,
    "uniform": uniform,
    "halves": halves,
    "bimodal": bimodal,
    "pareto": pareto,
}
"""Shapes of costs by name, each made from its mean."""


def poisson(mean: float, chance: Random) -> int:
    """How many come where `mean` are expected, each independent of the others."""
    if mean <= 0:
        return 0
    if mean > FEW_MEAN:
        return max(0, round(chance.gauss(mean, math.sqrt(mean))))
    limit, count, product = math.exp(-mean), 0, chance.random()
    while product > limit:
        product *= chance.random()
        count += 1
    return count
