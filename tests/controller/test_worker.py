"""The controller on a real store, with real requests."""

from random import Random

from limiter.store import keys
from limiter.store.keys import Slot
from limiter.store.link.connect import open_link
from limiter.store.policies.policy_store import PolicyStore
from tests.support.nodes import Watched, until
from tests.support.servers import Server
from tests.support.steered import Look, capped, policies
from tests.support.traffic import steering, traffic

ALL = {"service": "orders"}


async def test_r8_a_cap_settles_where_the_work_fits(server: Server) -> None:
    """100 units/s and requests of 5 units: 20 requests a second."""
    limits = policies(capped())
    look = Look(server)
    async with steering(server.url, limits), traffic(server.url, limits) as callers:
        async with callers.flowing(ALL, rate=60, work=lambda: 5.0):
            await until(lambda: abs(look.cap("capped") - 20) < 2, within_s=30)
            await until(lambda: (found := look.memory("capped")) is not None and len(found.reasons) == 10)
        memory = look.memory("capped")
        assert memory is not None
        last = memory.reasons[-1]
        assert last.committed == 100
        assert abs(last.work_per_request - 5) < 0.5
        assert "rps" in last.sentence


async def test_w8_a_learned_charge_reaches_acquires(valkey: Server) -> None:
    limits = policies({"name": "learning", "match": {}, "rate": 10_000, "charge": "learned"})
    async with (
        steering(valkey.url, limits),
        traffic(valkey.url, limits) as callers,
        callers.flowing(ALL, rate=50, work=lambda: 8.0),
    ):
        await until(lambda: abs(callers.charged - 8) < 0.5, within_s=20)


async def test_w8_a_charge_begins_where_its_policy_says(valkey: Server) -> None:
    learning = {"name": "learning", "match": {}, "rate": 1000, "charge": "learned", "learning": {"initial": 7}}
    async with traffic(valkey.url, policies(learning)) as callers:
        await callers.ask(ALL, work=1.0)
        assert callers.charged == 7


async def test_r10_auto_counts_requests_that_are_many_and_alike_and_work_once_they_vary(valkey: Server) -> None:
    limits = policies({"name": "either", "match": {}, "rate": 1000, "mechanism": "auto", "charge": "learned"})
    look = Look(valkey)
    draw = Random(1)
    works = [1.0]

    def counts_requests() -> bool:
        record = look.record("either")
        return record is not None and record.counts_requests

    async with (
        steering(valkey.url, limits),
        traffic(valkey.url, limits) as callers,
        callers.flowing(ALL, rate=150, work=lambda: draw.choice(works)),
    ):
        await until(counts_requests, within_s=30)
        works[:] = [0.1] * 20 + [100.0]
        await until(lambda: not counts_requests(), within_s=30)


async def test_a_changed_policy_is_steered_by_at_once(valkey: Server) -> None:
    look = Look(valkey)
    link = await open_link(valkey.url)
    async with (
        steering(valkey.url, policies(capped())),
        traffic(valkey.url, policies(capped())) as callers,
        callers.flowing(ALL, rate=100, work=lambda: 5.0),
    ):
        await until(lambda: abs(look.cap("capped") - 20) < 3, within_s=30)
        doubled = policies(capped(rate=200))
        callers.enforce(doubled)
        await PolicyStore(link).apply(doubled, who="test")
        await until(lambda: abs(look.cap("capped") - 40) < 4, within_s=30)
    await link.aclose()


async def test_a_policy_that_comes_later_is_steered_too(valkey: Server) -> None:
    """P6: live within a second."""
    plain = policies({"name": "plain", "match": {}, "rate": 100})
    link = await open_link(valkey.url)
    async with steering(valkey.url, plain) as controller:
        await until(lambda: controller.plans == {})
        await PolicyStore(link).apply(policies(capped(namespace="late")), who="test")
        await until(lambda: controller.owned == [Slot("late")], within_s=3)
        await PolicyStore(link).delete("late", "capped", who="test")
        await until(lambda: controller.owned == [], within_s=3)
        assert Look(valkey, Slot("late")).owner() == "", "given back"
    await link.aclose()


async def test_what_has_nothing_to_steer_costs_nothing(valkey: Server) -> None:
    """No policy that counts requests, learns or is divided: no lease is taken, and no bucket is read."""
    limits = policies({"name": "plain", "match": {}, "rate": 100})
    link = Watched(await open_link(valkey.url))
    async with steering(link, limits) as controller, traffic(valkey.url, limits) as callers:
        beats = len(link.calls)
        await callers.ask(ALL, work=1.0)
        await until(lambda: len(link.calls) > beats + 10)
        assert controller.owned == []
        assert not {"EVAL", "MGET"} & set(link.names[beats:])
    await link.aclose()


async def test_an_idle_slot_is_asked_about_once_a_second(valkey: Server) -> None:
    limits = policies(capped())
    link = Watched(await open_link(valkey.url))
    async with steering(link, limits, cycle_ms=20, lease_ms=4000) as controller, traffic(valkey.url, limits) as callers:
        await callers.ask(ALL, work=1.0)
        # The first doublings: 20, 40, … 640 ms.
        await until(lambda: controller.stats.cycles >= 8, within_s=20)
        before, cycles = link.names.count("MGET"), controller.stats.cycles
        began = valkey.command("TIME")
        await until(lambda: controller.stats.cycles >= cycles + 2, within_s=20)
        ended = valkey.command("TIME")
        assert ended[0] - began[0] + (ended[1] - began[1]) / 1e6 > 1.5, "two cycles, a second each"
        assert link.names.count("MGET") == before, "no bucket is read"
        assert controller.stats.slips < controller.stats.cycles
    await link.aclose()


async def test_f_s3_the_store_may_go_and_come_back(valkey: Server) -> None:
    limits = policies(capped())
    look = Look(valkey)
    async with steering(valkey.url, limits) as controller, traffic(valkey.url, limits) as callers:
        await until(lambda: controller.owned == [Slot()])
        valkey.restart(hard=True)
        link = await open_link(valkey.url)
        await PolicyStore(link).apply(limits, who="test")  # this server keeps nothing
        async with callers.flowing(ALL, rate=60, work=lambda: 5.0):
            await until(lambda: look.memory("capped") is not None, within_s=30)
        assert controller.owned == [Slot()]
        assert controller.stats.failures + controller.stats.leases_lost > 0
        await link.aclose()


async def test_a_damaged_state_is_as_none(valkey: Server) -> None:
    limits = policies(capped())
    look = Look(valkey)
    valkey.command("SET", keys.state(Slot().prefix, "capped"), b"\x93\x01nonsense")
    async with (
        steering(valkey.url, limits),
        traffic(valkey.url, limits) as callers,
        callers.flowing(ALL, rate=60, work=lambda: 5.0),
    ):
        await until(lambda: look.memory("capped") is not None, within_s=20)
