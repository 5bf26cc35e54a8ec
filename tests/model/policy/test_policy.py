"""Policies as values: units, what belongs together, and that what was written can be read back."""

import json
import math
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from limiter.model.policy.choices import Mechanism, OnStoreFailure
from limiter.model.policy.criticality import Criticality
from limiter.model.policy.fields import quantity
from limiter.model.policy.fields.kinds import rate_per_s
from limiter.model.policy.limit import Limit
from limiter.model.policy.policy import Policy
from limiter.model.policy.policy_set import Namespace
from limiter.model.policy.problems import PolicyError
from limiter.model.policy.reading import dump, read_namespace, read_policy, read_policy_set


def problems(**fields: object) -> list[str]:
    with pytest.raises(PolicyError) as caught:
        read_policy({"name": "p", "rate": 1, **fields})
    return caught.value.problems


@pytest.mark.parametrize(
    ("written", "per_s"),
    [
        (100, 100.0),
        (0.5, 0.5),
        ("100", 100.0),
        ("100/s", 100.0),
        ("6000/m", 100.0),
        ("6000 / m", 100.0),
        ("1800/h", 0.5),
        ("86400/D", 1.0),
        ("1e3/s", 1000.0),
        (".5/s", 0.5),
        (" 5/s ", 5.0),
    ],
)
def test_rates_have_units(written: float | str, per_s: float) -> None:
    assert rate_per_s(written) == per_s
    assert read_policy({"name": "p", "rate": written}).rate == written


@pytest.mark.parametrize(
    ("fields", "capacity"),
    [({"rate": "6/m"}, 1.0), ({"rate": "6/m", "minimum": 5}, 5.0), ({"rate": "6/m", "minimum": -5}, 0.1),
     ({"rate": 100}, 100.0), ({"rate": "6/m", "capacity": "10m"}, 60.0)],
)  # fmt: skip
def test_w3_the_default_capacity_of_a_slow_rate_admits_somebody(fields: dict[str, Any], capacity: float) -> None:
    assert Limit(read_policy({"name": "p", **fields})).terms.capacity == pytest.approx(capacity)


@pytest.mark.parametrize(
    "written", ["fast", "100/fortnight", "-1/s", "1//s", "1/s/s", "", "1/", "/s", "1 per s", "١/s"]
)
def test_text_that_is_no_rate_is_refused_by_name(written: str) -> None:
    assert math.isnan(rate_per_s(written))
    (line,) = problems(rate=written)
    assert line.startswith(f"policy 'p', rate: found {written!a}; allowed: a positive number of units per second")


@pytest.mark.parametrize(
    ("written", "units"), [("500ms", 50.0), (50, 50.0), ("5%", 5.0), ("2s", 200.0), ("1m", 6000.0), ("2e4us", 2.0)]
)
def test_capacities_have_units(written: float | str, units: float) -> None:
    """W2"""
    policy = read_policy({"name": "p", "rate": 100, "capacity": written})
    assert policy.capacity == written
    assert quantity.units(policy.capacity, rate=rate_per_s(100)) == pytest.approx(units)


@pytest.mark.parametrize(
    "field", ["rate", "capacity", "burst", "max_debt", "stop_debt", "minimum", "charge", "max_work"]
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, True, 2.0**53 * 2, 10**400, [1], {}, "1e400"])
def test_no_field_takes_a_number_that_is_none(field: str, value: object) -> None:
    (line,) = problems(**{field: value})
    assert line.startswith(f"policy 'p', {field}: found ")


def test_a_union_of_two_forms_has_one_line() -> None:
    (line,) = problems(steering={"initial": "fast"})
    assert line.startswith("policy 'p', steering.initial: found 'fast'; allowed: 'C', 'C/F', a share of the rate (30%)")


def test_dimensions_called_like_types_keep_their_names() -> None:
    (line,) = problems(match={"str": 5, "float": "x"})
    assert line.startswith("policy 'p', match.str: found 5;")


def test_every_problem_is_listed_at_once() -> None:
    assert [line.partition(":")[0] for line in problems(rate="x", capacity="y", charge=-1)] == [
        "policy 'p', rate",
        "policy 'p', capacity",
        "policy 'p', charge",
    ]


def test_a_document_that_is_no_policy_is_refused_without_a_name() -> None:
    document: object
    for document in (None, [], "orders", 5):
        with pytest.raises(PolicyError, match=r"^the policy: found .*; allowed: a mapping of fields to values$"):
            read_policy(document)
    with pytest.raises(PolicyError, match=r"^the policy, name: found nothing; it is required$"):
        read_policy({"rate": 1})


def test_defaults() -> None:
    policy = read_policy({"name": "p", "rate": 1})
    assert (policy.mechanism, policy.without_store, policy.namespace) == (
        Mechanism.WORK,
        OnStoreFailure.LOCAL,
        "default",
    )
    assert dump(policy) == {"name": "p", "rate": 1}
    quota = read_policy({"name": "q", "quota": {"work": 5, "period": "day"}})
    assert quota.without_store is OnStoreFailure.KNOWN, "a quota is handed out again only where that is asked for"


