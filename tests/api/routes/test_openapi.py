"""The OpenAPI document is true, and nothing generated from it makes the server fail."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import SkipTest

import httpx
import jsonschema
import pytest
import schemathesis
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from api.routes.documentation.policy_texts import POLICY_TEXTS
from tests.support.documents import CITED, policy_fields, rows
from tests.support.live import LiveApi, live
from tests.support.servers import running

CHECKS = [not_a_server_error, status_code_conformance, response_schema_conformance, content_type_conformance]
OPERATIONS = [
    "POST /v1/acquire", "POST /v1/settle", "POST /v1/batch", "POST /v1/leases", "POST /v1/leases/renew",
    "POST /v1/leases/return", "POST /v1/signals",
    "GET /v1/policies",
    "GET /v1/policies/{name}", "PUT /v1/policies/{name}", "DELETE /v1/policies/{name}",
    "PATCH /v1/policies/{name}", "POST /v1/policies/apply", "POST /v1/policies/check",
    "GET /v1/policies/{name}/history", "POST /v1/policies/{name}/rollback", "GET /v1/namespaces",
    "GET /v1/namespaces/{name}", "PUT /v1/namespaces/{name}", "DELETE /v1/namespaces/{name}", "GET /v1/audit",
    "GET /v1/store/loss", "POST /v1/store/loss/acknowledge",
    "GET /v1/buckets", "GET /v1/leases", "DELETE /v1/leases/{id}", "GET /v1/controller", "GET /v1/uncovered",
    "GET /healthz", "GET /load", "GET /readyz", "GET /metrics",
]  # fmt: skip
WORDED = {
    "## Fields": "Policy", "### Quota": "Quota", "### Steering": "Steering", "### Learning": "Learning",
    "### Block": "Block", "### Local": "Local", "### Overload": "Overload", "### Expectations": "Expectations",
    "### Response time": "ResponseTime", "### Utilisation": "Utilisation", "### Namespaces": "Namespace",
    "### Backends": "Backend",
}  # fmt: skip
"""The tables of docs/policies.md, and the schemas that have their words."""
MODES = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]


@pytest.fixture(scope="module")
def own_api(tmp_path_factory: pytest.TempPathFactory, policies: Path) -> Iterator[LiveApi]:
    """An API on a store of its own, because generated requests put policies of any kind."""
    with running("valkey", tmp_path_factory.mktemp("own-store")) as server, live(server.url, policies) as api:
        yield api


@pytest.mark.parametrize("mode", MODES, ids=["valid", "invalid"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_generated_requests_never_make_the_server_fail(own_api: LiveApi, operation: str, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_url(f"{own_api.base}/openapi.json")
    method, path = operation.split()

    @settings(
        max_examples=30,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    @given(case=schema[path][method].as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        case.validate_response(case.call(timeout=10), checks=CHECKS)

    with contextlib.suppress(Unsatisfiable, SkipTest):  # some operations can be called in no wrong way
        send()


def test_the_document_describes_every_route(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    listed = {f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods}
    assert listed == set(OPERATIONS)
    assert {
        "AcquireRequest",
        "SettleRequest",
        "SignalRequest",
        "GrantedAnswer",
        "RefusedAnswer",
        "Problem",
        "Policy",
        "Namespace",
    } <= set(document["components"]["schemas"])


def test_the_examples_of_the_document_are_taken(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    for path in ("/v1/acquire", "/v1/settle", "/v1/batch", "/v1/signals", "/v1/leases", "/v1/leases/renew"):
        content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        for example in content["examples"].values():
            assert client.post(path, json=example["value"]).status_code in (200, 404)


def test_every_field_has_a_description_and_an_example_that_fits(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    schemas, fields = document["components"]["schemas"], 0
    for name, schema in schemas.items():
        assert re.fullmatch(r"[A-Z`].*\.", schema["description"], re.DOTALL), name
        for field, told in schema.get("properties", {}).items():
            fields += 1
            assert re.fullmatch(r"[A-Z0-9`].*\.", told.get("description", "")), f"{name}.{field}"
            assert told.get("examples"), f"{name}.{field}"
            for example in told["examples"]:
                jsonschema.validate(example, {**told, "components": {"schemas": schemas}})
    assert fields > 300
    for where, operation in operations(document):
        for parameter in operation.get("parameters", ()):
            assert parameter.get("description"), f"{where}: {parameter['name']}"


def test_every_answer_has_a_type_and_every_operation_a_short_name(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    for where, operation in operations(document):
        assert operation["summary"], where
        assert operation["description"], where
        for status, answer in operation["responses"].items():
            for kind, content in answer.get("content", {}).items():
                assert kind in ("text/plain", "application/openmetrics-text") or "$ref" in content["schema"], (
                    f"{where} {status}"
                )
    names = sorted(operation["operationId"] for _, operation in operations(document))
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+){0,3}", name) for name in names)
    assert {"acquire", "settle", "batch", "report_load", "put_policy", "get_policy_history", "list_buckets"} <= set(
        names
    )


def test_the_examples_of_answers_fit_their_types(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    for _, operation in operations(document):
        for answer in operation["responses"].values():
            for content in answer.get("content", {}).values():
                shown = [example["value"] for example in content.get("examples", {}).values()]
                for example in [*shown, *([content["example"]] if "example" in content else [])]:
                    jsonschema.validate(example, {**content["schema"], "components": document["components"]})


def test_answers_of_management_routes_have_their_type(client: httpx.Client, customer: str) -> None:
    document = client.get("/openapi.json").json()
    client.post("/v1/acquire", json={"descriptor": {"service": "orders", "customer": customer}})
    client.post("/v1/acquire", json={"descriptor": {"costumer": customer}})
    client.put(f"/v1/policies/{customer}", json={"match": {"nobody": customer}, "rate": 1}).raise_for_status()
    client.put(f"/v1/namespaces/{customer}", json={"partitions": 2, "partition_by": ["a"]}).raise_for_status()
    for path in (
        "/v1/policies", "/v1/policies/{name}", "/v1/policies/{name}/history", "/v1/namespaces", "/v1/namespaces/{name}",
        "/v1/audit", "/v1/store/loss", "/v1/buckets", "/v1/controller", "/v1/uncovered", "/healthz", "/readyz",
    ):  # fmt: skip
        schema = document["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
        answer = client.get(path.format(name=customer)).json()
        jsonschema.validate(answer, {**schema, "components": document["components"]})
        told = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        assert answer.keys() <= told["properties"].keys(), path


def test_the_words_on_policies_are_those_of_the_documentation() -> None:
    for heading, kind in WORDED.items():
        told = {name.strip("`"): (meaning, example) for name, _, _, meaning, example in rows(policy_fields(heading))}
        assert told.keys() == POLICY_TEXTS[kind].keys()
        for name, (meaning, example) in told.items():
            text, value = POLICY_TEXTS[kind][name]
            assert text == re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", meaning), f"{kind}.{name}"
            assert yaml.safe_load(example.strip("`")) == {name: value}, f"{kind}.{name}"


def test_no_word_of_the_document_is_an_id_for_developers(client: httpx.Client) -> None:
    assert not set(CITED.findall(client.get("/openapi.json").text))


def operations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every operation, and where it is."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"{method.upper()} {path}", operation


def test_the_docs_are_served(client: httpx.Client) -> None:
    assert "Headgate" in client.get("/docs").text


def test_the_page_of_the_document_loads_nothing_from_elsewhere(client: httpx.Client) -> None:
    """Nothing is downloaded from anywhere else."""
    page = client.get("/docs")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "//" not in page.text
    assert page.headers["content-security-policy"].startswith("default-src 'self'; ")
    paths = re.findall(r'(?:src|href)="(?!data:)([^"]+)"', page.text)
    assert len(paths) == 3
    for path in paths:
        asset = client.get(f"/{path}")
        assert (asset.status_code, len(asset.content) > 100) == (200, True), path
    assert "//" not in client.get("/docs/start.js").text
    assert "url(http" not in client.get("/docs/swagger-ui.css").text
    for path in ("/docs/redoc.standalone.js", "/docs/..%2f__init__.py", "/redoc"):
        assert client.get(path).status_code == 404
