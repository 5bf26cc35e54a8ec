"""A description and an example of each field of leases, for the OpenAPI document."""

from __future__ import annotations

from typing import Any

LEASE_SCHEMA_TEXTS: dict[str, str] = {
    "LeaseRequest": "Ask for a part of every limit that covers a descriptor, to decide on it without asking.",
    "RenewRequest": "Ask for the next part. The same request again is answered the same.",
    "ReturnRequest": "Give a lease back before it ends.",
    "UsedSoFar": "What the holder did since its lease began. The sums only grow.",
    "HeldSlice": "One slice, as its holder has it.",
    "Lent": "What the holder may use until the lease ends.",
    "LentSlice": "A part of one limit.",
    "LentOverload": "What overload control says to the holder, by class. A class that is not limited is left out.",
    "Returned": "The lease is over.",
    "LeaseList": "The leases of a partition that have not ended.",
    "LeaseView": "One lease.",
    "LeaseViewSlice": "One bucket's part in a lease.",
    "Revoked": "Nothing more is lent under this lease.",
}

_USED: dict[str, Any] = {
    "requests": 120,
    "refused": 3,
    "charged": 117,
    "work": 130,
    "work_squared": 260,
    "settles": 117,
}
_HELD: dict[str, Any] = {"policy": "orders-reads", "held": 0.25, "debt": 0.0, "moved": 0.0}
_SLICE: dict[str, Any] = {
    "policy": "orders-reads",
    "mechanism": "work",
    "counts_requests": False,
    "share": 0.25,
    "rate": 25.0,
    "capacity": 25.0,
    "tokens": 25.0,
    "moved": 0.0,
    "charge": 1.0,
    "weight": 1.0,
    "minimums": {"critical_plus": 1.0, "critical": 1.0, "sheddable_plus": 1.0, "sheddable": 1.0},
    "debt_max": 6000.0,
    "admit": "covered",
}
LEASE_EXAMPLE: dict[str, Any] = {
    "descriptor": {"service": "lent", "customer": "c1"},
    "holder": "7f3d1c0a95",
    "work_rate": 20,
}
RENEW_EXAMPLE: dict[str, Any] = {
    "lease": "TJek…",
    "number": 2,
    "taken": 1,
    "work_rate": 21.5,
    "used": _USED,
    "slices": [_HELD],
}
RETURN_EXAMPLE: dict[str, Any] = {
    "lease": "TJek…",
    "number": 3,
    "taken": 2,
    "used": _USED,
    "slices": [{"policy": "orders-reads", "tokens": 11.5, "debt": 0.0, "moved": 0.0}],
}
LENT_EXAMPLE: dict[str, Any] = {
    "lease": "TJek…",
    "id": "0-5d0f1c3a",
    "number": 1,
    "expires_in_ms": 3000,
    "renew_in_ms": 1000,
    "charge": 1.0,
    "slices": [_SLICE],
    "quality": 1.0,
    "state": "calm",
    "on_service_failure": "local",
}
LISTED_EXAMPLE: dict[str, Any] = {
    "leases": [
        {
            "id": "0-5d0f1c3a",
            "namespace": "default",
            "partition": 0,
            "holder": "7f3d1c0a95",
            "weight": 1.0,
            "number": 17,
            "revoked": False,
            "expires_in_ms": 2700,
            "slices": [
                {
                    "policy": "orders-reads",
                    "bucket": "orders-reads",
                    "share": 0.25,
                    "capacity_share": 0.25,
                    "given": 0.0,
                }
            ],
        }
    ]
}

_TOKEN = ("The lease, as the last answer gave it.", "TJek…")
_NUMBER = ("Counts the holder's requests. A repeated number gets the same answer, a smaller one a 409.", 2)
_TAKEN = ("The number of the last answer that the holder took over.", 1)
_WORK_RATE = ("Work per second that the holder expects to be asked for; leave it out if it cannot tell.", 20)
_REQUEST_RATE = ("The same in requests, for limits that count requests.", 20)
_ALL_USED = ("What the holder did since the lease began.", _USED)

