"""Recipes that serve: an LLM gateway, a storage service, Django."""

import sys

import httpx
import pytest

from tests.support import eventually
from tests.support.recipe_service import RECIPES, STANDING, Service, Serving

pytestmark = pytest.mark.slow


def uvicorn(app: str) -> list[str]:
    return [sys.executable, "-m", "uvicorn", "--app-dir", str(RECIPES), app, "--port", "PORT"]


def test_the_gateway_counts_tokens_and_a_reader_who_leaves_pays_for_what_was_streamed(
    service: Service, serving: Serving
) -> None:
    def used(customer: str) -> float:
        return STANDING["llm-tokens"] - service.balance(service="llm", customer=customer)

    with serving(uvicorn("llm_gateway:app")) as address, httpx.Client(base_url=address, trust_env=False) as client:
        told = client.get("/chat", params={"customer": "reader", "prompt": "once upon a time", "tokens_max": 5})
        assert told.text == "once upon a time once "
        eventually(lambda: round(used("reader")) == 4 + 5, what="the prompt's tokens and the answer's")

        asked: dict[str, str | int] = {"customer": "leaver", "prompt": "go on", "tokens_max": 5000}
        with client.stream("GET", "/chat", params=asked) as streamed:
            chunks = streamed.iter_text()
            assert next(chunks).startswith("go ")
            assert round(used("leaver")) >= 5000, "the estimate is charged while it streams"
        eventually(lambda: 2 < used("leaver") < 3000, what="what was not streamed was given back")

        greedy: dict[str, str | int] = {"customer": "greedy", "prompt": "more", "tokens_max": 9000}
        with client.stream("GET", "/chat", params=greedy):
            refused = client.get("/chat", params=greedy)
        assert refused.status_code == 429
        assert refused.json() == {"reason": "work"}
        assert int(refused.headers["retry-after"]) >= 1


def test_the_storage_service_charges_units_of_two_kilobytes(service: Service, serving: Serving) -> None:
    def used(customer: str) -> float:
        return STANDING["storage"] - service.balance(service="storage", customer=customer)

    with serving(uvicorn("storage:app")) as address, httpx.Client(base_url=address, trust_env=False) as client:
        assert client.put("/files/c1/a", content=b"x" * 200_000).json() == {"bytes": 200_000}
        eventually(lambda: round(used("c1")) == 98, what="200,000 bytes begin 98 units")
        assert len(client.get("/files/c1/a").content) == 200_000
        eventually(lambda: round(used("c1")) == 2 * 98)
        chunks = iter([b"x" * 100_000, b"x" * 100_000])
        assert client.put("/files/c2/b", content=chunks).json() == {"bytes": 200_000}, "no length was announced"
        eventually(lambda: round(used("c2")) == 98)
        client.put("/files/c3/c", content=b"x" * 2048 * 1000)
        eventually(lambda: client.get("/files/c3/c").status_code == 429)


def test_django_counts_the_milliseconds_of_views_by_address(service: Service, serving: Serving) -> None:
    command = [sys.executable, str(RECIPES / "django_middleware.py"), "runserver", "--noreload", "PORT"]
    with serving(command) as address, httpx.Client(base_url=address, trust_env=False) as client:
        before = service.balance(service="web", ip="127.0.0.1")
        assert client.get("/slow", params={"ms": 600}).text == "done\n"
        eventually(lambda: before - service.balance(service="web", ip="127.0.0.1") >= 200)
        assert client.get("/slow", params={"ms": 3000}).status_code == 200
        eventually(lambda: service.balance(service="web", ip="127.0.0.1") < 0)
        refused = client.get("/slow")
        assert refused.status_code == 429
        assert refused.json() == {"reason": "work"}
        assert int(refused.headers["retry-after"]) >= 1
