"""Which policies cover a descriptor (P2).

    exact       service: orders                only this value
    list        operation: [read, "get*"]      any of these
    network     ip: {cidr: [10.0.0.0/8]}       an address in any of these, IPv4 or IPv6
    wildcard    operation: "read*"             `*` stands for any text, also none
    presence    customer: "*"                  any value
    absence     customer: null                 no such dimension

All policies that match apply together; in a `group` only the most specific one: the most exact dimensions, then the
most lists, then the most networks, then the longest prefixes of these (of each list its shortest), then the most
wildcards, then the most letters in them, then the most dimensions named; between equals the first by name.

The class of a value is the set of patterns of its dimension that it fits; values that no pattern distinguishes share
one. So matching is done once per combination of classes, however many customers there are, and then looks only at
policies whose rarest pattern the descriptor fits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from ipaddress import IPv4Address, IPv6Address
from operator import attrgetter
from typing import Generic, NamedTuple, Protocol, TypeVar

from limiter.model.steps import AT_ONCE, Steps, finish

CLASSES_KEPT_MAX = 4096
"""Values of a dimension whose class is kept."""

MATCHES_KEPT_MAX = 16_384
"""Combinations of classes whose policies are kept."""

PATTERNS_KEPT_MAX = 262_144
"""Patterns in the classes that are remembered, of one dimension or of all combinations: a value may fit thousands."""

ADDRESS_MAX = 45
"""Characters of the longest address: `0000:0000:0000:0000:0000:ffff:255.255.255.255`."""

IPV6_BITS = 128


class Network(NamedTuple):
    """A network: all addresses whose number begins like this. Read here, as the library takes ten times as long."""

    version: int
    start: int
    """The first bits of its addresses, as a number."""
    shift: int
    """How many bits are left for the addresses in it."""
    is_whole: bool
    """True if the bits behind the prefix are zero, as in 10.0.0.0/8; 10.1.0.0/8 names an address in it."""

    @property
    def prefix(self) -> int:
        """The length of its prefix, counted as of IPv6."""
        return IPV6_BITS - self.shift


def read_network(text: str) -> Network:
    """`10.0.0.0/8`, or an address alone, which is a network of its own; ValueError if it is neither."""
    name, slash, length = text.partition("/")
    address = IPv6Address(name) if ":" in name else IPv4Address(name)
    bits = address.max_prefixlen
    prefix = int(length) if length.isdecimal() and length.isascii() else -1 if slash else bits
    if not 0 <= prefix <= bits or (address.version == 6 and "%" in name):
        raise ValueError(f"{text!r} is no network")
    number, shift = int(address), bits - prefix
    return Network(address.version, number >> shift, shift, is_whole=number >> shift << shift == number)


class _Parts:
    """Several texts that are one pattern. Hashed once, so that the hash of a set of patterns does not read their
    texts."""

    __slots__ = ("_hash", "texts")

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = tuple(texts)
        self._hash = hash((type(self), self.texts))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (type(self) is type(other) and self.texts == other.texts)


class AnyOf(_Parts):
    """A list of patterns; one has to fit."""

    __slots__ = ()


class Networks(_Parts):
    """A list of networks; one has to contain the address. Raises ValueError for text that is no network."""

    __slots__ = ("networks", "shortest")

    def __init__(self, texts: Iterable[str]) -> None:
        super().__init__(texts)
        self.networks = tuple(map(read_network, self.texts))
        if not all(network.is_whole for network in self.networks):
            raise ValueError("a network has no bits of an address behind its prefix")
        self.shortest = min([network.prefix for network in self.networks])
        """The prefix of the widest of them."""


Pattern = str | None | AnyOf | Networks
"""The pattern of one dimension."""

Class = frozenset[Pattern]
"""The patterns of one dimension that a value fits; for an absent dimension, null."""

_ABSENT: Class = frozenset({None})


def addresses(text: str) -> Iterator[tuple[int, int]]:
    """Yield version and number of an address; an IPv6 address that maps an IPv4 one is both."""
    if len(text) > ADDRESS_MAX:
        return
    try:
        if ":" not in text:
            yield 4, int(IPv4Address(text))
            return
        address = IPv6Address(text)
    except ValueError:
        return
    if address.scope_id is None:
        yield 6, int(address)
        if address.ipv4_mapped is not None:
            yield 4, int(address.ipv4_mapped)


class Matchable(Protocol):
    """A policy, as far as matching uses it."""

    @property
    def name(self) -> str:
        """Unique."""

    @property
    def match(self) -> Mapping[str, Pattern]:
        """A pattern per dimension."""

    @property
    def group(self) -> str | None:
        """Of the policies in one group only the most specific applies."""


PolicyT = TypeVar("PolicyT", bound=Matchable)
FoundT = TypeVar("FoundT")


def _fits(pieces: Sequence[str], value: str) -> bool:
    """True if a value contains the pieces in this order, the first at its start and the last at its end.

    Each piece is taken where it is first found. A regular expression would try all places, which takes minutes for a
    client with a long value and a policy with many stars.
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
    """How narrow a policy's patterns are; larger is more specific."""

    exact: int
    lists: int
    networks: int
    prefixes: int
    wildcards: int
    letters: int
    named: int


