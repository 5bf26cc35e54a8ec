"""Requests that are nearly right: for every route in the OpenAPI document, and with real reservations."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from random import Random
from typing import Any
from urllib.parse import quote, urlencode

from loadtest.campaign import documents
from loadtest.campaign.raw_http import request

NAMESPACE = "fuzz"
"""The namespace in which attackers may change things."""
CLASSES = ("critical_plus", "critical", "sheddable_plus", "sheddable")
NAMES = tuple(f"fuzz-{number}" for number in range(12))


def policy(draw: Random) -> dict[str, Any]:
    """Return a valid policy."""
    limit: dict[str, Any] = draw.choice(
        [
            {"rate": draw.choice([1, 100, "600/m", "5000/d"]), "capacity": draw.choice([10, "2s", 1000])},
            {"rate": 100, "capacity": 50, "max_request": 40, "admit": "covered"},
            {"rate": 1, "capacity": 5, "block": {"after": 5, "in": "10s", "for": "30s"}},
            {"rate": 10, "capacity": 20, "count": "requests"},
            {"quota": {"work": draw.randrange(1, 10_000), "period": draw.choice(["day", "month"])}},
            {"rate": 50, "capacity": 100, "quota": {"work": 5_000, "period": "day"}},
            {"rate": 50, "mechanism": "requests", "burst": 5, "steering": {"initial": "C"}},
            {"rate": 100, "mechanism": "auto", "max_work": 50},
            {"rate": 100, "overload": {"utilisation": {}}},
            {"rate": 100, "overload": {"expectations": {}, "response_time": {}}},
            {"rate": 100, "max_work": 100, "charge": "learned"},
            {"deny": True},
        ]
    )
    dimension = draw.choice(["customer", "service", "operation", "ip"])
    patterns = ["*", "a*", "a*b*", "x", None, ["x", "a*"]]
    made = limit | {"namespace": NAMESPACE, "match": {dimension: draw.choice(patterns)}}
    if draw.random() < 0.2:
        made["group"] = draw.choice(["g", "h"])
    if draw.random() < 0.2:
        made["shadow"] = True
    if "deny" in limit:
        return made
    made["per"] = draw.sample(["customer", "operation"], draw.randrange(3))
    if draw.random() < 0.2:
        made["criticality_by"] = {"operation": {"read": draw.choice(CLASSES)}}
    if draw.random() < 0.2 and limit.get("mechanism") is None:
        made["weights"] = {"operation": {"read": 1, "write": draw.choice([0.5, 3, 1e9])}}
    return made


def change(draw: Random, key: str) -> bytes:
    """Return a valid request that puts or deletes a policy."""
    path = f"/v1/policies/{draw.choice(NAMES)}?namespace={NAMESPACE}"
    if draw.random() < 0.3:
        return request("DELETE", path, key=key)
    return request("PUT", path, json.dumps(policy(draw)).encode(), key=key)


def acquire(draw: Random) -> dict[str, Any]:
    """Return a valid acquire."""
    names = draw.sample(["customer", "service", "operation", "ip", "costumer", "plan"], draw.randrange(1, 5))
    body: dict[str, Any] = {
        "namespace": draw.choice([NAMESPACE] * 6 + ["default", "nobody"]),
        "descriptor": {name: draw.choice(["a", "ab", "x", "read", documents.text(draw)[:200]]) for name in names},
    }
    if draw.random() < 0.5:
        body["work"] = draw.choice([0, 1, 3, 0.5, 500, 1e9, 5e-324])
    if draw.random() < 0.2:
        body["criticality"] = draw.choice(CLASSES)
    if draw.random() < 0.2:
        body["ttl_ms"] = draw.choice([1, 50, 60_000, 86_400_000])
    if draw.random() < 0.1:
        body |= draw.choice([{"dry_run": True}, {"attempt": 3}, {"expected_latency_ms": 5e-324}])
    return body


def settle(draw: Random, tokens: list[str]) -> dict[str, Any]:
    """Return a settle of a reservation: a real one, an old one, one that was tampered with, or none at all."""
    token = draw.choice(tokens) if tokens and draw.random() < 0.9 else draw.choice(documents.ODD_TEXTS)
    if token and draw.random() < 0.3:
        at = draw.randrange(len(token))
        token = token[:at] + draw.choice(["A", "_", "", "AAAA", "\u00e9", token]) + token[at + draw.randrange(3) :]
    body: dict[str, Any] = {"reservation": token, "work": draw.choice([0, 1, 2, 7.5, 1e6, 5e-324, 2**53])}
    if draw.random() < 0.3:
        body["final"] = False
    if draw.random() < 0.3:
        body |= draw.choice([{"latency_ms": 5e-324}, {"latency_ms": 1e15}, {"outcome": "error"}])
    return body


def batch(draw: Random, tokens: list[str]) -> dict[str, Any]:
    """Return operations of all kinds, some of them wrong."""
    count = draw.choice([0, 1, 5, 50, 300, 1000, 1001])
    rows: list[Any] = []
    for _ in range(count):
        operation = (
            {"op": "acquire", **acquire(draw)} if draw.random() < 0.6 else {"op": "settle", **settle(draw, tokens)}
        )
        rows.append(documents.mutated(draw, operation) if draw.random() < 0.1 else operation)
    return {"operations": rows}


def largest(draw: Random, tokens: list[str], keys: Mapping[str, str]) -> bytes:
    """A request as large as is taken: a whole set of policies, a batch, a page. A set is only tried, not applied."""
    kind = draw.choice(["check", "apply", "batch", "page"])
    if kind == "batch":
        rows = [{"op": "acquire", **acquire(draw)} for _ in range(700)]
        rows += [{"op": "settle", **settle(draw, tokens)} for _ in range(300)]
        return request("POST", "/v1/batch", json.dumps({"operations": rows}).encode(), key=keys["caller"])
    if kind == "page":
        path = draw.choice(["/v1/audit", f"/v1/buckets?namespace={NAMESPACE}", f"/v1/controller?namespace={NAMESPACE}"])
        return request("GET", f"{path}{'&' if '?' in path else '?'}limit=1000", key=keys["viewer"])
    document = whole_set(draw) | ({"dry_run": True} if kind == "apply" else {})
    body = json.dumps(document, separators=(",", ":")).encode()
    return request("POST", f"/v1/policies/{kind}?namespace={NAMESPACE}", body, key=keys["admin"])


def whole_set(draw: Random) -> dict[str, Any]:
    """Policies up to one of the bounds on a set: how many there are, or how many values they have."""
    networks = {"cidr": [f"10.{number}.0.0/16" for number in range(100)]}
    rates = {"customer": {str(number): number + 1 for number in range(1000)}}
    sets: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
        (5_000, {"rate": 5, "match": {"customer": "a*b"}}, {}),
        (5_000, {}, {"rate": 5, "quota": {"work": 5, "period": "day"}}),
        (5_000, {}, {"rate": 5, "overload": {"utilisation": {}}}),
        (470, {"rate": 5, "match": {"ip": networks}}, {}),
        (48, {"rate": 5, "per": ["customer"], "rates": rates}, {}),
        (5_000, {"rate": -1}, {}),
    ]
    count, fields, defaults = draw.choice(sets)
    policies = [{"name": f"p{number}", **fields} for number in range(draw.choice([count, count // 10]))]
    if draw.random() < 0.3:
        policies[-1] = documents.mutated(draw, policies[-1])
    return {"policies": policies, **({"defaults": defaults} if defaults else {})}


class Described:
    """The operations of an OpenAPI document, and requests for them from its schemas."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._schemas = document["components"]["schemas"]
        self.operations = [
            (method.upper(), path, operation)
            for path, methods in document["paths"].items()
            for method, operation in methods.items()
        ]

    def request(self, draw: Random, tokens: list[str], keys: Mapping[str, str]) -> bytes:
        """Return one request for one operation: valid, nearly valid, or not at all."""
        method, path, operation = draw.choice(self.operations)
        if (method, path) == ("DELETE", "/v1/policies/{name}") and draw.random() < 0.5:
            method = "PUT"  # otherwise soon nothing would be left to ask for
            operation = next(found for verb, at, found in self.operations if (verb, at) == ("PUT", path))
        query, headers = {}, []
        for parameter in operation.get("parameters", ()):
            if parameter["in"] == "path":
                continue
            if draw.random() < 0.4:
                value = self._example(draw, parameter.get("schema", {}))
                if parameter["in"] == "query":
                    query[parameter["name"]] = value
                else:
                    headers.append((parameter["name"], re.sub(r"[\r\n]", "", str(value))))
        name = NAMESPACE if "namespaces" in path else draw.choice(NAMES)
        if draw.random() < 0.15:
            name = documents.text(draw)
        target = path.replace("{name}", quote(name, safe="", errors="replace"))
        if query:
            target += "?" + urlencode(query, errors="replace")
        body = self._body(draw, path, operation, tokens) if "requestBody" in operation else b""
        return request(method, target, body, *headers, key=_key(draw, keys))

    def _body(self, draw: Random, path: str, operation: Mapping[str, Any], tokens: list[str]) -> bytes:
        known = {
            "/v1/acquire": lambda: acquire(draw),
            "/v1/settle": lambda: settle(draw, tokens),
            "/v1/batch": lambda: batch(draw, tokens),
            "/v1/policies/{name}": lambda: policy(draw),
        }
        if path in known and draw.random() < 0.7:
            document = known[path]()
        else:
            document = self._example(draw, operation["requestBody"]["content"]["application/json"]["schema"])
        if draw.random() < 0.4:
            document = documents.mutated(draw, document)
        return documents.written(draw, document)

    def _example(self, draw: Random, schema: Mapping[str, Any], depth: int = 0) -> Any:
        """Return a value that fits a schema, as far as that is simple."""
        if depth > 6 or draw.random() < 0.03:
            return documents.value(draw)
        if "$ref" in schema:
            return self._example(draw, self._schemas.get(schema["$ref"].rpartition("/")[2], {}), depth + 1)
        for several in ("anyOf", "oneOf", "allOf"):
            if several in schema:
                return self._example(draw, draw.choice(schema[several]), depth + 1)
        for fixed in ("enum", "examples"):
            if schema.get(fixed):
                return draw.choice(list(schema[fixed]))
        if "const" in schema:
            return schema["const"]
        kind = schema.get("type")
        if kind == "object":
            return self._object(draw, schema, depth)
        if kind == "array":
            return [self._example(draw, schema.get("items", {}), depth + 1) for _ in range(draw.randrange(4))]
        if kind in ("integer", "number"):
            least, most = schema.get("minimum", 0), schema.get("maximum", 2**53)
            return draw.choice([least, most, least - 1, most + 1, 1, 0.5, draw.randrange(1, 100)])
        if kind == "boolean":
            return draw.random() < 0.5
        return documents.text(draw) if kind == "string" else documents.value(draw)

    def _object(self, draw: Random, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        properties = schema.get("properties", {})
        required = set(schema.get("required", ()))
        made = {
            name: self._example(draw, inner, depth + 1)
            for name, inner in properties.items()
            if name in required or draw.random() < 0.25
        }
        if not properties:
            inner = schema.get("additionalProperties")
            names = [draw.choice(["customer", "operation", documents.text(draw)]) for _ in range(draw.randrange(4))]
            made = {name: self._example(draw, inner if isinstance(inner, dict) else {}, depth + 1) for name in names}
        return made


def _key(draw: Random, keys: Mapping[str, str]) -> str | None:
    """Return an API key, mostly one with rights."""
    chance = draw.random()
    if chance < 0.85:
        return draw.choice(list(keys.values()))
    return None if chance < 0.95 else "hg_wrong"
