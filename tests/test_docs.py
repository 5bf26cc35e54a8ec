"""Commands, snippets and links of the documents are tried out, every one of them."""

import ast
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import yaml
from fastapi.routing import APIRoute
from typer.main import get_command

from api.app import MODULES
from limiter.cli import proxy_metrics
from limiter.cli.main import app
from limiter.cli.policy_commands import _reasons
from limiter.client.client_metrics import GAUGES, TOTALS
from limiter.metrics.catalogue import ALL
from limiter.model.control.caps import Reason
from limiter.model.control.reasoning import Cycle, Overload, Reasoning, Step
from limiter.model.overload.expectations import Reason as Missed
from limiter.model.overload.shedding import CLASSES
from limiter.settings import Settings
from limiter.store.link.urls import parse
from tests.support import eventually
from tests.support.documents import HERE, PAGES, ROOT, Block, blocks, name_of, script
from tests.support.programs import find, need
from tests.support.servers import free_port, running

PROXY_VARIABLES = {"HEADGATE_PROXY_API_KEY", "HEADGATE_PROXY_CLIENT_KEY"}
HEADGATE = f"""exec {shlex.quote(sys.executable)} -c 'from limiter.cli.main import main; main()' "$@" """


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    return furnished(tmp_path)


def furnished(directory: Path) -> Path:
    """A directory in which the commands of the documents find what they name."""
    programs = directory / "bin"
    programs.mkdir()
    (programs / "headgate").write_text(f"#!/bin/bash\n{HEADGATE}\n")
    (programs / "headgate").chmod(0o755)
    (directory / "docs").symlink_to(ROOT / "docs")
    return directory


