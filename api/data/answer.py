"""An HTTP answer, as both lanes send it."""

from __future__ import annotations

import re

from msgspec import Struct
from msgspec.structs import replace

JSON = b"content-type: application/json\r\n"
PROBLEM = b"content-type: application/problem+json\r\n"
RETRY = {retry: b"headgate-retry: %b\r\n" % retry.encode() for retry in ("now", "after", "never")}
"""The header line that says whether to retry (G6)."""

_UNSAFE = re.compile(r"[^\x20-\x7e]")


class Answer(Struct, frozen=True, gc=False):
    """Status, header lines (each ending in CRLF, without content-length), body."""

    status: int
    head: bytes
    body: bytes
    error: Exception | None = None
    """An internal failure, logged under the request's id when the answer is sent."""

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers as pairs, with the length."""
        lines = (line.partition(b": ") for line in self.head.split(b"\r\n") if line)
        return [*((name, value) for name, _, value in lines), (b"content-length", b"%d" % len(self.body))]

    def with_header(self, name: str, value: str) -> Answer:
        """Return a copy with one more header."""
        return replace(self, head=self.head + header(name, value))


def header(name: str, value: str) -> bytes:
    """Return a header line without characters that could end it and without non-ASCII (F-H5)."""
    return f"{name}: {_UNSAFE.sub('', value)}\r\n".encode()
