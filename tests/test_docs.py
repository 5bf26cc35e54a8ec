"""What the documents say is tried out."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.support import eventually
from tests.support.servers import free_port

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *ROOT.glob("docs/**/*.md")])


@contextmanager
def made_to_run(port: int, directory: Path) -> Iterator[None]:
    """What `make run` runs, on another port and with its data elsewhere."""
    command = re.search(r"^run:.*\n\t\$\(BIN\)/headgate (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert command is not None
    arguments = command[1].replace(
        "$(or $(HEADGATE_POLICIES),docs/policies.example.yaml)", "docs/policies.example.yaml"
    )
    environment = {**os.environ, "HEADGATE_PORT": str(port), "HEADGATE_DATA_DIR": str(directory / "data")}
    process = subprocess.Popen(
        [sys.executable, "-c", "from limiter.cli import main; main()", *arguments.split()], cwd=ROOT, env=environment
    )
    try:
        eventually(lambda: is_ready(port))
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def is_ready(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/readyz") as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def test_the_readme_s_first_acquire_and_settle_do_what_it_says(tmp_path: Path) -> None:
    """The README's curl lines, verbatim but for the port."""
    readme = (ROOT / "README.md").read_text()
    acquire, settle, again = re.findall(r"```sh\n(curl .*?)\n```", readme, re.DOTALL)
    shown = json.loads(re.findall(r"```json\n(.*?)\n```", readme)[0].replace("}, …]", "}]"))
    port = free_port()

    def run(line: str) -> str:
        line = line.replace("http://127.0.0.1:8080", f"http://127.0.0.1:{port}")
        return subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    with made_to_run(port, tmp_path):
        granted = json.loads(run(acquire))
        assert list(granted) == list(shown)
        assert granted["limits"][0] == shown["limits"][0]
        assert {**granted, "reservation": "", "limits": []} == {**shown, "reservation": "", "limits": []}
        assert json.loads(run(settle))["adjusted"] == 297
        refused = run(again)
        assert refused.startswith("HTTP/1.1 429")
        assert "\nretry-after: 1" in refused


def test_the_http_api_by_example_answers_as_it_says(tmp_path: Path) -> None:
    """Every curl line, verbatim but for the port. Behind it stands the status, and something of the answer."""
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / "http-api.md").read_text(), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    assert len(lines) > 20
    port = free_port()
    with made_to_run(port, tmp_path):
        for line in lines:
            said = re.fullmatch(r"(curl .*?)  # (\d{3})(?: (.*))?", line)
            assert said is not None, line
            command = said[1].replace("http://127.0.0.1:8080", f"http://127.0.0.1:{port}")
            command = command.replace("curl ", "curl -w '%{stderr}%{http_code}' ", 1)
            ran = subprocess.run(
                ["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=30
            )
            assert (ran.stderr, (said[3] or "") in ran.stdout) == (said[2], True), f"{line}\n{ran.stdout}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_within_the_documents_leads_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\((?!https?://)([^)#]+)(?:#[^)]*)?\)", document.read_text()):
        assert (document.parent / target).exists(), target
