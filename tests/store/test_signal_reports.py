"""Reports of load on a real server (G5): what is kept, how much of it, for how long, and how it gets there."""

import asyncio
from typing import Any

import pytest

from limiter.model.overload.signals import SIGNAL_TTL_US, SOURCES_MAX, Report, add, loads
from limiter.store import call_layout, keys, signal_reports
from limiter.store.keys import Slot
from limiter.store.link.connect import open_link
from limiter.store.link.script_calls import run_script
from limiter.store.scripts import SignalScript
from limiter.store.signal_reports import Signals, TooManyReports
from limiter.store.steering import Steering
from tests.support.nodes import until
from tests.support.operations import S_US, START_US
from tests.support.servers import Server
from tests.support.stores import ScriptStore

CPU = {"cpu": 0.5}


def kept(store: ScriptStore, bucket: str = "orders") -> tuple[Report, ...]:
    raw = store.signals(bucket)
    return () if raw is None else call_layout.unpack_reports(raw)


def test_g5_a_source_s_next_report_takes_the_place_of_its_last(server: Server) -> None:
    store = ScriptStore(server)
    store.report("orders", "host-1", {"cpu": 0.9, "queue_age": 3.0}, START_US)
    store.report("orders", "host-2", CPU, START_US + 1)
    assert store.report("orders", "host-1", {"cpu": 0.7}, START_US + 2) == 2
    assert [(report.reported_us - START_US, report.loads) for report in kept(store)] == [(1, CPU), (2, {"cpu": 0.7})]


def test_g5_a_source_that_falls_silent_is_forgotten(server: Server) -> None:
    store = ScriptStore(server)
    store.report("orders", "gone", CPU, START_US)
    store.report("orders", "alive", CPU, START_US + SIGNAL_TTL_US)
    assert [report.source for report in kept(store)] == [keys.source_digest("alive")]
    assert 0 < store.client.pttl(keys.signals(store.prefix, "orders")) <= SIGNAL_TTL_US / 1000


def test_f_n7_sources_are_bounded_and_the_newest_stay(server: Server) -> None:
    store = ScriptStore(server)
    for number in range(SOURCES_MAX + 5):
        count = store.report("orders", f"host-{number}", {"cpu": float(number)}, START_US + number)
    assert count == SOURCES_MAX
    assert [report.loads["cpu"] for report in kept(store)] == [float(5 + number) for number in range(SOURCES_MAX)]


@pytest.mark.parametrize("foreign", [b"", b"noise", b"x" * 18 + b"\xff\xff", b"\0" * 17])
def test_f_s11_reports_that_cannot_be_read_are_replaced(server: Server, foreign: bytes) -> None:
    store = ScriptStore(server)
    store.client.set(keys.signals(store.prefix, "orders"), foreign)
    assert store.report("orders", "host-1", CPU, START_US) == 1
    assert len(kept(store)) == 1


def test_f_s11_a_value_of_another_type_is_replaced(server: Server) -> None:
    store = ScriptStore(server)
    store.client.rpush(keys.signals(store.prefix, "orders"), "x")
    assert store.report("orders", "host-1", CPU, START_US) == 1


def test_f_t2_reports_from_a_time_that_has_not_come_are_dropped(server: Server) -> None:
    store = ScriptStore(server)
    store.report("orders", "ahead", CPU, START_US + 3600 * S_US)
    assert store.report("orders", "host-1", CPU, START_US) == 1


def test_the_model_keeps_the_same() -> None:
    reports: tuple[Report, ...] = ()
    for number in range(SOURCES_MAX + 5):
        reports = add(reports, Report(b"%08d" % number, START_US + number, CPU))
    assert len(reports) == SOURCES_MAX
    reports = add(reports, Report(b"late", START_US + 2 * SIGNAL_TTL_US, {"cpu": 2.0}))
    assert loads(reports, since_us=START_US) == {"cpu": 2.0}


