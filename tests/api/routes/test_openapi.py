"""The OpenAPI document is true, and nothing generated from it makes the server fail."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import SkipTest

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.support.live import LiveApi, live
from tests.support.servers import running

CHECKS = [not_a_server_error, status_code_conformance, response_schema_conformance, content_type_conformance]
OPERATIONS = [
    "POST /v1/acquire", "POST /v1/settle", "POST /v1/batch", "POST /v1/signals", "GET /v1/policies",
    "GET /v1/policies/{name}", "PUT /v1/policies/{name}", "DELETE /v1/policies/{name}",
    "PATCH /v1/policies/{name}", "POST /v1/policies/apply", "POST /v1/policies/check",
    "GET /v1/policies/{name}/history", "POST /v1/policies/{name}/rollback", "GET /v1/namespaces",
    "GET /v1/namespaces/{name}", "PUT /v1/namespaces/{name}", "DELETE /v1/namespaces/{name}", "GET /v1/audit",
    "GET /v1/store/loss", "POST /v1/store/loss/acknowledge",
    "GET /v1/buckets", "GET /v1/controller", "GET /v1/uncovered", "GET /healthz", "GET /readyz", "GET /metrics",
]  # fmt: skip
MODES = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]


@pytest.fixture(scope="module")
def own_api(tmp_path_factory: pytest.TempPathFactory, policies: Path) -> Iterator[LiveApi]:
    """One on a store of its own: who knows what policies will be put."""
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
    for path in ("/v1/acquire", "/v1/settle", "/v1/batch", "/v1/signals"):
        content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        for example in content["examples"].values():
            assert client.post(path, json=example["value"]).status_code in (200, 404)


def test_the_docs_are_served(client: httpx.Client) -> None:
    assert "Headgate" in client.get("/docs").text


def test_the_page_of_the_document_needs_nobody_else(client: httpx.Client) -> None:
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
