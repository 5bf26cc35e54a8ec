"""Cost of finding a descriptor's policies, with few policies and with many.

python -m loadtest.matching_bench
"""

from __future__ import annotations

import random
from timeit import repeat

from limiter.model.policy.matching import Matcher
from limiter.model.policy.policy import Policy
from limiter.model.policy.reading import read_policy

FEW, MANY = 10, 10_000
DESCRIPTORS = 1_000
ROUNDS = 7


def matching_ratio() -> float:
    """Return how many times longer a repeated match takes with 10 000 policies than with 10."""
    return microseconds(MANY) / microseconds(FEW)


def microseconds(count: int, *, first: bool = False) -> float:
    """Return the time of one match among `count` policies: from memory, or for the first time."""
    policies = [policy(number) for number in range(count)]
    draw = random.Random(count)  # noqa: S311
    asked = [descriptor(draw.randrange(count), draw) for _ in range(DESCRIPTORS)]
    matcher = Matcher(policies, tuple)

    def forget() -> None:
        nonlocal matcher
        matcher = Matcher(policies, tuple)

    def ask() -> None:
        for one in asked:
            matcher.match(one)

    ask()
    return min(repeat(ask, forget if first else "pass", number=1, repeat=ROUNDS)) / DESCRIPTORS * 1e6


def policy(number: int) -> Policy:
    """Return a default for everybody, or an override: exact ones, and some for a family of customers."""
    customer = "*" if number == 0 else f"family{number}-*" if number % 10 == 0 else f"customer{number}"
    match = {"service": "orders", "operation": "read*", "customer": customer}
    return read_policy({"name": f"p{number}", "rate": 100, "match": match, "per": ["customer"], "group": "reads"})


def descriptor(number: int, draw: random.Random) -> dict[str, str]:
    """Return the descriptor of a customer, of a member of a family, or of a stranger."""
    customer = draw.choice([f"customer{number}", f"family{number}-{number}", f"stranger{number}"])
    return {"service": "orders", "operation": draw.choice(["read", "read_item"]), "customer": customer}


def main() -> None:
    print("policies   from memory   for the first time")
    for count in (FEW, MANY):
        print(f"{count:8}   {microseconds(count):8.2f} us   {microseconds(count, first=True):12.2f} us")
    print(f"ratio {matching_ratio():.2f} (aim: at most 2)")


if __name__ == "__main__":
    main()
