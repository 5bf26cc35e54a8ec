"""Rules by which middlewares read a request: its descriptor, its work, its class. The same for ASGI, WSGI and gRPC.

    descriptor={"service": "shop", "operation": "{method} {route}", "customer": "header:x-customer", "ip": "client"}
    work={"/healthz": 0, "POST /search/*": 5}
    edge={"/checkout/*": "critical", "*": "sheddable_plus"}

A value of a descriptor is a text with fields in braces: `{method}`, `{path}`, `{route}` (the pattern that the framework
matches, such as `/orders/{id}`), `{host}`, `{client}` (the peer's address), `{header:NAME}`, `{query:NAME}`. `client`,
`header:NAME` and `query:NAME` may stand alone without braces.

Missing values: a field that the request lacks reads `unknown`, so callers who leave a header out share one bucket and
go around no limit. `header:x-customer|guest` says another word. `header:x-plan|` leaves the dimension out, so that
policies match its absence.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from hashlib import blake2b
from typing import Any, Generic, TypedDict, TypeVar
from urllib.parse import parse_qs

from limiter.client.holder import CRITICALITIES
from limiter.client.request_context import CRITICALITY_HEADER, from_header
from limiter.client.throttled import Refused

V = TypeVar("V")

UNKNOWN = "unknown"
VALUE_MAX = 1024
"""Characters of a dimension's value that the service takes."""
KEPT = 960
FIELDS = ("method", "path", "route", "host", "client", "header:NAME", "query:NAME")

_FIELD = re.compile(r"\{([^{}]*)\}")
_NAMED = re.compile(r"(?:method|path|route|host|client|(?:header|query):[\w.-]+)\Z")
_ALONE = re.compile(r"(?:client|(?:header|query):[\w.-]+)(?:\|.*)?\Z")


class IncomingRequest:
    """A request as rules see it, whatever protocol it came by."""

    method: str
    path: str
    """Without the prefix under which a server or a framework has mounted the application."""
    client: str | None
    """Address of the peer: that of a proxy, unless the server reads what the proxy says of its own peer."""
    raw: Any
    """The ASGI scope, the WSGI environment, or the gRPC context."""
    query_string: str = ""

    @property
    def route(self) -> str | None:
        """Return the pattern that the framework matches to the path; None if it matches none, or cannot be asked."""
        raise NotImplementedError

    def header(self, name: str) -> str | None:
        raise NotImplementedError

    def query(self, name: str) -> str | None:
        """Return the first value of a query parameter."""
        values = parse_qs(self.query_string).get(name) if self.query_string else None
        return values[0] if values else None

    def field(self, name: str) -> str | None:
        """Return the value of a field of descriptors; None or empty where the request has none."""
        kind, _, rest = name.partition(":")
        if kind == "header":
            return self.header(rest)
        if kind == "query":
            return self.query(rest)
        found: str | None = self.header("host") if kind == "host" else getattr(self, kind)
        return found


Descriptor = Mapping[str, str]
DescriptorRule = (
    Mapping[str, str | Callable[[Any], str | None]] | Callable[[Any], Descriptor | Awaitable[Descriptor | None] | None]
)
"""A mapping as above, whose values may also be functions of the request; or a function of the request, which may be a
coroutine function under ASGI and gRPC, and returns None for a request that is not limited."""
WorkRule = float | Mapping[str, float | None] | Callable[[Any], float | None] | None
"""A number; a mapping from paths, in which the first match counts, and 0 or None mean that nothing is asked; a function
of the request with the same meaning. None, or no match: each policy's own charge."""
EdgeRule = str | Mapping[str, str] | Callable[[Any], str | None] | None
"""The class of requests at the edge, where the header of strangers is not believed: a class, a mapping from paths, a
function of the request. None: this is not the edge, and the header counts."""


class Template:
    """One value of a descriptor, read once."""

    __slots__ = ("_is_optional", "_parts")

    def __init__(self, text: str) -> None:
        if _ALONE.match(text):
            text = f"{{{text}}}"
        self._parts: list[tuple[str, str, str]] = []
        """Text before a field, the field's name, and its text if it is missing."""
        end, default = 0, UNKNOWN
        for found in _FIELD.finditer(text):
            name, bar, default = found[1].partition("|")
            if not _NAMED.match(name):
                raise ValueError(f"unknown field {found[0]!r} in {text!r}; fields are {', '.join(FIELDS)}")
            default = default if bar else UNKNOWN
            self._parts.append((text[end : found.start()], name, default))
            end = found.end()
        self._parts.append((text[end:], "", ""))
        self._is_optional = len(self._parts) == 2 and default == "" and not self._parts[0][0] and not self._parts[1][0]

    def value(self, request: IncomingRequest) -> str | None:
        """Return the value; None if the dimension is left out."""
        if len(self._parts) == 1:
            return self._parts[0][0]
        said = [text + (request.field(name) or missing if name else "") for text, name, missing in self._parts]
        value = "".join(said)
        return None if self._is_optional and not value else value


