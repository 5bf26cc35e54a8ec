"""docs/middleware.md: every snippet runs, and does what the page says."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support import eventually
from tests.support.documents import HERE, ROOT, blocks
from tests.support.live import LiveApi, live
from tests.support.notebook import run_notebook
from tests.support.servers import free_port, running

PAGE = "docs/middleware.md"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveApi]:
    """A node with the example policies, as `make run` starts it."""
    folder = tmp_path_factory.mktemp("middleware-page")
    with running("valkey", folder / "store") as store, live(store.url, ROOT / "docs/policies.example.yaml") as api:
        yield api


def here(api: LiveApi) -> str:
    return f"127.0.0.1:{api.port}"


def test_ten_lines_limit_a_fastapi_application_by_tokens(example: LiveApi, tmp_path: Path) -> None:
    chat, *_ = blocks(PAGE, "python")
    (shown,) = blocks(PAGE, "")
    assert len([line for line in chat.text.splitlines() if line.strip()]) <= 10
    (tmp_path / "chat.py").write_text(chat.text.replace(HERE, here(example)))
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "uvicorn", "--app-dir", str(tmp_path), "chat:app", "--port", str(port)], cwd=ROOT
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            eventually(lambda: answers(client), within_s=60)
            asked = {"prompt": "word " * 1000}
            assert client.get("/complete", headers={"x-customer": "c80"}, params=asked).status_code == 200
            eventually(lambda: is_owing(example, "c80"), what="the settle has arrived")
            refused = client.get("/complete", headers={"x-customer": "c80"}, params=asked)
    finally:
        process.terminate()
        process.wait(30)
    assert refused.status_code == 429
    status, *headers = shown.commands
    assert status == "HTTP/1.1 429 Too Many Requests"
    for line in headers:
        name, _, value = line.partition(": ")
        assert re.match(re.sub(r"\d+", r"\\d+", re.escape(value.removesuffix("…"))), refused.headers[name]), line
    assert int(refused.headers["retry-after"]) <= 9


def answers(client: httpx.Client) -> bool:
    try:
        client.get("/nothing", headers={"x-customer": "c79"})
    except httpx.TransportError:
        return False
    return True


def is_owing(api: LiveApi, customer: str) -> bool:
    descriptor = {"service": "chat", "operation": "complete", "customer": customer}
    body = {"descriptor": descriptor, "work": 0, "dry_run": True}
    return httpx.post(f"{api.base}/v1/acquire", json=body, trust_env=False).status_code == 429


def test_flask_is_limited_as_shown(example: LiveApi) -> None:
    _, flask, _, _ = blocks(PAGE, "python")
    asked = """
answers = [app.test_client().get("/orders/3", headers={"x-customer": "c81"}) for _ in range(2)]
print([answer.text for answer in answers])
"""
    assert run_notebook(here(example), [flask], asked) == "['order 3', 'order 3']\n"


def test_functions_are_limited_as_shown(example: LiveApi) -> None:
    _, _, functions, _ = blocks(PAGE, "python")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", functions.text.replace(HERE, here(example))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("sent\n", "")


def test_the_grpc_server_of_the_page_starts(example: LiveApi) -> None:
    """What the interceptor does is tested beside its module."""
    *_, grpc = blocks(PAGE, "python")
    started = """
server = limited_server()
server.add_insecure_port("127.0.0.1:0")
await server.start()
await server.stop(0)
print("started")
"""
    assert run_notebook(here(example), [grpc], started) == "started\n"
