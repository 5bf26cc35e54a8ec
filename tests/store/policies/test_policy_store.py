"""The policy store: revisions, the audit log, rollbacks, whole sets, and data that cannot be used."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path

import pytest

from limiter.model.policy.policy_log import Applied, ApplyStatus, Logged
from limiter.model.policy.policy_set import PolicySet
from limiter.model.policy.problems import PolicyError
from limiter.model.policy.reading import dump, read_namespace
from limiter.store import keys
from limiter.store.inspect import CursorError
from limiter.store.link.connect import Link, open_link
from limiter.store.policies import policy_store
from limiter.store.policies.policy_entries import policy_place
from limiter.store.policies.policy_layout import pack_logged
from limiter.store.policies.policy_sets import AppliedSet, OwnedByOthers
from limiter.store.policies.policy_store import PolicyMissing, PolicyStore, RevisionConflict, StoredPolicies
from limiter.store.store_errors import StoreError, StoreOutOfMemory, StoreUnavailable
from tests.support.nodes import until
from tests.support.policies import policy, policy_set, rates, watching
from tests.support.proxy import Proxy
from tests.support.servers import Cluster, Server, free_port, running

START_US = 1_790_000_000_000_000


def revisions(stored: StoredPolicies) -> dict[str, int]:
    return {place.title: kept.revision for place, kept in stored.kept.items()}


def owners(stored: StoredPolicies) -> dict[str, str]:
    return {place.title: kept.owner for place, kept in stored.kept.items()}


def titles(applied: AppliedSet) -> tuple[int, list[str], list[str], list[str]]:
    """The changes that applying a set made, by name."""
    made, changed, removed = (
        [place.title for place in places] for places in (applied.made, applied.changed, applied.removed)
    )
    return applied.revision, made, changed, removed


async def test_an_empty_store_holds_nothing(store: PolicyStore) -> None:
    assert await store.load() == StoredPolicies(0, PolicySet())
    assert await store.audit() == []
    with pytest.raises(PolicyMissing, match="there is no policy default/reads"):
        await store.history("default", "reads")


async def test_a_policy_that_is_put_is_loaded(store: PolicyStore) -> None:
    reads = policy(match={"operation": "read*", "customer": None}, capacity="500ms", reserve={"sheddable": "50%"})
    assert await store.put(reads, who="ada") == 1
    stored = await store.load()
    assert (stored.revision, stored.policies.policies, revisions(stored)) == (1, [reads], {"default/reads": 1})
    assert [dump(found) for found in stored.policies.policies] == [dump(reads)]
    assert (stored.policy("default", "reads"), stored.policy("default", "writes")) == (reads, None)


async def test_each_change_has_a_revision_of_its_own(store: PolicyStore) -> None:
    assert await store.put(policy("a"), who="ada") == 1
    assert await store.put(policy("b"), who="ada") == 2
    assert await store.put(policy("a", rate=5), who="ada") == 3
    assert await store.put(policy("b"), who="ada") == 2, "nothing changed"
    assert await store.delete("default", "a", who="ada") == 4
    assert await store.put(policy("a"), who="ada", expected=0) == 5
    stored = await store.load()
    assert (stored.revision, revisions(stored)) == (5, {"default/a": 5, "default/b": 2})


async def test_f_p6_of_two_editors_at_once_one_is_refused(store: PolicyStore) -> None:
    """F-P6: an edit of a policy that has changed meanwhile is refused, and nothing of it is kept."""
    first = await store.put(policy(), who="ada")
    results = await asyncio.gather(
        *(store.put(policy(rate=rate), who="somebody", expected=first) for rate in range(1, 9)), return_exceptions=True
    )
    (winner,) = [number for number, result in enumerate(results) if not isinstance(result, Exception)]
    losers = [result for result in results if isinstance(result, Exception)]
    assert all(
        isinstance(loser, RevisionConflict) and (loser.place.name, loser.found) == ("reads", 2) for loser in losers
    )
    assert rates(await store.load()) == {"reads": winner + 1.0}
    assert len(await store.audit()) == 2


async def test_f_p6_expectations(store: PolicyStore) -> None:
    with pytest.raises(RevisionConflict, match="there is no policy default/reads") as none_yet:
        await store.put(policy(), who="ada", expected=1)
    assert none_yet.value.found == 0
    await store.put(policy(), who="ada", expected=0)
    with pytest.raises(RevisionConflict, match="policy default/reads is at revision 1"):
        await store.put(policy(rate=5), who="ada", expected=0)
    with pytest.raises(RevisionConflict):
        await store.delete("default", "reads", who="ada", expected=7)
    with pytest.raises(PolicyMissing):
        await store.delete("default", "writes", who="ada")
    await store.delete("default", "reads", who="ada", expected=1)
    await store.put(policy(), who="ada", expected=0)
    with pytest.raises(RevisionConflict):  # deleted and made again is not the one that was read
        await store.delete("default", "reads", who="ada", expected=1)


@pytest.mark.parametrize("name", ["", "a b", "a{b}", "\ud800", "x\n", "x" * 10_000, "../a", "a\x00"])
async def test_text_that_cannot_be_a_name_is_not_found(store: PolicyStore, name: str) -> None:
    """F-N3, F-N4"""
    for attempt in (
        store.history("default", name),
        store.delete("default", name, who="ada"),
        store.rollback("default", name, 1, who="ada"),
    ):
        with pytest.raises(PolicyMissing, match=r"^there is no policy '[ -~]{0,80}'$"):
            await attempt


async def test_the_audit_log_has_author_change_and_time(store: PolicyStore, server: Server) -> None:
    seconds, _ = server.command("TIME")
    await store.put(policy(), who="ada")
    await store.put(policy(rate=5), who="žofie")
    await store.delete("default", "reads", who="x" * 1000)
    newest, middle, oldest = await store.audit()
    assert (newest.action, newest.name, newest.before, newest.after) == (
        "delete", "reads", {"name": "reads", "rate": 5}, None
    )  # fmt: skip
    assert newest.who == "x" * 256
    assert (middle.action, middle.who, middle.revision, middle.kind) == ("put", "žofie", 2, "policy")
    assert (oldest.before, oldest.after) == (None, {"name": "reads", "rate": 100})
    assert all(0 <= entry.when_us - int(seconds) * 1_000_000 < 60_000_000 for entry in (newest, middle, oldest))
    assert await store.history("default", "reads") == [newest, middle, oldest]
    assert await store.audit(2) == [newest, middle]
    assert await store.audit(0) == []


async def test_the_audit_log_is_read_page_by_page_while_it_grows(store: PolicyStore) -> None:
    await store.put(policy("first"), who="ada")
    await store.apply(policy_set(*(policy(f"p{number}") for number in range(7)), wide=4), who="file")
    await store.delete("default", "first", who="ada")
    everything = await store.audit()
    assert len(everything) == 10
    read, cursor = [], ""
    while True:
        page = await store.audit_page(cursor=cursor, limit=3)
        read += page.entries
        cursor = page.cursor
        if not cursor:
            break
        assert len(page.entries) == 3
        await store.put(policy("other", rate=len(read)), who="bob")  # moves everything along
    assert read == everything
    for nonsense in ("x", "1", "1.", "-1.0", "1.1.1", "٣.1", "1" * 99):
        with pytest.raises(CursorError):
            await store.audit_page(cursor=nonsense, limit=3)


async def test_namespaces_are_entries_like_policies(store: PolicyStore) -> None:
    wide = read_namespace("wide", {"partitions": 4, "partition_by": ["customer"]})
    assert await store.put_namespace("wide", wide, who="ada", expected=0) == 1
    with pytest.raises(RevisionConflict, match="namespace wide is at revision 1"):
        await store.put_namespace("wide", read_namespace("wide", {}), who="bob", expected=0)
    stored = await store.load()
    assert (stored.policies.namespaces, revisions(stored)) == ({"wide": wide}, {"namespace wide": 1})
    await store.delete_namespace("wide", who="ada", expected=1)
    for missing, told in (("wide", "wide"), ("no name", "'no name'")):
        with pytest.raises(PolicyMissing, match=f"there is no namespace {told}"):
            await store.delete_namespace(missing, who="ada")
    newest, oldest = await store.audit()
    assert (newest.kind, newest.name, newest.action, newest.after) == ("namespace", "wide", "delete", None)
    assert oldest.after == {"partitions": 4, "partition_by": ["customer"]}


async def test_rolling_back_puts_the_former_policy(store: PolicyStore) -> None:
    await store.put(policy(), who="ada")
    await store.put(policy(rate=5), who="ada")
    assert await store.rollback("default", "reads", 1, who="bob") == (policy(), 3)
    assert rates(await store.load()) == {"reads": 100.0}
    await store.delete("default", "reads", who="ada")
    back = await store.rollback("default", "reads", 2, who="bob")
    assert back == (policy(rate=5), 5), "what was deleted can come back"
    assert rates(await store.load()) == {"reads": 5.0}
    newest = (await store.history("default", "reads"))[0]
    assert (newest.action, newest.who, newest.before) == ("rollback", "bob", None)
    for revision in (4, 9):  # the removal, and one that never was
        with pytest.raises(PolicyMissing, match=f"there is no revision {revision} of policy default/reads"):
            await store.rollback("default", "reads", revision, who="bob")
    with pytest.raises(PolicyMissing):
        await store.rollback("default", "writes", 1, who="bob")
    with pytest.raises(RevisionConflict):
        await store.rollback("default", "reads", 1, who="bob", expected=4)


async def test_f_p2_a_policy_that_is_no_longer_valid_is_not_rolled_back_to(store: PolicyStore, server: Server) -> None:
    await store.put(policy(), who="ada")
    old = Logged(9, START_US, "put", "ada", "p:default/reads", b"", b'{"name":"reads","speed":1}')
    server.command("LPUSH", keys.policy_history("p:default/reads"), pack_logged(old))
    with pytest.raises(PolicyError, match="speed: no such field"):
        await store.rollback("default", "reads", 9, who="ada")
    assert rates(await store.load()) == {"reads": 100.0}


async def test_applying_a_set_puts_only_policies_that_differ(store: PolicyStore) -> None:
    await store.put(policy("a"), who="ada")
    await store.put(policy("b"), who="ada")
    await store.put(policy("old"), who="ada")
    wanted = policy_set(policy("a"), policy("b", rate=5), policy("c"), wide=4)
    assert titles(await store.apply(wanted, who="file")) == (
        4, ["default/c", "namespace wide"], ["default/b"], []
    )  # fmt: skip
    stored = await store.load()
    assert revisions(stored) == {
        "default/a": 1, "default/b": 4, "default/c": 4, "default/old": 3, "namespace wide": 4
    }  # fmt: skip
    assert stored.policies.namespace("wide").partitions == 4
    assert titles(await store.apply(wanted, who="file")) == (4, [], [], [])
    assert titles(await store.apply(wanted, who="file", prune=True)) == (5, [], [], ["default/old"])
    revision, made, changed, removed = titles(await store.apply(policy_set(), who="file", prune=True))
    assert (revision, made, changed) == (6, [], [])
    assert sorted(removed) == ["default/a", "default/b", "default/c", "namespace wide"]
    assert (await store.load()).policies == PolicySet()
    assert {(entry.action, entry.who) for entry in await store.audit() if entry.revision > 3} == {("apply", "file")}


async def test_the_order_of_fields_is_no_difference(store: PolicyStore) -> None:
    await store.put(policy(match={"a": "1", "b": "2"}), who="ada")
    again = policy_set(policy(match={"b": "2", "a": "1"}))
    assert titles(await store.apply(again, who="file")) == (1, [], [], [])


async def test_many_nodes_may_apply_their_files_at_once(store: PolicyStore, link: Link) -> None:
    """Every node of a fleet applies the same file at start: it is put once."""
    wanted = policy_set(*(policy(f"p{number}") for number in range(20)))
    stores = [PolicyStore(link) for _ in range(10)]
    results = await asyncio.gather(*(other.apply(wanted, who="file") for other in stores))
    assert sum(bool(result.made) for result in results) == 1
    assert {result.revision for result in results} == {1}
    assert len(await store.audit()) == 20


def always_overtaken(store: PolicyStore, by: Callable[[], Awaitable[object]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let another change come between whatever a store reads and what it makes of it."""
    fetch = store._fetch

    async def fetch_and_fall_behind() -> tuple[bytes | None, dict[str, bytes]]:
        fetched = await fetch()
        await by()
        return fetched

    monkeypatch.setattr(store, "_fetch", fetch_and_fall_behind)


