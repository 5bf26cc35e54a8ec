"""F-S11, F-S16: whatever stands where our records stand costs one operation its answer, and no other."""

import random
from dataclasses import replace

import pytest

from limiter.engine.decider import Decider
from limiter.engine.request_errors import NotDecided
from limiter.model.bucket.block import BlockTerms
from limiter.model.bucket.bucket import Flags, Params, fresh
from limiter.model.bucket.contract import AcquireRequest, Granted
from limiter.model.bucket.operations import Acquire, AcquireStatus, Idempotency, Lot, SettleStatus, Want
from limiter.model.bucket.reservation import Signer
from limiter.model.policy.reading import read_policy_set
from limiter.store import keys, layout
from limiter.store.buckets import Buckets
from limiter.store.keys import Slot
from limiter.store.link.connect import open_link
from tests.support.operations import START_US, done, quota_terms, reserved, work_terms
from tests.support.servers import Server
from tests.support.stores import ScriptStore

BLOCK = BlockTerms(after=3, in_us=60e6, for_us=600e6)
TERMS = work_terms()
HEALTHY = Acquire((Want("healthy:a", TERMS, 1.0, 2.0),))

DECIDED = {AcquireStatus.GRANTED, AcquireStatus.REFUSED}

KINDS: dict[str, Params] = {
    "plain": TERMS,
    "quota": quota_terms(1000, (START_US - 1, START_US + 10**9)),
    "divided": replace(TERMS, flags=Flags.DIVIDED, partitions=2),
    "auto": replace(TERMS, flags=Flags.AUTO, cap=10.0),
    "shedding": replace(TERMS, flags=Flags.OVERLOAD | Flags.HISTOGRAM),
    "blocking": work_terms(block=BLOCK),
}


@pytest.mark.parametrize("flags", [*range(256), *(1 << bit for bit in range(8, 16))])
def test_f_s16_unknown_flag_bits_cost_only_their_own_bucket(valkey: Server, flags: int) -> None:
    store = ScriptStore(valkey)
    raw = bytearray(layout.pack_record(fresh(TERMS, START_US)))
    raw[1:3] = flags.to_bytes(2, "little")
    key = keys.bucket(store.prefix, "damaged:a")
    store.client.set(key, bytes(raw))
    damaged = Acquire((Want("damaged:a", TERMS, 1.0, 2.0),))
    answers = store.acquire([HEALTHY, damaged, HEALTHY], START_US)
    assert [answers[0].granted, answers[2].granted] == [True, True]
    if answers[1].status is AcquireStatus.CORRUPT:
        assert store.client.get(key) == bytes(raw), "what is not ours is left as it is"
    else:
        known = Flags.QUOTA | Flags.COUNTS_REQUESTS | Flags.REFUNDS
        assert not flags & ~known, "a record without trailers may be of another kind than its policy, which converts it"


@pytest.mark.parametrize("kind", KINDS)
def test_f_s16_no_bytes_at_a_bucket_stop_the_others(valkey: Server, kind: str) -> None:
    """Records with bits flipped, doubles replaced by NaN and infinity, cut and lengthened: seeded, so it repeats."""
    seed = random.randrange(2**32)
    print("seed", seed)  # noqa: T201
    draw, store, terms = random.Random(seed), ScriptStore(valkey), KINDS[kind]
    sound = layout.pack_record(fresh(terms, START_US))
    key = keys.bucket(store.prefix, "damaged:a")
    damaged = Acquire((Want("damaged:a", terms, 1.0, 2.0),), lot=Lot(1, 0.5))
    for _ in range(150):
        store.client.set(key, damage(sound, draw))
        answers = store.acquire([HEALTHY, damaged, HEALTHY], START_US + 10**6)
        assert [answer.status in (AcquireStatus.GRANTED, AcquireStatus.REFUSED) for answer in answers[::2]] == [
            True
        ] * 2
        settled = store.settle(
            [done(reserved(HEALTHY, answers[0], name=f"r{draw.random()}"), 1.0)] if answers[0].granted else [],
            START_US + 10**6,
        )
        assert all(answer.status is SettleStatus.SETTLED for answer in settled)
        store.client.delete(keys.bucket(store.prefix, "healthy:a"))


def damage(sound: bytes, draw: random.Random) -> bytes:
    raw = bytearray(sound)
    for _ in range(draw.randint(1, 4)):
        match draw.randrange(4):
            case 0:
                raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
            case 1:
                at = 2 + 8 * draw.randrange((len(raw) - 2) // 8)
                odd = [b"\0\0\0\0\0\0\xf8\x7f", b"\0\0\0\0\0\0\xf0\x7f", b"\0\0\0\0\0\0\xf0\xff", b"\xff" * 8, bytes(8)]
                raw[at : at + 8] = draw.choice(odd)
            case 2:
                raw[1] = draw.randrange(256)
            case _:
                if draw.random() < 0.3:
                    raw = raw[: draw.randrange(2, len(raw))] if draw.random() < 0.5 else raw + draw.randbytes(8)
        if len(raw) < 12:
            break
    return bytes(raw)


def test_f_s16_no_bytes_under_an_idempotency_key_stop_the_others(valkey: Server) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)  # noqa: T201
    draw, store = random.Random(seed), ScriptStore(valkey)
    once = HEALTHY.but(idempotency=Idempotency("order-17", b"f" * 16, b"a memo"))
    store.acquire([once], START_US)
    key = keys.idempotency(store.prefix, "order-17")
    sound: bytes = store.client.get(key)
    for _ in range(300):
        store.client.set(key, damage(sound, draw))
        answers = store.acquire([HEALTHY, once, HEALTHY], START_US + 10**6)
        assert [answer.status in (AcquireStatus.GRANTED, AcquireStatus.REFUSED) for answer in answers[::2]] == [
            True
        ] * 2
        store.client.delete(keys.bucket(store.prefix, "healthy:a"))


async def test_f_s16_a_damaged_memo_is_a_503_for_its_own_acquire(valkey: Server) -> None:
    link = await open_link(valkey.url)
    decider = Decider(Buckets(link), Signer(b"a secret of the tests"), deadline_s=5)
    decider.enforce(read_policy_set({"policies": [{"name": "reads", "match": {}, "rate": 100}]}))
    request = AcquireRequest({"customer": "c1"})
    assert isinstance(await decider.acquire(request, idempotency_key="order-17"), Granted)
    key = keys.idempotency(Slot().prefix, "order-17")
    sound = valkey.client().get(key)
    assert isinstance(sound, bytes)
    for at in range(29, len(sound)):  # behind layout, fingerprint, time and the memo's size
        raw = bytearray(sound)
        raw[at] ^= 0xFF
        valkey.client().set(key, bytes(raw))
        try:
            decision = await decider.acquire(request, idempotency_key="order-17")
        except NotDecided as undecided:
            assert undecided.reason == "record_damaged"  # noqa: PT017
        else:
            assert decision.replayed
    assert isinstance(await decider.acquire(request), Granted)
    await link.aclose()
