"""Bodies that are made to be slow to refuse, each of any size (F-H10)."""

from collections.abc import Callable

Make = Callable[[int], bytes]


def filled(before: bytes, unit: bytes, after: bytes = b"") -> Make:
    return lambda size: before + unit * ((size - len(before) - len(after)) // len(unit)) + after


def named(before: bytes, value: bytes, after: bytes, *, each: int = 1) -> Make:
    """An object of many names; each of them so many times."""

    def make(size: int) -> bytes:
        count = size // (len(value) + 10)
        return before + b",".join(b'"k%d":%b' % (number // each, value) for number in range(count)) + after

    return make


def operations(before: bytes, value: bytes, last: bytes = b"") -> Make:
    """A full batch of operations with many names each."""

    def make(size: int) -> bytes:
        names = b",".join(b'"k%d":%b' % (number, value) for number in range(size // 12_000 + 1))
        return b'{"operations":[%b%b]}' % (b",".join([before + names + b"}}"] * 999), last)

    return make


BODIES: dict[str, Make] = {
    "escaped quotes": filled(b'{"reservation":"', b'\\"'),
    "escaped quotes outside of a text, deep at its end": filled(b'{"descriptor":', b'\\"', b"[" * 40),
    "backslashes": filled(b'{"reservation":"', b"\\\\"),
    "quotes": filled(b'{"descriptor":', b'"'),
    "quotes and spaces": filled(b'{"descriptor":{"a":"b"', b'" '),
    "spaces": filled(b'{"descriptor"', b" ", b"x"),
    "lists": filled(b"[", b"[],", b"[]]"),
    "objects": filled(b'{"descriptor":{"a":[', b"{},", b"{}]}}"),
    "texts": filled(b'{"descriptor":[', b'"",', b'""]}'),
    "numbers": filled(b'{"descriptor":[', b"1,", b"1]}"),
    "NaN": filled(b'{"descriptor":[', b"NaN,", b"1]}"),
    "digits": filled(b'{"work":', b"9", b"}"),
    "decimals": filled(b'{"work":1.', b"9", b"}"),
    "an exponent": filled(b'{"work":1e', b"9", b"}"),
    "one name twice": named(b"{", b"1", b',"k1":1}'),
    "all names twice": named(b"{", b"1", b"}", each=2),
    "one name always": filled(b"{", b'"a":1,', b'"a":1}'),
    "unknown fields": named(b"{", b"1", b"}"),
    "dimensions": named(b'{"descriptor":{', b'"v"', b"}}"),
    "dimensions twice": named(b'{"descriptor":{', b'"v"', b"}}", each=2),
    "dimensions that are lists": named(b'{"descriptor":{', b"[]", b"}}"),
    "a long value": filled(b'{"descriptor":{"a":"', b"x", b'"}}'),
    "a long value of two bytes": filled(b'{"descriptor":{"a":"', "é".encode(), b'"}}'),
    "a long value, half a pair at its end": filled(b'{"descriptor":{"a":"', b"x", b'\\ud800"}}'),
    "halves of pairs": filled(b'{"descriptor":{"a":"', b"\\ud800", b'"}}'),
    "colons": filled(b'{"descriptor":{"a":"', b":", b'"}}'),
    "a long name": filled(b'{"descriptor":{"', b"x", b'":"b"}}'),
    "a long name over a long list": lambda size: b'{"%b":[%b1]}' % (b"x" * (size // 2), b"1," * (size // 4)),
    "deep at its end": filled(b"[", b"[],", b"[" * 40),
    "no UTF-8 at its end": filled(b'"', b"x", b'\xff"'),
    "a control character at its end": filled(b'{"a":"', b"x", b'\n"}'),
    "empty operations": filled(b'{"operations":[', b"{},", b"{}]}"),
    "wrong operations": operations(b'{"op":"acquire","descriptor":{"a":1,', b"1"),
    "operations, the last wrong": operations(b'{"op":"acquire","descriptor":{', b'"v"', last=b",1"),
    "fields beside operations": named(b'{"operations":[],', b"1", b"}"),
    "a long idempotency key": filled(
        b'{"operations":[{"op":"acquire","descriptor":{"a":"b"},"idempotency_key":"', b"x", b'\xc3\xa9"}]}'
    ),
    "signals": named(b'{"policy":"a","source":"b","signals":{', b"1", b"}}"),
    "patterns": named(b'{"rate":1,"match":{', b"1", b"}}"),
    "weights": named(b'{"rate":1,"weights":{"a":{', b'"x"', b"}}}"),
    "right weights, wrong rate": named(b'{"rate":-1,"weights":{"a":{', b"1", b"}}}"),
    "reserves": named(b'{"rate":1,"reserve":{', b"1", b"}}"),
    "the same dimension": filled(b'{"rate":1,"per":[', b'"a",', b'"a"]}'),
    "a long rate": filled(b'{"rate":"', b"1", b'x"}'),
    "a long capacity": filled(b'{"rate":1,"capacity":"', b"1", b'e"}'),
    "a deep time zone": filled(b'{"quota":{"work":1,"period":"day","timezone":"', b"a/", b'b"}}'),
    "a time zone above": filled(b'{"quota":{"work":1,"period":"day","timezone":"', b"../", b'b"}}'),
    "overload": named(b'{"rate":1,"overload":{', b"1", b"}}"),
    "a long revision": filled(b'{"revision":', b"1", b"}"),
}
