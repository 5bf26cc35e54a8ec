"""Which policies cover a descriptor: the matcher against a naive one, and what it costs."""

import re
import time
from collections.abc import Mapping, Sequence
from ipaddress import ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limiter.model.policy import matching
from limiter.model.policy.matching import AnyOf, Matcher, Networks, Pattern, most_specific, read_network, specificity
from limiter.model.policy.policy import Policy
from limiter.model.policy.reading import read_policy


def pattern_matches(pattern: Pattern, value: str | None) -> bool:
    """Whether one dimension's value fits one pattern."""
    descriptor = {} if value is None else {"dimension": value}
    return Matcher([Named("one", {"dimension": pattern})], bool).match(descriptor)


class Named:
    """A policy that counts how often its patterns are looked at."""

    looks = 0

    def __init__(self, name: str, match: Mapping[str, Pattern], group: str | None = None) -> None:
        self.name = name
        self.group = group
        self._match = match

    @property
    def match(self) -> Mapping[str, Pattern]:
        Named.looks += 1
        return self._match

    def __repr__(self) -> str:
        return f"{self.name}: {self._match} in {self.group}"


# Few letters, so that patterns do match; dimensions that policies name, and one that none does.
letters = st.text("ab.*\n", max_size=4)
NETWORKS = ["0.0.0.0/0", "10.0.0.0/8", "10.1.0.0/16", "10.1.2.3/32", "192.168.0.0/17", "::/0", "2001:db8::/32",
            "2001:db8:1::/48", "::ffff:0:0/96", "::1/128"]  # fmt: skip
ADDRESSES = ["10.1.2.3", "10.1.9.9", "10.2.0.1", "192.168.127.1", "192.168.128.1", "2001:db8::1", "2001:DB8:1::9",
             "::1", "::ffff:10.1.2.3", "::ffff:a01:203", "0.0.0.0", "255.255.255.255", "10.1.2", "10.1.2.3.4",
             "010.1.2.3", "10.1.2.3/8", " 10.1.2.3", "fe80::1%eth0", "1::2::3", "", "10.1.2.3\x00", "١٠.1.2.3",
             "a"]  # fmt: skip
values = st.text("ab.\n", max_size=6) | st.sampled_from(ADDRESSES)
lists = st.builds(AnyOf, st.lists(st.text("ab.*\n", max_size=4) | st.sampled_from(ADDRESSES), min_size=1, max_size=4))
networks = st.builds(Networks, st.lists(st.sampled_from(NETWORKS), min_size=1, max_size=4))
dimensions = st.sampled_from(["service", "operation", "customer"])
matches = st.dictionaries(dimensions, st.one_of(st.none(), st.just("*"), letters, values, lists, networks), max_size=3)
groups = st.sampled_from([None, None, "g", "h"])
descriptors = st.dictionaries(st.one_of(dimensions, st.just("ip")), values, max_size=4)


@st.composite
def policy_lists(draw: st.DrawFn) -> list[Named]:
    drawn = draw(st.lists(st.tuples(matches, groups), max_size=12))
    order = draw(st.permutations(range(len(drawn))))
    return [Named(f"p{number:02}", *drawn[number]) for number in order]


def naive_holds(network: str, value: str) -> bool:
    try:
        address, wanted = ip_address(value), ip_network(network)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return "%" not in value and (address in wanted or (mapped is not None and mapped in wanted))


def naive_fits(pattern: Pattern, value: str | None) -> bool:
    """Match by trying everything: a star takes nothing, or takes one letter and stays."""
    if pattern is None or value is None:
        return pattern is value
    if isinstance(pattern, AnyOf):
        return any(naive_fits(text, value) for text in pattern.texts)
    if isinstance(pattern, Networks):
        return any(naive_holds(network, value) for network in pattern.texts)
    if not pattern:
        return not value
    if pattern[0] == "*":
        return naive_fits(pattern[1:], value) or (bool(value) and naive_fits(pattern, value[1:]))
    return bool(value) and pattern[0] == value[0] and naive_fits(pattern[1:], value[1:])


