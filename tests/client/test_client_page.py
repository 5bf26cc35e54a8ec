"""docs/client.md: every snippet runs, every public name and option has its row."""

import asyncio
import inspect
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import headgate
from headgate import Headgate
from limiter.client.client_metrics import GAUGES, TOTALS
from tests.support.documents import HERE, ROOT, Block, blocks, rows, script
from tests.support.live import LiveApi, live
from tests.support.notebook import run_notebook
from tests.support.programs import need
from tests.support.servers import running

PAGE = "docs/client.md"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveApi]:
    """A node with the example policies, as `make run` starts it."""
    folder = tmp_path_factory.mktemp("client-page")
    with running("valkey", folder / "store") as store, live(store.url, ROOT / "docs/policies.example.yaml") as api:
        yield api


def here(api: LiveApi) -> str:
    return f"127.0.0.1:{api.port}"


def python_blocks() -> list[Block]:
    return blocks(PAGE, "python")


def run_shell(api: LiveApi, of: list[Block], workplace: Path) -> None:
    need("curl")
    command = ["bash", "-c", script(of, here(api))]
    done = subprocess.run(command, cwd=workplace, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_the_snippets_run_from_top_to_bottom(node: LiveApi, tmp_path: Path) -> None:
    allowed, *_ = blocks(PAGE, "sh")
    run_shell(node, [allowed], tmp_path)
    printed = run_notebook(here(node), python_blocks())
    assert "\n".join(["every", "reader", "pays", "for", "what", "was", "streamed"]) in printed
    assert re.search(r"^customer-work work after [\d.]+$", printed, re.MULTILINE)
    assert "short answer\nthere is room again\n" in printed
    assert "decided by the service" in printed


def test_a_newcomer_limits_a_fastapi_application_by_tokens_in_ten_lines(node: LiveApi) -> None:
    first = python_blocks()[0]
    (application,) = [block for block in python_blocks() if "FastAPI()" in block.text]
    assert len([line for line in application.text.splitlines() if line.strip()]) <= 10
    asked = """
import httpx
async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
    answers = [await client.get("/chat", params={"customer": "c97", "prompt": "word " * 150})]
    await gate.flush()
    answers.append(await client.get("/chat", params={"customer": "c97", "prompt": "more"}))
    await gate.close()
print([answer.status_code for answer in answers], answers[-1].json())
"""
    assert run_notebook(here(node), [first, application], asked) == "[200, 429] {'reason': 'work'}\n"


@pytest.mark.slow
def test_a_typescript_client_is_generated_and_acquires_and_settles(node: LiveApi, tmp_path: Path) -> None:
    node_program, generator = need("node"), need("openapi-typescript")
    (tmp_path / "node_modules").symlink_to(generator.parent.parent)
    (program,) = blocks(PAGE, "typescript")
    (tmp_path / "program.mts").write_text(program.text.replace(HERE, here(node)))
    _, generate, _ = blocks(PAGE, "sh")
    run_shell(node, [generate], tmp_path)
    options = ["--strict", "--target", "es2022", "--module", "nodenext", "--skipLibCheck", "--lib", "es2022,dom"]
    compile_ = [str(generator.with_name("tsc")), *options, "program.mts"]
    compiled = subprocess.run(compile_, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert compiled.returncode == 0, compiled.stdout
    assert ran([str(node_program), "program.mjs"], tmp_path) == "charged 3, then 9\n"


def test_a_go_client_is_generated_and_acquires_and_settles(node: LiveApi, tmp_path: Path) -> None:
    go = need("go")
    need("oapi-codegen")
    for name in ("go.mod", "go.sum"):
        shutil.copy(ROOT / ".ci" / "go" / name, tmp_path)
    (program,) = blocks(PAGE, "go")
    (tmp_path / "main.go").write_text(program.text.replace(HERE, here(node)))
    _, typescript, generate = blocks(PAGE, "sh")
    fetch = Block(PAGE, typescript.line, "sh", typescript.text.splitlines()[0])
    run_shell(node, [fetch, generate], tmp_path)
    assert ran([str(go), "run", "."], tmp_path) == "charged 3, then 9\n"


def ran(command: list[str], workplace: Path) -> str:
    done = subprocess.run(command, cwd=workplace, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def section(heading: str) -> str:
    return (ROOT / PAGE).read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def named(text: str) -> list[str]:
    return [name for first, *_ in rows(text) for name in re.findall(r"[\w.]+", first)]


def test_every_public_name_has_a_row_and_a_docstring() -> None:
    assert sorted(named(section("Every name"))) == sorted(headgate.__all__)
    for name in headgate.__all__:
        assert inspect.getdoc(getattr(headgate, name)), name


def test_every_count_has_a_row() -> None:
    assert sorted(named(section("Metrics"))) == sorted([*TOTALS, *GAUGES])


def test_every_option_has_a_row_and_no_other() -> None:
    of_client, of_acquire = section("Every option").split("\nOf `acquire`")
    assert named(of_client) == parameters(Headgate.__init__)
    assert sorted(named(of_acquire)) == sorted(parameters(Headgate.acquire))


def test_defaults_in_the_table_are_those_of_the_code() -> None:
    told = {cells[0].strip("` "): cells[1].strip("` ") for cells in rows(section("Every option").split("\nOf `ac")[0])}
    for name, parameter in inspect.signature(Headgate).parameters.items():
        if isinstance(parameter.default, str | int | float):
            default = parameter.default
            is_number = isinstance(default, int | float) and not isinstance(default, bool)
            assert told[name] == (f"{default:,.0f}" if is_number else str(default).lower()), name


def parameters(function: object) -> list[str]:
    assert callable(function)
    return [name for name in inspect.signature(function).parameters if name != "self"]


def test_the_gate_of_the_first_snippet_needs_no_loop_to_be_made() -> None:
    gate = Headgate("http://127.0.0.1:8080")
    assert asyncio.run(gate.flush()) == 0
