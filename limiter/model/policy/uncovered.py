"""The most frequent requests that no policy covers (P7), in memory that no flood of distinct ones can fill.

Requests are counted by their *shape*: the namespace and the names of the dimensions, not the values. `costumer` for
`customer` is one shape however many customers there are. Of each kind of namespace, declared or not, at most
SHAPES_KEPT_MAX shapes are kept by the space-saving algorithm: a new shape takes the place of the rarest and inherits
its count, so a count is too high by at most `count_error`, and a shape that makes up more than 1/SHAPES_KEPT_MAX of
all requests is always listed. Each count costs a few dictionary operations, whatever is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations
from typing import NamedTuple

SHAPES_KEPT_MAX = 128
EXAMPLES_MAX = 3
TEXT_KEPT_MAX = 64
"""Characters of a name or a value that are kept: the names in policies are no longer."""

HINTS_MAX = 4
"""Dimensions of one shape that are compared with known names."""
TYPOS_MAX = 2
"""Letters that may be left out of both names to make them equal."""
HINT_LENGTH_MAX = 32
KNOWN_MAX = 500
"""Known names of one namespace that are compared."""


class Shape(NamedTuple):
    """The common properties of uncovered requests."""

    namespace: str
    dimensions: tuple[str, ...]


class Seen:
    """The statistics of a shape."""

    __slots__ = ("count", "count_error", "examples", "first_us", "last_us")

    def __init__(self, count_error: int, now_us: int) -> None:
        self.count = count_error
        self.count_error = count_error
        self.examples: list[dict[str, str]] = []
        self.first_us = self.last_us = now_us


class Shapes:
    """The most frequent shapes."""

    def __init__(self, kept_max: int = SHAPES_KEPT_MAX) -> None:
        self._kept_max = kept_max
        self._seen: dict[Shape, Seen] = {}
        self._by_count: dict[int, dict[Shape, None]] = {}
        self._least = 0

    def __len__(self) -> int:
        return len(self._seen)

    def count(self, namespace: str, descriptor: Mapping[str, str], now_us: int) -> None:
        """Count one request, at a time of the store's clock."""
        shape = Shape(namespace[:TEXT_KEPT_MAX], tuple(sorted(descriptor)))
        seen = self._seen.get(shape) or self._add(shape, now_us)
        self._move(shape, seen.count, seen.count + 1)
        seen.count += 1
        seen.last_us = now_us
        if len(seen.examples) < EXAMPLES_MAX:
            example = {name: value[:TEXT_KEPT_MAX] for name, value in descriptor.items()}
            if example not in seen.examples:
                seen.examples.append(example)

    def _add(self, shape: Shape, now_us: int) -> Seen:
        error = 0
        if len(self._seen) >= self._kept_max:
            error = self._least
            rarest = next(iter(self._by_count[error]))
            del self._by_count[error][rarest], self._seen[rarest]
        self._seen[shape] = seen = Seen(error, now_us)
        self._by_count.setdefault(error, {})[shape] = None
        self._least = min(self._least, error)
        return seen

    def _move(self, shape: Shape, count: int, to: int) -> None:
        """Keep shapes sorted by count: the next step up is always one away, so nothing is ever searched."""
        del self._by_count[count][shape]
        if not self._by_count[count]:
            del self._by_count[count]
            if self._least == count:
                self._least = to
        self._by_count.setdefault(to, {})[shape] = None

    def most_frequent(self) -> list[tuple[Shape, Seen]]:
        """Return all shapes, the most frequent first."""
        return sorted(self._seen.items(), key=lambda found: (-found[1].count, found[0]))


class UncoveredTally:
    """Uncovered requests of one process. A flood of undeclared namespaces displaces no declared one."""

    def __init__(self) -> None:
        self.declared = Shapes()
        self.undeclared = Shapes()

    def count(self, namespace: str, descriptor: Mapping[str, str], now_us: int, *, declared: bool) -> None:
        """Count one request."""
        (self.declared if declared else self.undeclared).count(namespace, descriptor, now_us)

    def most_frequent(self) -> list[tuple[Shape, Seen]]:
        """Return all shapes, the most frequent first."""
        both = [*self.declared.most_frequent(), *self.undeclared.most_frequent()]
        return sorted(both, key=lambda found: (-found[1].count, found[0]))


class Nearest:
    """Finds the known name that a name was probably meant to be: `costumer` → `customer`.

    Two names are similar if leaving out up to two letters of each makes them equal. Known names are indexed by all of
    their shortened forms, so a look-up costs the same however many there are.
    """

    def __init__(self, known: Iterable[str]) -> None:
        self.known = frozenset(known)
        self._left: dict[str, str] = {}
        for name in sorted(self.known)[:KNOWN_MAX]:
            for left in _shortened(name):
                self._left.setdefault(left, name)

    def of(self, name: str) -> str | None:
        """Return the known name that is meant; None if the name is known itself, or none is similar."""
        if name in self.known:
            return None
        return next((self._left[left] for left in _shortened(name) if left in self._left), None)


def _shortened(name: str) -> Iterator[str]:
    """Yield the name with no, one and two letters left out; never less than half of it, which would be too vague."""
    if len(name) > HINT_LENGTH_MAX:
        return
    yield name
    for leaving in range(1, min(TYPOS_MAX, (len(name) - 1) // 2) + 1):
        for kept in combinations(name, len(name) - leaving):
            yield "".join(kept)
