"""The moving parts of the overload experiments: the backend, the users, and the way through Headgate."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from limiter.model.bucket.contract import AcquireRequest, SettleRequest
from limiter.model.policy.criticality import Criticality
from loadtest.overload import measurements
from loadtest.overload.backend import Pool, SlowingService, application, listen, server
from loadtest.overload.backend_terms import Slowing
from loadtest.overload.http import Http
from loadtest.overload.machine import Machine, Watch
from loadtest.overload.study import Run
from loadtest.overload.user_calls import Ask, Call, counted
from loadtest.overload.users import Crowd, Experiment, Phase, by_second, percentile

FAST = {"cheap": 0.1, "expensive": 5.0}


@asynccontextmanager
async def serving(app: Starlette) -> AsyncIterator[Http]:
    listener = listen()
    http = Http(f"http://127.0.0.1:{listener.getsockname()[1]}")
    running = server(app)
    task = asyncio.create_task(running.serve(sockets=[listener]))
    try:
        yield http
    finally:
        http.close()
        running.should_exit = True
        await task
        listener.close()


@asynccontextmanager
async def backend() -> AsyncIterator[Http]:
    pool = Pool(workers=1, iterations_per_ms=500, costs_ms=FAST)
    async with serving(application(pool)) as http:
        yield http
    pool.close()


class Gate:
    """Headgate's contract, refusing what is sheddable; every body is checked against the real one."""

    def __init__(self) -> None:
        self.asked: list[AcquireRequest] = []
        self.settled: list[SettleRequest] = []
        routes = [
            Route("/v1/acquire", self.acquire, methods=["POST"]),
            Route("/v1/settle", self.settle, methods=["POST"]),
        ]
        self.app = Starlette(routes=routes)

    async def acquire(self, request: Request) -> JSONResponse:
        ask = msgspec.json.decode(await request.body(), type=AcquireRequest)
        self.asked.append(ask)
        if ask.criticality is Criticality.SHEDDABLE:
            return JSONResponse({"granted": False, "reason": "overload"}, 429)
        return JSONResponse({"granted": True, "reservation": f"r{len(self.asked)}", "quality": 0.5})

    async def settle(self, request: Request) -> JSONResponse:
        self.settled.append(msgspec.json.decode(await request.body(), type=SettleRequest))
        return JSONResponse({"work": 1})


def cheap(_: Random) -> Ask:
    return Ask()


def either_class(draw: Random) -> Ask:
    criticality = draw.choice([Criticality.CRITICAL, Criticality.SHEDDABLE])
    return Ask(criticality=criticality, expected_latency_ms=200)


def crowd(*phases: Phase) -> Crowd:
    return Crowd(phases=phases, choose=cheap, think_s=0.01)


async def test_cheaper_work_costs_less() -> None:
    pool = Pool(workers=1, iterations_per_ms=500)
    assert pool.cost_ms("cheap", 1) == 5
    assert pool.cost_ms("expensive", 1) == 50
    assert pool.cost_ms("expensive", 0) == pytest.approx(10)
    pool.close()


async def test_the_pool_tells_its_load() -> None:
    pool = Pool(workers=1, iterations_per_ms=500, costs_ms=FAST)
    await asyncio.gather(*[pool.work("expensive", 1.0) for _ in range(4)])
    load = pool.load()
    assert 0 < load["utilisation"] <= 1
    assert load["queued"] == 0
    assert pool.load()["utilisation"] == 0
    pool.close()


async def test_the_backend_works() -> None:
    async with backend() as http:
        status, body = await http.post("/work?kind=expensive&quality=0.5")
        assert status == 200
        assert msgspec.json.decode(body)["worked_ms"] > 0
        assert (await http.post("/work?kind=unknown"))[0] == 422
        assert (await http.post("/work?quality=2"))[0] == 422
        assert (await http.post("/work?quality=much"))[0] == 422


async def test_a_bounded_pool_makes_the_others_wait() -> None:
    async with backend() as http:
        answers = await asyncio.gather(*[http.post("/work?kind=expensive") for _ in range(8)])
    queued = sorted(msgspec.json.decode(body)["queued_ms"] for _, body in answers)
    assert queued[-1] > 3 * msgspec.json.decode(answers[0][1])["worked_ms"]


async def test_users_ask_the_backend_straight_without_headgate() -> None:
    async with backend() as http:
        calls = await Experiment(http, None).run([crowd(Phase(0.2, users=3), Phase(0.3, users=20))])
    assert len(calls) > 50
    assert {one.outcome for one in calls} == {"served"}
    assert all(one.latency_ms > 0 for one in calls)


