"""Overload control by the controller, on a real store with real requests: Q, S and G5 from settles to refusals."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from limiter.model.overload.overload_state import unpack_state
from limiter.model.overload.shedding import State
from limiter.model.policy.criticality import Criticality
from limiter.model.policy.policy_set import PolicySet
from limiter.model.policy.reading import dump
from limiter.store import keys
from limiter.store.keys import Slot
from limiter.store.link.connect import open_link
from limiter.store.policies.policy_store import PolicyStore
from limiter.store.signal_reports import Signals
from tests.support.command import headgate, lines_of
from tests.support.live import live
from tests.support.nodes import Watched, until
from tests.support.scraping import scrape
from tests.support.servers import Server
from tests.support.steered import Look, capped, policies
from tests.support.traffic import steering, traffic

ALL = {"service": "orders"}
SHEDDABLE = Criticality.SHEDDABLE
EVERYBODY = dict.fromkeys(Criticality, 100.0)
QUICK = {"expected_latency_ms": 100, "interval_s": 0.2, "window_s": 0.4, "calm_intervals": 1, "min_samples": 5}
"""Five intervals a second, forgotten after two: tests need not wait for long."""


def guarded(ranks: dict[Any, float] | None = None, **parts: Any) -> PolicySet:
    """A limit that never binds, with overload control."""
    block = {**parts, **({"ranks": ranks} if ranks else {})}
    return policies({"name": "guarded", "match": {}, "rate": 1e6, "overload": block})


def expecting(**more: Any) -> dict[str, Any]:
    return QUICK | {"step_up": 20, "step_down": 5} | more


async def test_q3_misses_raise_the_throttle_and_refuse_by_rank(valkey: Server) -> None:
    limits = guarded(expectations=expecting())
    look = Look(valkey)
    async with steering(valkey.url, limits), traffic(valkey.url, limits) as callers:
        async with callers.flowing(ALL, rate=50, work=lambda: 1.0, latency_ms=500):
            await until(lambda: look.shedding("guarded").refused_shares[3] == 1)
        known = look.shedding("guarded")
        assert known.state == State.OVERLOADED
        assert known.refused_shares[0] == 0
        assert not await callers.ask(ALL, work=1.0, criticality=SHEDDABLE)
        assert await callers.ask(ALL, work=1.0, criticality=Criticality.CRITICAL_PLUS)


async def test_q3_a_throttle_is_released_although_nobody_asks(valkey: Server) -> None:
    limits = guarded(expectations=expecting(step_down=10))
    look = Look(valkey)
    async with steering(valkey.url, limits) as controller, traffic(valkey.url, limits) as callers:
        async with callers.flowing(ALL, rate=50, work=lambda: 1.0, latency_ms=500):
            await until(lambda: look.shedding("guarded").refused_shares[1] >= 0.2)
        await until(lambda: look.shedding("guarded").refused_shares == [0.0] * 4, within_s=20)
        assert look.shedding("guarded").state == State.CALM
        await until(lambda: not any(keeper.cycle.is_watching for keeper, _ in controller._keepers.values()))  # type: ignore[union-attr]


async def test_q3_a_bucket_of_which_everybody_is_refused_is_released_again(valkey: Server) -> None:
    """Nothing settles any more, yet calm intervals pass."""
    published = {"rules": "published", "step_down": 0.1, "step_up": 1}
    quick = {name: value for name, value in QUICK.items() if name != "min_samples"}
    limits = guarded(ranks=EVERYBODY, expectations=quick | published)
    look = Look(valkey)
    async with (
        steering(valkey.url, limits),
        traffic(valkey.url, limits) as callers,
    ):
        async with callers.flowing(ALL, rate=50, work=lambda: 1.0, latency_ms=500):
            await until(lambda: look.shedding("guarded").refused_shares == [1.0] * 4)
        callers.granted = 0
        async with callers.flowing(ALL, rate=50, work=lambda: 1.0, latency_ms=1):
            await until(lambda: callers.granted > 0, within_s=20)
            await until(lambda: look.shedding("guarded").refused_shares == [0.0] * 4, within_s=20)


async def test_s2_slow_answers_lower_the_rate_of_their_class_and_fast_ones_raise_it(valkey: Server) -> None:
    times = {"target_ms": 100, "nreq": 10, "timeout_s": 0.2, "rate_initial": 20, "adj_i": 10, "rules": "published"}
    limits = guarded(response_time=times)
    look = Look(valkey)

    def rate() -> float:
        return look.shedding("guarded").rates[1]

    async with steering(valkey.url, limits), traffic(valkey.url, limits) as callers:
        async with callers.flowing(ALL, rate=60, work=lambda: 1.0, latency_ms=900):
            await until(lambda: 0 < rate() < 10)
            await until(lambda: callers.refused > 0)
        async with callers.flowing(ALL, rate=60, work=lambda: 1.0, latency_ms=1):
            await until(lambda: rate() > 30, within_s=30)


async def test_s9_late_answers_lower_the_limit_of_what_is_in_flight_and_fast_ones_raise_it(valkey: Server) -> None:
    """It begins at 20 (S8); the work itself takes no time here, so that nothing queues."""
    limits = guarded(response_time={"target_ms": 100})
    look = Look(valkey)

    def limit() -> float:
        return look.shedding("guarded").limits[1]

    async with steering(valkey.url, limits), traffic(valkey.url, limits) as callers:
        assert await callers.ask(ALL, work=1.0)
        await until(lambda: limit() == 20)
        async with callers.flowing(ALL, rate=100, work=lambda: 1.0, latency_ms=900):
            await until(lambda: limit() < 10, within_s=20)
            assert look.shedding("guarded").late[1] > 0
        async with callers.flowing(ALL, rate=100, work=lambda: 1.0, latency_ms=1):
            await until(lambda: limit() > 6, within_s=60)
        await until(lambda: look.shedding("guarded").state == State.CALM, within_s=20)


async def test_f_p11_nothing_settles_and_the_bucket_is_overloaded(valkey: Server) -> None:
    """Silence is not calm (Q8): 300 are admitted, none settles."""
    limits = guarded(expectations={"mode": "ideal", "expected_latency_ms": 100})
    look = Look(valkey)
    async with steering(valkey.url, limits), traffic(valkey.url, limits) as callers:
        for _ in range(300):
            await callers.hold(ALL, work=1.0)
        await until(lambda: look.shedding("guarded").state == State.OVERLOADED, within_s=10)
        await callers.hold(ALL, work=1.0)
        await until(lambda: look.shedding("guarded").refused_shares[3] > 0, within_s=10)


async def test_q11_f_p10_throttles_end_by_themselves_where_nobody_steers_any_more(valkey: Server) -> None:
    """M = 100, and the only controller is gone: everybody was refused for ever."""
    limits = guarded(expectations={"initial": 100})
    look = Look(valkey)
    async with traffic(valkey.url, limits) as callers:
        async with steering(valkey.url, limits):
            await callers.ask(ALL, work=1.0)
            await until(lambda: look.shedding("guarded").refused_shares[1] == 1)
            assert not await callers.ask(ALL, work=1.0)
        callers.granted = 0
        async with callers.flowing(ALL, rate=10, work=lambda: 1.0, latency_ms=1):
            await until(lambda: callers.granted > 0, within_s=15)
        assert look.shedding("guarded").state == State.CALM


async def test_q11_throttles_are_renewed_while_somebody_steers(valkey: Server) -> None:
    limits = guarded(expectations={"initial": 50})
    look = Look(valkey)
    async with steering(valkey.url, limits), traffic(valkey.url, limits) as callers:
        await callers.ask(ALL, work=1.0)
        await until(lambda: look.shedding("guarded").refused_shares[1] == 0.5)
        first_us = look.shedding("guarded").lent_until_us
        async with callers.flowing(ALL, rate=10, work=lambda: 1.0, latency_ms=1):
            await until(lambda: look.shedding("guarded").lent_until_us > first_us, within_s=10)
        assert look.shedding("guarded").refused_shares[1] == 0.5


async def test_s5_a_slow_type_of_request_gets_no_other_refused(valkey: Server) -> None:
    times = {"target_ms": 100}
    each = {"name": "guarded", "match": {}, "per": ["operation"], "rate": 1e6, "overload": {"response_time": times}}
    limits = policies(each)
    look = Look(valkey)
    async with steering(valkey.url, limits), traffic(valkey.url, limits) as callers:
        slow = callers.flowing({"operation": "scan"}, rate=40, work=lambda: 1.0, latency_ms=900)
        fast = callers.flowing({"operation": "get"}, rate=10, work=lambda: 1.0, latency_ms=1)
        async with slow, fast:
            await until(lambda: 0 < look.shedding("guarded:scan").limits[1] < 10)
            assert look.shedding("guarded:get").limits[1] >= 15
            assert look.shedding("guarded:get").refused == [0.0] * 4


async def test_s4_quality_comes_before_refusals(valkey: Server) -> None:
    limits = guarded(response_time={"target_ms": 100, "degrade": True, "quality_min": 0.5})
    look = Look(valkey)
    async with (
        steering(valkey.url, limits),
        traffic(valkey.url, limits) as callers,
        callers.flowing(ALL, rate=60, work=lambda: 1.0, latency_ms=900),
    ):
        await until(lambda: look.shedding("guarded").quality < 1)
        assert callers.refused == 0
        await until(lambda: look.shedding("guarded").quality == 0.5)
        # Callers here settle at once, so few are in flight: what falls is the limit, far below where it began.
        await until(lambda: 0 < look.shedding("guarded").limits[3] < 10, within_s=30)


async def test_g5_reported_load_refuses_the_least_critical_and_silence_releases_them(valkey: Server) -> None:
    limits = guarded(utilisation={"target": "50%", "smoothing_s": 0.2, "stale_s": 1})
    look = Look(valkey)
    link = await open_link(valkey.url)
    signals = Signals(link)
    async with steering(valkey.url, limits), traffic(valkey.url, limits) as callers:
        await callers.ask(ALL, work=1.0)
        async with asyncio.timeout(20):
            while look.shedding("guarded").refused_shares[3] < 0.5:
                await signals.report([Slot()], "guarded", "host-1", {"cpu": 1.0})
        known = look.shedding("guarded")
        assert known.refused_shares[1] == 0
        assert known.state == State.OVERLOADED
        await until(lambda: look.shedding("guarded").refused_shares == [0.0] * 4, within_s=20)
    await link.aclose()


async def test_f_p7_a_new_owner_goes_on_with_the_throttle(valkey: Server) -> None:
    """The next raise begins where the last owner stopped, not at nothing."""
    limits = guarded(expectations=expecting(window_s=2, step_up=10, step_down=0.001))
    look = Look(valkey)
    async with traffic(valkey.url, limits) as callers:
        async with steering(valkey.url, limits), callers.flowing(ALL, rate=50, work=lambda: 1.0, latency_ms=500):
            await until(lambda: look.shedding("guarded").refused_shares[1] >= 0.3)
        memory = look.memory("guarded")
        assert memory is not None
        known = unpack_state(memory.overload).expectations
        assert known is not None
        assert known.throttle >= 30
        async with steering(valkey.url, limits):
            async with callers.flowing(ALL, rate=50, work=lambda: 1.0, latency_ms=1):
                await until(lambda: (found := look.memory("guarded")) is not None and found.notes != memory.notes)
            assert look.shedding("guarded").refused_shares[1] >= 0.25


async def test_q6_a_changed_block_takes_effect_at_once_and_a_removed_one_is_forgotten(valkey: Server) -> None:
    look = Look(valkey)
    link = await open_link(valkey.url)
    patient = guarded(expectations=expecting(interval_s=50, window_s=50, initial=20))
    strict = guarded(expectations=expecting(interval_s=50, window_s=50, initial=30))
    async with steering(valkey.url, patient), traffic(valkey.url, patient) as callers:
        await callers.ask(ALL, work=1.0, criticality=Criticality.CRITICAL_PLUS)
        await until(lambda: look.shedding("guarded").refused_shares[1] == 0.2)
        callers.enforce(strict)
        await PolicyStore(link).apply(strict, who="test")
        async with callers.flowing(ALL, rate=20, work=lambda: 1.0):
            await until(lambda: callers.refused > 0)
        plain = policies({"name": "guarded", "match": {}, "rate": 1e6})
        callers.enforce(plain)
        await PolicyStore(link).apply(plain, who="test")
        assert await callers.ask(ALL, work=1.0, criticality=SHEDDABLE)
        record = look.record("guarded")
        assert record is not None
        assert record.shedding is None
    await link.aclose()


async def test_without_a_block_no_signals_are_read_and_nothing_of_overload_is_kept(valkey: Server) -> None:
    limits = policies(capped())
    link = Watched(await open_link(valkey.url))
    look = Look(valkey)
    async with (
        steering(link, limits),
        traffic(valkey.url, limits) as callers,
        callers.flowing(ALL, rate=60, work=lambda: 5.0),
    ):
        await until(lambda: look.memory("capped") is not None)
    wanted = {key for command in link.calls if command[0] == "MGET" for key in command[1:]}
    signals = keys.signals(Slot().prefix, "capped")
    assert keys.bucket(Slot().prefix, "capped") in wanted
    assert signals not in wanted
    memory = look.memory("capped")
    assert memory is not None
    assert (memory.overload, memory.notes) == (b"", [])
    await link.aclose()


async def overload(server: Server) -> None:
    """Some intervals of a bucket that misses expectations, and is left so: callers ask until nobody steers any more."""
    limits = guarded(expectations=expecting())
    look = Look(server)
    async with (
        traffic(server.url, limits) as callers,
        callers.flowing(ALL, rate=100, work=lambda: 1.0, latency_ms=500),
        steering(server.url, limits),
    ):
        await until(lambda: (found := look.memory("guarded")) is not None and len(found.notes) > 2, within_s=20)


async def test_r11_the_reasoning_can_be_read_over_http(valkey: Server, tmp_path: Path) -> None:
    await overload(valkey)
    file = tmp_path / "policies.yaml"
    file.write_text("policies: []")
    with live(valkey.url, file) as api, api.client() as client:
        (bucket,) = client.get("/v1/controller").json()["buckets"]
    seen = bucket["overload"]
    assert {"state", "overloaded", "quality", "in_flight", "limits", "late_share", "target_ms"} < set(seen)
    assert (seen["quality"], seen["percentile_ms"], seen["limits"]["critical"]) == (1.0, None, None)
    assert seen["refused_shares"]["sheddable"] > 0
    assert seen["rates"]["sheddable"] is None
    step = next(step for step in seen["steps"] if step["rule"] == "raise")
    before, after = step["before"], step["after"]
    assert step["controller"] == "expectations"
    assert before < after <= before + 20
    words = rf"[\d.]+ % missed 100 ms \(threshold 5 %\): M {before:.4g} → {after:.4g}"
    assert re.fullmatch(words, step["sentence"])


async def test_the_throttle_multiplier_is_a_metric(valkey: Server, tmp_path: Path) -> None:
    await overload(valkey)
    file = tmp_path / "policies.yaml"
    file.write_text(json.dumps({"policies": [dump(policy) for policy in guarded(expectations=expecting()).policies]}))
    with live(valkey.url, file) as api, api.client() as client:
        (bucket,) = client.get("/v1/controller").json()["buckets"]
        shown = scrape(client)
    throttle = shown.value("headgate_policy_throttle_multiplier", policy="guarded")
    assert throttle == bucket["overload"]["steps"][-1]["after"] > 0
    refused = shown.value("headgate_policy_refused_share_ratio", policy="guarded", criticality="sheddable_plus")
    assert refused == pytest.approx(min(1, throttle * 2 / 100))


def test_r11_inspect_says_why(valkey: Server) -> None:
    asyncio.run(overload(valkey))
    told = lines_of(headgate("inspect", "--why", url=valkey.url))
    assert told[1:3] == ["  guarded", "    counts work: set by the policy"]
    assert re.fullmatch(r"    (overloaded|recovering|calm), quality 1, \d+ in flight, [\d.]+% late", told[3]), told[3]
    assert any(line.startswith("    sheddable: ") and line.endswith("% refused") for line in told)
    raised = r".*  raise     expectations  [\d.]+ % missed 100 ms \(threshold 5 %\): M [\d.]+ → [\d.]+"
    assert any(re.fullmatch(raised, line) for line in told), told
