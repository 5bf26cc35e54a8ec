"""Minutes of hostile traffic over all routes and both lanes, while somebody well-behaved is served (F-H1 to F-H17).

An independent route to the same faults: the generators know nothing of how requests are decoded, the judges nothing of
what was sent. `make campaign SECONDS= SEED=` runs the same by hand.
"""

import asyncio
import base64
import json
import os
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from random import Random

import pytest

from api.data.json_text import PARTS_MAX
from api.routes.policies.policy_routes import SET_BYTES_MAX, SET_ENTRIES_MAX
from limiter.model.policy.problems import PolicyError
from limiter.model.policy.reading import read_policy
from loadtest.campaign import __main__ as campaign
from loadtest.campaign import attacker, customer, documents, raw_http
from loadtest.campaign.crafted_requests import Described, acquire, batch, largest, policy, settle, whole_set
from loadtest.campaign.silence import Silence, Wait, computed_s
from tests.support.nodes import until

SECONDS = 300


@pytest.mark.long
@pytest.mark.timeout(SECONDS + 300)
def test_five_minutes_of_hostile_traffic_do_no_harm(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """No 5xx, flat memory, nobody well-behaved waits, exact balances. The seed is printed first."""
    seed = os.environ.get("CAMPAIGN_SEED", str(Random().randrange(10**9)))
    seconds = float(os.environ.get("CAMPAIGN_SECONDS", SECONDS))
    with capfd.disabled():
        sys.stdout.write(f"\ncampaign of {seconds:g} s, again with: make campaign SECONDS={seconds:g} SEED={seed}\n")
    checks = campaign.run(seed, seconds, tmp_path)
    broken = [f"{check.name}: {check.found}" for check in checks if not check.holds]
    findings = [shown(found) for file in sorted(tmp_path.glob("*.json")) for found in json.loads(file.read_text())]
    assert not broken, "\n".join([f"seed {seed}", *broken, *findings[:5]])


def shown(finding: dict[str, str]) -> str:
    sent = base64.b64decode(finding["sent"])
    told = f"case {finding['case']} ({finding['kind']}): {finding['problem']}"
    return f"{told}\n  sent {sent[:1500]!r}\n  got {finding['got'][:800]!r}"


def test_a_seed_gives_the_same_bytes() -> None:
    described = Described(OPENAPI)

    def all_of(seed: str) -> list[bytes]:
        draw = Random(seed)
        return [
            raw_http.noise(draw),
            raw_http.soup(draw),
            raw_http.odd_head(draw, documents.written(draw, acquire(draw)), "key"),
            raw_http.chunked(draw, "/v1/acquire", documents.heavy(draw), None),
            described.request(draw, ["token"], {"admin": "key"}),
            documents.written(draw, [batch(draw, ["token"]), settle(draw, ["token"]), policy(draw)]),
            raw_http.pipeline(draw, [b"x"]),
            largest(draw, ["token"], {"admin": "key", "caller": "key", "viewer": "key"}),
        ]

    for number in range(100):
        assert all_of(f"7.{number}") == all_of(f"7.{number}")
    assert all_of("7.1") != all_of("7.2")


OPENAPI = {
    "components": {"schemas": {"Acquire": {"type": "object", "properties": {"work": {"type": "number"}}}}},
    "paths": {
        "/v1/acquire": {
            "post": {
                "parameters": [{"name": "Idempotency-Key", "in": "header", "schema": {"type": "string"}}],
                "requestBody": {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Acquire"}}}},
            }
        },
        "/v1/audit": {"get": {"parameters": [{"name": "limit", "in": "query", "schema": {"type": "integer"}}]}},
    },
}


def test_the_policies_that_attackers_put_are_sound() -> None:
    """Or the campaign would only show how policies are refused."""
    taken = Counter(is_taken(policy(Random(number))) for number in range(400))
    assert taken[True] > 350, taken


def test_the_sets_that_attackers_send_are_within_the_bounds() -> None:
    """Or the campaign would only show how they are refused for their size."""
    for number in range(60):
        document = whole_set(Random(number))
        body = json.dumps(document, separators=(",", ":")).encode()
        assert len(document["policies"]) <= SET_ENTRIES_MAX
        assert len(body) <= SET_BYTES_MAX
        assert sum(map(body.count, (b"{", b"[", b","))) <= PARTS_MAX


def is_taken(document: dict[str, object]) -> bool:
    try:
        read_policy({"name": "x"} | document)
    except PolicyError:
        return False
    return True


def call(port: int, at_s: float, took_s: float) -> customer.Call:
    return customer.Call(at_s, port, took_s)


def test_a_slow_answer_is_the_nodes_unless_the_machine_was_slow_too() -> None:
    quick = [call(0, number * 0.1, 0.001) for number in range(100)] + [
        call(1, number * 0.1, 0.01) for number in range(100)
    ]

    def judged(*more: customer.Call, share: customer.Share | None = None) -> bool:
        return campaign.judge_times(customer.Report([*quick, *more], [share] if share else [], {}, 1, [])).holds

    assert judged()
    assert not judged(call(1, 5.0, 1.5))
    assert judged(call(1, 5.0, 1.5), call(0, 5.5, 0.6)), "the server that does nothing was slow just then"
    assert not judged(call(1, 5.0, 1.5), call(0, 50.0, 0.6)), "but not at another time"
    assert judged(call(1, 5.0, 1.5), share=customer.Share(5.0, 2.0)), "or processes had half a core each"
    assert not judged(call(1, 5.0, 2.5), share=customer.Share(5.0, 2.0))
    assert not judged(call(1, 5.0, 1.5), share=customer.Share(50.0, 2.0))


def slow(began_s: float, took_s: float) -> attacker.Slow:
    return attacker.Slow(Wait(took_s, began_s, 0.5), "1.0.7", "largest", 1, "POST /v1/batch", 9, 9, "eA==")


def test_an_attacker_s_wait_is_judged_as_the_others_are(tmp_path: Path) -> None:
    """F-H10: whatever was sent, its answer takes less than a second, unless the machine was slow."""
    idle = [call(0, number * 0.1, 0.001) for number in range(100)]

    def judged(*waits: attacker.Slow, share: customer.Share | None = None) -> campaign.Check:
        seen = customer.Report(idle, [share] if share else [], {}, 1, [])
        return campaign.judge_waits([attacker.Report(slowest=list(waits))], seen, tmp_path, "1")

    assert judged(slow(5.0, 0.9)).holds
    assert not judged().holds, "nobody was timed"
    assert judged(slow(5.0, 1.5), share=customer.Share(5.0, 2.0)).holds
    assert not list(tmp_path.iterdir())
    late = judged(slow(5.0, 0.9), slow(5.0, 1.5))
    assert not late.holds
    assert "1 did; the slowest took 1500 ms, in which node and store computed for 500 ms: case 1.0.7" in late.found
    (kept,) = json.loads((tmp_path / "campaign-1-slow.json").read_text())
    assert (kept["line"], base64.b64decode(kept["sent"])) == ("POST /v1/batch", b"x")


async def test_an_attacker_s_wait_begins_with_its_last_byte() -> None:
    """What a node takes while it is still being sent to is not its own time; what it takes afterwards is."""
    now_s = 0.0
    silence = Silence(lambda: now_s / 2, lambda: now_s)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal now_s
        now_s += 50  # while more is sent than buffers hold
        await reader.read()
        await until(lambda: silence.has_begun)
        sent = b""
        for part, took_s in ((b"HTTP/1.1 ", 1), (b"200 OK", 3), (b"\r\n\r\n", 2)):
            now_s, sent = now_s + took_s, sent + part
            writer.write(part)
            await until(partial(heard, len(sent)))
        now_s += 70  # the answer is whole: nobody waits for the end of the connection
        writer.close()

    def heard(count: int) -> bool:
        return silence.heard_bytes >= count

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"x" * 30_000_000)
        writer.write_eof()
        assert await attacker.listen(reader, writer, silence) == b"HTTP/1.1 200 OK\r\n\r\n"
        writer.close()
    assert silence.longest == Wait(3, 51, 1.5)


def test_the_end_of_a_connection_is_waited_for_where_nothing_else_comes() -> None:
    now_s = 0.0
    silence = Silence(lambda: 0.0, lambda: now_s)
    silence.begin()
    now_s = 4.0
    silence.closed()
    assert silence.longest == Wait(4, 0, 0)


def test_the_processor_time_of_processes_is_read() -> None:
    before_s, began_s = computed_s(os.getpid()), time.process_time()
    while time.process_time() < began_s + 0.05:
        pass
    assert computed_s(os.getpid(), 2**22 + 1) - before_s > 0.04


def test_what_attackers_find_is_judged_and_written_down(tmp_path: Path) -> None:
    heard = attacker.Report(cases=9, statuses=dict.fromkeys((200, 201, 204, 400, 401, 403, 404, 422, 429), 1))
    assert all(check.holds for check in campaign.judge_attack([heard], tmp_path, "1"))
    heard.findings = [attacker.Finding("1.0.7", "soup", 1, "status 500, reason internal", "eA==", "HTTP/1.1 500")]
    assert [check.holds for check in campaign.judge_attack([heard], tmp_path, "1")] == [False, True]
    (found,) = json.loads((tmp_path / "campaign-1.json").read_text())
    assert (found["case"], base64.b64decode(found["sent"])) == ("1.0.7", b"x")