@pytest.mark.parametrize(
    "fields",
    [
        {"burst": 3, "steering": {"floor": 1}, "min_work": 2},
        {"mechanism": "requests", "capacity": 50},
        {"weights": {"operation": {}}},
        {"reserve": {"sheddable": 0.5}},
        {"learning": {"target": "p90"}},
        {"charge": "learned", "learning": {"initial": 50}, "max_work": 20},
        {"admit": "covered", "minimum": -5},
        {"admit": "covered", "reserve": {"critical_plus": "-5%"}},
        {"quota": {"work": 50, "period": "day"}, "max_request": 80},
        {"count": "requests", "max_debt": 5},
        {"count": "requests", "admit": "covered", "weights": {"operation": {"write": 5}}, "stop_debt": 5},
        {"match": {"operation": "read"}, "weights": {"operation": {"write": 5}}},
        {"match": {"customer": None}, "per": ["customer"]},
        {"mechanism": "requests", "max_work": 5000, "steering": {"floor": 0.1}},
        {"mechanism": "requests", "steering": {"auto": {"even": 0.3}}},
        {"overload": {"expectations": {"ideal_step": 0.1, "expected_by": {"criticality": {"urgent": 5}}}}},
        {"overload": {"response_time": {"classes": False, "quality_min": 0.5}, "ranks": {"critical": 0.5}}},
        {"overload": {"response_time": {"rate_max": 500.0, "nreq": 20, "target_ms": 0.05}}},
    ],
)
def test_a_stored_policy_stays_in_force_with_fields_that_have_no_effect(fields: dict[str, Any]) -> None:
    """A limit must not be lost because a newer version would no longer take the policy (P6)."""
    document = {"name": "p", "rate": 100, **fields}
    with pytest.raises(PolicyError):
        read_policy(document)
    policy = read_policy(document, stored=True)
    assert Limit(policy.parts()[0]).terms.committed == 100
    assert dump(policy) == document
    with pytest.raises(PolicyError):
        read_policy(document | {"rate": -1}, stored=True)


@pytest.mark.parametrize(
    "fields",
    [
        {"admit": "covered", "minimum": 0, "reserve": {"sheddable": 50}},
        {"quota": {"work": 5000, "period": "day"}, "minimum": -5, "reserve": {"critical_plus": -10}},
        {"quota": {"requests": 50, "period": "day"}, "max_request": 80},
        {"count": "requests", "weights": {"operation": {"write": 5}}, "max_debt": 50, "stop_debt": 5},
        {"count": "requests", "minimum": 0, "max_debt": 1},
        {"count": "requests", "reserve": {"critical_plus": -5}, "max_debt": 5},
        {"match": {"operation": "read"}, "weights": {"operation": {"read": 2, "write": 5}}},
        {"match": {"operation": "re*"}, "weights": {"operation": {"read": 2}}},
        {"match": {"customer": None}, "per": ["region"]},
        {"charge": "learned", "learning": {"initial": 50}, "max_work": 20, "weights": {"operation": {"read": 0.1}}},
        {"charge": "learned", "learning": {"initial": 20}, "max_work": 20},
    ],
)
def test_fields_that_have_an_effect_are_accepted(fields: dict[str, Any]) -> None:
    document = {"name": "p", "rate": 100, **fields}
    assert dump(read_policy(document)) == document


@pytest.mark.parametrize("fields", [{"max_debt": 1}, {"stop_debt": 1}])
def test_a_quota_of_requests_may_have_a_debt(fields: dict[str, Any]) -> None:
    """Nodes without the store may have admitted more requests than it allows (F-S14)."""
    document = {"name": "p", "quota": {"requests": 5, "period": "day"}, **fields}
    assert dump(read_policy(document)) == document


def test_an_undeclared_namespace_has_one_partition() -> None:
    policies = read_policy_set({"namespaces": {"wide": {"partitions": 4, "partition_by": ["customer"]}}})
    assert policies.namespace("wide").partitions == 4
    assert policies.namespace("other") == Namespace()


def test_a_namespace_by_itself_is_checked_too() -> None:
    spread = {"partitions": 2, "partition_by": ["customer"]}
    assert read_namespace("a", spread) == Namespace(partitions=2, partition_by=["customer"])
    with pytest.raises(PolicyError, match=r"^namespace 'a', partitions: found 0; allowed: a whole number"):
        read_namespace("a", {"partitions": 0})


def test_policies_cannot_be_changed_in_place() -> None:
    policy = read_policy({"name": "p", "rate": 1})
    with pytest.raises(ValueError, match="frozen"):
        policy.rate = 2


names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
dimensions = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.-]{0,20}", fullmatch=True)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
networks = st.sampled_from(["10.0.0.0/8", "2001:db8::/32", "192.0.2.1", "::1"])
patterns = (
    st.none()
    | texts
    | st.lists(texts, min_size=1, max_size=3)
    | st.fixed_dictionaries({"cidr": st.lists(networks, min_size=1, max_size=3)})
)
numbers = st.integers(1, 10**9) | st.floats(1e-6, 1e12, allow_nan=False)
amounts = numbers | st.builds("{}{}".format, st.integers(1, 1000), st.sampled_from(["ms", "s", "%", "m"]))
rates = numbers | st.builds("{}/{}".format, st.integers(1, 10**6), st.sampled_from("smhd"))


