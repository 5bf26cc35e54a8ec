"""The OpenAPI document: what the framework makes of the routes, with all schemas, their descriptions and examples."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from api.data.decode import BatchRequest
from api.data.schemas import GrantedAnswer, Problem, RefusedAnswer, SettledAnswer
from api.routes.documentation.answers import ANSWERS
from api.routes.documentation.field_texts import FIELD_TEXTS, SCHEMA_TEXTS
from api.routes.documentation.lease_texts import (
    LEASE_SCHEMA_TEXTS,
    LEASE_TEXTS,
)
from api.routes.documentation.openapi import (
    BATCH_ANSWER,
    BATCH_RESULT,
    PATCH_EXAMPLE,
    POLICY_SET,
    REF,
    ROLLBACK_BODY,
    ref,
)
from api.routes.documentation.policy_texts import POLICY_TEXTS
from limiter.model.bucket.contract import AcquireRequest, SettleRequest, SignalRequest, SignalsTaken
from limiter.model.bucket.lease_contract import (
    LeaseList,
    LeaseRequest,
    Lent,
    RenewRequest,
    Returned,
    ReturnRequest,
    Revoked,
)
from limiter.model.policy.policy import Policy
from limiter.model.policy.policy_set import Namespace

STRUCTS = [
    AcquireRequest, SettleRequest, BatchRequest, SignalRequest, GrantedAnswer, RefusedAnswer, SettledAnswer,
    SignalsTaken, Problem, LeaseRequest, RenewRequest, ReturnRequest, Lent, Returned, LeaseList, Revoked, *ANSWERS,
]  # fmt: skip


def describe(app: FastAPI) -> None:
    """Make an application use the document of this module."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
    components = document.setdefault("components", {})
    components.setdefault("schemas", {}).update(_schemas())
    scheme = "An API key, where keys are configured: `Authorization: Bearer <key>`."
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer", "description": scheme}}
    for name in ("HTTPValidationError", "ValidationError"):  # the framework's own schemas, which no route answers with
        components["schemas"].pop(name, None)
    document["security"] = [{"key": []}, {}]
    for path, operations in document["paths"].items():
        thing = "name of the namespace" if "namespaces" in path else "name of the policy"
        thing = "id of the lease" if "leases" in path else thing
        for operation in operations.values():
            for parameter in operation.get("parameters", ()):
                if parameter["in"] == "path":
                    parameter["description"] = f"The {thing}."
    for content in document["paths"]["/v1/policies/{name}"]["patch"]["requestBody"]["content"].values():
        content["example"] = PATCH_EXAMPLE  # set here, as the framework drops every null
    return document


def _schemas() -> dict[str, Any]:
    _, schemas = msgspec.json.schema_components(STRUCTS, ref_template=REF)
    policy = Policy.model_json_schema(ref_template="#/components/schemas/{model}", mode="validation")
    schemas.update(policy.pop("$defs", {}))
    schemas["Policy"] = policy
    namespace = Namespace.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(namespace.pop("$defs", {}))
    schemas["Namespace"] = namespace
    schemas["PolicySetRequest"] = POLICY_SET
    schemas["RollbackRequest"] = ROLLBACK_BODY
    schemas["BatchResult"] = BATCH_RESULT
    schemas["BatchAnswer"] = BATCH_ANSWER
    for name in ("PolicyList", "NamespaceList"):
        schemas[name]["properties"]["namespaces"]["additionalProperties"] = ref("Namespace")
    schemas["PolicyList"]["properties"]["policies"]["items"] = ref("Policy")
    return {name: _doubled(_explained(name, schema)) for name, schema in schemas.items()}


def _doubled(value: Any) -> Any:
    """Return a schema whose numbers say that they are doubles: generated clients would take single precision."""
    if isinstance(value, list):
        return [_doubled(one) for one in value]
    if not isinstance(value, dict):
        return value
    inner = {key: one if key in ("examples", "default") else _doubled(one) for key, one in value.items()}
    return inner | {"format": "double"} if value.get("type") == "number" else inner


def _explained(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with descriptions and examples of it and its fields, in the order of the descriptions."""
    described = SCHEMA_TEXTS.get(name) or LEASE_SCHEMA_TEXTS.get(name)
    if described is not None:
        schema = schema | {"description": described}
    texts = POLICY_TEXTS.get(name) or LEASE_TEXTS.get(name) or FIELD_TEXTS.get(name, {})
    known = schema.get("properties", {})
    fields = {
        field: known[field] | {"description": _sentence(meaning), "examples": [example]}
        for field, (meaning, example) in texts.items()
        if field in known
    }
    return schema | {"properties": fields | {f: s for f, s in known.items() if f not in fields}} if known else schema


def _sentence(meaning: str) -> str:
    """Return the text of a table's cell as a sentence."""
    return meaning[:1].upper() + meaning[1:].removesuffix(".") + "."
