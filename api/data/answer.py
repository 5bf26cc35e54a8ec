"""An HTTP answer as both lanes send it."""

from __future__ import annotations

import re

from msgspec import Struct
from msgspec.structs import replace

JSON = b"content-type: application/json\r\n"
PROBLEM = b"content-type: application/problem+json\r\n"

_UNSAFE = re.compile(r"[^\x20-\x7e]")


class Answer(Struct, frozen=True, gc=False):
    """Status, header lines (each ending in CRLF, content-length apart), body."""

    status: int
    head: bytes
    body: bytes
    error: Exception | None = None
    """A failure of ours, logged under the request's id when the answer is sent."""

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """The headers as pairs, the length among them."""
        lines = (line.partition(b": ") for line in self.head.split(b"\r\n") if line)
        return [*((name, value) for name, _, value in lines), (b"content-length", b"%d" % len(self.body))]

    def with_header(self, name: str, value: str) -> Answer:
        """The same with one header more."""
        return replace(self, head=self.head + header(name, value))


def header(name: str, value: str) -> bytes:
    """A header line. Whatever could end it, or is no ASCII, is left out (F-H5)."""
    return f"{name}: {_UNSAFE.sub('', value)}\r\n".encode()
