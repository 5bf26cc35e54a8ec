"""Recipes that are programs, or belong into one: a crawler, LiteLLM, Celery."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import httpx
import pytest

from tests.support import eventually
from tests.support.documents import ROOT
from tests.support.programs import OF_TOOLS
from tests.support.recipe_service import RECIPES, STANDING, Service
from tests.support.servers import running

pytestmark = pytest.mark.slow

PYTHON = OF_TOOLS["litellm"].parent / "python"
"""The Python whose packages are LiteLLM and Celery."""
NO_NETWORK = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}


CALLS = """
import asyncio
from litellm_hook import litellm, main

async def calls() -> None:
    await main("plain", "Tell me a story")
    (hook,) = litellm.callbacks
    async with hook.gate:
        asked = {"model": "gpt-4o", "messages": [{"role": "user", "content": "Tell me a story"}]}
        stream = await litellm.acompletion(**asked, user="streams", mock_response="one two three", stream=True)
        words = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(words) == "one two three", words
        print(litellm.token_counter(model="gpt-4o", messages=asked["messages"]))
        try:
            await litellm.acompletion(**asked, user="fails", mock_response=Exception("no model"))
        except litellm.InternalServerError:
            print("failed")
        while hook.calls:
            await asyncio.sleep(0.01)
    await main("greedy", "Tell me another")

asyncio.run(calls())
"""


def run(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@contextmanager
def host() -> Iterator[tuple[str, list[float]]]:
    """A host that notes when it is asked."""
    asked_s: list[float] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked_s.append(time.monotonic())
            self.send_response(200)
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"ok")

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked_s
    finally:
        server.shutdown()
        server.server_close()


def test_crawlers_ask_a_host_as_often_as_its_policy_says_and_wait_for_the_rest(service: Service) -> None:
    """Two crawlers, twelve pages each: five at once, ten a second, and nothing is left out."""
    with host() as (address, asked_s):
        command = [sys.executable, str(RECIPES / "crawler.py"), *(f"{address}/{number}" for number in range(12))]
        began_s = time.monotonic()
        crawlers = [
            subprocess.Popen(command, env=service.environment(), stdout=subprocess.PIPE, text=True) for _ in range(2)
        ]
        printed = "".join(crawler.communicate(timeout=60)[0] for crawler in crawlers)
    assert printed.count("200 2 bytes") == 24
    assert max(asked_s) - began_s >= (24 - 5 - 1) / 10


@pytest.mark.needs("litellm")
def test_the_litellm_hook_settles_the_tokens_of_calls_and_of_streams(service: Service, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(CALLS)
    exhausted = {"descriptor": {"service": "llm", "customer": "greedy"}, "work": STANDING["llm-tokens"]}
    assert httpx.post(f"{service.url}/v1/acquire", json=exhausted, trust_env=False).status_code == 200
    environment = service.environment(**NO_NETWORK, PYTHONPATH=f"{ROOT}:{RECIPES}")
    printed = run([str(PYTHON), str(program)], environment).splitlines()
    assert "Once upon a time. 30" in printed
    assert printed[-2:] == ["failed", "refused: work"]

    def used(customer: str) -> float:
        return STANDING["llm-tokens"] - service.balance(service="llm", customer=customer)

    assert round(used("plain")) == 30
    assert round(used("streams")) == 3 + int(printed[1])
    assert round(used("fails")) == 0


@contextmanager
def worker(environment: dict[str, str], log: Path) -> Iterator[None]:
    """A worker of Celery with one process for tasks."""
    command = [str(OF_TOOLS["celery"]), "--workdir", str(RECIPES), "-A", "celery_tasks", "worker", "--concurrency=1",
               "--loglevel=INFO", f"--hostname={log.name}@%h"]  # fmt: skip
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT)
    try:
        eventually(lambda: "ready." in log.read_text(), within_s=60, what=log.read_text())
        yield
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.needs("celery")
def test_celery_tasks_wait_for_work_tokens_across_workers(service: Service, tmp_path: Path) -> None:
    """Eight tasks of 500 rows, 1000 at once and 1000 a second."""
    with running("valkey", tmp_path / "broker") as broker:
        environment = service.environment(BROKER=f"redis://127.0.0.1:{broker.port}")
        with worker(environment, tmp_path / "one"), worker(environment, tmp_path / "two"):
            printed = run([str(PYTHON), str(RECIPES / "celery_tasks.py"), *["500"] * 8], environment)
    results = [json.loads(f"[{line.replace(' ', ',')}]") for line in printed.splitlines()]
    asked_s, granted_s, processes = zip(*results, strict=True)
    assert len(results) == 8
    assert len(set(processes)) == 2, "both workers worked"
    assert max(granted_s) - min(asked_s) >= (7 * 500 - 1000 + 1) / 1000