LEASE_TEXTS: dict[str, dict[str, tuple[str, Any]]] = {
    "LeaseRequest": {
        "descriptor": ("What the holder will decide on, as in an acquire.", {"service": "orders"}),
        "holder": ("A random id of the holder's own. The same id gets the same lease.", "7f3d1c0a95"),
        "namespace": ("The namespace whose policies apply.", "default"),
        "work_rate": _WORK_RATE,
        "request_rate": _REQUEST_RATE,
        "weight": ("How many holders this one stands for, such as a proxy for its clients.", 1),
        "slices": ("Debt of a lease that has ended.", []),
    },
    "RenewRequest": {
        "lease": _TOKEN,
        "number": _NUMBER,
        "taken": _TAKEN,
        "work_rate": _WORK_RATE,
        "request_rate": _REQUEST_RATE,
        "used": _ALL_USED,
        "slices": ("Each slice, as the holder has it.", [_HELD]),
    },
    "ReturnRequest": {
        "lease": _TOKEN,
        "number": _NUMBER,
        "taken": _TAKEN,
        "used": _ALL_USED,
        "slices": ("Each slice, with what is left of it.", [{"policy": "orders-reads", "tokens": 11.5}]),
    },
    "UsedSoFar": {
        "requests": ("Requests, refused ones included.", 120),
        "refused": ("Those of them that were refused.", 3),
        "charged": ("Work charged for the others.", 117),
        "work": ("Work settled.", 130),
        "work_squared": ("Sum of the squares of the work settled.", 260),
        "settles": ("Requests settled.", 117),
        "answered": ("Settled requests that took a known time.", 117),
        "late": ("Those of them that took longer than expected.", 2),
        "seconds": ("How long all of them took together.", 3.9),
    },
    "HeldSlice": {
        "policy": ("The policy.", "orders-reads"),
        "mechanism": ("The slice's mechanism, where a policy has a rate and a quota.", "work"),
        "held": (
            "The share of the rate that the holder has limited itself to; of a quota, the tokens that it keeps.",
            0.25,
        ),
        "tokens": ("In a return: the tokens that are given back.", 11.5),
        "debt": ("Work beyond what the slice could pay.", 0.0),
        "moved": ("The last `moved` of this slice that the holder knows.", 0.0),
        "refused": ("Requests that this slice refused since the lease began.", 3),
        "spent": ("Of a quota: all that was spent in this period.", 40),
        "period": ("Of a quota: the `period` of the last answer.", 1790812800000000),
    },
    "Lent": {
        "lease": ("The lease, for the next request. Keep it as it is.", "TJek…"),
        "id": ("The lease in lists. It gives no rights.", "0-5d0f1c3a"),
        "number": ("The number of the request that this answers.", 1),
        "expires_in_ms": ("When the lease ends, counted from when the request was sent.", 3000),
        "renew_in_ms": ("When to ask again.", 1000),
        "charge": ("Work of a request without an estimate.", 1.0),
        "slices": ("A part of every limit that covers the descriptor.", [_SLICE]),
        "quality": ("How good answers should be, from 0 to 1.", 1.0),
        "state": ("calm, degraded, recovering or overloaded.", "calm"),
        "on_service_failure": ("What applies if the service cannot be reached once the lease has ended.", "local"),
        "overload": (
            "Only present with overload control or a limit on what is in flight.",
            {"in_flight": {"sheddable": 5.0}, "refused_share": {"sheddable": 0.2}, "rate": {}, "late_after_ms": {}},
        ),
    },
    "LentSlice": {
        "policy": ("The policy.", "orders-reads"),
        "mechanism": ("What the limit counts.", "work"),
        "counts_requests": ("True if each request takes `weight` tokens, whatever its work.", False),
        "share": ("The part of the rate.", 0.25),
        "rate": ("Units per second.", 25.0),
        "capacity": ("The most units that the slice holds; 0 if nothing could be lent: ask for each request.", 25.0),
        "tokens": ("Units that this answer adds to what the holder has.", 25.0),
        "moved": ("Debt of the holder's that the bucket has taken over since the lease began.", 0.0),
        "charge": ("This policy's charge for a request without an estimate.", 1.0),
        "weight": ("Units of this limit for a unit of work, or for a request.", 1.0),
        "minimums": ("The balance that a request of each class needs.", {"sheddable": 12.5}),
        "debt_max": ("How far a settle may take the whole limit below zero.", 6000.0),
        "admit": ("The slice must hold the whole charge.", "covered"),
        "period": ("Of a quota: names its period; send it back with the next request.", 1790812800000000),
        "ends_in_ms": ("Of a quota: when its period ends, and the tokens with it.", 86400000),
    },
    "LentOverload": {
        "in_flight": ("Requests in flight from which on a class is refused.", {"sheddable": 5.0}),
        "refused_share": ("The share of a class's requests to refuse.", {"sheddable": 0.2}),
        "rate": ("Requests per second of a class.", {"sheddable": 12.0}),
        "late_after_ms": ("Answers to a class that take longer count as late.", {"critical": 200.0}),
    },
    "Returned": {
        "id": ("The lease in lists.", "0-5d0f1c3a"),
        "returned": ("False if the lease was over before: nothing was given back.", True),
    },
    "LeaseList": {"leases": ("The leases, those that end first.", LISTED_EXAMPLE["leases"])},
    "LeaseView": {
        "id": ("The lease.", "0-5d0f1c3a"),
        "namespace": ("Its namespace.", "default"),
        "partition": ("Its partition.", 0),
        "holder": ("The holder's id.", "7f3d1c0a95"),
        "weight": ("How many holders it stands for.", 1.0),
        "number": ("The number of its last request.", 17),
        "revoked": ("True if nothing more is lent under it.", False),
        "expires_in_ms": ("When what is lent comes back, unless it is renewed.", 2700),
        "slices": ("Its parts.", LISTED_EXAMPLE["leases"][0]["slices"]),
    },
    "LeaseViewSlice": {
        "policy": ("The policy.", "orders-reads"),
        "bucket": ("The bucket, as in `GET /v1/buckets`.", "orders-reads"),
        "share": ("The part of the rate.", 0.25),
        "capacity_share": ("The part of the capacity.", 0.25),
        "given": ("Of a quota: units handed out in this period and not taken back.", 0.0),
    },
    "Revoked": {
        "id": ("The lease.", "0-5d0f1c3a"),
        "expires_in_ms": ("When what is lent comes back at the latest.", 2700),
    },
}
