"""The references in docs/ against the code that they describe: every name, every default, every example."""

import json
import re
from collections.abc import AsyncIterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from api.data import request_limits as limits
from api.data.decode import IDEMPOTENCY_KEY_MAX, OPERATIONS_MAX, acquire
from api.data.json_text import DEPTH_MAX, PARTS_MAX
from api.data.plane import BEGIN_MAX_S
from api.data.plane import BUCKETS_MAX as BATCH_BUCKETS_MAX
from api.data.turns import IN_PROGRESS_MAX
from api.routes.policies.audit_routes import LIMIT_MAX as AUDIT_LIMIT_MAX
from api.routes.policies.policy_routes import SET_BYTES_MAX, SET_ENTRIES_MAX
from api.routes.responses import DOCUMENT_BYTES_MAX
from api.server import KEEP_ALIVE_S
from limiter.engine import breaker
from limiter.engine.decider import Decider
from limiter.engine.policy_file import load_policy_file
from limiter.model.bucket.contract import TEXT_MAX, AcquireRequest, Granted, SettleRequest
from limiter.model.bucket.operations import LATE_US
from limiter.model.bucket.reservation import Signer
from limiter.model.numbers import DIMENSIONS_MAX
from limiter.model.overload.overload_block import (
    OF_RATES,
    OVERLOAD_PARTS,
    Expectations,
    Overload,
    ResponseTime,
    Utilisation,
)
from limiter.model.policy.blocks import Auto, Block, Learning, Local, Quota, Smoothing, Steering
from limiter.model.policy.criticality import Criticality
from limiter.model.policy.policy import Policy
from limiter.model.policy.policy_set import Backend, Namespace
from limiter.model.policy.reading import read_namespace, read_policy
from limiter.settings import Settings
from limiter.store.buckets import BUCKETS_PER_OPERATION_MAX, Buckets
from limiter.store.link.connect import OLDEST, open_link
from limiter.store.policies.policy_store import AUDIT_PAGE_BYTES
from limiter.store.scripts import load_source
from limiter.store.signal_reports import WAITING_MAX
from tests.support.documents import policy_fields, rows
from tests.support.servers import Server

DOCS = Path(__file__).parent.parent / "docs"
SETTINGS, POLICIES = (DOCS / "settings.md").read_text(), (DOCS / "policies.md").read_text()
PARTS: dict[str, type[BaseModel]] = {
    "## Fields": Policy,
    "### Quota": Quota,
    "### Steering": Steering,
    "### Smoothing": Smoothing,
    "### Auto": Auto,
    "### Learning": Learning,
    "### Block": Block,
    "### Local": Local,
    "### Overload": Overload,
    "### Expectations": Expectations,
    "### Response time": ResponseTime,
    "### Utilisation": Utilisation,
    "### Namespaces": Namespace,
    "### Backends": Backend,
}


def written(default: Any) -> str:
    """A default as the documents write it."""
    if default is PydanticUndefined:
        return "required"
    if isinstance(default, BaseModel):
        return "as below"
    if default is None or default == "":
        return "none"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, Enum):
        return f"`{default.value}`"
    if isinstance(default, tuple):
        return f"`[{', '.join(f'{number:g}' for number in default)}]`"
    return f"`{default:.10g}`" if isinstance(default, float) else f"`{default}`"


def test_every_setting_is_documented_with_its_default() -> None:
    told = {row[0].strip("`"): row[1] for row in rows(SETTINGS)}
    true = {
        variable: written(field.default).replace("none", "unset")
        for variable, field in zip(Settings.variables(), Settings.model_fields.values(), strict=True)
    }
    assert told == true
    assert len(rows(SETTINGS)) == len(told), "each once"


def default_of(field: FieldInfo) -> Any:
    return field.get_default(call_default_factory=True, validated_data={})


@pytest.mark.parametrize("heading", PARTS)
def test_every_field_of_a_policy_is_documented_with_its_default(heading: str) -> None:
    told = {row[0].strip("`"): row[2] for row in rows(policy_fields(heading))}
    fields = PARTS[heading].model_fields
    assert told == {field.alias or name: written(default_of(field)) for name, field in fields.items()}


@pytest.mark.parametrize("heading", PARTS)
def test_every_field_s_example_is_taken(heading: str) -> None:
    for row in rows(policy_fields(heading)):
        name, example = row[0].strip("`"), yaml.safe_load(row[-1].strip("`"))
        assert list(example) == [name]
        read_example(PARTS[heading], example)


OF_PUBLISHED = {"ideal_band_ms", "ideal_step", *OF_RATES}
"""Fields of overload control that only the published rules go by."""