def specificity(match: Mapping[str, Pattern]) -> Specificity:
    """Return the rank of a policy's patterns within its group."""
    texts = [pattern for pattern in match.values() if isinstance(pattern, str)]
    networks = [pattern for pattern in match.values() if isinstance(pattern, Networks)]
    wild = [text for text in texts if text.strip("*") and "*" in text]
    return Specificity(
        exact=sum("*" not in text for text in texts),
        lists=sum(isinstance(pattern, AnyOf) for pattern in match.values()),
        networks=len(networks),
        prefixes=sum(pattern.shortest for pattern in networks),
        wildcards=len(wild),
        letters=sum(len(text.replace("*", "")) for text in wild),
        named=len(match),
    )


def most_specific(policies: Iterable[PolicyT], ranks: dict[str, Specificity] | None = None) -> list[PolicyT]:
    """Those that apply, by name: all without a group, and of each group the most specific one.

    `ranks` keeps what was found of a policy, by its name: thousands in one group are compared again and again.
    """
    ranks = {} if ranks is None else ranks
    kept: list[PolicyT] = []
    best: dict[str, tuple[Specificity, PolicyT]] = {}
    for policy in sorted(policies, key=_name):
        group = policy.group
        if group is None:
            kept.append(policy)
            continue
        rank = ranks.get(policy.name)
        if rank is None:
            ranks[policy.name] = rank = specificity(policy.match)
        if group not in best or rank > best[group][0]:
            best[group] = rank, policy
    return sorted([*kept, *(policy for _, policy in best.values())], key=_name)


_name = attrgetter("name")


class Matcher(Generic[PolicyT, FoundT]):
    """The policies of one namespace, ready to be asked. `conclude` turns those that apply, by name, into the result."""

    def __init__(self, policies: Sequence[PolicyT], conclude: Callable[[list[PolicyT]], FoundT]) -> None:
        self._conclude = conclude
        finish(self._build(policies))

    @classmethod
    def steps(
        cls, policies: Sequence[PolicyT], conclude: Callable[[list[PolicyT]], FoundT]
    ) -> Steps[Matcher[PolicyT, FoundT]]:
        """Build a matcher in steps: thousands of policies take a while."""
        matcher = cls.__new__(cls)
        matcher._conclude = conclude  # noqa: SLF001  one of us
        yield from matcher._build(policies)  # noqa: SLF001  one of us
        return matcher

    def _build(self, policies: Sequence[PolicyT]) -> Steps[None]:
        patterns: dict[str, set[Pattern]] = {}
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
        self._ranks: dict[str, Specificity] = {}
        self._found: dict[tuple[Class, ...], FoundT] = {}
        self._patterns_kept = 0

    @property
    def dimensions(self) -> list[str]:
        """The dimensions that the policies match on."""
        return [name for name, _ in self._dimensions]

    def match(self, descriptor: Mapping[str, str]) -> FoundT:
        """Return the result of `conclude` for the policies that cover a descriptor."""
        get = descriptor.get
        classes = tuple([known.get(get(name)) or class_of(get(name)) for name, known, class_of in self._known])
        found = self._found.get(classes)
        if found is None:
            patterns = sum(map(len, classes))
            self._patterns_kept += patterns
            if len(self._found) >= MATCHES_KEPT_MAX or self._patterns_kept > PATTERNS_KEPT_MAX:
                self._found.clear()
                self._patterns_kept = patterns
            self._found[classes] = found = self._conclude(self._search(classes))
        return found

    def _search(self, classes: tuple[Class, ...]) -> list[PolicyT]:
        fitting = {name: found for (name, _), found in zip(self._dimensions, classes, strict=True)}
        found = [
            policy
            for policy in self._index.candidates(fitting)
            if all(pattern in fitting[name] for name, pattern in policy.match.items())
        ]
        return most_specific(found, self._ranks)


