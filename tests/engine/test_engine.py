"""A node's engine: what it does with its store absent, lost and found again."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from limiter.controller.worker import Controller
from limiter.engine import engine as engine_module
from limiter.engine.engine import Engine, open_engine
from limiter.engine.planner import Planner
from limiter.engine.policy_file import load_policy_file
from limiter.engine.request_errors import UnknownReservation
from limiter.model.bucket.contract import AcquireRequest, Decision, Granted, SettleRequest
from limiter.model.policy.policy_set import PolicySet
from limiter.model.policy.problems import PolicyError
from limiter.model.policy.reading import read_policy
from limiter.model.steps import Steps
from limiter.settings import Settings
from limiter.store import keys
from tests.support.nodes import until
from tests.support.servers import Server, running

FILE = """
policies:
  - name: reads
    match: {operation: read}
    per: [customer]
    rate: 100
    capacity: 500ms
    charge: 2
    on_store_failure: open
"""
ASK = AcquireRequest({"operation": "read", "customer": "c1"})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "policies.yaml"
    path.write_text(FILE)
    return path


@asynccontextmanager
async def running_engine(url: str, **settings: Any) -> AsyncIterator[Engine]:
    engine = await open_engine(Settings(**settings), url)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def granted(engine: Engine) -> Granted:
    decision: Decision = await engine.decider.acquire(ASK)
    assert isinstance(decision, Granted)
    return decision


async def test_a_policy_file_is_in_force_from_the_start(valkey: Server, file: Path) -> None:
    async with running_engine(valkey.url, policies=file, deadline_ms=2000) as engine:
        assert engine.troubles() == []
        assert (await granted(engine)).limits[0].policy == "reads"


async def test_nodes_without_a_configured_secret_know_each_other_s_reservations(valkey: Server, file: Path) -> None:
    async with (
        running_engine(valkey.url, policies=file, deadline_ms=2000) as one,
        running_engine(valkey.url, deadline_ms=2000) as other,
    ):
        grant = await granted(one)
        assert (await other.decider.settle(SettleRequest(grant.reservation, 12))).adjusted == 10


async def test_p6_a_policy_put_at_one_node_is_live_at_the_others(valkey: Server) -> None:
    async with running_engine(valkey.url) as one, running_engine(valkey.url) as other:
        policy = read_policy({"name": "reads", "match": {}, "rate": 5})
        await one.store.put(policy, who="a test", expected=None)
        await until(lambda: other.policies.policies == [policy])
        await until(lambda: one.policies.policies == [policy])
        await one.store.delete("default", "reads", who="a test", expected=None)
        await until(lambda: other.policies.policies == [])


async def test_policies_that_cannot_be_put_in_force_are_named_and_leave_the_old_ones(
    valkey: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An old node may find policies that a newer one wrote. Anybody may read warnings, so only the log says why."""
    unheard_of = read_policy({"name": "new", "match": {}, "rate": 7})

    def refuse(policies: PolicySet, before: Planner) -> Steps[Planner]:
        if unheard_of in policies.policies:
            raise ValueError("unheard of")
        return steps(policies, before)

    steps = Planner.steps
    monkeypatch.setattr(Planner, "steps", refuse)
    async with running_engine(valkey.url) as engine:
        await engine.store.put(unheard_of, who="a test", expected=None)
        await until(lambda: bool(engine.warnings()))
        assert engine.warnings() == [
            "the store's policies cannot be used and older ones stay in force; the log of the node says why"
        ]
        assert "ValueError: unheard of" in caplog.text
        assert engine.policies.policies == []
        await engine.store.delete("default", "new", who="a test", expected=None)
        await until(lambda: not engine.warnings())


