"""Values that an acquire may not have, with what the answer says of each."""

import json

NUMBER = "a number from 0 to 9007199254740992"
WHOLE_TTL = "a whole number from 1 to 86400000"
NO_LEASE = "no such field: POST /v1/leases lends a part of every limit that covers a descriptor"
WITH = b'{"descriptor":{"service":"slow","customer":"c"},%b}'

REFUSED_FIELDS = [
    ("F-V1", b'"work":-1', "work", "-1", NUMBER),
    ("F-V2", b'"work":NaN', "work", "NaN", NUMBER),
    ("F-V2", b'"work":Infinity', "work", "Infinity", NUMBER),
    ("F-V2", b'"work":-Infinity', "work", "-Infinity", NUMBER),
    ("F-V2", b'"work":1e400', "work", "1e400", NUMBER),
    ("F-V2", b'"expected_latency_ms":1e400', "expected_latency_ms", "1e400", NUMBER),
    ("F-V3", b'"work":9007199254740994', "work", "9007199254740994", NUMBER),
    ("F-V3", b'"work":1e300', "work", "1e+300", NUMBER),
    ("F-V3", b'"work":' + b"9" * 5000, "work", "9" * 57 + "...", NUMBER),
    ("F-V4", b'"work":"3"', "work", '"3"', NUMBER),
    ("F-V4", b'"work":true', "work", "true", NUMBER),
    ("F-V4", b'"attempt":true', "attempt", "true", "a whole number from 1 to 1000"),
    ("F-V4", b'"attempt":1.5', "attempt", "1.5", "a whole number from 1 to 1000"),
    ("F-V4", b'"dry_run":1', "dry_run", "1", "true or false"),
    ("F-V5", b'"lease":true', "lease", "a field that is gone", NO_LEASE),
    ("F-V5", b'"lease":false', "lease", "a field that is gone", NO_LEASE),
    ("F-V5", b'"work":1,"work":1', "work", "it more than once", "each name once"),
    ("F-V6", b'"ttl_ms":0', "ttl_ms", "0", WHOLE_TTL),
    ("F-V6", b'"ttl_ms":-5', "ttl_ms", "-5", WHOLE_TTL),
    ("F-V6", b'"ttl_ms":315360000000', "ttl_ms", "315360000000", WHOLE_TTL),
    ("F-V6", b'"ttl_ms":null', "ttl_ms", "null", WHOLE_TTL),
    ("G4", b'"criticality":"vital"', "criticality", '"vital"', "critical_plus, critical, sheddable_plus, sheddable"),
    ("F-N4", b'"namespace":"' + b"n" * 10_000 + b'"', "namespace", '"' + "n" * 56 + "...",
     "Unicode text of at most 1024 characters"),
]  # fmt: skip

TEXT = "Unicode text of at most 1024 characters"
NAMES = "names that are Unicode text of 1 to 64 characters"
SOME = "an object of 1 to 32 names with their values"
BAD_DESCRIPTORS = [
    (b'{"a":"\\ud800"}', "descriptor.a", '"\\ud800"', TEXT),
    (b'{"\\udc00":"a"}', "descriptor", 'the name "\\udc00"', NAMES),
    (b'{"":"a"}', "descriptor", 'the name ""', NAMES),
    (b'{"a":"' + b"x" * 10_000 + b'"}', "descriptor.a", '"' + "x" * 56 + "...", TEXT),
    (b'{"' + b"x" * 65 + b'":"a"}', "descriptor", 'the name "' + "x" * 56 + "...", NAMES),
    (json.dumps({f"d{number}": "x" for number in range(33)}).encode(), "descriptor", "33 names", SOME),
    (b"{}", "descriptor", "0 names", SOME),
    (b"[]", "descriptor", "[]", SOME),
    (b'{"a":{"b":"c"}}', "descriptor.a", '{"b": "c"}', TEXT),
    (b'{"a":1}', "descriptor.a", "1", TEXT),
    (b'{"a":"x","a":"y"}', "descriptor.a", "it more than once", "each name once"),
    (b'{"a":"x","\\u0061":"y"}', "descriptor.a", "it more than once", "each name once"),
    (b'{"a:b":"x","a:b":"y"}', 'descriptor["a:b"]', "it more than once", "each name once"),
]