def naive_specificity(policy: Named) -> list[int]:
    """The most exact dimensions, then lists, networks, bits of their prefixes, wildcards, letters, dimensions named."""
    exact = lists = networks = bits = wild = lettered = 0
    for pattern in policy.match.values():
        if isinstance(pattern, AnyOf):
            lists += 1
        elif isinstance(pattern, Networks):
            found = [ip_network(text) for text in pattern.texts]
            networks, bits = networks + 1, bits + min(128 - (net.max_prefixlen - net.prefixlen) for net in found)
        elif pattern is not None and "*" not in pattern:
            exact += 1
        elif text := re.sub(r"\*", "", pattern or ""):
            wild, lettered = wild + 1, lettered + len(text)
    return [exact, lists, networks, bits, wild, lettered, len(policy.match)]


def naive(policies: Sequence[Named], descriptor: Mapping[str, str]) -> list[str]:
    covering = [
        policy
        for policy in policies
        if all(naive_fits(pattern, descriptor.get(name)) for name, pattern in policy.match.items())
    ]
    applying = []
    for policy in covering:
        rivals = [rival for rival in covering if rival.group == policy.group]
        best = min(rivals, key=lambda rival: ([-part for part in naive_specificity(rival)], rival.name))
        if policy.group is None or policy is best:
            applying.append(policy.name)
    return sorted(applying)


@given(policy_lists(), st.lists(descriptors, max_size=8))
def test_the_matcher_agrees_with_a_naive_one(policies: list[Named], asked: list[dict[str, str]]) -> None:
    """P1, P2"""
    matcher = Matcher(policies, tuple)
    for descriptor in [*asked, *asked]:  # the second time from memory
        assert [policy.name for policy in matcher.match(descriptor)] == naive(policies, descriptor)


@given(st.one_of(st.none(), st.text("ab*", max_size=8)), st.one_of(st.none(), st.text("ab", max_size=10)))
def test_one_pattern_agrees_with_trying_everything(pattern: str | None, value: str | None) -> None:
    assert pattern_matches(pattern, value) == naive_fits(pattern, value)


@pytest.mark.parametrize(
    ("pattern", "fitting", "other"),
    [
        ("orders", ["orders"], ["order", "orders2", "Orders", ""]),
        ("read*", ["read", "read_item", "read*"], ["rea", "aread"]),
        ("*read", ["read", "item_read"], ["read_item"]),
        ("a*b*c", ["abc", "a.b.c", "abbbc"], ["ab", "acb", "abcd"]),
        ("aa*aa", ["aaaa", "aaxaa"], ["aaa", "aa"]),
        ("*", ["", "anything", "a\nb"], []),
        ("**", ["", "anything"], []),
        ("", [""], ["a"]),
        ("a.c", ["a.c"], ["abc"]),
        ("[ab]", ["[ab]"], ["a"]),
        ("über*", ["übermut"], ["uber"]),
    ],
)
def test_patterns(pattern: str, fitting: list[str], other: list[str]) -> None:
    assert [value for value in [*fitting, *other] if pattern_matches(pattern, value)] == fitting


def test_presence_and_absence() -> None:
    """P2"""
    assert pattern_matches("*", "")
    assert not pattern_matches("*", None)
    assert pattern_matches(None, None)
    assert not pattern_matches(None, "")


def test_many_stars_and_a_long_value_take_no_time() -> None:
    """A regular expression would try such a value for ever."""
    assert not pattern_matches("*a" * 100 + "b", "a" * 1024)
    assert pattern_matches("*a" * 100 + "*", "a" * 1024)


def test_in_a_group_the_most_specific_applies() -> None:
    """P2: an override beats a default."""
    default = Named("default", {"customer": "*"}, "g")
    gold = Named("gold", {"customer": "gold-*"}, "g")
    longer = Named("gold-eu", {"customer": "gold-eu-*"}, "g")
    acme = Named("acme", {"customer": "acme"}, "g")
    apart = Named("apart", {"customer": "*"})
    matcher = Matcher([default, gold, longer, acme, apart], tuple)
    expected = {"acme": [acme, apart], "gold-us": [apart, gold], "gold-eu-1": [apart, longer], "x": [apart, default]}
    assert {value: list(matcher.match({"customer": value})) for value in expected} == expected


def test_between_equals_the_first_by_name_applies() -> None:
    assert [policy.name for policy in most_specific([Named("b", {}, "g"), Named("a", {}, "g")])] == ["a"]


