"""The explainer judges as the decoder does: what one refuses, the other can say why, and nothing else."""

import contextlib
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.data import decode, json_text
from api.data.decode import AcquireOperation, BadRequest, Invalid
from api.data.field_problems import problems
from limiter.model.bucket.contract import AcquireRequest, SettleRequest, SignalRequest

texts = st.one_of(st.text(max_size=5), st.text(min_size=60, max_size=70), st.just("x" * 1025), st.just("critical"))
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 2000), st.integers(-(2**80), 2**80), texts,
    st.floats(allow_nan=False, allow_infinity=False),
)  # fmt: skip
values = st.one_of(scalars, st.lists(scalars, max_size=2), st.dictionaries(texts, scalars, max_size=3))
descriptors = st.one_of(values, st.dictionaries(texts, texts, max_size=34))


def documents(kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    fields = dict.fromkeys(kind.__struct_fields__, values) | {"unknown": values, "op": values}
    if "descriptor" in fields:
        fields["descriptor"] = descriptors
    if kind is SignalRequest:
        fields["signals"] = fields["key"] = values | st.dictionaries(texts, scalars, max_size=18)
    return st.fixed_dictionaries({}, optional=fields) | values


@settings(max_examples=400, deadline=None)
@given(data=st.data(), kind=st.sampled_from([AcquireRequest, SettleRequest, SignalRequest]))
def test_the_explainer_and_the_decoder_agree(data: st.DataObject, kind: type[msgspec.Struct]) -> None:
    body = json.dumps(data.draw(documents(kind))).encode()
    found = problems(json_text.read(body), kind)
    refused = contextlib.nullcontext() if not found else pytest.raises(msgspec.ValidationError)
    with refused:
        msgspec.json.decode(body, type=kind)


@settings(max_examples=200, deadline=None)
@given(
    document=st.dictionaries(st.text(max_size=8), st.text(max_size=8), min_size=1, max_size=6),
    indent=st.none() | st.just(1),
)
def test_valid_bodies_are_never_taken_for_doubles(document: dict[str, str], indent: int | None) -> None:
    """Colons, quotes, backslashes and spaces in texts do not mislead the counting."""
    if "" in document:
        document["a"] = document.pop("")
    body = json.dumps({"descriptor": document, "work": 1}, indent=indent, ensure_ascii=False).encode("utf-8", "replace")
    assert decode.acquire(body).descriptor == json.loads(body)["descriptor"]


@pytest.mark.parametrize(
    "body",
    [
        b'{"descriptor":{"a":"b"},"work":1,"work":1}',
        b'{"descriptor":{"a":"b"},"work" :1,"work":1}',
        b'{"descriptor":{"a":"b","a":"b"}}',
        b'{"descriptor":{":":"\\"", ":":"b"}}',
        b'{"descriptor":{"a":"\\"",":x":"1",":x":"2"}}',
        b'{"descriptor":{"a\\\\":"1","a\\\\":"2"}}',
        b'{"descriptor":{"a":"b"},"descriptor":{"a":"b"}}',
    ],
)
def test_doubles_are_always_found(body: bytes) -> None:
    with pytest.raises(Invalid, match="more than once"):
        decode.acquire(body)


@pytest.mark.parametrize(
    "operation",
    [
        b'"op":"acquire","descriptor":{"a":"b"},"work":1,"work":null',
        b'"op":"acquire","descriptor":{"a":"b"},"descriptor":{"a":"b"}',
        b'"op":"acquire","op":"acquire","descriptor":{":":"b"}',
        b'"op":"acquire","descriptor":{"a:":"b","a\\u003a":"b"}',
        b'"op":"settle","reservation":"a:b","work":1,"work":2',
        b'"op":"settle","reservation":"r","reservation":"r","work":1',
        b'"op":"settle","reservation":"r","reservation":"r"',
    ],
)
def test_doubles_in_an_operation_are_that_operation_s_alone(operation: bytes) -> None:
    sound = b'{"op":"acquire","descriptor":{"a":"b:c"},"work":1}'
    before, found, after = decode.batch(b'{"operations":[%b,{%b},%b]}' % (sound, operation, sound))
    assert isinstance(before, AcquireOperation)
    assert isinstance(after, AcquireOperation)
    assert isinstance(found, Invalid)
    assert "more than once" in str(found)


def test_operations_given_twice_are_found() -> None:
    with pytest.raises(Invalid, match="more than once"):
        decode.batch(b'{"operations":[],"operations":[{"op":"settle","reservation":"r","work":1}]}')


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=60))
def test_no_bytes_make_the_decoders_fail(data: bytes) -> None:
    for read in (decode.acquire, decode.settle, decode.batch):
        for body in (data, b'{"descriptor":{"a":"' + data + b'"}}', b'{"operations":[' + data + b"]}"):
            with contextlib.suppress(BadRequest):
                read(body)


def test_operations_of_a_batch_become_plain_requests() -> None:
    body = b'{"operations":[{"op":"acquire","descriptor":{"a":"b"},"idempotency_key":"k"}]}'
    (operation,) = decode.batch(body)
    assert isinstance(operation, AcquireOperation)
    assert isinstance(operation, AcquireRequest)
    assert operation.idempotency_key == "k"
