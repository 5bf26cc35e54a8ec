"""R11: why a cap is what it is, over HTTP and at the terminal."""

import asyncio
from pathlib import Path

import httpx

from limiter.model.control.reasoning import reasoning
from limiter.store.keys import Slot
from tests.support.command import headgate, lines_of
from tests.support.live import live
from tests.support.nodes import until
from tests.support.servers import Server
from tests.support.steered import Look, capped, policies
from tests.support.traffic import steering, traffic

CUSTOMER = {"customer": "c1"}


async def fill(server: Server) -> str:
    """Some cycles of a steered bucket; the controller's name."""
    limits = policies(capped(per=["customer"], charge="learned"), {"name": "plain", "match": {}, "rate": 1e6})
    look = Look(server)
    async with (
        steering(server.url, limits) as controller,
        traffic(server.url, limits) as callers,
        callers.flowing(CUSTOMER, rate=60, work=lambda: 5.0),
    ):
        await until(lambda: (found := look.memory("capped:c1")) is not None and len(found.reasons) == 10, within_s=30)
        name = look.owner()
        assert name == controller.name
    return name


async def test_r11_the_last_cycles_can_be_read_back(valkey: Server, tmp_path: Path) -> None:
    await fill(valkey)
    file = tmp_path / "policies.yaml"
    file.write_text("policies: []")
    with live(valkey.url, file) as api, api.client() as client:
        page = client.get("/v1/controller", params={"policy": "capped"}).json()
        (bucket,) = page["buckets"]
        assert (page["owner"], page["cursor"]) == (None, ""), "it gave its lease back"
        assert (bucket["bucket"], bucket["mechanism"], bucket["share"]) == ("capped:c1", "requests", None)
        assert bucket["mechanism_reason"] == "set by the policy"
        assert len(bucket["cycles"]) == 10
        last = bucket["cycles"][-1]
        assert set(last) == {
            "at_ms", "committed", "work_rate", "work_per_request", "rejection_rate", "rule", "before", "after",
            "sentence",
        }  # fmt: skip
        assert last["committed"] == 100
        assert last["sentence"].endswith("rps")
        assert abs(bucket["charge"] - 5) < 0.6
        for query, names in (("contains=c1", ["capped:c1"]), ("contains=c2", []), ("policy=plain", [])):
            assert _names(client, query) == names, query
        assert client.get("/v1/controller", params={"cursor": "?"}).status_code == 422


def _names(client: httpx.Client, query: str) -> list[str]:
    return [bucket["bucket"] for bucket in client.get(f"/v1/controller?{query}").json()["buckets"]]


async def test_r11_the_owner_of_a_partition_is_named(valkey: Server, tmp_path: Path) -> None:
    file = tmp_path / "policies.yaml"
    file.write_text("policies: []")
    async with steering(valkey.url, policies(capped())) as controller:
        await until(lambda: controller.owned == [Slot()])
        with live(valkey.url, file) as api, api.client() as client:
            owner = client.get("/v1/controller").json()["owner"]
    assert (owner["controller"], owner["fence"]) == (controller.name, 1)


def test_r11_inspect_says_why(valkey: Server) -> None:
    asyncio.run(fill(valkey))
    first, bucket, counts, cap, charge, *cycles = lines_of(headgate("inspect", "--why", url=valkey.url))
    assert first == "default/0: owned by no controller; what it set last stays in force"
    assert (bucket, counts) == ("  capped:c1", "    counts requests: set by the policy")
    assert cap.startswith("    cap ")
    assert cap.endswith(" requests/s for 100 units/s")
    assert charge.startswith("    learned charge ")
    assert len(cycles) == 10
    assert all(line.endswith("rps") and "rejected" in line for line in cycles)
    assert lines_of(headgate("inspect", "--why", "--contains", "nobody", url=valkey.url)) == ["nothing is steered here"]


async def test_a_bucket_without_a_past_has_no_reasons(valkey: Server) -> None:
    limits = policies(capped(mechanism="auto"))
    async with traffic(valkey.url, limits) as callers:
        await callers.ask(CUSTOMER, work=1.0)
    record = Look(valkey).record("capped")
    assert record is not None
    seen = reasoning("capped", record, None, 0.0)
    assert (seen.cycles, seen.cap, seen.charge) == ([], None, None)
    assert seen.mechanism_reason == "chosen while running: nothing was measured yet"