def test_specificity_is_ordered() -> None:
    ordered: list[dict[str, Pattern]] = [
        {},
        {"a": "*"},
        {"a": "*", "b": None},
        {"a": "x*"},
        {"a": "xy*"},
        {"a": "x*", "b": "y*"},
        {"a": Networks(["0.0.0.0/0", "10.0.0.0/8"])},
        {"a": Networks(["10.0.0.0/8"])},
        {"a": Networks(["10.0.0.0/8"]), "b": "*"},
        {"a": Networks(["10.0.0.0/16"])},
        {"a": Networks(["2001:db8::/113"])},
        {"a": AnyOf(["x", "y*"])},
        {"a": "x"},
        {"a": "x", "b": "*"},
        {"a": "x", "b": "y*"},
        {"a": "x", "b": "y"},
    ]
    assert sorted(ordered, key=specificity) == ordered


def test_a_match_from_memory_looks_at_no_policy() -> None:
    matcher = Matcher(
        [Named(f"p{number}", {"customer": f"c{number}", "operation": "r*"}) for number in range(1000)], tuple
    )
    descriptor = {"customer": "c5", "operation": "read"}
    first = matcher.match(descriptor)
    Named.looks = 0
    assert matcher.match(descriptor) is first
    assert matcher.match({"customer": "stranger", "operation": "read"}) == ()
    known = Named.looks
    assert matcher.match({"customer": "another stranger", "operation": "read"}) == ()
    assert Named.looks == known, "strangers are all alike"


def test_a_match_for_the_first_time_looks_at_few_policies() -> None:
    matcher = Matcher(
        [Named(f"p{number}", {"customer": f"c{number}", "operation": "read"}) for number in range(10_000)], tuple
    )
    Named.looks = 0
    assert [policy.name for policy in matcher.match({"customer": "c5", "operation": "read"})] == ["p5"]
    assert Named.looks < 10


def test_values_without_end_are_not_remembered_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """F-N7, in small: many customers, in a dimension with wildcards, exact values and both."""
    monkeypatch.setattr(matching, "CLASSES_KEPT_MAX", 100)
    monkeypatch.setattr(matching, "MATCHES_KEPT_MAX", 200)
    exact = [Named(f"e{number}", {"customer": str(number), "region": "*"}) for number in range(1000)]
    wild = [Named(f"w{number}", {"customer": f"*{number}*", "ip": f"{number}.*"}) for number in range(10)]
    matcher = Matcher([*exact, *wild], tuple)
    for number in range(50_000):
        matcher.match({"customer": str(number), "region": str(number % 7), "ip": f"{number % 256}.1"})
        assert len(matcher._found) <= 200
    assert all(len(dimension.known) <= 100 for _, dimension in matcher._dimensions)
    assert [policy.name for policy in matcher.match({"customer": "77", "region": "x", "ip": "7.1"})] == ["e77", "w7"]


def test_values_that_no_pattern_tells_apart_are_not_remembered_at_all() -> None:
    matcher = Matcher([Named("all", {"customer": "*"}), Named("one", {"customer": "acme"})], tuple)
    for number in range(50_000):
        assert len(matcher.match({"customer": f"c{number}"})) == 1
    assert len(matcher._found) == 1
    assert sum(len(dimension.known) for _, dimension in matcher._dimensions) == 0


def test_p2_lists_and_networks_of_policies() -> None:
    """P2: any of a list; IPv4 and IPv6, and IPv6 that stands for IPv4."""
    policy = read_policy(
        {
            "name": "p",
            "rate": 1,
            "match": {"operation": ["read", "get*"], "ip": {"cidr": ["10.0.0.0/8", "2001:db8::/32"]}},
        }
    )
    matcher = Matcher([policy], tuple)
    for address in ("10.255.0.1", "2001:db8:ffff::1", "2001:0DB8::", "::ffff:10.0.0.1"):
        for operation in ("read", "get", "getItem"):
            assert matcher.match({"operation": operation, "ip": address}) == (policy,)
        assert matcher.match({"operation": "write", "ip": address}) == ()
    for other in (
        "11.0.0.1",
        "2001:db9::1",
        "::10.0.0.1",
        "10.0.0.0/8",
        "localhost",
        "",
        "10.0.0.1:80",
        "[2001:db8::1]",
    ):
        assert matcher.match({"operation": "read", "ip": other}) == ()
    assert matcher.match({"operation": "read"}) == ()