async def test_an_open_loop_asks_at_its_rate() -> None:
    """However busy the machine is: one seed, so many requests."""
    asked = []

    def noted(draw: Random) -> Ask:
        asked.append(cheap(draw))
        return asked[-1]

    async with backend() as http:
        calls = await Experiment(http, None).run([Crowd(phases=[Phase(0.5, rate=200)], choose=noted)])
    assert len(asked) == 98
    assert 0 < len(calls) <= len(asked)


async def test_calls_go_through_headgate() -> None:
    gate = Gate()
    async with backend() as http, serving(gate.app) as headgate:
        calls = await Experiment(http, headgate).run(
            [Crowd(phases=[Phase(0.5, users=10)], choose=either_class, think_s=0.02)]
        )
    by_class = {(one.ask.criticality, one.outcome) for one in calls}
    assert by_class == {(Criticality.CRITICAL, "served"), (Criticality.SHEDDABLE, "refused")}
    assert {one.quality for one in calls if one.outcome == "served"} == {0.5}
    assert all(settled.latency_ms and settled.latency_ms > 0 for settled in gate.settled)
    assert {asked.expected_latency_ms for asked in gate.asked} == {200}
    served = sum(one.outcome == "served" for one in calls)
    assert served <= len(gate.settled) <= served + 10


async def test_who_does_not_answer_is_a_failure() -> None:
    listener = listen()
    nobody = Http(f"http://127.0.0.1:{listener.getsockname()[1]}")
    listener.close()
    calls = await Experiment(nobody, None).run([crowd(Phase(0.1, users=2))])
    assert {one.outcome for one in calls} == {"failed"}


def test_results_are_told_by_the_second_in_which_they_were_answered() -> None:
    calls = [Call(0.5, Ask(), "served", 100, 0.5), Call(0.9, Ask(), "served", 200, 1.0), Call(2.1, Ask(), "refused")]
    first, second, third = by_second(calls)
    assert (first.served, first.p90_ms, first.quality) == (1, 100, 0.5)
    assert (second.served, second.p90_ms) == (1, 200)
    assert (third.refused, third.refused_share, third.p90_ms) == (1, 1.0, None)


def test_percentiles_are_of_the_nearest_rank() -> None:
    assert percentile([(value, 1) for value in range(1, 11)], 90) == 9
    assert percentile([(5, 1)], 90) == 5
    assert percentile([(1, 90), (2, 10)], 90) == 1
    assert percentile([(1, 89), (2, 11)], 90) == 2
    assert percentile([], 90) is None


def test_calls_of_a_second_that_are_alike_are_counted_together() -> None:
    calls = [Call(0.1, Ask(), "refused"), Call(0.9, Ask(), "refused"), Call(0.5, Ask(), "served", 1234.4, 0.499)]
    served, refused = counted(calls)[::-1]
    assert (refused.second, refused.count) == (0, 2)
    assert (served.second, served.latency_ms, served.quality) == (1, 1230, 0.5)


def test_measurements_are_read_as_they_were_written() -> None:
    calls = counted([Call(0.1, Ask(), "refused"), Call(2.0, Ask("read"), "served", 80.5, 0.4)])
    results = {"with control, 2 users": Run(calls, (), Machine(2, 1.5, 0.25, 0.1, 0.004))}
    assert measurements.read(measurements.written(results)) == results


def test_a_machine_that_stood_still_is_not_fit_to_judge_by() -> None:
    assert Watch().seen([0.001] * 100).is_fit(1.0)
    assert not Watch().seen([0.001] * 99 + [2.5]).is_fit(1.0)
    assert not Watch().seen([0.15] * 100).is_fit(1.0)


async def test_a_backend_that_slows_down_answers_later_the_more_it_is_asked() -> None:
    service = SlowingService(Slowing(capacity=5, base_ms=1, ms_per_excess=20))
    took_ms = [worked for _, worked in await asyncio.gather(*[service.work("cheap", 1.0) for _ in range(10)])]
    assert took_ms[0] >= 1
    assert took_ms[-1] >= 100, "five more than it can do, 20 ms for each"
    assert took_ms[5:] == sorted(took_ms[5:])


async def test_a_backend_that_hangs_answers_once_it_no_longer_does() -> None:
    service = SlowingService(Slowing(capacity=100, base_ms=1))
    async with serving(application(service)) as http:
        assert (await http.post("/hang?seconds=0.3"))[0] == 200
        status, body = await http.post("/work")
    assert status == 200
    assert msgspec.json.decode(body)["worked_ms"] > 100
