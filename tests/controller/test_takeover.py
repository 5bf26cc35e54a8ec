"""F-P7: the owner is killed, paused, or there are two: caps stay, another takes over, and no stale write lands."""

import asyncio
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from limiter.controller.ownership import preferred
from limiter.controller.plan import Plan, make_plans
from limiter.controller.slot_cycle import SlotCycle
from limiter.store import keys
from limiter.store.call_layout import LeaseLost
from limiter.store.keys import Slot
from limiter.store.link.connect import Link, open_link
from limiter.store.policies.policy_store import PolicyStore
from limiter.store.steering import Steering
from tests.support import eventually
from tests.support.command import HEADGATE, environment, headgate_up
from tests.support.nodes import Watched, until
from tests.support.servers import Server
from tests.support.steered import Look, capped, policies
from tests.support.stores import STEER
from tests.support.traffic import steering, traffic

ALL = {"service": "orders"}
LEASE_MS = 2000
SLACK_S = 1.0
"""For a busy machine, and the beat by which the others notice."""


@contextmanager
def controllers(server: Server, count: int) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """So many `headgate controller`s, by the names they go by."""
    found = {}
    with ExitStack() as stack:
        for _ in range(count):
            process = stack.enter_context(
                subprocess.Popen(
                    [*HEADGATE, "controller"],
                    env=environment(redis_url=server.url, lease_ms=str(LEASE_MS)),
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            stack.callback(process.kill)
            assert process.stdout is not None
            found[process.stdout.readline().split()[3]] = process
        yield found


async def apply(server: Server) -> None:
    link = await open_link(server.url)
    await PolicyStore(link).apply(policies(capped()), who="test")
    await link.aclose()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "paused"])
def test_f_p7_another_takes_over_within_the_lease(valkey: Server, number: signal.Signals) -> None:
    asyncio.run(apply(valkey))
    look = Look(valkey)
    with controllers(valkey, 2) as running:
        first = preferred("default", running)
        eventually(lambda: look.owner() == first, what="who ought to own the slot does")
        fence = look.fence()
        running[first].send_signal(number)
        began_s = time.monotonic()
        second = eventually(lambda: (owner := look.owner()) not in ("", first) and owner, within_s=10)
        took_s = time.monotonic() - began_s
        assert took_s < LEASE_MS / 1000 + SLACK_S, f"took {took_s:.2f} s"
        assert second in running
        assert look.fence() == fence + 1
        if number is signal.SIGSTOP:
            running[first].send_signal(signal.SIGCONT)
            # It is preferred, so it comes back into its own: by a lease of its own, after the other let go.
            eventually(lambda: look.owner() == first, within_s=10)
            assert look.fence() == fence + 2


def test_a_controller_ends_in_order_and_gives_its_leases_back(valkey: Server) -> None:
    asyncio.run(apply(valkey))
    look = Look(valkey)
    with controllers(valkey, 1) as running:
        (owner,) = running
        eventually(lambda: look.owner() == owner)
        running[owner].send_signal(signal.SIGTERM)
        assert running[owner].wait(timeout=10) == 0
        assert look.owner() == "", "nobody has to wait for the lease to end"


class Pausing(Watched):
    """A link that, once told to, holds back what is written, as if the process had been paused right before."""

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self.is_pausing = False
        self.reached = asyncio.Event()

    async def call(self, key: bytes, *command: bytes | str | float, timeout_s: float) -> Any:
        if self.is_pausing and command[1] == STEER.sha:
            self.hold()
            self.reached.set()
        return await super().call(key, *command, timeout_s=timeout_s)


async def test_f_p7_a_write_of_a_paused_owner_changes_nothing(valkey: Server) -> None:
    """It decided, was paused before it wrote, and another took over meanwhile."""
    limits = policies(capped())
    plan = make_plans(limits)["default"]
    link, new_link = Pausing(await open_link(valkey.url)), await open_link(valkey.url)
    old, look = Steering(link), Look(valkey)
    lease = await old.take(Slot())
    assert lease is not None
    cycle = SlotCycle(old, Slot(), lease, plan, cycle_s=0.1)
    async with traffic(valkey.url, limits) as callers:

        async def cycling() -> None:
            while True:
                await callers.ask(ALL, work=50.0)
                await cycle.run()

        running = asyncio.create_task(cycling())
        await until(lambda: look.memory("capped"))
        link.is_pausing = True
        await asyncio.wait_for(link.reached.wait(), timeout=10)
        before, kept = look.record("capped"), look.memory("capped")
        valkey.command("DEL", keys.lease(Slot().prefix))  # its lease ended
        assert await Steering(new_link).take(Slot()) is not None
        link.release()
        with pytest.raises(LeaseLost):
            await running
        with pytest.raises(LeaseLost):
            await cycle.run()
        assert look.memory("capped") == kept
        assert look.record("capped") == before
    await link.aclose()
    await new_link.aclose()


