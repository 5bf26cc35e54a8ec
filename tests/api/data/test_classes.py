"""Classes that callers cannot choose: by key, by dimension, by default (G4, Q12), in both lanes and in batches."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from limiter.api_keys import new_key
from tests.support.live import Lane, LiveApi, live
from tests.support.servers import Server, running

KEYS = {name: new_key(name, "caller", None, highest) for name, highest in [("shop", None), ("jobs", "sheddable")]}
# Nobody below critical is let in: what is granted was critical or more.
LIMIT = "per: [customer], rate: 0.001, capacity: 10, charge: 0.001, reserve: {sheddable: 100%, sheddable_plus: 100%}"
POLICIES = f"""
namespaces:
  batch: {{default_criticality: sheddable}}
policies:
  - {{name: plain, match: {{kind: plain}}, {LIMIT}}}
  - {{name: assigned, match: {{kind: assigned}}, {LIMIT}, criticality_by: {{plan: {{free: sheddable}}}}}}
  - {{name: defaulted, match: {{kind: defaulted}}, {LIMIT}, default_criticality: sheddable_plus}}
  - {{name: batch, namespace: batch, match: {{kind: plain}}, {LIMIT}}}
"""


@pytest.fixture(scope="module")
def own_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Other tests look at all policies and namespaces of theirs."""
    with running("valkey", tmp_path_factory.mktemp("own-store")) as server:
        yield server


@pytest.fixture(scope="module", params=["fast", "plain"])
def guarded(
    request: pytest.FixtureRequest, own_store: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveApi]:
    lane: Lane = request.param
    file: Path = tmp_path_factory.mktemp("classes") / "policies.yaml"
    file.write_text(POLICIES)
    with live(own_store.url, file, lane=lane, api_keys=",".join(entry for _, entry in KEYS.values())) as api:
        yield api


def client_of(api: LiveApi, key: str) -> httpx.Client:
    return api.client(headers={"authorization": f"Bearer {KEYS[key][0]}"})


def passes(api: LiveApi, key: str, customer: str, **fields: Any) -> list[bool]:
    """Whether a request is let in beside a first one that took some: alone, and in a batch."""
    descriptor = {"kind": "plain", "customer": customer, **fields.pop("descriptor", {})}
    first = {"descriptor": descriptor | {"plan": "gold"}, "work": 5, "criticality": "critical_plus"}
    asked = {"descriptor": descriptor, **fields}
    with client_of(api, "shop") as shop, client_of(api, key) as client:
        drained = shop.post("/v1/acquire", json=first | {"namespace": fields.get("namespace", "default")})
        assert drained.status_code == 200, drained.text
        alone = client.post("/v1/acquire", json=asked).status_code
        (inside,) = client.post("/v1/batch", json={"operations": [{"op": "acquire", **asked}]}).json()["results"]
    assert {alone, inside["status"]} <= {200, 429}
    return [alone == 200, inside["status"] == 200]


@pytest.mark.parametrize("claimed", [None, "critical_plus", "critical", "sheddable"])
def test_q12_a_key_s_requests_have_at_most_its_class(guarded: LiveApi, customer: str, claimed: str | None) -> None:
    claim = {} if claimed is None else {"criticality": claimed}
    assert passes(guarded, "shop", customer, **claim) == [claimed != "sheddable"] * 2
    assert passes(guarded, "jobs", f"{customer}-jobs", **claim) == [False, False]


@pytest.mark.parametrize(("plan", "claimed", "passed"), [
    ("free", "critical_plus", False), ("free", None, False), ("gold", "critical_plus", True), ("gold", None, True),
])  # fmt: skip
def test_q12_a_dimension_assigns_a_class(
    guarded: LiveApi, customer: str, plan: str, claimed: str | None, passed: bool
) -> None:
    descriptor = {"kind": "assigned", "plan": plan}
    assert passes(guarded, "shop", customer, descriptor=descriptor, criticality=claimed) == [passed, passed]


def test_g4_policies_and_namespaces_have_defaults(guarded: LiveApi, customer: str) -> None:
    descriptor = {"kind": "defaulted"}
    assert passes(guarded, "shop", customer, descriptor=descriptor) == [False, False]
    assert passes(guarded, "shop", f"{customer}-2", descriptor=descriptor, criticality="critical") == [True, True]
    assert passes(guarded, "shop", f"{customer}-3", namespace="batch") == [False, False]
    assert passes(guarded, "shop", f"{customer}-4", namespace="batch", criticality="critical") == [True, True]
