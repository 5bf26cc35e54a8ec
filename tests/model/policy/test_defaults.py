"""The `defaults` block of a policy file (P12)."""

from typing import Any

import pytest

from limiter.model.policy.problems import PROBLEMS_MAX, PolicyError
from limiter.model.policy.reading import dump, read_policy_set


def filled(defaults: dict[str, Any], *policies: dict[str, Any]) -> list[dict[str, Any]]:
    """The policies with their defaults filled in."""
    return [dump(policy) for policy in read_policy_set({"defaults": defaults, "policies": list(policies)}).policies]


def test_p12_a_policy_has_what_the_defaults_say_unless_it_says_otherwise() -> None:
    overload = {"expectations": {"expected_latency_ms": 100}, "utilisation": {}}
    own = {"response_time": {"target_ms": 50}}
    defaults = {"namespace": "shop", "capacity": "2s", "overload": overload}
    assert filled(defaults, {"name": "a", "rate": 10}, {"name": "b", "rate": 10, "capacity": 5, "overload": own}) == [
        {"namespace": "shop", "capacity": "2s", "overload": overload, "name": "a", "rate": 10},
        {"namespace": "shop", "name": "b", "rate": 10, "capacity": 5, "overload": own},
    ]


def test_p12_a_limit_is_only_for_policies_that_name_none() -> None:
    quota = {"work": 100, "period": "day"}
    policies: list[dict[str, Any]] = [
        {"name": "a"},
        {"name": "b", "rate": 5},
        {"name": "c", "quota": quota},
        {"name": "d", "deny": True},
    ]
    assert filled({"rate": 10}, *policies) == [{"rate": 10, "name": "a"}, *policies[1:]]


@pytest.mark.parametrize(
    ("defaults", "policy"),
    [
        ({"capacity": "2s", "overload": {"utilisation": {}}}, {"quota": {"work": 100, "period": "day"}}),
        ({"steering": {"floor": 1}, "burst": 3, "min_work": 2}, {"rate": 10}),
        ({"learning": {"target": "p90"}}, {"rate": 10, "charge": 2}),
        ({"charge": 2, "settle_threshold": 1}, {"rate": 10, "count": "requests"}),
        ({"per": ["customer"], "on_store_failure": "closed", "charge": 2}, {"deny": True}),
        ({"weights": {"operation": {"write": 3}}}, {"quota": {"requests": 5, "period": "day"}}),
    ],
)
def test_p12_a_default_without_effect_on_a_policy_is_not_filled_in(
    defaults: dict[str, Any], policy: dict[str, Any]
) -> None:
    assert filled(defaults, {"name": "p", **policy}) == [{"name": "p", **policy}]


def test_p12_defaults_count_among_the_fields_that_have_an_effect() -> None:
    defaults = {"mechanism": "auto", "steering": {"floor": 1}, "charge": "learned", "learning": {"target": "p90"}}
    assert filled(defaults, {"name": "p", "rate": 10}) == [defaults | {"name": "p", "rate": 10}]


def test_p12_a_policy_s_own_mistake_is_not_blamed_on_the_defaults() -> None:
    with pytest.raises(PolicyError) as refused:
        filled({"capacity": "2s"}, {"name": "p", "rate": 10, "burst": 3}, {"name": "q", "rate": -1})
    assert [line.partition(":")[0] for line in refused.value.problems] == ["policy 'p', burst", "policy 'q', rate"]


def test_p12_a_default_that_does_not_fit_says_where_it_is_from() -> None:
    with pytest.raises(PolicyError) as refused:
        filled({"stop_debt": 500, "capacity": 5}, {"name": "p", "rate": 10, "max_debt": 60, "minimum": 2})
    (line,) = refused.value.problems
    assert line.startswith("policy 'p', stop_debt: found 500 beyond max_debt 60;")
    assert line.endswith("(it is from defaults)")


@pytest.mark.parametrize("policies", [None, 5, [None, 5, "x"], {}, [[]]])
def test_defaults_beside_nonsense_have_the_usual_messages(policies: object) -> None:
    with pytest.raises(PolicyError):
        read_policy_set({"defaults": {"rate": 5}, "policies": policies})


def test_defaults_alone_are_no_policies() -> None:
    assert read_policy_set({"defaults": {"rate": 5}}).policies == []
    assert read_policy_set({"defaults": {}, "policies": [{"name": "a", "rate": 1}]}).policies[0].rate == 1


def test_f_h10_defaults_fill_in_no_more_than_a_set_of_its_size_may_have() -> None:
    """A few kilobytes would otherwise take half a minute: each policy is checked with all that it is given."""
    rates = {"customer": {f"c{number}": 1 for number in range(1000)}}
    defaults = {"rate": 1, "per": ["customer"], "rates": rates}
    document = {"defaults": defaults, "policies": [{"name": f"p{number}"} for number in range(1000)]}
    with pytest.raises(PolicyError) as refused:
        read_policy_set(document)
    (problem,) = refused.value.problems
    assert problem.startswith("defaults: found 1006000 values to fill in; allowed: at most ")


def test_f_h10_a_set_is_checked_no_further_than_the_problems_that_are_listed() -> None:
    document = {"policies": [{"rate": -1}] * 20_000}
    with pytest.raises(PolicyError) as refused:
        read_policy_set(document)
    assert len(refused.value.problems) <= PROBLEMS_MAX + 1


def test_ordinary_defaults_of_thousands_of_policies_are_taken() -> None:
    defaults = {"rate": 100, "per": ["customer"], "capacity": "2s", "reserve": {"sheddable": "50%"}}
    policies = [{"name": f"p{number}", "match": {"service": f"s{number}"}} for number in range(3000)]
    assert len(read_policy_set({"defaults": defaults, "policies": policies}).policies) == 3000
