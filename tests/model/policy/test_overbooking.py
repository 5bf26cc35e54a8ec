"""R17: overbooking is seen, from what namespaces say of their backends and policies commit."""

from typing import Any

import pytest

from limiter.model.policy.policy_set import committed, warnings
from limiter.model.policy.reading import read_policy, read_policy_set

READS = {"name": "reads", "rate": 1500}
WRITES = {"name": "writes", "rate": "36000/m"}


def told(*policies: dict[str, Any], within: str | None = None, **backends: Any) -> list[str]:
    document = {"namespaces": {"default": {"backends": backends}}, "policies": list(policies)}
    return warnings(read_policy_set(document), within)


@pytest.mark.parametrize(
    ("fields", "units"),
    [
        ({"rate": 100}, 100),
        ({"rate": "6000/m"}, 100),
        ({"rate": 100, "mechanism": "requests"}, 100),
        ({"rate": 100, "per": ["customer"]}, 100),
        ({"rate": 100, "per": ["customer"], "match": {"customer": ["a", "b", "c"]}}, 300),
        ({"rate": 100, "per": ["customer"], "match": {"customer": ["a", "b*"]}}, 100),
        ({"rate": 100, "per": ["customer", "operation"], "match": {"operation": ["get", "put"]}}, 200),
        ({"rate": 100, "match": {"customer": ["a", "b", "c"]}}, 100),
        ({"rate": 10, "per": ["customer"], "rates": {"customer": {"a": 500, "b": 50}}}, 560),
        (
            {
                "rate": 10,
                "per": ["customer"],
                "match": {"customer": ["a", "c"]},
                "rates": {"customer": {"a": 500, "b": 50}},
            },
            510,
        ),
        ({"rate": 100, "shadow": True}, 0),
        ({"rate": 100, "count": "requests"}, 0),
        ({"quota": {"work": 1000, "period": "day"}}, 0),
        ({"rate": 100, "quota": {"work": 1000, "period": "day"}}, 100),
        ({"deny": True}, 0),
    ],
)
def test_r17_a_policy_commits_its_rate_to_every_key_that_is_known(fields: dict[str, Any], units: float) -> None:
    assert committed(read_policy({"name": "p", **fields})) == units


def test_r17_commitments_above_a_backend_are_told_with_the_largest_of_them() -> None:
    (warning,) = told(READS, WRITES, db={"rate": 2000})
    assert warning == (
        "namespace default: backend db can do 2000 units/s, and its policies commit 2100 or more "
        "(reads 1500, writes 600): lower their rates, or raise backends.db.rate"
    )
    assert told(READS, WRITES, db={"rate": 2100}) == []


def test_r17_a_backend_may_have_a_group_of_the_policies() -> None:
    assert told(READS, WRITES, db={"rate": 1500, "policies": ["reads"]}) == []
    assert len(told(READS, WRITES, db={"rate": 1500, "policies": ["reads"]}, all={"rate": 2000})) == 1


def test_r17_a_policy_that_does_not_exist_is_told() -> None:
    (warning,) = told(READS, db={"rate": 2000, "policies": ["reads", "deletes"]})
    assert "deletes, which does not exist" in warning


def test_r17_another_namespace_is_no_business_of_this_one() -> None:
    assert told(READS, {**WRITES, "namespace": "other"}, db={"rate": 2000}) == []
    assert told(READS, db={"rate": 1}, within="other") == []
    assert len(told(READS, db={"rate": 1}, within="default")) == 1


def test_r17_equal_parts_that_do_not_add_up_to_the_last_bit_are_no_overbooking() -> None:
    parts = [{"name": f"part-{number}", "rate": 0.1} for number in range(10)]
    assert told(*parts, db={"rate": 1}) == []
