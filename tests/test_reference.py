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
from pydantic_core import PydanticUndefined

from api.decode import acquire
from limiter.decider import Decider
from limiter.model.contract import Granted
from limiter.model.overload import Overload
from limiter.model.policy import Learning, Namespace, Policy, Quota, Steering, read_namespace, read_policy
from limiter.model.reservation import Signer
from limiter.policy_file import load_policy_file
from limiter.settings import Settings
from limiter.store.buckets import Buckets
from limiter.store.connect import open_link
from tests.support.servers import Server

DOCS = Path(__file__).parent.parent / "docs"
SETTINGS, POLICIES = (DOCS / "settings.md").read_text(), (DOCS / "policies.md").read_text()
PARTS: dict[str, type[BaseModel]] = {
    "## Fields": Policy,
    "### Quota": Quota,
    "### Steering": Steering,
    "### Learning": Learning,
    "### Overload": Overload,
    "### Namespaces": Namespace,
}


def rows(text: str) -> list[list[str]]:
    """The rows of a table whose first cell is code, with the marks of code off."""
    cells = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in row] for row in cells]


def section(heading: str) -> str:
    return re.split(r"^#{2,3} ", POLICIES.partition(f"\n{heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


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
    return f"`{default:.10g}`" if isinstance(default, float) else f"`{default}`"


def test_every_setting_is_told_with_its_default() -> None:
    told = {row[0].strip("`"): row[1] for row in rows(SETTINGS)}
    true = {
        variable: written(field.default).replace("none", "unset")
        for variable, field in zip(Settings.variables(), Settings.model_fields.values(), strict=True)
    }
    assert told == true
    assert len(rows(SETTINGS)) == len(told), "each once"


@pytest.mark.parametrize("heading", PARTS)
def test_every_field_of_a_policy_is_told_with_its_default(heading: str) -> None:
    told = {row[0].strip("`"): row[2] for row in rows(section(heading))}
    assert told == {name: written(field.default) for name, field in PARTS[heading].model_fields.items()}


@pytest.mark.parametrize("heading", PARTS)
def test_every_field_s_example_is_taken(heading: str) -> None:
    for row in rows(section(heading)):
        name, example = row[0].strip("`"), yaml.safe_load(row[-1].strip("`"))
        assert list(example) == [name]
        read_example(PARTS[heading], example)


def read_example(kind: type[BaseModel], example: dict[str, Any]) -> None:
    """Read the field where it stands, with what has to stand beside it."""
    whole: dict[str, Any] = {"name": "x", "rate": 100, "max_work": 10, "charge": "learned"}
    if kind is Namespace:
        read_namespace("x", {"partition_by": ["customer"]} | example)
    elif kind is Quota:
        unit = {} if "requests" in example else {"work": 1}
        read_policy({"name": "x", "quota": {"period": "day", **unit} | example})
    elif kind is Overload:
        read_policy(whole | {"overload": {"utilisation": {}} | example})
    elif kind is Policy:
        read_policy({"name": "x"} | example if "quota" in example else whole | example)
    else:
        read_policy(whole | {kind.__name__.lower(): example})


@pytest.fixture
async def decider(valkey: Server) -> AsyncIterator[Decider]:
    link = await open_link(valkey.url)
    yield Decider(Buckets(link), Signer(b"a secret of the tests"), deadline_s=5)
    await link.aclose()


EXAMPLES = re.findall(
    r"^### ([^\n]+)\n(?:(?!^#).)*?```yaml\n(.*?)```\n\nAsk with `(.*?)`: charges ([^\n]*)\.$",
    POLICIES,
    re.DOTALL | re.MULTILINE,
)


def test_there_are_examples() -> None:
    assert len(EXAMPLES) == POLICIES.count("```yaml") == 4


@pytest.mark.parametrize(("title", "file", "asked", "charged"), EXAMPLES, ids=[example[0] for example in EXAMPLES])
async def test_the_policies_by_example_do_what_they_say(
    decider: Decider, tmp_path: Path, title: str, file: str, asked: str, charged: str
) -> None:
    path = tmp_path / "policies.yaml"
    path.write_text(file)
    decider.enforce(load_policy_file(path))
    decision = await decider.acquire(acquire(asked.encode()))
    assert isinstance(decision, Granted), (title, decision)
    assert sorted(limit.policy for limit in decision.limits) == sorted(re.findall(r"`(.*?)`", charged))
    assert decision.charged >= json.loads(asked)["work"]