def descriptor_rule(rule: DescriptorRule) -> Callable[[Any], Descriptor | Awaitable[Descriptor | None] | None]:
    """Return the function from requests to descriptors that a rule stands for."""
    if not isinstance(rule, Mapping):
        return rule
    if not rule:
        raise ValueError("a descriptor needs at least one dimension")
    dimensions: list[tuple[str, Callable[[Any], str | None]]] = [
        (name, Template(value).value if isinstance(value, str) else value) for name, value in rule.items()
    ]

    def describe(request: IncomingRequest) -> Descriptor | None:
        found = {name: value for name, value_of in dimensions if (value := value_of(request)) is not None}
        return found or None

    return describe


def within_bounds(descriptor: Descriptor) -> Descriptor:
    """Shorten values that the service would not take; values that differ stay different."""
    if all(len(value) <= VALUE_MAX for value in descriptor.values()):
        return descriptor
    return {name: value if len(value) <= VALUE_MAX else _shortened(value) for name, value in descriptor.items()}


def _shortened(value: str) -> str:
    return value[:KEPT] + blake2b(value.encode("utf-8", "replace"), digest_size=16).hexdigest()


class ByPath(Generic[V]):
    """A mapping from paths: `/exact`, `/prefix/*`, `POST /orders`, `*`; the first match counts."""

    def __init__(self, mapping: Mapping[str, V]) -> None:
        self._rows: list[tuple[str | None, re.Pattern[str], V]] = []
        for key, value in mapping.items():
            method, space, path = key.rpartition(" ")
            if not path.startswith(("/", "*")):
                raise ValueError(f"{key!r} is no pattern of a path, such as '/orders/*' or 'POST /orders'")
            pattern = ".*".join(map(re.escape, path.split("*")))
            self._rows.append((method if space else None, re.compile(pattern, re.DOTALL), value))

    def value(self, request: IncomingRequest, default: V) -> V:
        for method, pattern, value in self._rows:
            if (method is None or method == request.method) and pattern.fullmatch(request.path):
                return value
        return default


NOT_ASKED = -1.0
"""The work of a request that is not limited."""


def work_rule(rule: WorkRule) -> Callable[[Any], float | None]:
    """Return the function from requests to their work: `NOT_ASKED`, or None for each policy's own charge."""
    if isinstance(rule, Mapping):
        mapped: Mapping[str, float | None] = {path: work or NOT_ASKED for path, work in rule.items()}
        by_path = ByPath(mapped)
        return lambda request: by_path.value(request, None)
    if callable(rule):
        return lambda request: rule(request) or NOT_ASKED
    constant = NOT_ASKED if rule == 0 else rule
    return lambda request: constant


def class_rule(edge: EdgeRule, default: str | None) -> Callable[[Any], str | None]:
    """Return the function from requests to classes; `default` is for requests that name none."""
    if default is not None:
        checked(default)
    if edge is None:
        return lambda request: from_header(request.header(CRITICALITY_HEADER)) or default
    if isinstance(edge, str):
        name = checked(edge)
        return lambda request: name
    if isinstance(edge, Mapping):
        by_path = ByPath({path: checked(name) for path, name in edge.items()})
        return lambda request: by_path.value(request, "") or default
    return lambda request: edge(request) or default


def checked(name: str) -> str:
    if name not in CRITICALITIES:
        raise ValueError(f"criticality {name!r} is none of {', '.join(CRITICALITIES)}")
    return name


class AcquireOptions(TypedDict, total=False):
    """Options that go to `acquire` as they are."""

    namespace: str | None
    expected_latency_ms: float | None
    ttl_ms: int | None
    on_refused: Refused | None
    wait_s: float | None
    deadline_ms: float | None


class RequestRules:
    """The rules of one middleware, read once."""

    def __init__(
        self,
        descriptor: DescriptorRule,
        *,
        work: WorkRule,
        edge: EdgeRule,
        criticality: str | None,
        options: AcquireOptions,
    ) -> None:
        self.options = checked_options(options)
        self.class_of = class_rule(edge, criticality)
        self._descriptor = descriptor_rule(descriptor)
        self._work = work_rule(work)

    def asks(self, request: IncomingRequest) -> tuple[float | None, Any] | None:
        """Return the work and the descriptor, which may have to be awaited; None if nothing is to be asked."""
        work = self._work(request)
        if work == NOT_ASKED:
            return None
        descriptor = self._descriptor(request)
        return None if descriptor is None else (work, descriptor)


def checked_options(options: AcquireOptions) -> AcquireOptions:
    if unknown := options.keys() - AcquireOptions.__annotations__.keys():
        raise TypeError(
            f"unknown option {', '.join(sorted(unknown))}; acquire has {', '.join(AcquireOptions.__annotations__)}"
        )
    return options
