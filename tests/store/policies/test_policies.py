"""The policy store: its script against the model, revisions, the audit log, and word to every node."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from redis.exceptions import NoScriptError, ResponseError

from limiter.model.policy import policy_log
from limiter.model.policy.policy import Policy
from limiter.model.policy.policy_log import ACTIONS, ANY, Applied, ApplyStatus, Call, Change, Entry, Logged, PolicyLog
from limiter.model.policy.policy_set import PolicySet
from limiter.model.policy.problems import PolicyError
from limiter.model.policy.reading import dump, read_namespace, read_policy, read_policy_set
from limiter.store import keys
from limiter.store.errors import StoreError, StoreOutOfMemory, StoreUnavailable
from limiter.store.inspect import CursorError
from limiter.store.link.connect import Link, open_link
from limiter.store.policies import policies
from limiter.store.policies.policies import PolicyMissing, PolicyStore, RevisionConflict, StoredPolicies
from limiter.store.policies.policy_entries import policy_place
from limiter.store.policies.policy_layout import REVISION, pack_entry, pack_logged, unpack_entry, unpack_logged
from limiter.store.policies.policy_sets import AppliedSet
from limiter.store.scripts import PoliciesScript
from tests.support.nodes import until
from tests.support.proxy import Proxy
from tests.support.servers import Cluster, Server, free_port, running

SCRIPT = PoliciesScript()
START_US = 1_790_000_000_000_000
LIFE = b"lifename"


# The script and the model


class PolicyScriptStore:
    """The script on a real server, with the face of the model."""

    def __init__(self, server: Server | Cluster) -> None:
        self.client: Any = server.client_for(keys.POLICIES) if isinstance(server, Cluster) else server.client()
        self.calls = 0

    def apply(self, call: Call, now_us: int, *, call_id: bytes = b"") -> Applied:
        self.calls += 1
        arguments = SCRIPT.call(call_id or b"%d" % self.calls, call, now_us=now_us)
        try:
            reply = self.client.execute_command("EVALSHA", SCRIPT.sha, *arguments)
        except NoScriptError:
            reply = self.client.execute_command("EVAL", SCRIPT.source, *arguments)
        return SCRIPT.answer(reply)

    def shown(self) -> object:
        """All there is, as bytes."""
        current = self.client.hgetall(keys.POLICIES_CURRENT)
        entries = {key.decode(): value for key, value in current.items()}
        histories = {
            key.removeprefix(keys.policy_history("")).decode(): self.client.lrange(key, 0, -1)
            for key in self.client.keys(keys.policy_history("") + b"*")
        }
        return entries, self.client.lrange(keys.POLICIES_AUDIT, 0, -1), histories


def model_shown(model: PolicyLog) -> object:
    entries = {name: pack_entry(entry) for name, entry in model.entries.items()}
    if model.revision:
        entries[REVISION.decode()] = b"%d %b" % (model.revision, model.life)
    histories = {name: list(map(pack_logged, history)) for name, history in model.histories.items()}
    return entries, list(map(pack_logged, model.audit)), histories


names = st.sampled_from(["p:default/a", "p:tenant/a", "p:b", "n:default"])
texts = st.sampled_from([b"", b"", b'{"rate":1}', b'{"rate":2}', b"with a space \x00\xff\n"])
expectations = st.sampled_from([ANY, ANY, ANY, 0, 1, 2, 3, 4])


@st.composite
def calls(draw: st.DrawFn) -> Call:
    entries = draw(st.lists(names, max_size=4, unique=True))
    return Call(
        [Change(entry, draw(texts), draw(expectations)) for entry in entries],
        who=draw(st.sampled_from(["ada", "", "žofie"])),
        action=draw(st.sampled_from(ACTIONS)),
        life=LIFE,
        expected=draw(st.sampled_from([ANY, ANY, ANY, 0, 1, 2, 3])),
        owner=draw(st.sampled_from(["", "api", "file", "a.b-c_9"])),
    )


def compare(server: Server | Cluster, examples: int) -> None:
    store = PolicyScriptStore(server)

    @settings(
        max_examples=examples, deadline=None, print_blob=True, phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.lists(calls(), min_size=1, max_size=12))
    def histories_agree(history: list[Call]) -> None:
        store.client.flushall()
        model = PolicyLog()
        for number, call in enumerate(history):
            now_us = START_US + number
            call_id = b"call-%d" % number
            found = store.apply(call, now_us, call_id=call_id)
            assert found == model.apply(call, now_us)
            assert store.apply(call, now_us, call_id=call_id) == found, "a repeat"
            assert store.shown() == model_shown(model)

    histories_agree()


def test_the_script_agrees_with_the_model(server: Server) -> None:
    compare(server, 150)


def test_the_script_agrees_with_the_model_on_a_cluster(cluster: Cluster) -> None:
    compare(cluster, 30)


def call_of(*changes: Change, action: policy_log.Action = "put", expected: int = ANY) -> Call:
    return Call(changes, "ada", action, LIFE, expected)


def test_what_is_remembered_is_bounded(valkey: Server) -> None:
    store = PolicyScriptStore(valkey)
    many = policy_log.CHANGES_MAX // 2
    store.apply(call_of(*(Change(f"p:{number}", b"1") for number in range(many))), START_US)
    store.apply(call_of(*(Change(f"p:{number}", b"2") for number in range(many))), START_US)
    assert store.client.llen(keys.POLICIES_AUDIT) == policy_log.AUDIT_MAX
    for number in range(60):
        store.apply(call_of(Change("p:1", b"%d" % number)), START_US)
    assert store.client.llen(keys.policy_history("p:1")) == policy_log.HISTORY_MAX
    newest = unpack_logged(store.client.lindex(keys.POLICIES_AUDIT, 0))
    assert newest == Logged(62, START_US, "put", "ada", "p:1", b"58", b"59", "")


def test_the_number_of_entries_is_bounded(valkey: Server) -> None:
    store = PolicyScriptStore(valkey)
    fill = [Change(f"p:{number}", b"1") for number in range(policy_log.ENTRIES_MAX)]
    assert store.apply(call_of(*fill), START_US).status is ApplyStatus.APPLIED
    assert store.apply(call_of(Change("p:more", b"1")), START_US) == Applied(ApplyStatus.FULL, 1)
    swap = call_of(Change("p:more", b"1"), Change("p:0", b""))
    assert store.apply(swap, START_US).status is ApplyStatus.APPLIED


def test_the_history_of_what_is_deleted_goes_in_time_unless_it_comes_back(valkey: Server) -> None:
    store = PolicyScriptStore(valkey)
    history = keys.policy_history("p:a")
    store.apply(call_of(Change("p:a", b"1")), START_US)
    assert store.client.ttl(history) == -1
    store.apply(call_of(Change("p:a", b"")), START_US)
    assert store.client.ttl(history) > 80 * 86_400
    store.apply(call_of(Change("p:a", b"2")), START_US)
    assert store.client.ttl(history) == -1


def test_damaged_lists_do_not_stand_in_the_way(server: Server) -> None:
    """F-S11: the policies count for more than what is remembered of them."""
    store = PolicyScriptStore(server)
    server.command("SET", keys.POLICIES_AUDIT, "foreign")
    server.command("SET", keys.policy_history("p:a"), "foreign")
    assert store.apply(call_of(Change("p:a", b"1")), START_US) == Applied(ApplyStatus.APPLIED, 1)
    assert unpack_entry(store.client.hget(keys.POLICIES_CURRENT, "p:a")) == Entry(1, b"1")


def test_what_stands_damaged_can_be_replaced_and_removed(valkey: Server) -> None:
    store = PolicyScriptStore(valkey)
    valkey.command("HSET", keys.POLICIES_CURRENT, "p:a", "nonsense", "p:b", "nonsense", "revision", "nonsense")
    assert store.apply(call_of(Change("p:a", b"1"), Change("p:b", b"")), START_US) == Applied(ApplyStatus.APPLIED, 1)
    assert store.client.hgetall(keys.POLICIES_CURRENT) == {b"p:a": b"1 1", b"revision": b"1 " + LIFE}


# The store


@pytest.fixture
async def link(server: Server) -> AsyncIterator[Link]:
    link = await open_link(server.url)
    yield link
    await link.aclose()


@pytest.fixture
def store(link: Link) -> PolicyStore:
    return PolicyStore(link)


def policy(name: str = "reads", **fields: object) -> Policy:
    return read_policy({"name": name, "rate": 100, **fields})


def rates(stored: StoredPolicies) -> dict[str, object]:
    return {policy.name: policy.rate for policy in stored.policies.policies}


def revisions(stored: StoredPolicies) -> dict[str, int]:
    return {place.title: kept.revision for place, kept in stored.kept.items()}


def owners(stored: StoredPolicies) -> dict[str, str]:
    return {place.title: kept.owner for place, kept in stored.kept.items()}


def titles(applied: AppliedSet) -> tuple[int, list[str], list[str], list[str]]:
    """What applying a set came to, by names."""
    made, changed, removed = (
        [place.title for place in places] for places in (applied.made, applied.changed, applied.removed)
    )
    return applied.revision, made, changed, removed


async def test_an_empty_store_holds_nothing(store: PolicyStore) -> None:
    assert await store.load() == StoredPolicies(0, PolicySet())
    assert await store.audit() == []
    with pytest.raises(PolicyMissing, match="there is no policy default/reads"):
        await store.history("default", "reads")


async def test_what_is_put_is_loaded(store: PolicyStore) -> None:
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


async def test_f_p6_of_two_editors_at_once_one_is_told(store: PolicyStore) -> None:
    """F-P6: whoever edits what another has changed meanwhile is refused, and nothing of his is kept."""
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
async def test_what_cannot_be_a_name_is_not_there(store: PolicyStore, name: str) -> None:
    """F-N3, F-N4"""
    for attempt in (
        store.history("default", name),
        store.delete("default", name, who="ada"),
        store.rollback("default", name, 1, who="ada"),
    ):
        with pytest.raises(PolicyMissing, match=r"^there is no policy '[ -~]{0,80}'$"):
            await attempt


async def test_the_audit_log_tells_who_did_what_and_when(store: PolicyStore, server: Server) -> None:
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


async def test_rolling_back_puts_what_was(store: PolicyStore) -> None:
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


async def test_f_p2_what_is_no_longer_valid_is_not_rolled_back_to(store: PolicyStore, server: Server) -> None:
    await store.put(policy(), who="ada")
    old = Logged(9, START_US, "put", "ada", "p:default/reads", b"", b'{"name":"reads","speed":1}')
    server.command("LPUSH", keys.policy_history("p:default/reads"), pack_logged(old))
    with pytest.raises(PolicyError, match="speed: no such field"):
        await store.rollback("default", "reads", 9, who="ada")
    assert rates(await store.load()) == {"reads": 100.0}


def policy_set(*policies: Policy, **namespaces: int) -> PolicySet:
    spread = {name: {"partitions": partitions, "partition_by": ["customer"]} for name, partitions in namespaces.items()}
    return read_policy_set({"namespaces": spread, "policies": [dump(policy) for policy in policies]})


async def test_applying_a_set_puts_only_what_differs(store: PolicyStore) -> None:
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


async def test_a_policy_beyond_all_bounds_is_refused(store: PolicyStore) -> None:
    huge = policy(weights={"operation": {f"operation-{number}": 1 for number in range(5000)}})
    with pytest.raises(
        PolicyError, match=r"^policy default/reads: found \d+ bytes; allowed: at most 65536 bytes of JSON$"
    ):
        await store.put(huge, who="ada")
    assert (await store.load()).revision == 0


async def test_f_p2_a_damaged_policy_is_told_and_left_out(
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


async def test_a_copy_that_comes_too_late_changes_nothing(valkey: Server) -> None:
    call = call_of(Change("p:a", b"1"))
    arguments = SCRIPT.call(b"late", call, now_us=START_US, expires_us=START_US - 1)
    reply = valkey.command("EVAL", SCRIPT.source, *arguments)
    with pytest.raises(Exception, match="after its expiry"):
        SCRIPT.answer(reply)
    assert valkey.command("EXISTS", keys.POLICIES_CURRENT) == 0


async def test_a_store_that_is_away_is_told_in_time() -> None:
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


# Word to every node


@asynccontextmanager
async def watching(store: PolicyStore) -> AsyncIterator[list[StoredPolicies]]:
    """What a node is told."""
    told: list[StoredPolicies] = []

    async def take(stored: StoredPolicies) -> None:
        told.append(stored)

    task = asyncio.create_task(store.watch(take))
    try:
        yield told
        assert not task.done()
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def is_told(told: list[StoredPolicies], revision: int) -> Callable[[], bool]:
    return lambda: bool(told) and told[-1].revision == revision


async def test_a_node_is_told_what_there_is_and_what_changes(store: PolicyStore, link: Link) -> None:
    await store.put(policy("a"), who="ada")
    async with watching(PolicyStore(link)) as told:
        await until(is_told(told, 1))
        await store.put(policy("b"), who="ada")
        await until(is_told(told, 2))
        await store.delete("default", "a", who="ada")
        await until(is_told(told, 3))
    assert [sorted(rates(stored)) for stored in told] == [["a"], ["a", "b"], ["b"]]


async def test_a_notification_is_enough(store: PolicyStore, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "POLL_S", 1000.0)
    async with watching(store) as told:
        await until(is_told(told, 0))
        await until(lambda: server.command("PUBSUB", "NUMSUB", keys.POLICIES_CHANNEL)[1] == 1)
        await store.put(policy(), who="ada")
        await until(is_told(told, 1), within_s=1.0)


class Deaf:
    """A link over which no notification comes."""

    def __init__(self, link: Link) -> None:
        self.call = link.call
        self.send = link.send
        self.aclose = link.aclose

    async def listen(self, channel: bytes) -> AsyncGenerator[bytes]:
        raise ResponseError("NOPERM not this channel")
        yield b""


async def test_without_notifications_a_node_is_told_within_a_second(store: PolicyStore, link: Link) -> None:
    async with watching(PolicyStore(Deaf(link))) as told:
        await until(is_told(told, 0))
        await store.put(policy(), who="ada")
        await until(is_told(told, 1), within_s=1.0)


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Server]:
    """A Valkey that this test may mistreat; what it was told survives."""
    with running("valkey", tmp_path, config={"appendonly": "yes"}) as server:
        yield server


async def test_watching_survives_the_loss_of_the_store(own_server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """F-S2, F-S3: it begins without a store, and goes on when one is back."""
    own_server.stop()
    link = await open_link(own_server.url)
    store = PolicyStore(link)
    async with watching(store) as told:
        await until(lambda: "policies cannot be read from the store" in caplog.text)
        assert told == []
        own_server.start()
        await until(is_told(told, 0))
        await store.put(policy(), who="ada")
        await until(is_told(told, 1))
        own_server.restart()
        await store.put(policy("b"), who="ada")
        await until(is_told(told, 2))
    assert len(told) == 3, "a store that merely went away is no change"
    assert caplog.text.count("policies cannot be read from the store") <= 2
    await link.aclose()


async def test_f_s10_a_store_that_lost_its_policies_is_told_of(store: PolicyStore, server: Server) -> None:
    """F-S10"""
    await store.put(policy("a"), who="ada")
    await store.put(policy("b"), who="ada")
    async with watching(store) as told:
        await until(is_told(told, 2))
        server.command("FLUSHALL")
        await until(is_told(told, 0))
        assert told[-1].policies == PolicySet()


async def test_f_s10_a_store_emptied_and_filled_again_between_two_looks_is_told_of(
    store: PolicyStore, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F-S10: the same revision, but of another life."""
    monkeypatch.setattr(policies, "POLL_S", 1000.0)
    await store.put(policy("a"), who="ada")
    async with watching(store) as told:
        await until(is_told(told, 1))
        server.command("FLUSHALL")
        await store.put(policy("b"), who="ada")
        await until(lambda: rates(told[-1]) == {"b": 100.0})


async def test_whoever_cannot_take_a_change_is_told_of_the_next(
    store: PolicyStore, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[int] = []

    async def stumble(stored: StoredPolicies) -> None:
        told.append(stored.revision)
        raise RuntimeError("no")

    task = asyncio.create_task(store.watch(stumble))
    await until(lambda: told == [0])
    await store.put(policy(), who="ada")
    await until(lambda: told == [0, 1])
    assert "could not be taken over" in caplog.text
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def test_what_has_not_changed_is_not_read_again(store: PolicyStore) -> None:
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