def read_example(kind: type[BaseModel], example: dict[str, Any]) -> None:
    """Read the field where it stands, with what has to stand beside it."""
    whole: dict[str, Any] = {"name": "x", "rate": 100, "max_work": 500, "charge": "learned", "mechanism": "auto"}
    if kind is Namespace:
        read_namespace("x", {"partition_by": ["customer"]} | example)
    elif kind is Backend:
        read_namespace("x", {"backends": {"db": {"rate": 1} | example}})
    elif kind is Quota:
        unit = {} if "requests" in example else {"work": 1}
        read_policy({"name": "x", "quota": {"period": "month", **unit} | example})
    elif kind is Overload:
        read_policy(whole | {"overload": {"utilisation": {}, "expectations": {}} | example})
    elif kind in OVERLOAD_PARTS.values():
        (part,) = [name for name, found in OVERLOAD_PARTS.items() if found is kind]
        (field,) = example
        needs: dict[str, Any] = {"mode": "ideal"} if field.startswith("ideal_") else {}
        needs |= {"degrade": True} if field.startswith("quality_") else {}
        needs |= {"rules": "published"} if field in OF_PUBLISHED else {}
        named = whole | {"mechanism": "work"} if field == "in" else whole
        read_policy(named | {"overload": {part: needs | example}})
    elif kind is Local:
        read_policy({"name": "x", "rate": 100, "local": {"allowed": True} | example})
    elif kind is Block:
        read_policy(whole | {"block": {"after": 3, "in": "1m", "for": "10m"} | example})
    elif kind is Policy:
        (field,) = example
        beside: dict[str, dict[str, Any]] = {
            "rates": {"rate": 100, "per": ["customer"]},
            "capacity": {"rate": 100},
            "count": {"rate": 100},
            "deny": {},
            "round": whole | {"work_unit": 2048},
            "local": {"rate": 100},
            "quota": {},
        }
        read_policy({"name": "x", **beside.get(field, whole), **example})
    elif kind in (Smoothing, Auto):
        read_policy(whole | {"steering": {kind.__name__.lower(): example}})
    elif kind is Steering:
        beside_floor = {"max_work": 50} if "floor" in example else {}
        read_policy(whole | beside_floor | {"steering": example})
    else:
        read_policy(whole | {kind.__name__.lower(): example})


def told_limits() -> dict[str, list[int]]:
    """The numbers in the table of docs/security.md, by the name of the limit."""
    table = (DOCS / "security.md").read_text().partition("| what | at most |")[2].partition("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return {row[0]: [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", row[1])] for row in rows}


def test_the_limits_on_requests_are_those_of_the_code() -> None:
    settings = Settings.model_fields
    dimension = [DIMENSIONS_MAX, 64, TEXT_MAX]
    assert told_limits() == {
        "request line and headers": [limits.HEAD_BYTES_MAX, limits.HEADERS_MAX, limits.PARAMETERS_MAX],
        "body": [settings["body_max_bytes"].default],
        "chunks of a body": [limits.CHUNKS_MAX],
        "time for a request to arrive": [settings["body_timeout_s"].default],
        "time to take an answer": [],
        "idle connection": [KEEP_ALIVE_S],
        "operations in a batch": [OPERATIONS_MAX],
        "operations of batches in progress, each process": [IN_PROGRESS_MAX],
        "buckets that the acquires of a batch ask together": [BATCH_BUCKETS_MAX],
        "a node's processor time to begin a batch": [BEGIN_MAX_S * 1000],
        "reports of load that wait for the store, each process": [WAITING_MAX],
        "dimensions of a descriptor": dimension,
        "`Idempotency-Key`": [IDEMPOTENCY_KEY_MAX],
        "numbers": [0, 2, 53],
        "nesting of JSON": [DEPTH_MAX],
        "objects, lists and commas in a body": [PARTS_MAX],
        "document of a policy or a namespace": [DOCUMENT_BYTES_MAX],
        "document of a whole set of policies": [SET_BYTES_MAX, SET_ENTRIES_MAX],
        "policies that cover one request": [BUCKETS_PER_OPERATION_MAX],
        "page of the audit log": [AUDIT_LIMIT_MAX, AUDIT_PAGE_BYTES],
    }


