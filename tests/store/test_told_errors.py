"""Answers about a store's failure use words of ours, never the server's, and never its address."""

import pytest

from limiter.store.store_errors import (
    StoreBusy,
    StoreError,
    StoreOutOfMemory,
    StoreRefused,
    StoreUnavailable,
    StoreUnsupported,
    without_address,
)

TEXT = "10.1.2.3:6379 cannot serve now: {} key 'hg:tenant-acme' of user acme"


@pytest.mark.parametrize("kind", [StoreError, StoreUnavailable, StoreRefused, StoreOutOfMemory, StoreUnsupported])
@pytest.mark.parametrize("code", ["LOADING", "WRONGTYPE", "ACME", "NOPERM", "Operation not in time"])
def test_the_server_s_words_stay_with_us(kind: type[StoreError], code: str) -> None:
    told = without_address(kind(TEXT.format(code)))
    assert not any(word in told.lower() for word in ("10.1.2.3", "6379", "acme", "hg:", "wrongtype"))
    assert told.startswith("the store ")


def test_helpful_parts_of_an_error_are_still_shown() -> None:
    assert without_address(StoreRefused(TEXT.format("LOADING"))) == "the store cannot serve now: it answers LOADING"
    assert without_address(StoreBusy("too many operations are waiting")) == "too many operations are waiting"
    assert without_address(StoreUnsupported("too old")).endswith("the log of the node says why, and what to change")
