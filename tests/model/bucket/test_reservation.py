"""Signed reservations: what we sign we read back, and nothing else is one of ours (F-R6)."""

import math
from base64 import urlsafe_b64decode, urlsafe_b64encode

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from limiter.model.bucket.operations import Charge
from limiter.model.bucket.reservation import ID_SIZE, TOKEN_MAX, Reservation, Signer, _unpack, taken_by

OURS = Signer(b"our secret")
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"

times_us = st.integers(0, 2**53)
amounts = st.floats(0, 1e15)
charges = st.builds(
    Charge,
    bucket=st.text(ALPHABET + ".:,%~!", max_size=201),
    charge=amounts,
    weight=st.floats(0, 1e6),
    params=st.none(),
    expected_ms=st.one_of(st.just(math.nan), amounts),
)
reservations = st.builds(
    Reservation,
    id=st.binary(min_size=ID_SIZE, max_size=ID_SIZE),
    namespace=st.text(st.characters(exclude_categories=()), max_size=60),  # lone surrogates too
    partition=st.integers(0, 65_535),
    acquired_us=times_us,
    deadline_us=times_us,
    expected_ms=st.one_of(st.just(math.inf), amounts),
    taken=st.lists(charges.map(taken_by), max_size=8).map(tuple),
    class_number=st.integers(0, 3),
)

PLAIN = Reservation(
    id=bytes(range(ID_SIZE)),
    namespace="default",
    partition=0,
    acquired_us=1_790_000_000_000_000,
    deadline_us=1_790_000_060_000_000,
    expected_ms=200.0,
    taken=(taken_by(Charge("orders-reads:c1", 3.0)), taken_by(Charge("monthly:c1", 3.0, 0.5))),
)
TOKEN = OURS.sign(PLAIN)


def raw(token: str) -> bytes:
    return urlsafe_b64decode(token + "=" * (-len(token) % 4))


def spell(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()


@given(reservations)
def test_a_signed_reservation_is_read_back(reservation: Reservation) -> None:
    assert OURS.open(OURS.sign(reservation)) == reservation


@given(reservations)
def test_a_token_is_safe_in_urls_and_headers(reservation: Reservation) -> None:
    assert set(OURS.sign(reservation)) <= set(ALPHABET)


def test_an_unknown_expectation_survives_the_way() -> None:
    """NaN equals nothing, so the round trip above leaves it out."""
    opened = OURS.open(OURS.sign(replace(PLAIN, expected_ms=math.nan)))
    assert opened is not None
    assert math.isnan(opened.expected_ms)


def test_nodes_that_share_the_secret_read_each_others_tokens() -> None:
    assert Signer(b"our secret").open(TOKEN) == PLAIN


@pytest.mark.parametrize("size", [255, 256, 10_000])
def test_f_n4_a_long_namespace_can_be_signed_for(size: int) -> None:
    long = replace(PLAIN, namespace="n" * size)
    assert OURS.open(OURS.sign(long)) == long


def test_f_r6_every_flipped_bit_is_noticed() -> None:
    data = raw(TOKEN)
    for bit in range(len(data) * 8):
        forged = bytearray(data)
        forged[bit // 8] ^= 1 << bit % 8
        assert OURS.open(spell(bytes(forged))) is None, bit


def test_f_r6_a_token_cut_at_any_length_is_none() -> None:
    assert all(OURS.open(TOKEN[:size]) is None for size in range(len(TOKEN)))
    assert all(OURS.open(spell(raw(TOKEN)[:size])) is None for size in range(len(raw(TOKEN))))


def test_f_r6_a_token_of_another_installation_is_none() -> None:
    assert Signer(b"their secret").open(TOKEN) is None
    assert Signer(b"").open(TOKEN) is None


@pytest.mark.parametrize(
    "spelling",
    [
        TOKEN + "=",
        TOKEN + "==",
        " " + TOKEN,
        TOKEN + " ",
        TOKEN + "\n",
        TOKEN[:8] + "\n" + TOKEN[8:],
        TOKEN[:8] + "*" + TOKEN[8:],
        TOKEN.replace("-", "+").replace("_", "/") + "+",
        TOKEN + "A",
        TOKEN + "AAAA",
        TOKEN.encode().decode("utf-16-le", "replace"),
    ],
)
def test_f_r6_one_reservation_has_one_spelling(spelling: str) -> None:
    assert OURS.open(spelling) is None


def test_f_r6_the_bits_that_base64_leaves_over_must_be_zero() -> None:
    """Tokens whose length leaves 2 or 4 unused bits in the last letter have other spellings of the same bytes."""
    for bucket in ("b", "bb", "bbb"):
        token = OURS.sign(replace(PLAIN, taken=(taken_by(Charge(bucket, 1.0)),)))
        others = [token[:-1] + letter for letter in ALPHABET if letter != token[-1]]
        assert OURS.open(token) is not None
        assert all(OURS.open(other) is None for other in others)


def test_f_r6_the_standard_alphabet_is_not_ours() -> None:
    tokens = (OURS.sign(replace(PLAIN, partition=n)) for n in range(100))
    token = next(token for token in tokens if "-" in token or "_" in token)
    assert OURS.open(token.replace("-", "+").replace("_", "/")) is None


def test_f_r6_a_layout_of_another_version_is_none() -> None:
    """Signed with our secret, by a node that is newer or older."""
    payload = raw(TOKEN)[:-16]
    for version in (0, 1, 255):
        other = bytes([version]) + payload[1:]
        assert OURS.open(spell(other + OURS._tag(other))) is None


@given(st.text(st.characters(exclude_categories=()), max_size=300))
def test_f_r6_any_text_is_none_and_never_an_error(text: str) -> None:
    assert OURS.open(text) is None


@pytest.mark.parametrize("letter", ["A", "\0", "=", "é"])
def test_f_r6_a_token_longer_than_any_of_ours_is_none(letter: str) -> None:
    assert OURS.open(letter * (TOKEN_MAX + 1)) is None
    assert OURS.open(letter * TOKEN_MAX) is None


def test_f_r6_a_payload_shorter_than_its_head_is_none() -> None:
    """Signed with our secret, by a node whose layout was shorter."""
    assert _unpack(b"\x01short") is None