def test_f_p1_an_invalid_policy_file_is_refused_before_anything_starts(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("policies: [{name: x, rate: fast}]")
    with pytest.raises(PolicyError, match=r"bad\.yaml.*policy 'x', rate: found 'fast'"):
        asyncio.run(open_engine(Settings(policies=path), "redis://127.0.0.1:1"))


async def test_f_s2_a_node_starts_without_its_store_and_connects_later(tmp_path: Path, file: Path) -> None:
    """Promise 5"""
    with running("valkey", tmp_path / "store") as server:
        server.stop()
        async with running_engine(server.tcp_url, policies=file) as engine:
            assert len(engine.troubles()) == 1
            assert (await granted(engine)).degraded
            server.start()
            await until(lambda: not engine.troubles())
            assert not (await granted(engine)).degraded


@pytest.mark.parametrize("secret", [None, "shared by all of them"])
async def test_grants_of_a_node_without_its_store_are_known_to_others_by_a_configured_secret_alone(
    tmp_path: Path, file: Path, secret: str | None
) -> None:
    """docs/operations.md: without one, it signs with its own until the store is there."""
    with running("valkey", tmp_path / "store") as server:
        server.stop()
        async with running_engine(server.tcp_url, policies=file, deadline_ms=500, secret=secret) as one:
            early = (await granted(one)).reservation
            server.start()
            await until(lambda: not one.troubles())
            async with running_engine(server.tcp_url, deadline_ms=2000, secret=secret) as other:
                if secret is None:
                    with pytest.raises(UnknownReservation):
                        await other.decider.settle(SettleRequest(early, 12))
                else:
                    assert (await other.decider.settle(SettleRequest(early, 12))).adjusted == 12
                assert (await other.decider.settle(SettleRequest((await granted(one)).reservation, 12))).adjusted == 10


async def test_f_s3_a_store_that_is_away_is_reported_and_its_return_needs_no_traffic(
    valkey: Server, file: Path
) -> None:
    async with running_engine(valkey.tcp_url, policies=file, deadline_ms=50) as engine:
        valkey.pause()
        try:
            for _ in range(10):
                await granted(engine)
            (warning,) = engine.warnings()
            assert warning.startswith("the store does not answer in time")
            assert engine.troubles() == [], "it still decides, as each policy says"
        finally:
            valkey.resume()
        await until(lambda: not engine.warnings())


async def test_f_s9_an_eviction_policy_is_warned_of(valkey: Server) -> None:
    valkey.client().config_set("maxmemory-policy", "allkeys-lru")
    try:
        async with running_engine(valkey.url) as engine:
            (warning,) = engine.warnings()
            assert "allkeys-lru" in warning
            assert "noeviction" in warning
    finally:
        valkey.client().config_set("maxmemory-policy", "noeviction")


async def test_f_s10_policies_are_restored_from_the_file_after_a_flush(valkey: Server, file: Path) -> None:
    async with running_engine(valkey.url, policies=file, deadline_ms=2000) as engine:
        await granted(engine)
        before = (await engine.store.load()).kept
        valkey.client().flushall()

        async def restored() -> bool:
            return (await engine.store.load()).kept.keys() == before.keys()

        async with asyncio.timeout(10):
            while not await restored():  # noqa: ASYNC110
                await asyncio.sleep(0)
        await until(lambda: [policy.name for policy in engine.policies.policies] == ["reads"])
        assert (await granted(engine)).limits[0].balance == 48


def rewrite(file: Path, text: str | None) -> None:
    """Edit or remove the policy file, as an operator would."""
    if text is None:
        file.unlink()
    else:
        file.write_text(text)


EDITED = FILE.replace("rate: 100", "rate: 7") + "  - {name: added, match: {operation: write}, rate: 3}\n"


async def test_f_s10_the_file_is_put_back_as_it_is_now_and_not_as_it_was_at_the_start(
    valkey: Server, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """F-S10: what was edited and applied since the node started was undone."""
    async with running_engine(valkey.url, policies=file) as engine:
        rewrite(file, EDITED)
        await engine.store.apply(load_policy_file(file), who="ada", owner="file", prune=True, foreign="take_over")
        await until(lambda: len(engine.policies.policies) == 2)
        valkey.client().flushall()
        await until(lambda: "the policies of the file were put back" in caplog.text)
        assert await kept_rates(engine) == {"reads": 7.0, "added": 3.0}
        await until(lambda: len(engine.warnings()) == 1)  # of the loss: the store is as the file says


@pytest.mark.parametrize("now", ["policies: [{name: reads, rate: fast}]", "policies: [", None])
async def test_f_s10_a_file_that_cannot_be_used_any_more_is_put_back_as_it_was(
    valkey: Server, file: Path, now: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_engine(valkey.url, policies=file) as engine:
        rewrite(file, now)
        valkey.client().flushall()
        await until(lambda: "the policies of the file were put back" in caplog.text)
        assert await kept_rates(engine) == {"reads": 100.0}
    assert "the policy file cannot be used in its present form" in caplog.text
    assert str(file) in caplog.text


OWNED = "policies: [{name: reads, match: {service: orders}, rate: 1/d, capacity: 50}, {name: writes, rate: 10}]"


async def kept_rates(engine: Engine) -> dict[str, object]:
    return {policy.name: policy.rate for policy in (await engine.store.load()).policies.policies}


async def test_f_p13_a_node_that_starts_with_an_older_file_does_not_undo_a_rollback(
    valkey: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """F-P13: the runbook's rollback stays; a warning counts the differences, and only the log names them."""
    path = tmp_path / "policies.yaml"
    path.write_text(OWNED)
    async with running_engine(valkey.url, policies=path) as engine:
        assert engine.warnings() == []
        path.write_text(OWNED.replace("rate: 10", "rate: 20"))
    async with running_engine(valkey.url, policies=path) as engine:
        assert await kept_rates(engine) == {"reads": "1/d", "writes": 20.0}, "its own it may change"
        await engine.store.rollback("default", "writes", 1, who="ada")
        await until(lambda: bool(engine.warnings()))
    caplog.clear()
    async with running_engine(valkey.url, policies=path) as engine:
        assert await kept_rates(engine) == {"reads": "1/d", "writes": 10.0}
        (warning,) = engine.warnings()
        assert warning.startswith(
            "1 entry of the policy file differs from the store, where others own what is in force"
        )
        assert "writes" not in warning, "anybody may read it"
        await engine.store.put(read_policy({"name": "unrelated", "rate": 20}), who="ada")
        await until(lambda: len(engine.policies.policies) == 3)
        named = (
            "policy default/writes in the file differs from the store, where it was changed over the API at revision 3"
        )
        assert caplog.text.count(named) == 1, "the log names it, once"
        await engine.store.delete("default", "unrelated", who="ada")
        assert "headgate policies apply --take-over" in warning
        path.write_text(OWNED)
        await engine.store.put(read_policy({"name": "writes", "rate": 20}), who="ada")
        await until(lambda: not engine.warnings())  # as the file of this node says
    async with running_engine(valkey.url, policies=path, policies_take_over=True) as engine:
        assert await kept_rates(engine) == {"reads": "1/d", "writes": 10.0}
        assert engine.warnings() == []


async def test_a_file_removes_policies_that_it_no_longer_contains_only_with_prune(
    valkey: Server, tmp_path: Path
) -> None:
    """P12"""
    path = tmp_path / "policies.yaml"
    path.write_text(OWNED)
    async with running_engine(valkey.url, policies=path) as engine:
        await engine.store.put(read_policy({"name": "by-hand", "rate": 1}), who="ada")
    path.write_text("policies: [{name: reads, match: {service: orders}, rate: 1/d, capacity: 50}]")
    async with running_engine(valkey.url, policies=path) as engine:
        assert set(await kept_rates(engine)) == {"reads", "writes", "by-hand"}
    async with running_engine(valkey.url, policies=path, policies_prune=True, policies_owner="another") as engine:
        assert set(await kept_rates(engine)) == {"reads", "writes", "by-hand"}, "nothing of its own to remove"
    async with running_engine(valkey.url, policies_prune=True) as engine:
        assert set(await kept_rates(engine)) == {"reads", "writes", "by-hand"}, "no file, nothing to compare with"
    async with running_engine(valkey.url, policies=path, policies_prune=True) as engine:
        assert set(await kept_rates(engine)) == {"reads", "by-hand"}


async def test_the_first_node_of_a_new_version_takes_over_the_policies_of_an_older_one(
    valkey: Server, file: Path
) -> None:
    """P12: policies were once kept by their names alone."""
    text = b'{"name":"older","match":{"a":"b"},"namespace":"tenant","rate":5}'
    valkey.command("HSET", keys.POLICIES_CURRENT, "p:older", b"1 " + text, "revision", b"1 lifename")
    async with running_engine(valkey.url, policies=file) as engine:
        assert [f"{policy.namespace}/{policy.name}" for policy in engine.policies.policies] == [
            "default/reads", "tenant/older"
        ]  # fmt: skip
        assert engine.decider.planner.find("tenant", "older") is not None
    assert valkey.command("HEXISTS", keys.POLICIES_CURRENT, "p:older") == 0


async def test_f_s3_a_store_that_is_away_for_long_and_its_return_are_logged(
    valkey: Server, file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_module, "STORE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(engine_module, "WATCH_S", 0.05)
    async with running_engine(valkey.tcp_url, policies=file, deadline_ms=50) as engine:
        valkey.pause()
        try:
            await until(lambda: not engine.store_is_up)
        finally:
            valkey.resume()
        await until(lambda: engine.store_is_up)
    assert "the store answers again" in caplog.text


async def test_f_p13_a_file_that_differs_in_many_entries_is_not_logged_whole(
    valkey: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_module, "FOREIGN_LOGGED_MAX", 1)
    path = tmp_path / "policies.yaml"
    path.write_text(OWNED)
    async with running_engine(valkey.url) as engine:
        for name in ("reads", "writes"):
            await engine.store.put(read_policy({"name": name, "rate": 77}), who="ada")
    async with running_engine(valkey.url, policies=path):
        pass
    assert "1 more entries of the file differ from the store" in caplog.text


async def test_q11_a_node_warns_where_policies_need_a_controller_and_none_is_heard_of(
    valkey: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("limiter.engine.engine.UNSTEERED_S", 1.5)
    monkeypatch.setattr("limiter.engine.engine.WATCH_S", 0.05)
    async with running_engine(valkey.url) as engine:
        await engine.store.put(read_policy({"name": "plain", "rate": 5}), who="a test", expected=None)
        steered = read_policy({"name": "steered", "rate": 5, "mechanism": "requests"})
        await engine.store.put(steered, who="a test", expected=None)
        await until(lambda: bool(engine.warnings()))
        (warning,) = engine.warnings()
        assert warning.startswith("policies need steering, and no controller has been heard of")
        controller = asyncio.create_task(Controller(engine.link).run())
        try:
            await until(lambda: not engine.warnings())
        finally:
            controller.cancel()
            await asyncio.gather(controller, return_exceptions=True)
        await until(lambda: bool(engine.warnings()))
        await engine.store.delete("default", "steered", who="a test", expected=None)
        await until(lambda: not engine.warnings())
