"""Overload control over HTTP: reports of load (G5), and answers that are the same in both lanes (Q6, S4, G6)."""

from typing import Any

import httpx
import pytest

from limiter.engine.planner import Planner
from limiter.engine.policy_file import load_policy_file
from limiter.model.control.stewardship import Steer, SteerStatus
from limiter.model.overload.shedding import ShedOrder, State
from limiter.model.policy.limit import Limit
from limiter.model.policy.reading import read_policy_set
from limiter.store import call_layout
from tests.support.lanes import CUSTOMER, normal
from tests.support.live import LANES, Lane, LiveApi, ask, exchange, request
from tests.support.servers import Server
from tests.support.stores import LEASE_MS, ScriptStore

REPORT = {"policy": "busy", "source": "host-1", "signals": {"cpu": 0.93}}


def steer(store: Server, customer: str, order: ShedOrder, policies: Any) -> None:
    """Set overload control of a customer's bucket, as a controller would."""
    (policy,) = [one for one in load_policy_file(policies).policies if one.name == "busy"]
    scripts = ScriptStore(store)
    lease = scripts.take(b"controller", LEASE_MS)
    assert lease is not None
    row = Steer(f"busy:{customer}", Limit(policy).terms, overload=order)
    assert scripts.steer(lease, [row], 0) == [SteerStatus.DONE]


ORDERS = {
    "degraded": (ShedOrder(quality=0.25, state=State.OVERLOADED), "critical", 200),
    "turned away": (ShedOrder(state=State.OVERLOADED, refused_shares=(0, 0, 0, 1.0)), "sheddable", 429),
    "at its rate": (ShedOrder(rates=(0, 0, 1e-6, 0)), "sheddable_plus", 429),
}


@pytest.mark.parametrize(("order", "criticality", "status"), ORDERS.values(), ids=ORDERS)
def test_both_lanes_tell_of_overload_alike(
    both: dict[Lane, LiveApi], store: Server, policies: Any, order: ShedOrder, criticality: str, status: int
) -> None:
    answers = {}
    for lane in LANES:
        customer = f"{lane[0]}-{order.quality}-{criticality}".ljust(len(CUSTOMER), "x")[: len(CUSTOMER)]
        body = ask(customer, "busy", criticality=criticality)
        exchange(both[lane], request(body=body))
        steer(store, customer, order, policies)
        if any(order.rates):
            exchange(both[lane], request(body=body))  # takes the only token
        single, batched = (
            exchange(both[lane], raw)[0]
            for raw in (request(body=body), request("/v1/batch", {"operations": [{"op": "acquire"} | body]}))
        )
        assert single.status == batched.json["results"][0]["status"] == status
        share = order.refused_shares[3] if criticality == "sheddable" else 0.0
        assert single.json.get("drawn_share", 0.0) == share, "a rate is no draw (G3)"
        answers[lane] = [normal(reply, customer.encode()) for reply in (single, batched)]
    assert answers["fast"] == answers["plain"]


def test_g6_the_problem_says_why_and_not_to_retry(
    client: httpx.Client, store: Server, policies: Any, customer: str
) -> None:
    body = ask(customer, "busy", criticality="sheddable")
    assert client.post("/v1/acquire", json=body).json()["quality"] == 1.0
    steer(store, customer, ShedOrder(state=State.OVERLOADED, refused_shares=(0, 0, 0, 1.0)), policies)
    reply = client.post("/v1/acquire", json=body)
    problem = reply.json()
    assert reply.status_code == problem["status"] == 429
    assert problem["type"].endswith("#temporary-reduced-capacity")
    assert (problem["reason"], problem["retry"], problem["overloaded"]) == ("overload", "never", True)
    assert problem["violated-policies"] == ["busy"]
    assert "retry-after" not in reply.headers
    assert reply.headers["ratelimit"].endswith(";t=1"), "the limit is as it should be, whatever becomes of this request"
    client.post("/v1/acquire", json=body | {"criticality": "critical"}).raise_for_status()


def test_the_bucket_s_page_shows_what_overload_control_does(
    client: httpx.Client, store: Server, policies: Any, customer: str
) -> None:
    body = ask(customer, "busy", criticality="sheddable")
    client.post("/v1/acquire", json=body)
    steer(store, customer, ShedOrder(quality=0.5, refused_shares=(0, 0, 0, 1.0)), policies)
    client.post("/v1/acquire", json=body)
    page = client.get("/v1/buckets", params={"policy": "busy", "contains": customer}).json()
    shown = page["buckets"][0]["overload"]
    assert (shown["quality"], shown["overloaded"]) == (0.5, False)
    assert shown["classes"]["sheddable"] == {
        "refused_share": 1.0, "rate": 0.0, "limit": 0.0, "asked": 2.0, "refused": 1.0, "timed": 0.0, "late": 0.0
    }  # fmt: skip
    plain = ask(customer, "slow")
    client.post("/v1/acquire", json=plain)
    page = client.get("/v1/buckets", params={"policy": "slow", "contains": customer}).json()
    assert "overload" not in page["buckets"][0]


