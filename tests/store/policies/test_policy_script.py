"""The script of the policy store against its model: the same answers, entries, histories and audit log."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from redis.exceptions import NoScriptError

from limiter.model.policy import policy_log
from limiter.model.policy.policy_log import ACTIONS, ANY, Applied, ApplyStatus, Call, Change, Entry, Logged, PolicyLog
from limiter.store import keys
from limiter.store.policies.policy_layout import REVISION, pack_entry, pack_logged, unpack_entry, unpack_logged
from limiter.store.scripts import PoliciesScript
from tests.support.servers import Cluster, Server

SCRIPT = PoliciesScript()
START_US = 1_790_000_000_000_000
LIFE = b"lifename"


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
texts = st.sampled_from([b'{"rate":1}', b'{"rate":2}', b"with a space \x00\xff\n", b""])
# Mostly none: with many expectations hardly any call would be applied.
expectations = st.sampled_from([ANY] * 35 + [0, 1, 2, 3, 4])


@st.composite
def calls(draw: st.DrawFn) -> Call:
    entries = draw(st.lists(names, min_size=draw(st.sampled_from([1, 1, 1, 0])), max_size=3, unique=True))
    return Call(
        [Change(entry, draw(texts), draw(expectations)) for entry in entries],
        who=draw(st.sampled_from(["ada", "", "žofie"])),
        action=draw(st.sampled_from(ACTIONS)),
        life=LIFE,
        expected=draw(expectations),
        owner=draw(st.sampled_from(["", "api", "file", "a.b-c_9"])),
    )


def compare(server: Server | Cluster, examples: int) -> Counter[str]:
    """Run generated histories on both; how often each status came, and how often an entry was removed."""
    store, seen = PolicyScriptStore(server), Counter[str]()

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
            seen[found.status.name] += 1
            seen["removed"] += found.status is ApplyStatus.APPLIED and any(not change.text for change in call.changes)
            assert store.apply(call, now_us, call_id=call_id) == found, "a repeat"
            assert store.shown() == model_shown(model)

    histories_agree()
    return seen


def test_the_script_agrees_with_the_model(server: Server) -> None:
    seen = compare(server, 150)
    rare = [name for name in ("APPLIED", "CONFLICT", "MISSING", "STALE", "removed") if seen[name] < 5]
    assert not rare, f"histories that show too little: {seen}"


def test_the_script_agrees_with_the_model_on_a_cluster(cluster: Cluster) -> None:
    compare(cluster, 30)


def call_of(*changes: Change, action: policy_log.Action = "put", expected: int = ANY) -> Call:
    return Call(changes, "ada", action, LIFE, expected)


def test_histories_and_the_audit_log_are_bounded(valkey: Server) -> None:
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


def test_the_history_of_a_deleted_policy_goes_in_time_unless_the_policy_comes_back(valkey: Server) -> None:
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


def test_a_damaged_policy_can_be_replaced_and_removed(valkey: Server) -> None:
    store = PolicyScriptStore(valkey)
    valkey.command("HSET", keys.POLICIES_CURRENT, "p:a", "nonsense", "p:b", "nonsense", "revision", "nonsense")
    assert store.apply(call_of(Change("p:a", b"1"), Change("p:b", b"")), START_US) == Applied(ApplyStatus.APPLIED, 1)
    assert store.client.hgetall(keys.POLICIES_CURRENT) == {b"p:a": b"1 1", b"revision": b"1 " + LIFE}


def test_a_copy_that_comes_too_late_changes_nothing(valkey: Server) -> None:
    call = call_of(Change("p:a", b"1"))
    arguments = SCRIPT.call(b"late", call, now_us=START_US, expires_us=START_US - 1)
    reply = valkey.command("EVAL", SCRIPT.source, *arguments)
    with pytest.raises(Exception, match="after its expiry"):
        SCRIPT.answer(reply)
    assert valkey.command("EXISTS", keys.POLICIES_CURRENT) == 0