class _Index(Generic[PolicyT]):
    """Finds the policies that could cover a descriptor; each is indexed by its pattern that the fewest others have."""

    def __init__(self) -> None:
        self._everywhere: list[PolicyT] = []
        self._at: dict[str, dict[Pattern, list[PolicyT]]] = {}

    def build(self, policies: Sequence[PolicyT]) -> Steps[None]:
        """Index policies, in steps."""
        uses: Counter[tuple[str, Pattern]] = Counter()
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
        """Yield every policy that could cover a descriptor whose values fit these patterns, and few others."""
        yield from self._everywhere
        for name, policies in self._at.items():
            for pattern in fitting[name]:
                yield from policies.get(pattern, ())


class _Dimension:
    """Sorts the values of one dimension into classes that no pattern of any policy distinguishes."""

    def __init__(self, patterns: Collection[Pattern]) -> None:
        owners = _owners(patterns)
        self._exact = {text: found for text, found in owners.items() if "*" not in text}
        anything = {text for text in owners if text and not text.strip("*")}
        wild = {text: found for text, found in owners.items() if "*" in text and text not in anything}
        # Most wildcards are at the end: those are looked up, however many there are.
        self._heads = {text[:-1]: found for text, found in wild.items() if text.index("*") == len(text) - 1}
        self._head_sizes = sorted({len(head) for head in self._heads})
        self._others = [
            (found, text.split("*")) for text, found in sorted(wild.items()) if text[:-1] not in self._heads
        ]
        self._networks = _by_prefix(pattern for pattern in patterns if isinstance(pattern, Networks))
        self._is_searched = bool(wild or self._networks)
        self._any: Class = frozenset(pattern for text in anything for pattern in owners[text])
        self.known: dict[str | None, Class] = {}
        """Classes that were asked for before."""
        self._patterns_kept = 0

    def class_of(self, value: str | None) -> Class:
        """Return the class of a value; an absent value has a class of its own."""
        if value is None:
            return _ABSENT
        found = self.known.get(value)
        if found is not None:
            return found
        if not self._is_searched and value not in self._exact:
            return self._any  # not worth remembering, and clients have many of these
        found = frozenset(self._fitting(value)) | self._any
        self._patterns_kept += len(found)
        if len(self.known) >= CLASSES_KEPT_MAX or self._patterns_kept > PATTERNS_KEPT_MAX:
            self.known.clear()
            self._patterns_kept = len(found)
        self.known[value] = found
        return found

    def _fitting(self, value: str) -> Iterator[Pattern]:
        yield from self._exact.get(value, ())
        for size in self._head_sizes:
            if size <= len(value):
                yield from self._heads.get(value[:size], ())
        for patterns, pieces in self._others:
            if _fits(pieces, value):
                yield from patterns
        if self._networks:
            for version, number in addresses(value):
                for shift, networks in self._networks[version]:
                    yield from networks.get(number >> shift, ())


_Owners = dict[str, list[Pattern]]
_Prefixes = dict[int, list[tuple[int, dict[int, list[Pattern]]]]]
"""By version and length of a prefix: how far to shift an address to the right, and the patterns of each network."""


def _owners(patterns: Iterable[Pattern]) -> _Owners:
    """Return the patterns that contain each text that a value may equal: the text itself, or lists."""
    owners: _Owners = {}
    for pattern in patterns:
        if isinstance(pattern, str):
            owners.setdefault(pattern, []).append(pattern)
        elif isinstance(pattern, AnyOf):
            for text in pattern.texts:
                owners.setdefault(text, []).append(pattern)
    return owners


def _by_prefix(patterns: Iterable[Networks]) -> _Prefixes:
    """Return a table for each length of prefix: one look-up per length, however many networks there are."""
    found: dict[int, dict[int, dict[int, list[Pattern]]]] = {4: {}, 6: {}}
    for pattern in patterns:
        for network in pattern.networks:
            found[network.version].setdefault(network.shift, {}).setdefault(network.start, []).append(pattern)
    if not found[4] and not found[6]:
        return {}
    return {version: sorted(tables.items()) for version, tables in found.items()}