def test_times_in_the_operators_pages_are_those_of_the_code() -> None:
    """docs/operations.md: the breaker's figures, and how long what is kept in the store is kept."""
    page = (DOCS / "operations.md").read_text()
    assert breaker.FAILURES_MAX == 5
    assert "after five calls in a row without an answer" in page
    assert f"first after {breaker.PAUSE_MIN_S:g} s and later every {breaker.PAUSE_MAX_S:g} s" in page
    scripts = b"".join(map(load_source, ("acquire", "settle"))).decode()
    times = re.findall(r"^local (\w+_[MU]?S)\b[^=\n]* = (\d+)", scripts, re.MULTILINE)
    kept = {name: int(number) for name, number in times}
    assert (kept["IDLE_TTL_S"], "ten minutes longer than it takes to fill up again" in page) == (600, True)
    assert "until `HEADGATE_LATE_MS` after its deadline, which is `ttl_ms`" in page
    assert Settings.model_fields["late_ms"].default * 1000 == LATE_US
    assert f"its decision | {kept['IDEMPOTENCY_TTL_MS'] // 1000} s |" in page
    assert f"its reply | {kept['REPLY_TTL_MS'] // 1000} s |" in page
    assert {name: ".".join(map(str, version)) for name, version in OLDEST.items()} == {"redis": "7.0", "valkey": "8.0"}
    assert "Redis 7.0 or Valkey 8.0, or newer" in page


@pytest.fixture
async def decider(valkey: Server) -> AsyncIterator[Decider]:
    link = await open_link(valkey.url)
    yield Decider(Buckets(link), Signer(b"a secret of the tests"), deadline_s=5)
    await link.aclose()


EXAMPLES = re.findall(
    r"^### ([^\n]+)\n(?:(?!^#).)*?```yaml\n((?:(?!```).)*?)```\n\nAsk with `(.*?)`: charges ([^\n]*)\.$",
    POLICIES,
    re.DOTALL | re.MULTILINE,
)


def test_there_are_examples() -> None:
    titles = [
        "Requests per second and per month",
        "An API platform",
        "A storage service with reads and writes",
        "An LLM gateway by tokens",
        "Batch jobs",
    ]
    assert [title for title, *_ in EXAMPLES] == titles
    assert POLICIES.count("```yaml") == len(titles) + 2, "and the first one, at the top, and defaults"


def enforce(decider: Decider, tmp_path: Path, file: str) -> None:
    path = tmp_path / "policies.yaml"
    path.write_text(file)
    decider.enforce(load_policy_file(path))


@pytest.mark.parametrize(("title", "file", "asked", "charged"), EXAMPLES, ids=[example[0] for example in EXAMPLES])
async def test_the_policies_by_example_do_what_they_say(
    decider: Decider, tmp_path: Path, title: str, file: str, asked: str, charged: str
) -> None:
    enforce(decider, tmp_path, file)
    decision = await decider.acquire(acquire(asked.encode()))
    assert isinstance(decision, Granted), (title, decision)
    assert sorted(limit.policy for limit in decision.limits) == sorted(re.findall(r"`(.*?)`", charged))
    assert decision.charged >= json.loads(asked).get("work", 0.0)


def example(title: str) -> str:
    (found,) = [file for name, file, *_ in EXAMPLES if name == title]
    return str(found)


async def charged_by(decider: Decider, **descriptor: str) -> set[str]:
    decision = await decider.acquire(AcquireRequest(descriptor))
    return {limit.policy for limit in decision.limits}


async def test_on_the_api_platform_one_customer_has_paid_for_more(decider: Decider, tmp_path: Path) -> None:
    enforce(decider, tmp_path, example("An API platform"))
    assert await charged_by(decider, customer="acme") == {"customer-acme", "allowance"}
    assert await charged_by(decider, operation="search") == {"strangers"}


@pytest.mark.parametrize(
    ("title", "descriptor", "work"),
    [
        ("A storage service with reads and writes", {"service": "storage", "operation": "read", "table": "t"}, 20_000),
        ("An LLM gateway by tokens", {"team": "search", "model": "large"}, 200_000),
    ],
)
async def test_work_that_goes_on_for_long_is_asked_to_stop(
    decider: Decider, tmp_path: Path, title: str, descriptor: dict[str, str], work: float
) -> None:
    enforce(decider, tmp_path, example(title))
    granted = await decider.acquire(AcquireRequest(descriptor))
    assert isinstance(granted, Granted)
    stops = [
        (await decider.settle(SettleRequest(granted.reservation, so_far, final=False))).stop for so_far in (1.0, work)
    ]
    assert stops == [False, True]


async def test_batch_jobs_need_half_of_the_bucket_and_others_do_not(decider: Decider, tmp_path: Path) -> None:
    enforce(decider, tmp_path, example("Batch jobs"))
    jobs = {"backend": "db1", "job": "reindex"}
    assert isinstance(await decider.acquire(AcquireRequest({"backend": "db1"}, work=1900.0)), Granted)
    assert not isinstance(await decider.acquire(AcquireRequest(jobs, criticality=Criticality.SHEDDABLE)), Granted)
    assert isinstance(await decider.acquire(AcquireRequest(jobs, criticality=Criticality.CRITICAL)), Granted)
