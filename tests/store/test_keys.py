"""F-N1 to F-N6: no client text shares a key with another, moves a slot, or reaches a key as it is."""

import string

from hypothesis import example, given, settings
from hypothesis import strategies as st
from redis.crc import key_slot

from limiter.model.policy.limit import Limit
from limiter.model.policy.reading import read_policy
from limiter.store import keys
from limiter.store.keys import NAME_MAX, TEXT_MAX, Slot, bucket_name, encode, limit_at

KEY_MAX = len("hg:{/65535}:b::") + TEXT_MAX + NAME_MAX

HOSTILE = [
    "", "!", "!!", "%21", "%2521", "~", "~~", "%7E", ",", ":", "/", "{", "}", "{}", "}{", "{x}", "a,b", "a:b", "a/0",
    "b:x", "*", "?", "[a]", "\\", "\0", "\n", "\r\n", "\t", "\x1b[31m", "\x7f", "\x85", "\u2028", "\u202e", "\u200f",
    "\ud800", "\udfff", "\ud83d\ude00", "😀", "é", "e\u0301", "ß", "Ⅷ", "²", "٣", "A", "a", " ", "a ", " a", "0", "00",
    "x" * TEXT_MAX, "x" * (TEXT_MAX + 1), "x" * 10_000, "{" * 10_000, "\0" * 10_000,
]  # fmt: skip

letters = st.one_of(
    st.sampled_from(HOSTILE),
    st.text(st.characters(exclude_categories=()), max_size=200),  # lone surrogates too
    st.text("{}:,/%~!21E ", max_size=8),
)
values = st.one_of(st.none(), letters)
buckets = st.tuples(letters, st.lists(values, min_size=1, max_size=40).map(tuple))


def test_f_n1_to_f_n5_no_two_hostile_texts_are_written_alike() -> None:
    written = [encode(text) for text in (None, *HOSTILE)]
    assert len(set(written)) == len(written)


def test_f_n2_a_digest_cannot_be_imitated() -> None:
    """The digest of a long text differs from the key of every other text, also of a text spelled like the digest."""
    long = encode("x" * 10_000)
    assert encode(long) != long
    many = bucket_name("p", ["x" * 60] * 40)
    assert bucket_name("p", [many.removeprefix("p:")]) != many


@given(first=values, second=values)
@example(first=None, second="!")
@example(first=None, second="")
@example(first="!", second="%21")
@example(first="\ud83d\ude00", second="😀")
def test_f_n1_to_f_n5_two_texts_are_written_alike_only_if_the_same(first: str | None, second: str | None) -> None:
    assert (encode(first) == encode(second)) == (first == second)


@settings(max_examples=300)
@given(first=buckets, second=buckets)
@example(first=("p", ("a,b",)), second=("p", ("a", "b")))
@example(first=("p", ("",) * 33), second=("p", ("",) * 34))
@example(first=("p", ("x" * 60,) * 33), second=("p", ("x" * 60,) * 34))
@example(first=("p:a", ("b",)), second=("p", ("a:b",)))
@example(first=("", ("",)), second=("", (None,)))
def test_f_n1_to_f_n6_two_descriptors_share_a_bucket_only_if_they_are_the_same(
    first: tuple[str, tuple[str | None, ...]], second: tuple[str, tuple[str | None, ...]]
) -> None:
    assert (bucket_name(*first) == bucket_name(*second)) == (first == second)


@given(policy=letters, combination=st.lists(values, min_size=1, max_size=40), data=st.data())
def test_f_n6_changing_one_value_of_many_changes_the_bucket(
    policy: str, combination: list[str | None], data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(combination) - 1))
    other = data.draw(values.filter(lambda value: value != combination[at]))
    changed = [*combination[:at], other, *combination[at + 1 :]]
    assert bucket_name(policy, changed) != bucket_name(policy, combination)


def test_f_n5_no_values_at_all_are_not_one_empty_value() -> None:
    """A policy that begins to split by customer must not hand its one bucket to the customer named ""."""
    assert bucket_name("p", []) != bucket_name("p", [""])


@given(namespace=letters, partition=st.integers(0, 65_535), name=buckets, text=letters, raw=st.binary(min_size=12))
def test_f_n1_no_text_moves_a_key_to_another_slot(
    namespace: str, partition: int, name: tuple[str, tuple[str | None, ...]], text: str, raw: bytes
) -> None:
    prefix = Slot(namespace, partition).prefix
    of_slot = [
        keys.bucket(prefix, bucket_name(*name)),
        keys.idempotency(prefix, text),
        keys.tombstone(prefix, raw[:12].hex()),
        keys.reply(prefix, raw[:12].hex().encode()),
        keys.sampling(prefix),
        keys.touched(prefix),
    ]
    assert {key_slot(key) for key in of_slot} == {key_slot(prefix)}
    assert len(set(of_slot)) == len(of_slot)


@given(namespace=letters, name=buckets, text=letters)
def test_f_n3_f_n4_keys_are_short_and_printable(
    namespace: str, name: tuple[str, tuple[str | None, ...]], text: str
) -> None:
    prefix = Slot(namespace, 65_535).prefix
    for key in (keys.bucket(prefix, bucket_name(*name)), keys.idempotency(prefix, text)):
        assert len(key) <= KEY_MAX
        assert set(key.decode()) <= set(string.ascii_letters + string.digits + "{}:/.,_-%~!")
        assert (key.count(b"{"), key.count(b"}")) == (1, 1)


@given(first=letters, second=letters, partitions=st.tuples(st.integers(0, 65_535), st.integers(0, 65_535)))
@example(first="a/1", second="a", partitions=(0, 1))
def test_f_n1_f_n2_namespaces_and_partitions_never_share_a_prefix(
    first: str, second: str, partitions: tuple[int, int]
) -> None:
    slots = [Slot(first, partitions[0]), Slot(second, partitions[1])]
    prefixes = [slot.prefix for slot in slots]
    assert (prefixes[0] == prefixes[1]) == (slots[0] == slots[1])
    if slots[0] != slots[1]:
        assert not prefixes[0].startswith(prefixes[1])
        assert not prefixes[1].startswith(prefixes[0])


@given(first=letters, second=letters)
def test_f_n2_two_idempotency_keys_are_never_one(first: str, second: str) -> None:
    prefix = Slot().prefix
    assert (keys.idempotency(prefix, first) == keys.idempotency(prefix, second)) == (first == second)


def test_p12_a_limit_without_rates_of_its_own_holds_for_every_key() -> None:
    limit = Limit(read_policy({"name": "reads", "rate": 1}))
    assert limit_at(limit, "reads:a") is limit