def test_g5_a_report_is_taken_and_kept_where_the_controller_finds_it(
    client: httpx.Client, store: Server, customer: str
) -> None:
    reply = client.post("/v1/signals", json=REPORT | {"key": {"customer": customer}})
    assert (reply.status_code, reply.json()) == (
        202,
        {"bucket": f"busy:{customer}", "partitions": 1, "signals": {"cpu": 0.93}},
    )
    raw = ScriptStore(store).signals(f"busy:{customer}")
    assert raw is not None
    (report,) = call_layout.unpack_reports(raw)
    assert report.loads == {"cpu": 0.93}
    assert report.reported_us > 0


def test_g5_without_a_key_a_report_is_for_every_bucket_of_the_policy(client: httpx.Client) -> None:
    assert client.post("/v1/signals", json=REPORT).json()["bucket"] == "busy"
    assert client.post("/v1/signals", json=REPORT | {"policy": "crowd"}).json()["bucket"] == "crowd"


def test_g5_a_report_without_a_policy_is_for_the_whole_namespace(client: httpx.Client, store: Server) -> None:
    report = {"source": "host-9", "signals": {"cpu": 0.99}}
    reply = client.post("/v1/signals", json=report)
    assert (reply.status_code, reply.json()["bucket"]) == (202, "*")
    assert ScriptStore(store).signals("*")
    elsewhere = client.post("/v1/signals", json=report | {"namespace": "nobody's"})
    assert (elsewhere.status_code, elsewhere.json()["errors"][0]["field"]) == (422, "namespace")
    keyed = client.post("/v1/signals", json=report | {"key": {"customer": "c1"}})
    assert (keyed.status_code, keyed.json()["errors"][0]["field"]) == (422, "key")


BAD_REPORTS: dict[str, tuple[dict[str, Any], str]] = {
    "a negative load": ({"signals": {"cpu": -1}}, "signals.cpu"),
    "a load that is no number": ({"signals": {"cpu": "high"}}, "signals.cpu"),
    "no signal": ({"signals": {}}, "signals"),
    "too many signals": ({"signals": {f"s{number}": 1 for number in range(17)}}, "signals"),
    "a name with a space": ({"signals": {"c p u": 1}}, "signals"),
    "no source": ({"source": ""}, "source"),
    "an unknown field": ({"load": 1}, "load"),
    "a policy that does not listen": ({"policy": "slow"}, "policy"),
    "a key of other dimensions": ({"key": {"user": "x"}}, "key"),
    "a key without its dimension": ({"key": {}}, "key"),
    "a key where there is none": ({"policy": "crowd", "key": {"customer": "x"}}, "key"),
    "a policy that is no text": ({"policy": 3}, "policy"),
}


@pytest.mark.parametrize(("fields", "field"), BAD_REPORTS.values(), ids=BAD_REPORTS)
def test_a_bad_report_is_refused_by_the_field(client: httpx.Client, fields: dict[str, Any], field: str) -> None:
    reply = client.post("/v1/signals", json=REPORT | fields)
    assert reply.status_code == 422
    assert [problem["field"] for problem in reply.json()["errors"]] == [field]


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"{", 400), (b'{"policy":"busy","source":"h","signals":{"cpu":NaN}}', 422),
     (b'{"policy":"busy","source":"h","signals":{"cpu":1,"cpu":2}}', 422), (b"[]", 422)],
)  # fmt: skip
def test_f_v2_f_v5_odd_bodies_are_refused(client: httpx.Client, body: bytes, status: int) -> None:
    assert client.post("/v1/signals", content=body, headers={"Content-Type": "application/json"}).status_code == status


def test_a_report_to_no_policy_is_404(client: httpx.Client) -> None:
    for fields in ({"policy": "none"}, {"namespace": "elsewhere"}, {"policy": "busy:c1"}):
        assert client.post("/v1/signals", json=REPORT | fields).status_code == 404


def test_r9_a_divided_policy_hears_a_report_in_every_partition() -> None:
    planner = Planner(
        read_policy_set(
            {
                "namespaces": {"default": {"partitions": 4, "partition_by": ["customer"]}},
                "policies": [
                    {"name": "wide", "match": {}, "rate": 1, "overload": {"utilisation": {}}},
                    {"name": "own", "match": {}, "per": ["customer"], "rate": 1, "overload": {"utilisation": {}}},
                ],
            }
        )
    )
    wide, own = (planner.find("default", name) for name in ("wide", "own"))
    assert wide is not None
    assert own is not None
    assert [slot.partition for slot in planner.places("default", wide, None)[0]] == [0, 1, 2, 3]
    slots, name = planner.places("default", own, {"customer": "c1"})
    assert (list(slots), name) == ([planner.cover("default", {"customer": "c1"})[0]], "own:c1")
    assert len(planner.places("default", own, None)[0]) == 4
