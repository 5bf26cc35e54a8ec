"""Bytes that are not quite HTTP: broken heads, odd framing, pipelines, from a generator of random numbers."""

from __future__ import annotations

from random import Random

PATHS = (
    "/v1/acquire", "/v1/settle", "/v1/batch", "/v1/signals", "/v1/policies", "/v1/namespaces", "/v1/audit",
    "/v1/buckets", "/v1/controller", "/v1/uncovered", "/healthz", "/readyz", "/metrics", "/docs", "/openapi.json",
)  # fmt: skip
METHODS = (
    "GET",
    "POST",
    "PUT",
    "DELETE",
    "HEAD",
    "OPTIONS",
    "PATCH",
    "TRACE",
    "CONNECT",
    "PRI",
    "get",
    "",
    "G\0T",
    "X" * 40,
)
TOKENS = (
    b"POST /v1/acquire HTTP/1.1\r\n", b"POST /v1/settle HTTP/1.1\r\n", b"POST /v1/batch HTTP/1.1\r\n", b"GET /",
    b"\r\n", b"\r\n\r\n", b"\n", b"\r", b"Host: x\r\n", b"Content-Length: 5\r\n", b"Content-Length: 0\r\n",
    b"Content-Length: 18446744073709551616\r\n", b"Content-Length: -1\r\n", b"Content-Length: 5, 5\r\n",
    b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: gzip, chunked\r\n", b"Transfer-Encoding: xchunked\r\n",
    b"5\r\nhello\r\n", b"0\r\n\r\n", b"ffffffffffffffff\r\n", b"5;x=y\r\nhello\r\n", b"Expect: 100-continue\r\n",
    b"Connection: close\r\n", b"Connection: upgrade\r\nUpgrade: websocket\r\n", b"Connection: Upgrade\r\n",
    b"Upgrade: h2c\r\n", b"{}", b'{"descriptor":{"a":"b"}}', b"\x00", b"\xff" * 10, b":", b" ", b"HTTP/1.1",
    b"Authorization: Bearer x\r\n", b'{"operations":[', b"]}", b"Content-Type: application/json\r\n", b" folded: x\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"CONNECT x:1 HTTP/1.1\r\n\r\n", b"x" * 1000, b"HTTP/9.9",
    b"GET http://x/v1/audit HTTP/1.1\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
)  # fmt: skip


def request(
    method: str, path: str, body: bytes = b"", *headers: tuple[str, str], key: str | None = None, version: str = "1.1"
) -> bytes:
    """Return a request as bytes, with its length; other text than Latin-1 is sent as UTF-8."""
    own = [("Host", "x"), ("Content-Length", str(len(body)))]
    if body:
        own.append(("Content-Type", "application/json"))
    if key is not None:
        own.append(("Authorization", f"Bearer {key}"))
    lines = [f"{method} {path} HTTP/{version}", *(f"{name}: {value}" for name, value in (*own, *headers))]
    return "\r\n".join([*lines, "", ""]).encode("utf-8", "surrogateescape") + body


def noise(draw: Random) -> bytes:
    """Return random bytes."""
    return draw.randbytes(draw.randrange(1, 2_000))


def soup(draw: Random) -> bytes:
    """Return pieces of HTTP in any order, sometimes after a valid request."""
    raw = b"".join(draw.choice(TOKENS) for _ in range(draw.randrange(1, 14)))
    return request("GET", draw.choice(PATHS)) + raw if draw.random() < 0.3 else raw


