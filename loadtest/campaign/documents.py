"""JSON that nobody should send: deep, huge, odd or broken, from a generator of random numbers alone."""

from __future__ import annotations

import json
from random import Random
from typing import Any

ODD_NUMBERS = (
    "0", "-0", "-1", "1e-400", "5e-324", "1e308", "1e400", "-1e400", "9007199254740993", "1" + "0" * 400, "0.1" * 3,
    "NaN", "Infinity", "-Infinity", "1_000", "0x10", "01", "1.", ".5", "+1", "1e", "4294967296", "9223372036854775808",
)  # fmt: skip
ODD_TEXTS = (
    "", " ", "\0", "a\r\nb: c", "\u202e", "\ufeff", "\U0001f4a9" * 8, "e\u0301", "..", "/", "%00", "*", "a*b*c*d*e*f*",
    "default", "{}", "[]", "null", "hg:{x}:b:y", "x" * 64, "x" * 65, "x" * 1025, "\u00e9" * 255, "'; --", "\\", '"',
)  # fmt: skip
BROKEN = (
    b"", b"{", b"}", b"[", b"nul", b'{"', b'{"a', b'{"a":', b'{"a":1', b'{"a":1,}', b"[1,]", b'"', b'"\\', b'"\\u12',
    b'"\\ud800"', b'"\xff\xfe"', b"\xef\xbb\xbf{}", b"\xc0\xaf", b'{"descriptor":{"a":"\xed\xa0\x80"}}', b"{}{}", b"\0",
)  # fmt: skip


def value(draw: Random, depth: int = 0) -> Any:
    """Return any value, odd ones among them."""
    kind = draw.randrange(9 if depth < 4 else 6)
    if kind == 0:
        return draw.choice([None, True, False])
    if kind == 1:
        return draw.choice([0, 1, -1, 2**53, 2**63, 2**64, 10**40, draw.randrange(-1000, 1000)])
    if kind == 2:
        return draw.choice([0.0, -0.0, 5e-324, 1e308, 0.1, -1.5, draw.random() * 10 ** draw.randrange(-20, 20)])
    if kind <= 5:
        return text(draw)
    if kind == 6:
        return [value(draw, depth + 1) for _ in range(draw.randrange(4))]
    return {text(draw): value(draw, depth + 1) for _ in range(draw.randrange(4))}


def text(draw: Random) -> str:
    """Return any text without lone surrogates."""
    if draw.random() < 0.6:
        return draw.choice(ODD_TEXTS)
    letters = [chr(draw.choice([draw.randrange(0x20, 0x7F), draw.randrange(0xD800), draw.randrange(0xE000, 0x110000)]))]
    return "".join(letters) * draw.randrange(1, 80)


def mutated(draw: Random, document: Any) -> Any:
    """Return a copy with one place changed: a value replaced, a field left out or one too many."""
    if isinstance(document, dict) and document and draw.random() < 0.8:
        name = draw.choice(list(document))
        others = {key: inner for key, inner in document.items() if key != name}
        if draw.random() < 0.15:
            return others
        if draw.random() < 0.15:
            return document | {text(draw): value(draw)}
        return others | {name: mutated(draw, document[name])}
    if isinstance(document, list) and document and draw.random() < 0.8:
        at = draw.randrange(len(document))
        return [*document[:at], mutated(draw, document[at]), *document[at + 1 :]]
    return value(draw)


def written(draw: Random, document: Any) -> bytes:
    """Return JSON, sometimes with a number that JSON or Python cannot express, a repeated name, or damaged text."""
    body = json.dumps(document, ensure_ascii=draw.random() < 0.5).encode("utf-8", "surrogatepass")
    chance = draw.random()
    if chance < 0.08 and b":" in body:
        at = draw.choice([found for found in range(len(body)) if body[found] == 0x3A])
        end = min((found for found in range(at, len(body)) if body[found] in b",}"), default=len(body))
        return body[: at + 1] + draw.choice(ODD_NUMBERS).encode() + body[end:]
    if chance < 0.12 and body.startswith(b"{") and len(body) > 2:
        return body[:-1] + b"," + body[1:]
    if chance < 0.16:
        at = draw.randrange(len(body) + 1)
        return body[:at] + draw.choice([b"\0", b"\xff", b'"', b"\\", b"{", b"]", draw.randbytes(3)]) + body[at:]
    return body


def heavy(draw: Random) -> bytes:
    """Return a body made to be slow to refuse (F-H10), up to about a megabyte."""
    count = draw.choice([10, 1_000, 16_000, 60_000])
    kinds = [
        lambda: b'{"reservation":"' + b'\\"' * count,
        lambda: b'{"reservation":"' + b"\\u0041" * count + b'","work":1}',
        lambda: b"[" * count,
        lambda: b'{"a":' * count,
        lambda: b"{" + b",".join(b'"k%d":1' % number for number in range(count)) + b',"k1":2}',
        lambda: b'{"descriptor":{' + b",".join(b'"k%d":"v"' % number for number in range(count)) + b"}}",
        lambda: b'{"operations":[' + b",".join([b'{"op":"acquire"}'] * min(count, 16_000)) + b"]}",
        lambda: b'{"operations":[' + b",".join([b"[]"] * count) + b"]}",
        lambda: b'{"descriptor":{"a":"' + b"x" * (count * 8) + b'"}}',
        lambda: b'{"work":' + b"9" * (count * 8) + b"}",
        lambda: b'{"work":1e' + b"9" * count + b"}",
        lambda: b" " * (count * 8) + b"{}",
        lambda: b'{"rate":1,"match":{' + b",".join(b'"d%d":"*a*b*"' % number for number in range(count)) + b"}}",
        lambda: b'{"rate":1,"per":[' + b",".join(b'"d%d"' % number for number in range(count)) + b"]}",
    ]
    return draw.choice(kinds)()[:1_200_000]
