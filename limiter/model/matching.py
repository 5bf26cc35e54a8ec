"""Which policies cover a descriptor (P2).

    exact       service: orders        only this value
    wildcard    operation: "read*"     `*` stands for any text, also none
    presence    customer: "*"          any value
    absence     customer: null         no such dimension

All policies that match apply together; in a `group` only the most specific one: the most exact dimensions, then the
most wildcards, then the most letters in them, then the most dimensions named; between equals the first by name.

The patterns of one dimension that a value fits are its class, and values that no pattern tells apart share one. So
matching is done once per combination of classes, however many customers there are; and where it has to be done,
only those policies are looked at whose rarest pattern the descriptor fits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from limiter.model.steps import AT_ONCE, Steps, finish

CLASSES_KEPT_MAX = 4096
"""Values of a dimension whose class is remembered."""

MATCHES_KEPT_MAX = 16_384
"""Combinations of classes whose policies are remembered."""

Class = frozenset[str | None]
"""The patterns of one dimension that a value fits; for a dimension that is absent, null."""

_ABSENT: Class = frozenset({None})


class Matchable(Protocol):
    """What matching needs to know of a policy."""

    @property
    def name(self) -> str:
        """Unique."""

    @property
    def match(self) -> Mapping[str, str | None]:
        """A pattern per dimension."""

    @property
    def group(self) -> str | None:
        """Of the policies in one group only the most specific applies."""


PolicyT = TypeVar("PolicyT", bound=Matchable)
FoundT = TypeVar("FoundT")


def pattern_matches(pattern: str | None, value: str | None) -> bool:
    """Whether one dimension's value fits one pattern."""
    if pattern is None or value is None:
        return pattern is None and value is None
    if "*" not in pattern:
        return pattern == value
    return _fits(pattern.split("*"), value)


def _fits(pieces: Sequence[str], value: str) -> bool:
    """Whether a value has the pieces in this order, the first at its start and the last at its end.

    Each piece is taken where it is first found. A regular expression would try all places, which takes a client
    with a long value and a policy with many stars into the minutes.
    """
    first, last = pieces[0], pieces[-1]
    at, end = len(first), len(value) - len(last)
    if at > end or not value.startswith(first) or not value.endswith(last):
        return False
    for piece in pieces[1:-1]:
        found = value.find(piece, at, end)
        if found < 0:
            return False
        at = found + len(piece)
    return True


class Specificity(NamedTuple):
    """How narrowly a policy is drawn; the larger the more specific."""

    exact: int
    wildcards: int
    letters: int
    named: int


def specificity(match: Mapping[str, str | None]) -> Specificity:
    """Compare the patterns of policies in a group."""
    exact = [pattern for pattern in match.values() if pattern is not None and "*" not in pattern]
    wild = [pattern for pattern in match.values() if pattern is not None and pattern.strip("*") and "*" in pattern]
    return Specificity(len(exact), len(wild), sum(len(pattern.replace("*", "")) for pattern in wild), len(match))


def most_specific(policies: Iterable[PolicyT]) -> list[PolicyT]:
    """Those that apply, by name: all without a group, and of each group the most specific one."""
    kept: list[PolicyT] = []
    best: dict[str, PolicyT] = {}
    for policy in sorted(policies, key=lambda policy: policy.name):
        if policy.group is None:
            kept.append(policy)
        elif policy.group not in best or specificity(policy.match) > specificity(best[policy.group].match):
            best[policy.group] = policy
    return sorted([*kept, *best.values()], key=lambda policy: policy.name)