def odd_head(draw: Random, body: bytes, key: str | None) -> bytes:
    """Return a request with a fault in its first line or its headers."""
    method, path = draw.choice(METHODS), draw.choice(PATHS)
    odd: list[tuple[str, str]] = [
        ("X", "y" * draw.choice([1, 8_000, 70_000])),
        ("Content-Length", str(draw.choice([0, 3, 2**31, 2**64, "x"]))),
        ("Transfer-Encoding", draw.choice(["chunked", "identity", "chunked, chunked", ""])),
        ("Content-Type", draw.choice(["", "text/plain", "application/json; charset=utf-16", "multipart/form-data"])),
        ("Content-Encoding", draw.choice(["gzip", "br", "identity", "\x7f"])),
        ("Authorization", draw.choice(["", "Bearer", "Bearer ", "Basic eDp5", "Bearer " + "x" * 5_000])),
        ("Idempotency-Key", draw.choice(["", "a", "\u00e9", "x" * 300, "a b", "k1"])),
        ("Expect", draw.choice(["100-continue", "200-ok"])),
        ("Connection", draw.choice(["close", "keep-alive", "upgrade", "close, keep-alive", ""])),
        ("Upgrade", draw.choice(["websocket", "h2c", "x"])),
        ("Host", draw.choice(["", "y", "x:99999", "[::1", "\u00e9"])),
        ("X-Request-Id", draw.choice(["a" * 300, "\x01", "ok-1"])),
        ("Traceparent", draw.choice(["00-" + "a" * 32 + "-" + "b" * 16 + "-01", "x", ""])),
        ("If-Match", draw.choice(['"1"', "*", '"x"', "1", '"99999999999999999999"'])),
        ("Range", "bytes=0-0"),
        ("Sec-Fetch-Site", draw.choice(["cross-site", "same-origin", "none", "x"])),
        ("Accept", draw.choice(["*/*;q=x", "application/openmetrics-text", "a" * 500])),
        ("Bad Name", "x"),
        ("", "x"),
    ]
    chosen = draw.sample(odd, draw.randrange(1, 5))
    if draw.random() < 0.05:
        chosen += [(f"h{number}", "v") for number in range(draw.choice([50, 150, 2_000]))]
    if draw.random() < 0.2:
        path += draw.choice(
            ["/" * 100, "?" + "a=b&" * 2_000, "/%00", "/../../etc/passwd", "?limit=\u00e9", "#x", "/x" * 50]
        )
    return request(
        method, path, body, *chosen, key=key, version=draw.choice(["1.1"] * 6 + ["1.0", "2.0", "0.9", "1.2"])
    )


def chunked(draw: Random, path: str, body: bytes, key: str | None) -> bytes:
    """Return a body in chunks, valid or not, often with trailers (F-H14)."""
    head = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", "Transfer-Encoding: chunked"]
    if key is not None:
        head.append(f"Authorization: Bearer {key}")
    raw = "\r\n".join([*head, "", ""]).encode()
    left = body
    while left:
        size = draw.randrange(1, min(len(left), 50_000) + 1)
        raw += b"%x%b\r\n%b\r\n" % (size, draw.choice([b"", b"", b";x=" + b"y" * 20]), left[:size])
        left = left[size:]
    if draw.random() < 0.2:
        raw += draw.choice([b"-1\r\n", b"zz\r\n", b"fffffffffffffffff\r\n", b"5\r\nab", b"\r\n"])
    trailer = draw.choice(
        [b"", b"Authorization: Bearer x\r\n", b"Content-Length: 3\r\n", b"X: " + b"y" * 9_000 + b"\r\n"]
    )
    return raw + b"0\r\n" + trailer + b"\r\n"


def pipeline(draw: Random, requests: list[bytes]) -> bytes:
    """Return requests that do not wait for answers, sometimes thousands, sometimes with something odd between them."""
    count = draw.choice([2, 5, 20, 100, 1_000, 3_000])
    if draw.random() < 0.3:
        tiny = draw.choice(
            [
                b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
                b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
                b"POST /v1/acquire HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n",
                b"\r\n\r\n",
            ]
        )
        return tiny * count
    chosen = [draw.choice(requests) for _ in range(min(count, 200))]
    if draw.random() < 0.3:
        chosen.insert(draw.randrange(len(chosen)), soup(draw))
    return b"".join(chosen)