async def test_two_controllers_share_the_namespaces_and_one_takes_all_when_it_is_alone(valkey: Server) -> None:
    names = [f"n{number}" for number in range(12)]
    limits = policies(*(capped(name=f"p-{name}", namespace=name) for name in names))
    slots = [Slot(name) for name in sorted(names)]
    async with steering(valkey.url, limits) as one:
        await until(lambda: one.owned == slots)
        async with steering(valkey.url, limits) as two:
            await until(lambda: one.owned and two.owned and sorted(one.owned + two.owned) == slots)
            for mine, controller in ((one.owned, one), (two.owned, two)):
                assert all(preferred(slot.namespace, [one.name, two.name]) == controller.name for slot in mine)
        await until(lambda: one.owned == slots)
        assert one.stats.leases_lost == 0, "handed over, not lost"


async def test_state_survives_a_takeover(valkey: Server) -> None:
    """Smoothed values go on: the new owner does not begin from nothing."""
    limits = policies(capped())
    look = Look(valkey)

    def has_settled() -> bool:
        memory = look.memory("capped")
        return memory is not None and len(memory.reasons) == 10 and all(abs(it.after - 20) < 4 for it in memory.reasons)

    async with traffic(valkey.url, limits) as callers:
        async with steering(valkey.url, limits), callers.flowing(ALL, rate=60, work=lambda: 5.0):
            await until(has_settled, within_s=60)
        kept = look.memory("capped")
        assert kept is not None
        assert kept.state.caps.work_rate > 0
        async with steering(valkey.url, limits) as second:
            await callers.ask(ALL, work=5.0)
            await until(lambda: second.stats.buckets > 0)
            (cycle,) = [keeper.cycle for keeper, _ in second._keepers.values()]
            assert cycle is not None
            bucket = cycle.buckets["capped"]
            assert kept.reasons[-1] in bucket.reasons
            assert bucket.state.caps.cost.work == pytest.approx(5.0, rel=0.2)
            assert abs(look.cap("capped") - 20) < 6, "and the cap stays about where it was"


def test_rendezvous_moves_only_what_it_must() -> None:
    names = [f"namespace-{number}" for number in range(1000)]
    three, two = ["a", "b", "c"], ["a", "b"]
    before = {name: preferred(name, three) for name in names}
    after = {name: preferred(name, two) for name in names}
    assert all(after[name] == owner for name, owner in before.items() if owner != "c")
    counts = [list(before.values()).count(name) for name in three]
    assert all(250 < count < 420 for count in counts), "a fair part for each"


def test_the_command_takes_no_store_that_is_not_there(tmp_path: Path) -> None:
    refused = subprocess.run(
        [*HEADGATE, "controller"], env=environment(data_dir=str(tmp_path)), capture_output=True, text=True, check=False
    )
    assert refused.returncode == 1
    assert refused.stderr.startswith(f"headgate: no store runs in {tmp_path}")


def test_up_runs_a_controller_and_ends_with_it(valkey: Server) -> None:
    asyncio.run(apply(valkey))
    look = Look(valkey)
    with headgate_up({"redis_url": valkey.url}) as (process, _):
        eventually(look.owner, within_s=20, what="its controller owns the slot")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0
    assert look.owner() == "", "the lease was given back"


class Interrupting(Watched):
    """A link on which policies change while records are on their way."""

    def __init__(self, link: Link, interrupt: Callable[[], None]) -> None:
        super().__init__(link)
        self._interrupt = interrupt

    async def call(self, key: bytes, *command: bytes | str | float, timeout_s: float) -> Any:
        answer = await super().call(key, *command, timeout_s=timeout_s)
        if command[0] in ("MGET", b"MGET"):
            self._interrupt()
        return answer


async def test_a_policy_that_goes_while_its_buckets_are_read_ends_no_cycle(valkey: Server) -> None:
    """F-P7: found by the campaign; the slot was given up and started anew."""
    limits = policies(capped())
    plans: list[Plan] = []

    def interrupt() -> None:
        for plan in plans:
            cycle.adopt(plan)

    link = Interrupting(await open_link(valkey.url), interrupt)
    steers = Steering(link)
    lease = await steers.take(Slot())
    assert lease is not None
    cycle = SlotCycle(steers, Slot(), lease, make_plans(limits)["default"], cycle_s=0.1)
    async with traffic(valkey.url, limits) as callers:
        await callers.ask(ALL, work=5.0)
        plans.append(Plan("default", 1, {}))
        assert await cycle.run() == 1
        assert cycle.buckets == {}
    await link.aclose()
