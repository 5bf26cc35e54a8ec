"""Minutes of hostile traffic over all routes and both lanes, while somebody well-behaved is served (F-H1 to F-H17).

An independent route to the same faults: the generators know nothing of how requests are decoded, the judges nothing of
what was sent. `make campaign SECONDS= SEED=` runs the same by hand.
"""

import base64
import json
import os
import sys
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from limiter.model.policy.problems import PolicyError
from limiter.model.policy.reading import read_policy
from loadtest.campaign import __main__ as campaign
from loadtest.campaign import attacker, customer, documents, wire
from loadtest.campaign.operations import Described, acquire, batch, policy, settle

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
            wire.noise(draw),
            wire.soup(draw),
            wire.odd_head(draw, documents.written(draw, acquire(draw)), "key"),
            wire.chunked(draw, "/v1/acquire", documents.heavy(draw), None),
            described.request(draw, ["token"], {"admin": "key"}),
            documents.written(draw, [batch(draw, ["token"]), settle(draw, ["token"]), policy(draw)]),
            wire.pipeline(draw, [b"x"]),
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


def test_what_attackers_find_is_judged_and_written_down(tmp_path: Path) -> None:
    heard = attacker.Report(cases=9, statuses=dict.fromkeys((200, 201, 204, 400, 401, 403, 404, 422, 429), 1))
    assert all(check.holds for check in campaign.judge_attack([heard], tmp_path, "1"))
    heard.findings = [attacker.Finding("1.0.7", "soup", 1, "status 500, reason internal", "eA==", "HTTP/1.1 500")]
    assert [check.holds for check in campaign.judge_attack([heard], tmp_path, "1")] == [False, True]
    (found,) = json.loads((tmp_path / "campaign-1.json").read_text())
    assert (found["case"], base64.b64decode(found["sent"])) == ("1.0.7", b"x")