class Matcher(Generic[PolicyT, FoundT]):
    """The policies of one namespace, ready to be asked. `conclude` makes the answer of those that apply, by name."""

    def __init__(self, policies: Sequence[PolicyT], conclude: Callable[[list[PolicyT]], FoundT]) -> None:
        self._conclude = conclude
        finish(self._build(policies))

    @classmethod
    def steps(
        cls, policies: Sequence[PolicyT], conclude: Callable[[list[PolicyT]], FoundT]
    ) -> Steps[Matcher[PolicyT, FoundT]]:
        """The same in steps: thousands of policies take a while."""
        matcher = cls.__new__(cls)
        matcher._conclude = conclude  # noqa: SLF001  one of us
        yield from matcher._build(policies)  # noqa: SLF001  one of us
        return matcher

    def _build(self, policies: Sequence[PolicyT]) -> Steps[None]:
        patterns: dict[str, set[str | None]] = {}
        for number, policy in enumerate(policies):
            if number % AT_ONCE == 0:
                yield
            for dimension, pattern in policy.match.items():
                patterns.setdefault(dimension, set()).add(pattern)
        self._dimensions: list[tuple[str, _Dimension]] = []
        for name, found in sorted(patterns.items()):
            yield
            self._dimensions.append((name, _Dimension(found)))
        self._known = [(name, dimension.known, dimension.class_of) for name, dimension in self._dimensions]
        self._index: _Index[PolicyT] = _Index()
        yield from self._index.build(policies)
        self._found: dict[tuple[Class, ...], FoundT] = {}

    def match(self, descriptor: Mapping[str, str]) -> FoundT:
        """What was concluded of the policies that cover a descriptor."""
        get = descriptor.get
        classes = tuple([known.get(get(name)) or class_of(get(name)) for name, known, class_of in self._known])
        found = self._found.get(classes)
        if found is None:
            if len(self._found) >= MATCHES_KEPT_MAX:
                self._found.clear()
            self._found[classes] = found = self._conclude(self._search(classes))
        return found

    def _search(self, classes: tuple[Class, ...]) -> list[PolicyT]:
        fitting = {name: found for (name, _), found in zip(self._dimensions, classes, strict=True)}
        return most_specific(
            policy
            for policy in self._index.candidates(fitting)
            if all(pattern in fitting[name] for name, pattern in policy.match.items())
        )


class _Index(Generic[PolicyT]):
    """Finds the policies that could cover a descriptor, each by the one of its patterns that fewest others have."""

    def __init__(self) -> None:
        self._everywhere: list[PolicyT] = []
        self._at: dict[str, dict[str | None, list[PolicyT]]] = {}

    def build(self, policies: Sequence[PolicyT]) -> Steps[None]:
        """Take in policies, in steps."""
        uses: Counter[tuple[str, str | None]] = Counter()
        for number, policy in enumerate(policies):
            if number % AT_ONCE == 0:
                yield
            uses.update(policy.match.items())
        for number, policy in enumerate(policies):
            if number % AT_ONCE == 0:
                yield
            rarest = min(policy.match.items(), key=uses.__getitem__, default=None)
            if rarest is None:
                self._everywhere.append(policy)
            else:
                name, pattern = rarest
                self._at.setdefault(name, {}).setdefault(pattern, []).append(policy)

    def candidates(self, fitting: Mapping[str, Class]) -> Iterator[PolicyT]:
        """Every policy that could cover a descriptor whose values fit these patterns, and few that do not."""
        yield from self._everywhere
        for name, policies in self._at.items():
            for pattern in fitting[name]:
                yield from policies.get(pattern, ())


class _Dimension:
    """Sorts the values of one dimension into classes that no pattern of any policy tells apart."""

    def __init__(self, patterns: Iterable[str | None]) -> None:
        texts = {pattern for pattern in patterns if pattern is not None}
        self._exact = {pattern for pattern in texts if "*" not in pattern}
        anything = {pattern for pattern in texts if pattern and not pattern.strip("*")}
        wild = texts - self._exact - anything
        # Most wildcards are at the end: those are looked up, however many there are.
        self._heads = {pattern[:-1]: pattern for pattern in wild if pattern.index("*") == len(pattern) - 1}
        self._head_sizes = sorted({len(head) for head in self._heads})
        self._others = [(pattern, pattern.split("*")) for pattern in sorted(wild - set(self._heads.values()))]
        self._wild = bool(wild)
        self._any: Class = frozenset(anything)
        self.known: dict[str | None, Class] = {}
        """Classes that were asked for before."""

    def class_of(self, value: str | None) -> Class:
        """The class of a value; the absence of one is a class of its own."""
        if value is None:
            return _ABSENT
        found = self.known.get(value)
        if found is not None:
            return found
        if not self._wild and value not in self._exact:
            return self._any  # not worth remembering, and clients have many of these
        if len(self.known) >= CLASSES_KEPT_MAX:
            self.known.clear()
        self.known[value] = found = frozenset(self._fitting(value)) | self._any
        return found

    def _fitting(self, value: str) -> Iterator[str]:
        if value in self._exact:
            yield value
        for size in self._head_sizes:
            if size <= len(value) and (pattern := self._heads.get(value[:size])) is not None:
                yield pattern
        for pattern, pieces in self._others:
            if _fits(pieces, value):
                yield pattern