def test_p2_a_flood_of_addresses_is_matched_in_bounded_memory_and_even_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many networks and lists there are, an address costs a look-up for each length of prefix."""
    monkeypatch.setattr(matching, "CLASSES_KEPT_MAX", 1000)
    costs = []
    for count in (1000, 16_000):
        listed = [f"10.{number >> 8 & 255}.{number & 255}.0/24" for number in range(count)]
        policies = [Named(f"n{at}", {"ip": Networks(listed[at : at + 500])}) for at in range(0, count, 500)]
        matcher = Matcher(policies, tuple)
        best = 1e9
        for attempt in range(3):
            begun = time.perf_counter()
            for number in range(5000):
                matcher.match({"ip": f"10.{number % 256}.{number >> 8}.{attempt}"})
            best = min(best, time.perf_counter() - begun)
            assert all(len(dimension.known) <= 1000 for _, dimension in matcher._dimensions)
        costs.append(best)
    assert costs[1] < 4 * costs[0], "sixteen times as many networks"


def test_p2_long_lists_are_hashed_once() -> None:
    long = AnyOf([f"value-{number}" for number in range(1000)])
    assert hash(long) == hash(AnyOf(long.texts))
    assert long == AnyOf(long.texts)
    assert long != Networks(["10.0.0.0/8"])
    assert AnyOf(["10.0.0.0/8"]) != Networks(["10.0.0.0/8"])


def test_policies_themselves_can_be_matched() -> None:
    policies: list[Policy] = [read_policy({"name": "p", "rate": 1, "match": {"customer": "a*"}})]
    assert Matcher(policies, tuple).match({"customer": "acme"}) == (policies[0],)


def test_the_patterns_that_values_fit_are_not_remembered_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """F-H10: a class may hold as many patterns as there are policies, and there are as many classes as values."""
    monkeypatch.setattr(matching, "PATTERNS_KEPT_MAX", 1000)
    wide = [Named(f"w{number}", {"customer": "*" + "c*" * number}, "g") for number in range(1, 100)]
    own = [Named(f"o{number}", {"customer": f"{'c' * 100}{number}"}, "g") for number in range(50)]
    matcher = Matcher([*wide, *own], tuple)
    for number in range(50):
        assert [policy.name for policy in matcher.match({"customer": f"{'c' * 100}{number}"})] == [f"o{number}"]
        assert sum(len(kept) for classes in matcher._found for kept in classes) <= 1000
        assert sum(map(len, matcher._dimensions[0][1].known.values())) <= 1000


def test_policies_of_a_group_are_ranked_once() -> None:
    """F-H10: each descriptor of another class compares them again, and must not measure them again."""
    policies = [Named(f"p{number}", {"customer": "*"}, "g") for number in range(500)]
    own = [Named(f"o{number}", {"customer": str(number)}, "g") for number in range(20)]
    matcher = Matcher([*policies, *own], tuple)
    matcher.match({"customer": "0"})
    Named.looks = 0
    assert [policy.name for policy in matcher.match({"customer": "1"})] == ["o1"]
    assert Named.looks <= 501 + 1, "a look at each to see whether it fits, and at the new one's rank"


addressed = st.one_of(
    st.ip_addresses().map(str),
    st.sampled_from([*NETWORKS, *ADDRESSES, "10.0.0.0/08", "10.0.0.0/+8", "10.0.0.0/ 8", "::/129", "1.2.3.4/33", "/"]),
    st.builds("{}/{}".format, st.ip_addresses(), st.integers(-1, 140)),
    st.builds("{}/{}".format, st.sampled_from(ADDRESSES), st.sampled_from(["0", "8", "", "255.0.0.0", "²", "٣"])),
)


@given(addressed)
def test_p2_networks_are_read_as_the_library_reads_them(text: str) -> None:
    """Except that masks (`/255.0.0.0`) and zones (`%eth0`) are none."""
    try:
        wanted = ip_network(text, strict=False)
    except ValueError:
        wanted = None
    if wanted is None or "%" in text or "." in text.partition("/")[2]:
        with pytest.raises(ValueError):  # noqa: PT011
            read_network(text)
        return
    found = read_network(text)
    assert (found.version, found.start << found.shift) == (wanted.version, int(wanted.network_address))
    assert found.shift == wanted.max_prefixlen - wanted.prefixlen
    assert found.is_whole == (ip_address(text.partition("/")[0]) == wanted.network_address)
