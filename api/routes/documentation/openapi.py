"""The OpenAPI texts of every route: bodies, answers and errors, each with an example."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi.responses import PlainTextResponse

from api.routes.documentation.field_texts import FIELD_TEXTS, LOSS_EXAMPLE
from api.routes.documentation.lease_texts import (
    LEASE_EXAMPLE,
    LENT_EXAMPLE,
    LISTED_EXAMPLE,
    RENEW_EXAMPLE,
    RETURN_EXAMPLE,
)
from limiter.model.numbers import NUMBER_MAX

REF = "#/components/schemas/{name}"


def ref(name: str) -> dict[str, str]:
    """Return the reference to a schema of the document."""
    return {"$ref": REF.format(name=name)}


def _body(name: str, **examples: Any) -> dict[str, Any]:
    shown = {title: {"value": value} for title, value in examples.items()}
    content = {"application/json": {"schema": ref(name), "examples": shown}}
    return {"requestBody": {"required": True, "content": content}}


def _answer(description: str, name: str, example: Any = None) -> dict[str, Any]:
    content: dict[str, Any] = {"schema": ref(name)}
    if example is not None:
        content["example"] = example
    return {"description": description, "content": {"application/json": content}}


def _problem(description: str, name: str = "Problem", *examples: Any) -> dict[str, Any]:
    content: dict[str, Any] = {"schema": ref(name)}
    if examples:
        content["examples"] = {example["reason"]: {"value": example} for example in examples}
    return {"description": description, "content": {"application/problem+json": content}}


def _failed(status: int, reason: str, description: str, detail: str, **more: Any) -> dict[str, Any]:
    """Return an error with an example of its body."""
    title = HTTPStatus(status).phrase
    body = {"type": "about:blank", "title": title, "status": status, "detail": detail, "reason": reason, **more}
    return _problem(description, "Problem", body)


_LIMIT = {"policy": "orders-reads", "mechanism": "work", "balance": 47.0, "capacity": 50.0, "rate": 100.0}
_ASK = {"descriptor": {"service": "orders", "operation": "read", "customer": "c1"}, "work": 3}
_TELL = {"reservation": "AQID…", "work": 12, "latency_ms": 34.5}
_GRANTED = {
    "granted": True,
    "reservation": "AQID…",
    "charged": 3.0,
    "expires_in_ms": 60000,
    "limits": [_LIMIT],
    "overloaded": False,
    "quality": 1.0,
    "degraded": False,
    "covered": True,
}
_REFUSED = {
    "type": "https://iana.org/assignments/http-problem-types#quota-exceeded",
    "title": "Request cannot be satisfied as assigned quota has been exceeded",
    "status": 429,
    "detail": "orders-reads: the balance is -11 of 50 units and refills by 100 per second; this request needs 1",
    "granted": False,
    "policy": "orders-reads",
    "reason": "work",
    "retry": "after",
    "retry_after_ms": 120,
    "limits": [_LIMIT | {"balance": -11.0, "passed": False}],
    "violated-policies": ["orders-reads"],
}
_OVERLOADED = _REFUSED | {
    "type": "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity",
    "title": "Request cannot be satisfied due to temporary server capacity constraints",
    "detail": "orders-reads: overloaded; 40 % of the requests of this class are refused",
    "reason": "overload",
    "retry_after_ms": 1200,
    "limits": [_LIMIT | {"passed": False}],
    "overloaded": True,
}
_SETTLED = {
    "work": 12.0, "adjusted": 9.0, "uncollected": 0.0, "stop": False, "duplicate": False, "late": False,
    "expires_in_ms": 0, "limits": [_LIMIT],
}  # fmt: skip
_POLICY = {"name": "orders-reads", "match": {"service": "orders"}, "per": ["customer"], "rate": 100, "capacity": 50}

_COMMON: dict[int | str, dict[str, Any]] = {
    400: _failed(400, "malformed", "Not JSON, or not HTTP", "the body is not JSON"),
    401: _failed(
        401, "unauthenticated", "No known API key", "a known API key is required, sent as Authorization: Bearer <key>"
    ),
    403: _failed(
        403,
        "forbidden",
        "This API key may not do that, or a page of another site sent the request",
        "the key orders (caller) may not manage policies",
    ),
    408: _failed(408, "too_slow", "The request did not arrive in time", "the request took longer than 10 s to arrive"),
    413: _failed(413, "too_long", "The body is too long", "the body is longer than 1048576 bytes"),
    415: _failed(
        415,
        "content_type",
        "The body is not declared as JSON",
        'Content-Type: found "text/plain"; allowed: application/json',
    ),
    422: _failed(
        422,
        "invalid",
        "Invalid; `errors` lists the fields",
        "work: found -1; allowed: a number from 0 to 9007199254740992",
        errors=[{"field": "work", "found": "-1", "allowed": "a number from 0 to 9007199254740992"}],
    ),
    431: _failed(
        431,
        "head_too_long",
        "The URL or the headers are too long, or there are too many headers",
        "the headers are longer than 65536 bytes",
    ),
    503: _failed(
        503,
        "store_unavailable",
        "No decision: the store does not answer, or a record is damaged",
        "the store did not answer in time",
        retry_after_ms=1000,
    ),
}
_READ = {status: _COMMON[status] for status in (400, 401, 403, 422, 431, 503)}
_MISSING: dict[int | str, dict[str, Any]] = {
    404: _failed(404, "no_such_policy", "Not found", "there is no policy default/orders-reads")
}
_LOST: dict[int | str, dict[str, Any]] = {
    412: _failed(
        412,
        "revision",
        "It has changed since the revision in `If-Match`",
        "policy default/orders-reads has changed since: it is at revision 9",
    )
}
_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "The same key with the same request gets the same decision and is charged once.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[!-~]+$"},
}
_IF_MATCH = {
    "name": "If-Match",
    "in": "header",
    "required": False,
    "description": "The ETag of the revision to replace; a 412 if it has changed since.",
    "schema": {"type": "string", "pattern": '^"[0-9]{1,15}"$'},
}
_NAMES = {"maxLength": 64, "pattern": "^[A-Za-z0-9][A-Za-z0-9._-]*$"}

ACQUIRE: dict[str, Any] = {
    "responses": {
        200: _answer("Granted", "GrantedAnswer", _GRANTED),
        409: _failed(
            409,
            "idempotency_conflict",
            "The Idempotency-Key was used with another request",
            "the Idempotency-Key was used with another request",
        ),
        429: _problem("Over a limit, or refused by overload control", "RefusedAnswer", _REFUSED, _OVERLOADED),
        **_COMMON,
    },
    "openapi_extra": {"parameters": [_KEY], **_body("AcquireRequest", known_work=_ASK)},
}
SETTLE: dict[str, Any] = {
    "responses": {
        200: _answer("Settled", "SettledAnswer", _SETTLED),
        404: _failed(404, "unknown_reservation", "Unknown or expired reservation", "no such reservation"),
        409: _failed(
            409,
            "settled_otherwise",
            "Settled before with another amount; `first` has the result",
            "the reservation was settled before with other work",
            first=_SETTLED,
        ),
        **_COMMON,
    },
    "openapi_extra": _body("SettleRequest", finished=_TELL, so_far=_TELL | {"final": False}),
}
BATCH_RESULT: dict[str, Any] = {
    "type": "object",
    "properties": {"status": {"type": "integer"}},
    "required": ["status"],
    "anyOf": [ref(name) for name in ("GrantedAnswer", "SettledAnswer", "RefusedAnswer", "Problem")],
}
BATCH_ANSWER: dict[str, Any] = {
    "type": "object",
    "properties": {"results": {"type": "array", "items": ref("BatchResult")}},
    "required": ["results"],
}
BATCH: dict[str, Any] = {
    "responses": {
        200: _answer("The results, in order", "BatchAnswer", {"results": [{"status": 200} | _GRANTED]}),
        **_COMMON,
    },
    "openapi_extra": _body("BatchRequest", both={"operations": [{"op": "acquire"} | _ASK, {"op": "settle"} | _TELL]}),
}
_REPORT = {"policy": "orders-reads", "source": "host-1", "signals": {"cpu": 0.93, "executor": 1.4, "queue_age": 0.2}}
SIGNALS: dict[str, Any] = {
    "status_code": 202,
    "responses": {
        202: _answer("Taken", "SignalsTaken", {"bucket": "orders-reads", "partitions": 1, "signals": {"cpu": 0.93}}),
        404: _failed(404, "no_such_policy", "No such policy", "there is no policy default/orders-reads"),
        **_COMMON,
    },
    "openapi_extra": _body("SignalRequest", of_all=_REPORT, of_one=_REPORT | {"key": {"customer": "c1"}}),
}
_NO_LEASE = _failed(
    404, "lease_unknown", "The lease is unknown or long over", "this lease ended long ago; begin another"
)
_OVER = _failed(
    409,
    "lease_outdated",
    "A larger number was answered before, or the lease was given back or revoked",
    "a request with a larger number was answered before; nothing was done",
)
_NOT_ALLOWED = _failed(
    403,
    "local_not_allowed",
    "A policy lends no part of its limit, or this API key may not do that",
    "orders-reads lends no part of its limit; set local.allowed in the policy, or ask each time",
    policy="orders-reads",
)
LEASE: dict[str, Any] = {
    "responses": {**_COMMON, 200: _answer("Lent", "Lent", LENT_EXAMPLE), 403: _NOT_ALLOWED, 409: _OVER},
    "openapi_extra": _body("LeaseRequest", first=LEASE_EXAMPLE),
}
LEASE_RENEW: dict[str, Any] = {
    "responses": {
        **_COMMON,
        200: _answer("Lent", "Lent", LENT_EXAMPLE | {"number": 2}),
        403: _NOT_ALLOWED,
        404: _NO_LEASE,
        409: _OVER,
    },
    "openapi_extra": _body("RenewRequest", second=RENEW_EXAMPLE),
}
LEASE_RETURN: dict[str, Any] = {
    "responses": {
        **_COMMON,
        200: _answer("Given back", "Returned", {"id": "0-5d0f1c3a", "returned": True}),
        403: _NOT_ALLOWED,
        404: _NO_LEASE,
        409: _OVER,
    },
    "openapi_extra": _body("ReturnRequest", last=RETURN_EXAMPLE),
}
LEASES: dict[str, Any] = {"responses": {200: _answer("The leases", "LeaseList", LISTED_EXAMPLE), **_READ}}
LEASE_DELETE: dict[str, Any] = {
    "responses": {
        200: _answer("Revoked", "Revoked", {"id": "0-5d0f1c3a", "expires_in_ms": 2700}),
        **_READ,
        404: _NO_LEASE,
        409: _OVER,
    }
}
_NAMESPACE_ASKED = {
    "name": "namespace",
    "in": "query",
    "required": False,
    "description": "By default the namespace that the API key is bound to, otherwise `default`.",
    "schema": {"type": "string", **_NAMES},
}
_ONLY_NAMESPACE = _NAMESPACE_ASKED | {
    "description": "Only this namespace. By default the one that the API key is bound to, otherwise all."
}
_ONLY: dict[str, Any] = {"openapi_extra": {"parameters": [_ONLY_NAMESPACE]}}
_LISTED = {
    "revision": 9,
    "namespaces": {},
    "policies": [{"namespace": "default"} | _POLICY],
    "revisions": {"default/orders-reads": 9},
    "owners": {"default/orders-reads": "file"},
    "damaged": {},
    "warnings": [],
}
POLICIES: dict[str, Any] = {"responses": {200: _answer("The policies", "PolicyList", _LISTED), **_READ}, **_ONLY}
POLICY: dict[str, Any] = {
    "responses": {200: _answer("The policy", "Policy", _POLICY), **_READ, **_MISSING},
    "openapi_extra": {"parameters": [_NAMESPACE_ASKED]},
}
POLICY_SET: dict[str, Any] = {
    "type": "object",
    "properties": {
        "namespaces": {"type": "object", "additionalProperties": ref("Namespace")},
        "defaults": {"type": "object"},
        "policies": {"type": "array", "items": {"type": "object"}},
        "owner": {"type": "string", **_NAMES, "default": "api"},
        "prune": {"type": "boolean", "default": False},
        "take_over": {"type": "boolean", "default": False},
        "dry_run": {"type": "boolean", "default": False},
    },
}
_SET_BODY = {
    "parameters": [_ONLY_NAMESPACE],
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": ref("PolicySetRequest"),
                "example": {"policies": [_POLICY], "owner": "ci", "prune": True},
            }
        },
    },
}
_APPLIED = {
    "revision": 9,
    "dry_run": False,
    "made": [{"kind": "policy", "namespace": "default", "name": "orders-reads"}],
    "changed": [],
    "removed": [],
    "kept": [],
}
POLICIES_APPLY: dict[str, Any] = {
    "responses": {
        200: _answer("Applied; for a dry run, what would change", "AppliedSet", _APPLIED),
        409: _failed(
            409,
            "owned_by_others",
            "Another owner has a policy that differs; `take_over` replaces it",
            "nothing was applied: policy default/orders-reads differs from the store, where 'file' applied it",
        ),
        **_COMMON,
    },
    "openapi_extra": _SET_BODY,
}
POLICIES_CHECK: dict[str, Any] = {
    "responses": {200: _answer("Valid", "CheckedSet", {"ok": True, "warnings": []}), **_COMMON},
    "openapi_extra": _SET_BODY,
}
POLICY_PUT: dict[str, Any] = {
    "responses": {
        200: _answer("Replaced", "Policy", _POLICY),
        201: _answer("New", "Policy", _POLICY),
        **_COMMON,
        **_LOST,
    },
    "openapi_extra": {"parameters": [_NAMESPACE_ASKED, _IF_MATCH], **_body("Policy", reads=_POLICY)},
}
PATCH_EXAMPLE = {"rate": 200, "description": None}
POLICY_PATCH: dict[str, Any] = {
    "responses": {200: _answer("Changed", "Policy", _POLICY), **_COMMON, **_MISSING, **_LOST},
    "openapi_extra": {
        "parameters": [_NAMESPACE_ASKED, _IF_MATCH],
        "requestBody": {
            "required": True,
            "content": {
                kind: {"schema": {"type": "object"}} for kind in ("application/merge-patch+json", "application/json")
            },
        },
    },
}
POLICY_DELETE: dict[str, Any] = {
    "status_code": 204,
    "responses": {204: {"description": "Removed"}, **_READ, **_MISSING, **_LOST},
    "openapi_extra": {"parameters": [_NAMESPACE_ASKED, _IF_MATCH]},
}
_REVISION = {
    "revision": 9,
    "when": "2026-01-01T12:00:00.000+00:00",
    "who": "ada",
    "action": "put",
    "owner": "api",
    "before": _POLICY | {"rate": 50},
    "after": _POLICY,
}
_HISTORY = {"policy": "orders-reads", "namespace": "default", "history": [_REVISION]}
POLICY_HISTORY: dict[str, Any] = {
    "responses": {200: _answer("The changes, newest first", "PolicyHistory", _HISTORY), **_READ, **_MISSING},
    "openapi_extra": {"parameters": [_NAMESPACE_ASKED]},
}
ROLLBACK_BODY = {
    "type": "object",
    "properties": {"revision": {"type": "integer", "minimum": 1, "maximum": int(NUMBER_MAX)}},
    "required": ["revision"],
    "additionalProperties": False,
}
POLICY_ROLLBACK: dict[str, Any] = {
    "responses": {200: _answer("Rolled back", "Policy", _POLICY), **_COMMON, **_MISSING, **_LOST},
    "openapi_extra": {
        "parameters": [_NAMESPACE_ASKED, _IF_MATCH],
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": ref("RollbackRequest"), "example": {"revision": 7}}},
        },
    },
}
_NAMESPACE = {"partitions": 4, "partition_by": ["customer"]}
_NAMESPACES = {
    "revision": 9,
    "namespaces": {"orders": _NAMESPACE},
    "revisions": {"orders": 8},
    "owners": {"orders": "api"},
}
NAMESPACES: dict[str, Any] = {
    "responses": {200: _answer("The declared namespaces", "NamespaceList", _NAMESPACES), **_READ},
    **_ONLY,
}
NAMESPACE: dict[str, Any] = {"responses": {200: _answer("The namespace", "Namespace", _NAMESPACE), **_READ, **_MISSING}}
NAMESPACE_PUT: dict[str, Any] = {
    "responses": {
        200: _answer("Replaced", "Namespace", _NAMESPACE),
        201: _answer("New", "Namespace", _NAMESPACE),
        **_COMMON,
        **_LOST,
    },
    "openapi_extra": {"parameters": [_IF_MATCH], **_body("Namespace", spread=_NAMESPACE)},
}
NAMESPACE_DELETE: dict[str, Any] = POLICY_DELETE | {"openapi_extra": {"parameters": [_IF_MATCH]}}
_CHANGE = {"kind": "policy", "namespace": "default", "name": "orders-reads", **_REVISION}
AUDIT: dict[str, Any] = {
    "responses": {200: _answer("A page of changes", "AuditPage", {"changes": [_CHANGE], "cursor": "9.1"}), **_READ},
    **_ONLY,
}
LOSS: dict[str, Any] = {
    "responses": {
        200: _answer("Whether policies were lost", "LossStatus", {"lost": True, "loss": LOSS_EXAMPLE}),
        **_READ,
    }
}
LOSS_ACKNOWLEDGE: dict[str, Any] = {
    "responses": {
        200: _answer("Whether there was a loss to acknowledge", "LossAcknowledged", {"acknowledged": True}),
        **_COMMON,
    }
}
_BUCKETS = {
    "buckets": [{field: example for field, (_, example) in FIELD_TEXTS["Bucket"].items() if field != "overload"}],
    "cursor": "",
    "unreadable": [],
}
BUCKETS: dict[str, Any] = {"responses": {200: _answer("A page of buckets", "BucketPage", _BUCKETS), **_READ}}
_STEERED = {
    "owner": {"controller": "host-17-a1b2c3", "fence": 3, "expires_in_ms": 1912},
    "buckets": [
        {
            "namespace": "default",
            "bucket": "orders-reads:c1",
            "policy": "orders-reads",
            "mechanism": "requests",
            "mechanism_reason": "set by the policy",
            "committed": 1000.0,
            "cap": 80.6,
            "charge": 12.4,
            "charge_error": 0.02,
            "share": 0.31,
            "share_ends_in_ms": 9200.0,
            "cycles": [
                {
                    "at_ms": 1767225600000.0,
                    "committed": 1000.0,
                    "work_rate": 1000.0,
                    "work_per_request": 12.4,
                    "rejection_rate": 0.2,
                    "rule": "start",
                    "before": 0.0,
                    "after": 80.6,
                    "sentence": "1000 units/s ÷ 12.4 units/request → 80.6 rps",
                }
            ],
            "overload": {
                "state": "overloaded",
                "overloaded": True,
                "quality": 1.0,
                "in_flight": 37.0,
                "limits": {"critical_plus": 38.0, "critical": 38.0, "sheddable_plus": 34.2, "sheddable": 34.2},
                "target_ms": 1000.0,
                "late_share": 0.11,
                "percentile_ms": 984.0,
                "refused_shares": {"critical_plus": 0.0, "critical": 0.2, "sheddable_plus": 0.4, "sheddable": 0.8},
                "rates": {"critical_plus": 900.0, "critical": 240.0, "sheddable_plus": 12.0, "sheddable": 0.05},
                "steps": [
                    {
                        "at_ms": 1767225600000.0,
                        "controller": "expectations",
                        "rule": "raise",
                        "before": 10.0,
                        "after": 20.0,
                        "sentence": "12 % missed 200 ms (threshold 5 %): M 10 → 20",
                    }
                ],
            },
        }
    ],
    "cursor": "",
    "unreadable": [],
}
CONTROLLER: dict[str, Any] = {
    "responses": {200: _answer("A page of buckets, and why they are steered", "ControllerPage", _STEERED), **_READ}
}
_UNCOVERED = {
    "namespace": "default",
    "namespace_known": True,
    "dimensions": ["costumer", "service"],
    "nearest": {"costumer": "customer"},
    "count": 1207,
    "count_error": 0,
    "first_seen_ms": 1767225600000.0,
    "last_seen_ms": 1767229200000.0,
    "examples": [{"service": "orders", "costumer": "c1"}],
}
UNCOVERED: dict[str, Any] = {
    "responses": {200: _answer("The most frequent", "UncoveredList", {"uncovered": [_UNCOVERED]}), **_READ}
}
METRICS: dict[str, Any] = {
    "response_class": PlainTextResponse,
    "responses": {
        200: {
            "description": "Metrics of all namespaces, for Prometheus",
            "content": {"text/plain": {}, "application/openmetrics-text": {}},
        },
        401: _COMMON[401],
        403: _COMMON[403],
        431: _COMMON[431],
    },
}
HEALTH: dict[str, Any] = {"responses": {200: _answer("Alive", "Health", {"status": "ok"})}}
LOAD: dict[str, Any] = {"responses": {200: _answer("How busy it is", "Load", {"load": 0.42, "waiting": 3})}}
READY: dict[str, Any] = {
    "responses": {
        200: _answer("Ready", "Readiness", {"status": "ready", "warnings": []}),
        503: _problem("Not ready", "NotReady"),
    }
}