def surroundings(workplace: Path, port: int, **settings: str) -> dict[str, str]:
    """The environment of commands: no settings but these."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HEADGATE_")}
    own = {
        "PATH": f"{workplace / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HEADGATE_PORT": str(port),
        "HEADGATE_DATA_DIR": str(workplace / "data"),
        "HEADGATE_DEADLINE_MS": "2000",  # a busy machine is not what the pages speak of
    }
    return inherited | own | settings


def follow(of: list[Block], workplace: Path, port: int, *, store_port: int = 0) -> str:
    """Run the commands of some blocks, one after the other; what they printed. Whatever they started ends with them."""
    need("curl")
    here, there = "127.0.0.1:6379", f"127.0.0.1:{store_port}"
    printed, said = workplace / "printed", workplace / "said"
    with printed.open("w") as out, said.open("w") as err:  # a pipe would stay open as long as what was started
        process = subprocess.Popen(
            ["bash", "-c", script(of, f"127.0.0.1:{port}").replace(here, there)],
            cwd=workplace,
            env=surroundings(workplace, port),
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
    try:
        assert process.wait(timeout=120) == 0, f"{said.read_text()[-2000:]}\n{printed.read_text()[-2000:]}"
    finally:
        if _has_group(process.pid):
            os.killpg(process.pid, signal.SIGTERM)
            eventually(lambda: not _has_group(process.pid), within_s=40, what="what was started has ended")
    return printed.read_text(errors="replace")  # the log of slow calls shows their bytes


def _has_group(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@dataclass(frozen=True)
class Running:
    """Headgate as `make run` starts it. Pages share it: each speaks of customers of its own."""

    workplace: Path
    port: int

    def follow(self, of: list[Block]) -> str:
        return follow(of, self.workplace, self.port)


@pytest.fixture(scope="module")
def made_to_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Headgate as `make run` starts it, on another port and with its data elsewhere."""
    command = re.search(r"^run:.*\n\t\$\(BIN\)/headgate (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert command is not None
    arguments = command[1].replace(
        "$(or $(HEADGATE_POLICIES),docs/policies.example.yaml)", "docs/policies.example.yaml"
    )
    workplace, port = furnished(tmp_path_factory.mktemp("run")), free_port()
    process = subprocess.Popen(
        ["headgate", *arguments.split()],
        executable=workplace / "bin" / "headgate",
        cwd=workplace,
        env=surroundings(workplace, port),
    )
    try:
        eventually(lambda: is_ready(port), within_s=30)
        yield Running(workplace, port)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def is_ready(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/readyz") as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


A_PERSONS_TIME_MS = 240_000
"""A person reads on between two steps: what a step relies on lasts at least as long."""


def test_the_readme_from_top_to_bottom(made_to_run: Running) -> None:
    """The two commands exist; the curl lines, verbatim but for the port, answer what it shows."""
    makes, *curls = blocks("README.md", "sh")
    assert [command.split("  ")[0] for command in makes.commands] == ["make run", "make test"]
    shown = json.loads(blocks("README.md", "json")[0].text.replace("}, …]", "}]"))
    granted, settled, refused = (made_to_run.follow([block]) for block in curls)
    answer = json.loads(granted)
    assert list(answer) == list(shown)
    assert answer["expires_in_ms"] >= A_PERSONS_TIME_MS, "settled whenever the next step is pasted"
    assert answer["limits"][0] == shown["limits"][0]
    assert {**answer, "reservation": "", "limits": []} == {**shown, "reservation": "", "limits": []}
    assert json.loads(settled)["adjusted"] == 29_997
    assert refused.startswith("HTTP/1.1 429")
    assert json.loads(refused.splitlines()[-1])["retry_after_ms"] >= A_PERSONS_TIME_MS, "refused whenever it is pasted"
    (program,) = blocks("README.md", "python")
    printed = run_python(program, made_to_run)
    assert re.fullmatch(r"customer-work work \d+\n", printed), printed
    assert float(printed.split()[-1]) >= A_PERSONS_TIME_MS


def test_the_http_api_by_example_answers_as_it_says(made_to_run: Running) -> None:
    """Every curl line. Behind it stands the status, and something of the answer; the refusal is shown with its head."""
    told = blocks("docs/http-api.md", "sh")
    lines = [command for block in told for command in block.commands]
    assert len(lines) > 20
    assert all(re.search(r"  # \d{3}", line) for line in lines)
    printed = made_to_run.follow(told)
    (head,) = blocks("docs/http-api.md", "")
    pattern = "".join(_like(line) for line in head.commands)
    assert re.search(pattern, printed), pattern
    for kept in ("granted.json", "long.json"):
        assert json.loads((made_to_run.workplace / kept).read_text())["expires_in_ms"] >= A_PERSONS_TIME_MS
    waits_ms = [int(found) for found in re.findall(r'"retry_after_ms":(\d+)', printed)]
    assert len(waits_ms) == 2
    assert min(waits_ms) >= A_PERSONS_TIME_MS, "refused whenever they are pasted"


def _like(line: str) -> str:
    """A header as it may come: figures change with time, and others may stand between."""
    figures = re.sub(r"\d+|…", r"\\d+", re.escape(line).replace("…", "0"))
    return rf"{figures}\n(?:[a-z-]+: .*\n)*?"


@pytest.mark.slow
def test_the_commands_on_policies_do_what_they_say(made_to_run: Running) -> None:
    printed = made_to_run.follow(blocks("docs/policies.md", "sh"))
    assert "docs/policies.example.yaml: 6 policies, all valid" in printed
    assert "Rolled back default/anonymous to revision 1" in printed


def test_load_is_reported_as_the_page_on_overload_says(made_to_run: Running) -> None:
    (reported,) = blocks("docs/overload.md", "sh")
    apply = "headgate policies apply --prune docs/policies.{}.yaml > /dev/null\n"
    made_to_run.follow([Block("", 0, "sh", apply.format("overload.example"))])
    answer = eventually(lambda: _taken(made_to_run.follow([reported])), what="the policy is in force")
    assert answer["signals"] == {"cpu": 0.93, "queue_age_s": 0.4}
    made_to_run.follow([Block("", 0, "sh", apply.format("example"))])  # as the other pages expect it


def test_leases_are_held_as_their_page_says(made_to_run: Running) -> None:
    """docs/leases.md from top to bottom: the policy, the requests, and the holder of the client's own."""
    put, *asked = blocks("docs/leases.md", "sh")
    (program,) = blocks("docs/leases.md", "python")
    made_to_run.follow([put])
    eventually(lambda: _lends(made_to_run), what="the policy is in force")
    made_to_run.follow(asked)
    printed = run_python(program, made_to_run)
    found = re.fullmatch(r"granted (\d+); given back: True\n", printed)
    assert found is not None, printed
    assert 20 <= int(found[1]) <= 100 + 3 * 100
    removed = f"curl -sf -X DELETE 'http://{HERE}/v1/policies/lent?namespace=edge' > /dev/null\n"
    made_to_run.follow([Block("", 0, "sh", removed)])


def run_python(program: Block, running: Running) -> str:
    """Run a program of a page; what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", program.text.replace(HERE, f"127.0.0.1:{running.port}")],
        env=surroundings(running.workplace, running.port),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def _lends(running: Running) -> bool:
    body = json.dumps({"namespace": "edge", "descriptor": {"service": "lent"}, "holder": "probe"}).encode()
    request = Request(f"http://127.0.0.1:{running.port}/v1/leases", body, {"content-type": "application/json"})
    try:
        with urlopen(request) as answer:
            return bool(answer.status == 200)
    except HTTPError:
        return False


def _taken(printed: str) -> dict[str, object]:
    answer: dict[str, object] = json.loads(printed)
    return answer if "signals" in answer else {}


@pytest.mark.slow
def test_the_store_is_set_up_and_the_runbook_followed(workplace: Path) -> None:
    """docs/operations.md from top to bottom, on a server with its settings."""
    (settings,) = blocks("docs/operations.md", "conf")
    config = dict(line.split(" ", 1) for line in settings.commands)
    if find("redis-cli") is None:
        stand_in(workplace / "bin" / "redis-cli")
    with running("valkey", workplace / "store", config=config) as store:
        printed = follow(blocks("docs/operations.md", "sh"), workplace, free_port(), store_port=store.port)
        assert b"headgate" in store.command("ACL", "USERS")
    assert "PONG" in printed
    assert "Rolled back default/anonymous to revision 1" in printed


def stand_in(path: Path) -> None:
    """For redis-cli where there is none: the same command to the same server."""
    path.write_text(
        f"#!{sys.executable}\nimport sys\nimport redis\n"
        "print(redis.Redis.from_url(sys.argv[2], decode_responses=True).execute_command(*sys.argv[3:]) or 'PONG')\n"
    )
    path.chmod(0o755)


def test_the_runbook_has_every_alert() -> None:
    (group,) = yaml.safe_load((ROOT / "docs/alerts.yaml").read_text())["groups"]
    page = (ROOT / "docs/operations.md").read_text()
    assert re.findall(r"^### (Headgate\w+)$", page, re.MULTILINE) == [rule["alert"] for rule in group["rules"]]


def test_the_store_urls_can_be_read() -> None:
    urls = re.findall(r"`((?:rediss?(?:\+\w+)?|unix)://[^`]+)`", (ROOT / "docs/operations.md").read_text())
    kinds = [parse(url).kind for url in urls]
    assert kinds == ["server", "server", "sentinel", "sentinel", "cluster", "server", "sentinel", "cluster"]


@pytest.mark.slow
@pytest.mark.needs("openssl")
def test_keys_and_tls_keep_strangers_out(workplace: Path) -> None:
    """docs/security.md from top to bottom."""
    follow(blocks("docs/security.md", "sh"), workplace, free_port())


def test_the_output_of_the_controller_looks_as_shown() -> None:
    reason = Reason(1.7672256e15, 100.0, 97.4, 5.0, 0.612, "raise", 20.0, 20.1)
    cycle = Cycle(
        reason.at_us / 1000, 100.0, 97.4, 5.0, reason.rejection_rate, reason.rule, 20.0, 20.1, reason.sentence
    )
    seen = Reasoning(
        "table-reads:c1", "table-reads", "requests", "set by the policy", 100.0, 20.1, None, None, None, None, [cycle],
        None,
    )  # fmt: skip
    (shown,) = blocks("docs/controller.md", "")
    assert shown.text.splitlines()[1:] == [f"  {line}" for line in _reasons(seen)]
    missed = Missed("raise", 10.0, 20.0, 12.0, 5.0, 200.0)
    step = Step(1.7672256e12, "expectations", missed.rule, 10.0, 20.0, str(missed))
    shares: dict[str, float] = dict(zip(CLASSES, (0.0, 0.2, 0.0, 0.0), strict=True))
    overload = Overload(
        "overloaded", True, 1.0, 37.0, dict.fromkeys(CLASSES), None, 0.12, None, shares, dict.fromkeys(CLASSES), [step]
    )
    (shown,) = blocks("docs/overload.md", "")
    seen = Reasoning("", "", "work", "", None, None, None, None, None, None, [], overload)
    assert shown.text.splitlines() == [f"  {line}" for line in _reasons(seen)][2:]


COMMAND = re.compile(r"`((?:headgate|make|(?:\.venv/bin/)?python -m loadtest\.\w+) [^`…]+)`")


def spoken() -> list[tuple[str, str]]:
    """Commands in the text of pages, and in blocks that would take minutes to run."""
    pages = [page for page in PAGES if page.name != "CHANGELOG.md"]
    found = [(name_of(page), command) for page in pages for command in COMMAND.findall(page.read_text())]
    long = [
        (page, command.partition("  #")[0].strip())
        for page in ("docs/loadtest.md", "docs/judge.md")
        for block in blocks(page, "sh")
        for command in block.commands
    ]
    return found + long


@pytest.mark.parametrize(("page", "command"), sorted(set(spoken())))
def test_commands_in_the_text_exist_with_their_options(page: str, command: str) -> None:
    words = shlex.split(command.replace("\\\n", " "))
    if words[0] == "headgate":
        check_headgate(words[1:])
    elif words[0] == "make":
        targets = re.findall(r"^([a-z]+):.*## (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
        told = dict(targets)[words[1]]
        assert all(word.partition("=")[0] + "=" in told for word in words[2:]), told
    elif words[0] == "locust":  # whose help leaves out the options of the file
        check_options(words[3:], help_of("-m", "locust") + (ROOT / words[2]).read_text())
    else:
        sub = words[3:4] if words[3:4] and re.fullmatch(r"[a-z]+", words[3]) else []
        check_options(words[3:], help_of(*words[1:3]) + (help_of(*words[1:3], *sub) if sub else ""))


def check_headgate(words: list[str]) -> None:
    """A command, or several of one group with bars between; options that there are."""
    command = get_command(app)
    while words and hasattr(command, "commands"):
        alternatives = [word for word in words if word != "|"] if "|" in words else words[:1]
        assert set(alternatives) <= set(command.commands), words
        command, words = command.commands[words[0]], [] if "|" in words else words[1:]
    options = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("-")} <= options


def help_of(*module: str) -> str:
    done = subprocess.run(
        [sys.executable, *module, "--help"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout


def check_options(words: list[str], shown: str) -> None:
    for word in words:
        if word.startswith("-") or re.fullmatch(r"[a-z]+", word):
            assert re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", shown), word


OF_CLIENT = set(re.findall(r'os\.environ\.get\("(HEADGATE_\w+)"', (ROOT / "limiter/client/gate.py").read_text()))
"""Variables that the client library reads."""


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_settings_metrics_routes_and_extras_in_the_text_exist(page: Path) -> None:
    text = page.read_text()
    assert set(re.findall(r"\bHEADGATE_[A-Z_]*[A-Z]\b", text)) <= {*Settings.variables(), *PROXY_VARIABLES, *OF_CLIENT}
    known = {definition.name for definition in (*ALL, *proxy_metrics.ALL)}
    known |= {f"headgate_client_{name}_total" for name in TOTALS} | {f"headgate_client_{name}" for name in GAUGES}
    for metric in re.findall(r"\bheadgate_[a-z_]*[a-z]\b(?!\.|_…)", text):
        assert metric in known or re.sub(r"_(?:bucket|sum|count)$", "", metric) in known, metric
    assert set(re.findall(r"`(GET|POST|PUT|DELETE) (/v1/[a-z/{}]+)", text)) <= routes()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {extra for found in re.findall(r"pip install [^`]*\[([\w,]+)\]", text) for extra in found.split(",")}
    assert named <= extras.keys()


def routes() -> set[tuple[str, str]]:
    """Every method and path that there is."""
    found = [route for module in MODULES for route in module.router.routes if isinstance(route, APIRoute)]
    return {(method, route.path) for route in found for method in route.methods or ()}


def test_pictures_in_the_text_are_well_formed() -> None:
    """Mermaid's flowcharts: what opens closes, what is joined is an arrow of its language."""
    drawn = [block for page in PAGES for block in blocks(page, "mermaid")]
    assert len(drawn) >= 2
    for block in drawn:
        head, *lines = block.commands
        assert re.fullmatch(r"flowchart (?:LR|TD)", head), block
        assert sum(line.strip().startswith("subgraph") for line in lines) == [line.strip() for line in lines].count(
            "end"
        )
        for opening, closing in ("[]", "()"):
            assert block.text.count(opening) == block.text.count(closing), block
        assert all(re.search(r"-->|-- .* -->|-\. .* \.->|^\s*(?:subgraph|end|direction)", line) for line in lines), (
            block
        )


SNIPPETS: dict[tuple[str, str], str] = {
    ("README.md", "sh"): "test_docs.py::test_the_readme_from_top_to_bottom",
    ("README.md", "json"): "test_docs.py::test_the_readme_from_top_to_bottom",
    ("README.md", "python"): "test_docs.py::test_the_readme_from_top_to_bottom",
    ("docs/client.md", "go"): "client/test_client_page.py::test_a_go_client_is_generated_and_acquires_and_settles",
    ("docs/client.md", "python"): "client/test_client_page.py::test_the_snippets_run_from_top_to_bottom",
    ("docs/client.md", "sh"): "client/test_client_page.py::test_the_snippets_run_from_top_to_bottom",
    ("docs/client.md", "typescript"): (
        "client/test_client_page.py::test_a_typescript_client_is_generated_and_acquires_and_settles"
    ),
    ("docs/controller.md", ""): "test_docs.py::test_the_output_of_the_controller_looks_as_shown",
    ("docs/http-api.md", "sh"): "test_docs.py::test_the_http_api_by_example_answers_as_it_says",
    ("docs/http-api.md", ""): "test_docs.py::test_the_http_api_by_example_answers_as_it_says",
    ("docs/kubernetes.md", "sh"): "chart/test_page.py::test_the_commands_do_what_they_say",
    ("docs/kubernetes.md", "yaml"): "chart/test_page.py::test_the_values_can_be_used",
    ("docs/leases.md", "sh"): "test_docs.py::test_leases_are_held_as_their_page_says",
    ("docs/leases.md", "python"): "test_docs.py::test_leases_are_held_as_their_page_says",
    ("docs/middleware.md", "python"): "client/middleware/test_middleware_page.py::test_functions_are_limited_as_shown",
    ("docs/middleware.md", ""): (
        "client/middleware/test_middleware_page.py::test_ten_lines_limit_a_fastapi_application_by_tokens"
    ),
    ("docs/loadtest.md", "sh"): "test_docs.py::test_commands_in_the_text_exist_with_their_options",
    ("docs/judge.md", "sh"): "test_docs.py::test_commands_in_the_text_exist_with_their_options",
    ("docs/operations.md", "conf"): "test_docs.py::test_the_store_is_set_up_and_the_runbook_followed",
    ("docs/operations.md", "sh"): "test_docs.py::test_the_store_is_set_up_and_the_runbook_followed",
    ("docs/overload.md", "sh"): "test_docs.py::test_load_is_reported_as_the_page_on_overload_says",
    ("docs/overload.md", ""): "test_docs.py::test_the_output_of_the_controller_looks_as_shown",
    ("docs/policies.md", "sh"): "test_docs.py::test_the_commands_on_policies_do_what_they_say",
    ("docs/policies.md", "yaml"): "test_reference.py::test_the_policies_by_example_do_what_they_say",
    ("docs/proxy.md", "sh"): "client/proxy/test_proxy_page.py::test_the_commands_do_what_they_say",
    ("docs/proxy.md", "yaml"): "client/proxy/test_proxy_page.py::test_the_chart_s_values_run_a_proxy",
    ("docs/security.md", "sh"): "test_docs.py::test_keys_and_tls_keep_strangers_out",
}
"""The test, under tests/, that tries the blocks of a page and a language; pictures are tried wherever they are."""


def test_every_snippet_is_tried_by_some_test() -> None:
    """A page or a language that is new here needs a test first."""
    found = {(block.page, block.language) for page in PAGES for block in blocks(page) if block.language != "mermaid"}
    assert found == set(SNIPPETS)
    for test in SNIPPETS.values():
        module, _, name = test.partition("::")
        assert re.search(rf"^(?:async )?def {name}\(", (ROOT / "tests" / module).read_text(), re.MULTILINE), test
    for page in PAGES:
        assert page.read_text().count("\n```") == 2 * len(blocks(page)), f"{name_of(page)}: a fence within something"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_within_the_documents_leads_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?://)([^)#]*)(?:#([^)]*))?\)", page.read_text()):
        there = (page.parent / target) if target else page
        assert there.exists(), target
        if anchor:
            assert anchor in anchors(there), f"{target}#{anchor}"


def anchors(page: Path) -> set[str]:
    """Its headings as they are linked to."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


RECIPES = sorted((ROOT / "docs" / "recipes").glob("*.py"))


@pytest.mark.parametrize("recipe", RECIPES, ids=name_of)
def test_a_recipe_is_short_listed_and_tried(recipe: Path) -> None:
    tree = ast.parse(recipe.read_text())
    of_docstring = range(1, (tree.body[0].end_lineno or 0) + 1)
    lines = [line for number, line in enumerate(recipe.read_text().splitlines(), 1) if number not in of_docstring]
    assert sum(bool(line.strip()) for line in lines) <= 40
    assert f"](recipes/{recipe.name})" in (ROOT / "docs/recipes.md").read_text()
    tests = "".join(path.read_text() for path in (ROOT / "tests/recipes").glob("*.py"))
    assert re.search(rf"\b{recipe.stem}\b", tests)


def test_every_page_is_reached_from_the_readme() -> None:
    linked = set(re.findall(r"\]\((docs/[^)#]+)", (ROOT / "README.md").read_text()))
    pages = {name_of(page) for page in ROOT.glob("docs/*.md")}
    assert pages <= linked
