"""Heads that the fast lane remembers."""

import pytest

from api.data.plane import Headers
from api.transport import fastlane
from api.transport.fastlane import Head, Heads


def test_f_n7_the_memory_of_heads_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads are client text: a new one with every request must not fill the memory."""
    monkeypatch.setattr(fastlane, "HEADS_KEPT_MAX", 3)
    heads, head = Heads(), Head(b"/v1/acquire", Headers(), keep_alive=True, body_bytes=0)
    for number in range(10):
        heads.keep(b"POST /v1/acquire HTTP/1.1\r\nX: %d\r\n\r\n" % number, head)
        assert len(heads.known) <= 3
    heads.keep(b"x" * (fastlane.HEAD_KEPT_BYTES_MAX + 1), head)
    assert heads.find(b"x" * (fastlane.HEAD_KEPT_BYTES_MAX + 1)) is None
