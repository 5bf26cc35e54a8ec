"""Owners of policies, the changes that a file may make (F-P13), and a store that an older version has filled."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from limiter.model.policy.policy import Policy
from limiter.model.policy.policy_log import Action, Logged
from limiter.model.policy.reading import dump, read_namespace
from limiter.store import keys
from limiter.store.link.connect import Link, open_link
from limiter.store.policies import policy_store
from limiter.store.policies.policy_entries import namespace_place, policy_place
from limiter.store.policies.policy_layout import pack_logged
from limiter.store.policies.policy_sets import AppliedSet, OwnedByOthers
from limiter.store.policies.policy_store import PolicyMissing, PolicyStore
from tests.support.policies import policy, policy_set
from tests.support.servers import Server


@pytest.fixture
async def link(valkey: Server) -> AsyncIterator[Link]:
    link = await open_link(valkey.url)
    yield link
    await link.aclose()


async def owners(store: PolicyStore) -> dict[str, str]:
    return {place.title: kept.owner for place, kept in (await store.load()).kept.items()}


async def rates(store: PolicyStore) -> dict[str, object]:
    return {f"{one.namespace}/{one.name}": one.rate for one in (await store.load()).policies.policies}


def titles(applied: AppliedSet) -> tuple[list[str], list[str], list[str]]:
    made, changed, removed = (
        sorted(place.title for place in places) for places in (applied.made, applied.changed, applied.removed)
    )
    return made, changed, removed


async def test_the_api_owns_policies_that_are_put_and_a_file_those_that_it_applies(store: PolicyStore) -> None:
    await store.put(policy("a"), who="ada")
    await store.put_namespace("wide", read_namespace("wide", {}), who="ada")
    await store.apply(policy_set(policy("b"), tall=2), who="ci", owner="orders-repo")
    assert await owners(store) == {
        "default/a": "api", "default/b": "orders-repo", "namespace tall": "orders-repo", "namespace wide": "api"
    }  # fmt: skip
    assert [(entry.name, entry.owner) for entry in await store.audit()] == [
        ("tall", "orders-repo"), ("b", "orders-repo"), ("wide", "api"), ("a", "api")
    ]  # fmt: skip


async def test_a_file_changes_its_own_policies_and_leaves_the_rest(store: PolicyStore) -> None:
    """F-P13"""
    await store.apply(policy_set(policy("own"), policy("edited"), policy("same"), wide=2), who="f", owner="file")
    await store.put(policy("edited", rate=5), who="ada")
    await store.put(policy("same"), who="ada")
    await store.put_namespace("wide", read_namespace("wide", {}), who="ada")
    wanted = policy_set(policy("own", rate=7), policy("edited"), policy("same"), policy("new"), wide=2)
    applied = await store.apply(wanted, who="f", owner="file", foreign="keep")
    assert titles(applied) == (["default/new"], ["default/own"], [])
    assert [str(foreign) for foreign in applied.foreign] == [
        "policy default/edited differs from the store, where it was changed over the API at revision 2",
        "namespace wide differs from the store, where it was changed over the API at revision 4",
    ]
    assert await rates(store) == {
        "default/edited": 5.0, "default/new": 100.0, "default/own": 7.0, "default/same": 100.0
    }  # fmt: skip
    assert (await owners(store))["default/same"] == "api", "the same, and still another's"


async def test_a_set_that_would_overwrite_another_owner_s_policy_is_refused_whole(store: PolicyStore) -> None:
    """F-P13"""
    await store.apply(policy_set(policy("a"), policy("b")), who="x", owner="one")
    with pytest.raises(OwnedByOthers, match="policy default/b differs from the store, where 'one' applied it at rev"):
        await store.apply(policy_set(policy("b", rate=5), policy("c")), who="y", owner="two")
    assert await rates(store) == {"default/a": 100.0, "default/b": 100.0}
    looked = await store.apply(policy_set(policy("b", rate=5), policy("c")), who="y", owner="two", dry_run=True)
    assert (titles(looked), len(looked.foreign)) == ((["default/c"], [], []), 1)
    taken = await store.apply(policy_set(policy("b", rate=5), policy("a")), who="y", owner="two", foreign="take_over")
    assert titles(taken) == ([], ["default/a", "default/b"], []), "what is the same is taken over, too"
    assert await owners(store) == {"default/a": "two", "default/b": "two"}


async def test_pruning_removes_policies_of_the_owner_and_no_others(store: PolicyStore) -> None:
    """P12"""
    await store.apply(policy_set(policy("a"), policy("b"), wide=2), who="x", owner="file")
    await store.apply(policy_set(policy("other")), who="x", owner="another-file")
    await store.put(policy("by-hand"), who="ada")
    wanted = policy_set(policy("a"))
    seen = await store.apply(wanted, who="x", owner="file", prune=True, dry_run=True)
    assert titles(seen) == ([], [], ["default/b", "namespace wide"])
    assert set(await rates(store)) == {"default/a", "default/b", "default/by-hand", "default/other"}, "a dry run"
    assert titles(await store.apply(wanted, who="x", owner="file", prune=True)) == titles(seen)
    assert set(await rates(store)) == {"default/a", "default/by-hand", "default/other"}


async def test_a_removal_by_another_owner_of_the_same_name_in_another_namespace_is_none(store: PolicyStore) -> None:
    await store.apply(policy_set(policy("a"), policy("a", namespace="tenant")), who="x", owner="file")
    await store.apply(policy_set(policy("a")), who="x", owner="file", prune=True, within="default")
    assert set(await rates(store)) == {"default/a", "tenant/a"}
    await store.apply(policy_set(), who="x", owner="file", prune=True, within="tenant")
    assert set(await rates(store)) == {"default/a"}


async def test_a_rollback_makes_a_policy_the_api_s(store: PolicyStore) -> None:
    """F-P13"""
    await store.apply(policy_set(policy()), who="x", owner="file")
    await store.apply(policy_set(policy(rate=5)), who="x", owner="file")
    await store.rollback("default", "reads", 1, who="ada")
    applied = await store.apply(policy_set(policy(rate=5)), who="x", owner="file", foreign="keep")
    assert (len(applied.foreign), applied.is_nothing) == (1, True)
    assert await rates(store) == {"default/reads": 100.0}


async def test_a_change_of_owner_alone_is_a_change(store: PolicyStore) -> None:
    await store.apply(policy_set(policy()), who="x", owner="file")
    assert await store.put(policy(), who="ada") == 2
    assert await owners(store) == {"default/reads": "api"}
    assert await store.put(policy(), who="ada") == 2, "and no other"


# Names unique within a namespace


async def test_one_name_in_two_namespaces_is_two_policies(store: PolicyStore) -> None:
    """P12"""
    await store.put(policy(), who="ada", expected=0)
    await store.put(policy(namespace="tenant", rate=5), who="bob", expected=0)
    assert await rates(store) == {"default/reads": 100.0, "tenant/reads": 5.0}
    await store.put(policy(namespace="tenant", rate=7), who="bob")
    await store.rollback("tenant", "reads", 2, who="bob")
    assert [entry.who for entry in await store.history("default", "reads")] == ["ada"]
    assert [entry.who for entry in await store.history("tenant", "reads")] == ["bob", "bob", "bob"]
    with pytest.raises(PolicyMissing, match="there is no revision 1 of policy tenant/reads"):
        await store.rollback("tenant", "reads", 1, who="bob")
    await store.delete("default", "reads", who="ada")
    assert await rates(store) == {"tenant/reads": 5.0}


def test_a_file_may_have_one_name_in_two_namespaces() -> None:
    assert len(policy_set(policy(), policy(namespace="tenant")).policies) == 2


# A store that an older version has filled


def old_text(one: Policy) -> bytes:
    return json.dumps(dump(one), separators=(",", ":")).encode()


def fill_as_before(server: Server, *kept: tuple[int, Policy]) -> None:
    """Policies as they were kept when their names were unique in the whole store, and nobody owned them."""
    for revision, one in kept:
        server.command("HSET", keys.POLICIES_CURRENT, f"p:{one.name}", b"%d %b" % (revision, old_text(one)))
        remember_as_before(server, revision, "put", one.name, b"", old_text(one))
    newest = max(revision for revision, _ in kept)
    server.command("HSET", keys.POLICIES_CURRENT, "revision", b"%d lifename" % newest)


def remember_as_before(server: Server, revision: int, action: Action, name: str, before: bytes, after: bytes) -> None:
    owner_bytes = len(b"\x00\x00")
    raw = pack_logged(Logged(revision, 1_790_000_000_000_000, action, "ada", f"p:{name}", before, after))[:-owner_bytes]
    server.command("LPUSH", keys.POLICIES_AUDIT, raw)
    server.command("LPUSH", keys.policy_history(f"p:{name}"), raw)


OLD = [(1, policy("reads")), (2, policy("tenant-reads", namespace="tenant")), (4, policy("edited", rate=5))]


async def test_an_older_store_is_read_as_it_is(store: PolicyStore, valkey: Server) -> None:
    """P12"""
    fill_as_before(valkey, *OLD)
    assert await rates(store) == {"default/edited": 5.0, "default/reads": 100.0, "tenant/tenant-reads": 100.0}
    assert await owners(store) == {"default/edited": "", "default/reads": "", "tenant/tenant-reads": ""}
    assert valkey.command("HEXISTS", keys.POLICIES_CURRENT, "p:reads") == 1, "looking changes nothing"


async def test_an_older_store_is_moved_in_one_step_and_its_history_is_still_shown(
    store: PolicyStore, valkey: Server
) -> None:
    """P12"""
    fill_as_before(valkey, *OLD)
    assert await store.move_old_names() == 3
    assert set(valkey.command("HKEYS", keys.POLICIES_CURRENT)) == {
        b"p:default/reads", b"p:default/edited", b"p:tenant/tenant-reads", b"revision"
    }  # fmt: skip
    stored = await store.load()
    assert (stored.revision, stored.revision_of(policy_place("tenant", "tenant-reads"))) == (5, 5), "one call"
    assert len(await store.audit()) == 3, "people did nothing"
    (known,) = await store.history("tenant", "tenant-reads")
    assert (known.revision, known.who, known.namespace, known.owner) == (2, "ada", "tenant", None)
    assert valkey.command("TTL", keys.policy_history("p:reads")) > 80 * 86_400
    with pytest.raises(PolicyMissing):
        await store.history("default", "tenant-reads")
    await store.put(policy(rate=1), who="bob")
    await store.rollback("default", "reads", 1, who="bob")
    assert [entry.action for entry in await store.history("default", "reads")] == ["rollback", "put", "put"]
    assert (await rates(store))["default/reads"] == 100.0
    assert await store.move_old_names() == 0


@pytest.mark.parametrize("change", ["put", "delete", "rollback", "apply"])
async def test_the_first_change_of_an_older_store_moves_it(store: PolicyStore, valkey: Server, change: str) -> None:
    """Under two names, a policy could be removed and still be there."""
    fill_as_before(valkey, *OLD)
    if change == "put":
        await store.put(policy(rate=1), who="ada")
    elif change == "delete":
        await store.delete("default", "reads", who="ada")
    elif change == "rollback":
        await store.rollback("default", "reads", 1, who="ada")
    else:
        await store.apply(policy_set(policy(rate=1)), who="ada", foreign="take_over")
    assert valkey.command("HEXISTS", keys.POLICIES_CURRENT, "p:reads") == 0
    found = await rates(store)
    assert found.get("default/reads") == {"put": 1.0, "delete": None, "rollback": 100.0, "apply": 1.0}[change]
    assert found["tenant/tenant-reads"] == 100.0


async def test_a_policy_that_an_older_node_puts_is_read_unless_it_has_its_new_name_already(
    store: PolicyStore, valkey: Server
) -> None:
    fill_as_before(valkey, *OLD)
    await store.put(policy(rate=7), who="ada")
    for one in (policy(rate=1), policy("new")):  # a node of the older version starts with its file
        valkey.command("HSET", keys.POLICIES_CURRENT, f"p:{one.name}", b"9 " + old_text(one))
    assert {name: rate for name, rate in (await rates(store)).items() if name in ("default/reads", "default/new")} == {
        "default/reads": 7.0, "default/new": 100.0
    }  # fmt: skip
    await store.delete("default", "reads", who="ada")
    assert (await rates(store)).keys() == {"default/edited", "default/new", "tenant/tenant-reads"}


async def test_the_first_file_with_the_same_policies_owns_those_without_an_owner(
    store: PolicyStore, valkey: Server
) -> None:
    """F-P13: an upgrade hands nothing to a file that differs, and does not trouble one that does not."""
    fill_as_before(valkey, *OLD)
    wanted = policy_set(policy("reads"), policy("edited", rate=50))
    applied = await store.apply(wanted, who="f", owner="file", foreign="keep")
    assert [foreign.place.title for foreign in applied.foreign] == ["default/edited"]
    assert await owners(store) == {"default/edited": "", "default/reads": "file", "tenant/tenant-reads": ""}
    assert (await rates(store))["default/edited"] == 5.0


async def test_damaged_entries_by_old_names_are_moved_too_so_that_they_can_be_removed(
    store: PolicyStore, valkey: Server
) -> None:
    fill_as_before(valkey, *OLD)
    odd = {"p:json": b"3 {", "p:bytes": b"\xff\x00", "p:empty": b"3 ", "p:list": b'3 {"name":"list","namespace":[1]}'}
    for entry, raw in odd.items():
        valkey.command("HSET", keys.POLICIES_CURRENT, entry, raw)
    assert await store.move_old_names() == 7
    assert {place.title for place in (await store.load()).damaged} == {"default/json", "default/bytes", "default/list"}
    await store.delete("default", "json", who="ada")
    await store.delete("default", "bytes", who="ada")
    assert {place.title for place in (await store.load()).damaged} == {"default/list"}


async def test_nodes_that_start_at_once_move_an_older_store_once(link: Link, valkey: Server) -> None:
    fill_as_before(valkey, *OLD)
    moved = await asyncio.gather(*(PolicyStore(link).move_old_names() for _ in range(8)))
    assert sorted(moved) == [0] * 7 + [3]


async def test_a_large_older_store_is_moved_in_several_calls(
    store: PolicyStore, valkey: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_store, "MOVED_AT_ONCE", 10)
    fill_as_before(valkey, *((number + 1, policy(f"p{number}")) for number in range(150)))
    assert await store.move_old_names() == 150
    assert len(await rates(store)) == 150


async def test_a_policy_that_moved_between_namespaces_takes_no_history_along(
    store: PolicyStore, valkey: Server
) -> None:
    """Older versions allowed it; a tenant must not read of it what was another's."""
    fill_as_before(valkey, (1, policy("reads", namespace="tenant")))
    before, after = old_text(policy("reads", rate=1)), old_text(policy("reads", namespace="tenant"))
    remember_as_before(valkey, 2, "put", "reads", before, after)
    newest, oldest = await store.history("tenant", "reads")
    assert (newest.namespace, oldest.namespace) == ("", "tenant")
    assert [entry.namespace for entry in await store.history("default", "reads")] == [""]


async def test_a_damaged_owner_counts_as_none(store: PolicyStore, valkey: Server) -> None:
    for name, head in (("a", b"1@"), ("b", b"1@x y"), ("c", b"1@\xff"), ("d", b"@api")):
        valkey.command("HSET", keys.POLICIES_CURRENT, f"p:default/{name}", head + b" " + old_text(policy(name)))
    stored = await store.load()
    assert stored.kept == {}
    assert len(stored.damaged) == 4
    assert stored.revision_of(namespace_place("none")) == 0
    await store.apply(policy_set(policy("a")), who="x", owner="file", foreign="keep")
    assert await rates(store) == {"default/a": 100.0}, "what cannot be in force is nobody's loss"
    await store.put(policy("b"), who="ada", expected=stored.revision_of(policy_place("default", "b")))
    assert await rates(store) == {"default/a": 100.0, "default/b": 100.0}
