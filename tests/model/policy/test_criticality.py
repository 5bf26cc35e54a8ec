"""The class of a request: what it claims, what it is assigned, what its key may have (G4, Q12)."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limiter.engine.planner import Planner
from limiter.model.policy.criticality import Classes, Criticality, class_of, lowest
from limiter.model.policy.reading import read_policy_set

C, CP, SP, S = Criticality.CRITICAL, Criticality.CRITICAL_PLUS, Criticality.SHEDDABLE_PLUS, Criticality.SHEDDABLE


@pytest.mark.parametrize(("some", "found"), [([CP, C], C), ([S, CP], S), ([SP, C, SP], SP), ([CP], CP)])
def test_the_lowest_is_the_least_critical(some: list[Criticality], found: Criticality) -> None:
    assert lowest(some) is found


maybe = st.none() | st.sampled_from(Criticality)


@given(claimed=maybe, assigned=maybe, default=maybe, highest=maybe, node=st.sampled_from(Criticality))
def test_g4_q12_the_class_is_the_lowest_of_claim_assignment_and_key(
    claimed: Criticality | None,
    assigned: Criticality | None,
    default: Criticality | None,
    highest: Criticality | None,
    node: Criticality,
) -> None:
    tables = () if assigned is None else (("plan", {"free": assigned}),)
    found = class_of(claimed, {"plan": "free"}, Classes(tables, default), default=node, highest=highest)
    order = list(Criticality)
    base = claimed or assigned or default or node
    bounds = [bound for bound in (base, assigned, highest) if bound is not None]
    assert order.index(found) == max(order.index(bound) for bound in bounds)


def covering(policies: list[dict[str, object]], **namespace: object) -> Classes | None:
    spread = {"default": namespace} if namespace else {}
    planner = Planner(read_policy_set({"policies": policies, "namespaces": spread}))
    return planner.cover("default", {"plan": "free"})[1].classes


def test_without_classes_in_any_policy_there_is_nothing_to_find() -> None:
    assert covering([{"name": "a", "rate": 1}, {"name": "b", "rate": 1}]) is None


def test_g4_the_default_is_the_policies_lowest_or_the_namespace_s() -> None:
    a, b = {"name": "a", "rate": 1}, {"name": "b", "rate": 1}
    assert covering([a, b], default_criticality="sheddable") == Classes((), S)
    policies: list[dict[str, object]] = [
        a | {"default_criticality": "critical"},
        b | {"default_criticality": "sheddable_plus"},
    ]
    assert covering(policies, default_criticality="sheddable") == Classes((), SP)


def test_q12_every_policy_that_covers_a_request_may_assign_its_class() -> None:
    policies: list[dict[str, object]] = [
        {"name": name, "rate": 1, "criticality_by": {"plan": {"free": level}}}
        for name, level in (("a", "sheddable_plus"), ("b", "critical"))
    ]
    classes = covering(
        [*policies, {"name": "other", "match": {"plan": "gold"}, "rate": 1, "default_criticality": "sheddable"}]
    )
    assert classes is not None
    assert classes.default is None
    for plan, claimed in product(("free", "gold"), (None, CP)):
        found = class_of(claimed, {"plan": plan}, classes, default=C, highest=None)
        assert found is (SP if plan == "free" else claimed or C)