def test_names_and_loads_come_back_as_they_were() -> None:
    given = {"cpu": 0.93, "x" * 64: 1e300, "é": 0.0}
    script = SignalScript()
    _, _, _, digest, packed = script.call(Slot().prefix, "b", "host-1", given)
    assert isinstance(packed, bytes)
    raw = call_layout._REPORT.pack(digest, 1.0, len(packed)) + packed
    assert call_layout.unpack_reports(raw) == (Report(keys.source_digest("host-1"), 1.0, given),)
    assert call_layout.unpack_reports(raw[:-1]) == (), "what cannot be read says nothing"


async def test_the_controller_reads_a_bucket_s_own_reports_and_those_of_its_policy(valkey: Server) -> None:
    link, slot = await open_link(valkey.url), Slot()
    reports, steering = Signals(link), Steering(link)
    await reports.report([slot], "orders", "host-1", {"cpu": 0.9})
    await reports.report([slot], "orders:c1", "host-2", {"queue_age": 2.0})
    await reports.report([slot], "whole", "host-1", CPU)
    found = await steering.signals(slot, ["orders:c1", "orders:c2", "whole", "silent"])
    await link.aclose()
    assert {name: [dict(report.loads) for report in reports] for name, reports in found.items()} == {
        "orders:c1": [{"queue_age": 2.0}, {"cpu": 0.9}],
        "orders:c2": [{"cpu": 0.9}],
        "whole": [CPU],
    }


class Gate:
    """Lets calls of reports through to the server, and knows how many are under way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = asyncio.Event()
        self.under_way: list[bytes] = []
        """Whose."""
        self.most = self.most_of_one = 0
        monkeypatch.setattr(signal_reports, "run_script", self._run)

    async def _run(self, link: Any, prefix: bytes, script: Any, call: list[Any], *, timeout_s: float) -> Any:
        source = call[3]
        self.under_way.append(source)
        self.most = max(self.most, len(self.under_way))
        self.most_of_one = max(self.most_of_one, self.under_way.count(source))
        try:
            await self.open.wait()
            return await run_script(link, prefix, script, call, timeout_s=timeout_s)
        finally:
            self.under_way.remove(source)


def slots(count: int) -> list[Slot]:
    return [Slot("wide", partition) for partition in range(count)]


async def test_g5_few_calls_of_reports_are_under_way_at_once(valkey: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many partitions there are and however many report: the connections are for decisions."""
    link, gate = await open_link(valkey.url), Gate(monkeypatch)
    reports = Signals(link)
    many = [
        asyncio.create_task(reports.report(slots(50), f"orders-{number}", f"host-{number}", CPU))
        for number in range(10)
    ]
    await until(lambda: len(gate.under_way) == signal_reports.IN_FLIGHT_MAX)
    gate.open.set()
    await asyncio.gather(*many)
    await link.aclose()
    assert (gate.most, gate.most_of_one) == (signal_reports.IN_FLIGHT_MAX, signal_reports.EACH_MAX)
    assert len(valkey.client().keys("hg:{wide*}:u:orders-*")) == 500


async def test_g5_more_reports_than_may_wait_are_refused(valkey: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report that is wider than all that may wait is taken if nothing else waits."""
    monkeypatch.setattr(signal_reports, "WAITING_MAX", 100)
    link, gate = await open_link(valkey.url), Gate(monkeypatch)
    reports = Signals(link)
    first = asyncio.create_task(reports.report(slots(80), "orders", "host-1", CPU))
    await until(lambda: gate.under_way)
    with pytest.raises(TooManyReports, match="80 calls of other reports are waiting"):
        await reports.report(slots(21), "orders", "host-2", CPU)
    fits = asyncio.create_task(reports.report(slots(20), "orders", "host-3", CPU))
    gate.open.set()
    await asyncio.gather(first, fits)
    await reports.report(slots(150), "orders", "host-4", CPU)
    await link.aclose()