async def test_changes_of_another_namespace_hold_up_no_set(
    store: PolicyStore, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F-P12: one that edits without a pause would keep the others, and nodes that start, from applying theirs."""
    other, rates = PolicyStore(link), count(1)
    await store.put(policy("old", namespace="one"), who="ada")

    async def edit() -> None:
        await other.put(policy("busy", namespace="two", rate=next(rates)), who="eve")

    always_overtaken(store, edit, monkeypatch)
    wanted = policy_set(policy("new", namespace="one"))
    applied = await store.apply(wanted, who="ada", prune=True, within="one")
    assert titles(applied)[1:] == (["one/new"], [], ["one/old"])
    assert sorted(revisions(await other.load())) == ["one/new", "two/busy"]


@pytest.mark.parametrize("change", ["put", "delete", "make"])
async def test_a_set_is_applied_to_what_is_there_when_it_is_applied(
    store: PolicyStore, link: Link, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """F-P6: what another did to one of its entries meanwhile is not overwritten unseen."""
    other = PolicyStore(link)
    await store.put(policy("a"), who="ada")
    edits: dict[str, Callable[[], Awaitable[object]]] = {
        "put": lambda: other.put(policy("a", rate=7), who="eve", owner="file"),
        "delete": lambda: other.delete("default", "a", who="eve"),
        "make": lambda: other.put(policy("b", rate=7), who="eve", owner="file"),
    }
    once = iter([edits[change]])

    async def edit() -> None:
        for made in once:
            await made()

    always_overtaken(store, edit, monkeypatch)
    wanted = policy_set(policy("a", rate=5), policy("b", rate=5))
    if change == "delete":
        assert titles(await store.apply(wanted, who="ada"))[1:] == (["default/a", "default/b"], [], [])
    else:
        with pytest.raises(OwnedByOthers):
            await store.apply(wanted, who="ada")


async def test_a_policy_beyond_all_bounds_is_refused(store: PolicyStore) -> None:
    huge = policy(weights={"operation": {f"operation-{number}": 1 for number in range(5000)}})
    with pytest.raises(
        PolicyError, match=r"^policy default/reads: found \d+ bytes; allowed: at most 65536 bytes of JSON$"
    ):
        await store.put(huge, who="ada")
    assert (await store.load()).revision == 0


async def test_f_p2_a_damaged_policy_is_named_and_left_out(
    store: PolicyStore, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """F-P2, from the store's side: one that cannot be used does not take the others with it."""
    await store.put(policy("good"), who="ada")
    damaged = {
        "p:default/bytes": b"\xff\x00",
        "p:default/json": b"2 {",
        "p:default/invalid": b'2 {"name":"invalid","rate":-1}',
        "p:default/named": b'2 {"name":"otherwise","rate":1}',
        "p:tenant/moved": b'2 {"name":"moved","rate":1}',
        "p:default/deep": b"2@file " + b"[" * 60_000,
        "n:none": b'2 {"partitions":0}',
        "stray": b"1",
    }
    for entry, raw in damaged.items():
        server.command("HSET", keys.POLICIES_CURRENT, entry, raw)
    stored = await store.load()
    assert rates(stored) == {"good": 100.0}
    assert stored.policies.namespaces == {}
    assert {place.title for place in stored.damaged} == {
        "default/bytes", "default/json", "default/invalid", "default/named", "tenant/moved", "default/deep",
        "namespace none", "default/",
    }  # fmt: skip
    assert "rate: found -1" in str(stored.damaged[policy_place("default", "invalid")].part)
    assert stored.revision_of(policy_place("default", "deep")) == 2
    async with watching(store) as told:
        await until(lambda: told)
    assert "policy default/invalid is damaged and left out" in caplog.text
    await store.apply(policy_set(policy("good"), policy("json")), who="ada", prune=True)
    assert {place.title for place in (await store.load()).damaged} == {"default/deep"}, "which another owns"
    await store.delete("default", "deep", who="ada", expected=2)
    assert (await store.load()).damaged == {}


async def test_damaged_memories_are_passed_over(store: PolicyStore, server: Server) -> None:
    await store.put(policy(), who="ada")
    for raw in (b"", b"nonsense", pack_logged(Logged(1, 1, "put", "a", "p:default/reads", b"", b"{"))):
        server.command("RPUSH", keys.POLICIES_AUDIT, raw)
    assert [entry.after for entry in await store.audit()] == [{"name": "reads", "rate": 100}, "{"]


async def test_foreign_data_at_our_keys_is_a_failure_that_says_so(store: PolicyStore, server: Server) -> None:
    """F-S11"""
    server.command("SET", keys.POLICIES_CURRENT, "foreign")
    for attempt in (store.load, lambda: store.put(policy(), who="ada"), store.stamp):
        with pytest.raises(StoreError, match="look at what stands at hg:"):
            await attempt()
    assert server.command("GET", keys.POLICIES_CURRENT) == b"foreign"


async def test_it_works_on_a_cluster(cluster: Cluster) -> None:
    link = await open_link(cluster.url)
    store = PolicyStore(link)
    async with watching(store) as told:
        await store.put(policy("a"), who="ada")
        await store.apply(policy_set(policy("b")), who="file", prune=True)
        await until(lambda: told and rates(told[-1]) == {"b": 100.0})
    assert [entry.name for entry in await store.audit()] == ["a", "b", "a"]
    await link.aclose()


# When the way to the store is bad


async def test_f_s4_a_change_whose_answer_was_lost_is_made_once(valkey: Server) -> None:
    """F-S4"""
    async with Proxy(valkey.port) as proxy:
        link = await open_link(proxy.url)
        store = PolicyStore(link)
        await store.put(policy("before"), who="ada")
        proxy.cut_after_reply_bytes(len(b"*2\r\n$10\r\n1790000000\r\n$6\r\n123456\r\n") + 10)  # TIME, then the change's
        assert await store.put(policy(), who="ada", expected=0) == 2
        assert proxy.connections == 2, "the answer was lost"
        assert [entry.name for entry in await store.audit()] == ["reads", "before"]
        await link.aclose()


async def test_f_s1_a_script_that_was_forgotten_is_sent_along(store: PolicyStore, server: Server) -> None:
    """F-S1"""
    await store.put(policy("a"), who="ada")
    server.command("SCRIPT FLUSH SYNC")
    assert await store.put(policy("b"), who="ada") == 2


async def test_a_store_that_is_away_is_reported_in_time() -> None:
    link = await open_link(f"redis://127.0.0.1:{free_port()}")
    store = PolicyStore(link, timeout_s=0.2)
    for attempt in (store.load, lambda: store.put(policy(), who="ada"), store.audit):
        with pytest.raises(StoreUnavailable):
            await attempt()
    await link.aclose()


async def test_f_s8_a_full_store_refuses_at_once(tmp_path: Path) -> None:
    """F-S8"""
    with running("valkey", tmp_path, config={"maxmemory": "1mb", "maxmemory-policy": "noeviction"}) as server:
        link = await open_link(server.url)
        with pytest.raises(StoreOutOfMemory):
            await PolicyStore(link).put(policy(), who="ada")
        await link.aclose()


async def test_unchanged_policies_are_not_read_again(store: PolicyStore) -> None:
    await store.put(policy("a"), who="ada")
    await store.put(policy("b"), who="ada")
    first = await store.load()
    await store.put(policy("b", rate=5), who="ada")
    second = await store.load()
    assert second.policy("default", "a") is first.policy("default", "a")
    assert second.policy("default", "b") != first.policy("default", "b")


async def test_entries_are_json_that_others_can_read(store: PolicyStore, server: Server) -> None:
    await store.put(policy(description="žlutý kůň"), who="ada")
    raw = server.command("HGET", keys.POLICIES_CURRENT, "p:default/reads")
    assert raw.startswith(b"1@api {")
    assert json.loads(raw.partition(b" ")[2]) == {"name": "reads", "description": "žlutý kůň", "rate": 100}


async def test_a_set_of_too_many_changes_is_refused(store: PolicyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_store, "CHANGES_MAX", 1)
    with pytest.raises(PolicyError, match="found 2 changes at once; allowed: at most 1"):
        await store.apply(policy_set(policy("a"), policy("b")), who="ada")
    assert (await store.load()).revision == 0


async def test_a_set_that_is_always_overtaken_is_given_up(store: PolicyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    async def overtaken(*_: object, **__: object) -> Applied:
        return Applied(ApplyStatus.CONFLICT, 1)

    monkeypatch.setattr(store, "_send", overtaken)
    with pytest.raises(StoreUnavailable, match="changing too fast"):
        await store.apply(policy_set(policy("a")), who="ada")


async def test_more_policies_than_the_store_holds_are_refused(
    store: PolicyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(*_: object, **__: object) -> Applied:
        return Applied(ApplyStatus.FULL, 1)

    monkeypatch.setattr(store, "_send", full)
    with pytest.raises(PolicyError, match="found more policies than the store holds"):
        await store.put(policy("a"), who="ada")