@st.composite
def documents(draw: st.DrawFn) -> dict[str, object]:
    """Policies as people may write them."""
    document: dict[str, object] = {"name": draw(names)}
    if draw(st.booleans()):
        document["rate"] = draw(rates)
        optional: dict[str, st.SearchStrategy[object]] = {
            "capacity": amounts, "burst": amounts, "max_debt": amounts, "stop_debt": amounts,
            "mechanism": st.sampled_from(Mechanism).map(str), "steering": st.fixed_dictionaries({"initial": numbers}),
            "reserve": st.dictionaries(st.sampled_from(Criticality).map(str), amounts),
            "on_store_failure": st.sampled_from(["open", "closed", "local"]),
        }  # fmt: skip
    else:
        document["quota"] = {"requests": draw(numbers), "period": "day"}
        optional = {"max_debt": numbers, "on_store_failure": st.sampled_from(OnStoreFailure).map(str)}
    optional |= {
        "match": st.dictionaries(dimensions, patterns, max_size=5),
        "per": st.lists(dimensions, max_size=5, unique=True),
        "group": names, "minimum": numbers, "charge": numbers | st.just("learned"), "shadow": st.booleans(),
        "weights": st.dictionaries(dimensions, st.dictionaries(names, numbers, max_size=3), max_size=2),
        "description": st.just("words"),
    }  # fmt: skip
    chosen = draw(st.sets(st.sampled_from(sorted(optional))))
    return document | {field: draw(optional[field]) for field in sorted(chosen)}


@given(documents())
def test_a_policy_reads_back_as_it_was_put(document: dict[str, object]) -> None:
    try:
        policy = read_policy(document)
    except PolicyError as error:  # what was drawn admits nobody, has a stop beyond all debt, or no effect
        assume(not any(words in str(error) for words in ("at most", "at least", "allowed: only ", "than the minimum")))
        raise
    assert dump(policy) == document
    again = read_policy(json.loads(json.dumps(dump(policy))))
    assert (again, dump(again)) == (policy, document)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.integers(), inner, max_size=3),
    max_leaves=5,
)


def taken_or_told(document: object) -> list[str]:
    """Nothing if a document is good, else the problems with it, of which there are some."""
    try:
        read_policy_set(document)
    except PolicyError as error:
        return error.problems or ["no problem was told"]
    return []


@given(st.dictionaries(st.sampled_from([*Policy.model_fields, "other"]), anything))
def test_any_policy_is_accepted_or_its_problems_are_listed(document: dict[str, object]) -> None:
    """F-P2: nothing but PolicyError, each line on one line, and never the same line twice."""
    told = taken_or_told({"policies": [document]})
    assert all(line.isprintable() and ("allowed" in line or "required" in line) for line in told)
    assert len(set(told)) == len(told)


@given(anything)
def test_any_document_is_accepted_or_its_problems_are_listed(document: object) -> None:
    taken_or_told(document)


amounts = st.integers(1, 3000) | st.builds("{}{}".format, st.integers(1, 200), st.sampled_from(["ms", "s", "m", "%"]))


@given(
    fields=st.fixed_dictionaries(
        {},
        optional={
            "capacity": amounts,
            "max_debt": amounts,
            "stop_debt": amounts,
            "minimum": st.integers(-500, 500),
            "max_work": st.integers(1, 3000),
            "max_request": st.integers(1, 3000),
            "charge": st.integers(0, 500),
            "admit": st.sampled_from(["covered", "minimum"]),
            "reserve": st.dictionaries(
                st.sampled_from(["sheddable", "critical_plus"]),
                amounts | st.integers(-500, -1) | st.sampled_from(["-20%", "-5s"]),
                min_size=1,
            ),
        },
    ),
    rates=st.tuples(*[st.floats(0.001, 1e6)] * 3).map(sorted),
)
def test_p12_what_fits_the_lowest_and_the_highest_rate_fits_those_between(
    fields: dict[str, Any], rates: list[float]
) -> None:
    """Only these two of a table are looked at, so the bounds of a policy must be such that this is enough."""

    def is_sound(rate: float) -> bool:
        try:
            read_policy({"name": "p", "rate": rate, **fields}, stored=True)
        except PolicyError:
            return False
        return True

    lowest, middle, highest = rates
    assume(is_sound(lowest) and is_sound(highest))
    assert is_sound(middle)


@pytest.mark.parametrize(("table", "named"), [({"a": 50, "b": 2}, "b"), ({"a": 50, "b": 5000}, "b"), ({"a": 2}, "a")])
def test_p12_a_rate_of_a_table_that_does_not_fit_is_named(table: dict[str, float], named: str) -> None:
    fields = {"per": ["customer"], "capacity": "2s", "minimum": 10, "stop_debt": "1m", "max_debt": 100_000, "rate": 50}
    (problem,) = problems(**fields, rates={"customer": table})
    assert f"rates.customer.{named}: " in problem
