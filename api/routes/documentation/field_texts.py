"""A description and an example of each field of requests and answers, for the OpenAPI document.

Fields of policies have theirs in `api.routes.documentation.policy_texts`.
"""

from __future__ import annotations

from typing import Any

SCHEMA_TEXTS: dict[str, str] = {
    "AcquireRequest": "Ask before the work. Only `descriptor` is required.",
    "AcquireOperation": "An acquire in a batch.",
    "SettleRequest": "Report what the work really cost, or the work so far.",
    "SettleOperation": "A settle in a batch.",
    "BatchRequest": "Up to 1000 acquires and settles.",
    "BatchAnswer": "The results of a batch, in order.",
    "BatchResult": "The result of one operation: a status, and the body that the single call would have.",
    "SignalRequest": "How busy a service is, for policies with `overload: {utilisation: …}`.",
    "SignalsTaken": "Where a report of load was put.",
    "GrantedAnswer": "Granted: do the work, then settle with the reservation.",
    "RefusedAnswer": "Refused: which limit, why, and whether and when to try again (RFC 9457).",
    "SettledAnswer": "What the settle did; for a duplicate, what the first one did.",
    "Limit": "One limit of a request, with the state of its bucket.",
    "Problem": "An error (RFC 9457).",
    "FieldProblem": "One mistake in a request.",
    "Criticality": "The class of a request, most important first.",
    "Policy": "A limit: which requests it covers, what splits it into buckets, and how much it admits.",
    "Namespace": "How a namespace is divided into partitions, and what stands behind its limits.",
    "Backend": "What a backend can do, and the policies that commit it.",
    "Quota": "An absolute limit over a calendar period.",
    "Steering": "How the controller moves the cap of a bucket that counts requests.",
    "Smoothing": "The weight of the newest sample in each average that steers a cap.",
    "Auto": "When a bucket of mechanism auto counts requests.",
    "Learning": "How a learned charge follows the real work.",
    "Block": "Denies a key for a time after too many refusals.",
    "Local": "Whether holders of leases may decide by themselves, each on its part of the limit.",
    "Overload": "Refuses requests while the service behind them is overloaded.",
    "Expectations": "Overload control by how soon callers expect answers.",
    "ResponseTime": "Overload control by a percentile of response times.",
    "Utilisation": "Overload control by the load that services report.",
    "Rounding": "How the caller's own measure becomes units of work.",
    "Mechanism": "What a bucket counts.",
    "Count": "What a bucket of mechanism `work` counts.",
    "Admit": "What the balance must cover for a request to be admitted.",
    "Mode": "How the throttle of `expectations` moves.",
    "OnStoreFailure": "How a policy decides while the store does not answer.",
    "PolicySetRequest": "A whole set of policies and namespaces, and how to apply it.",
    "RollbackRequest": "Which revision to go back to.",
}
"""Descriptions of schemas whose own docstring is for developers."""

Texts = dict[str, tuple[str, Any]]
"""Description and example by field."""

_ACQUIRE: Texts = {
    "descriptor": (
        "Who asks for what: a map of text, each entry a dimension that policies can match and split by.",
        {"service": "orders", "operation": "read", "customer": "c1"},
    ),
    "namespace": ("The namespace whose policies apply.", "default"),
    "work": ("Your estimate of the work, in units. Without it each policy's own charge applies.", 3),
    "criticality": ("The class of the request. It is lowered to what policies and the API key allow.", "critical"),
    "expected_latency_ms": (
        "How soon you expect the answer of the protected service, for policies with `expectations`.",
        200,
    ),
    "attempt": ("Which attempt this is: 1 for the first, 2 for the first retry.", 1),
    "ttl_ms": ("How long the reservation may stay open before a settle is late. Progress renews it.", 60000),
    "dry_run": ("Return the decision without charging anything.", False),
}
_SETTLE: Texts = {
    "reservation": ("The token from the answer to the acquire, unchanged.", "AmnKZ2V4YW1wbGU"),
    "work": ("The work really done, in units. With `final: false`, the total so far.", 12),
    "final": ("False reports progress: what is new is debited, and the reservation stays open.", True),
    "latency_ms": ("How long the protected service took. Overload control goes by it.", 34.5),
    "outcome": ("How the request ended, such as `ok`, `error` or `timeout`.", "ok"),
}
_REVISION: Texts = {
    "revision": ("The number of the change.", 9),
    "when": ("When it was made (ISO 8601, UTC).", "2026-11-18T03:12:44.120+00:00"),
    "who": ("The API key, or the user of the command line, that made it.", "ada"),
    "action": ("What was done, such as `put`, `patch`, `delete`, `rollback` or `apply`.", "put"),
    "owner": ("The owner after the change; null if it was removed, or before there were owners.", "api"),
    "before": (
        "The document before; null if there was none.",
        {"name": "orders-reads", "match": {"service": "orders"}, "per": ["customer"], "rate": 50, "capacity": 50},
    ),
    "after": (
        "The document after; null if it was removed.",
        {"name": "orders-reads", "match": {"service": "orders"}, "per": ["customer"], "rate": 100, "capacity": 50},
    ),
}
LOSS_EXAMPLE: dict[str, Any] = {
    "when": "2026-11-18T03:12:44.120+00:00",
    "last": "2026-11-18T03:12:44.120+00:00",
    "times": 1,
    "revision_before": 41,
    "revision_after": 0,
    "policies": [{"namespace": "default", "name": "orders-reads"}],
    "more": 0,
}

FIELD_TEXTS: dict[str, Texts] = {
    "AcquireRequest": _ACQUIRE,
    "AcquireOperation": {
        "op": ("Which operation this is.", "acquire"),
        **_ACQUIRE,
        "idempotency_key": (
            (
                "As the header `Idempotency-Key` of a single acquire: the same key gets the same decision and is "
                "charged once."
            ),
            "order-17",
        ),
    },
    "SettleRequest": _SETTLE,
    "SettleOperation": {
        "op": ("Which operation this is.", "settle"),
        **_SETTLE,
    },
    "BatchRequest": {
        "operations": (
            "Acquires and settles. They are answered in this order.",
            [{"op": "acquire", "descriptor": {"service": "orders", "operation": "read", "customer": "c1"}, "work": 3}],
        ),
    },
    "BatchAnswer": {
        "results": (
            "One result per operation, in order: a status and the body that the single call would have.",
            [
                {
                    "status": 200,
                    "work": 12.0,
                    "adjusted": 9.0,
                    "uncollected": 0.0,
                    "stop": False,
                    "duplicate": False,
                    "late": False,
                    "expires_in_ms": 0,
                    "limits": [
                        {
                            "policy": "orders-reads",
                            "mechanism": "work",
                            "balance": 47.0,
                            "capacity": 50.0,
                            "rate": 100.0,
                        }
                    ],
                }
            ],
        ),
    },
    "BatchResult": {
        "status": ("The HTTP status that the single call would have.", 200),
    },
    "SignalRequest": {
        "policy": (
            "The policy whose service reports. Without it the report is for all policies of the namespace.",
            "orders-reads",
        ),
        "source": ("Who reports, such as a host name. Its next report replaces this one.", "host-1"),
        "signals": (
            "Loads by name, each in the unit of the policy's target for it.",
            {"cpu": 0.93, "queue_age_s": 0.4},
        ),
        "namespace": ("The policy's namespace.", "default"),
        "key": (
            "One bucket, by the policy's `per` dimensions. Without it the report is for all buckets of the policy.",
            {"customer": "c1"},
        ),
    },
    "SignalsTaken": {
        "bucket": (
            "The bucket that the report is for; the policy's name if it is for all of them; `*` for the namespace.",
            "orders-reads",
        ),
        "partitions": ("The number of partitions that keep the report.", 1),
        "signals": ("The loads as they were taken.", {"cpu": 0.93}),
    },
    "GrantedAnswer": {
        "granted": ("Always true in this answer.", True),
        "reservation": ("The token to settle with. Keep it as it is.", "AmnKZ2V4YW1wbGU"),
        "charged": ("Units debited at once.", 3.0),
        "expires_in_ms": ("Until when a settle can refund.", 60000),
        "limits": (
            "Every limit that applied, with what is left of it.",
            [{"policy": "orders-reads", "mechanism": "work", "balance": 47.0, "capacity": 50.0, "rate": 100.0}],
        ),
        "overloaded": ("True while the protected service is overloaded: slow down.", False),
        "quality": (
            "How good an answer the service should give, from 0 to 1. Below 1, do cheaper work if you can.",
            1.0,
        ),
        "degraded": ("True if this was decided without the store.", False),
        "covered": ("False if no policy covers the request: nothing was charged and nothing limits it.", True),
        "state": (
            "Only present with overload control: calm, degraded, recovering or overloaded.",
            "calm",
        ),
        "refused_share": (
            "Only present with overload control: the share of this class's requests that it refuses, from 0 to 1.",
            0.0,
        ),
        "drawn_share": (
            "Only present where requests of this class are refused by draw: the share that is drawn.",
            0.4,
        ),
    },
    "Limit": {
        "policy": ("The policy's name.", "orders-reads"),
        "mechanism": ("What the bucket counts now.", "work"),
        "balance": ("Units left after this decision; below zero it is debt.", 47.0),
        "capacity": ("The most units that the bucket holds; for a quota, the quota.", 50.0),
        "rate": ("Units refilled per second; 0 for a quota.", 100.0),
        "passed": ("Only present if false: this limit refused the request.", False),
        "shadow": ("Only present if true: a shadow policy, which refuses nothing.", True),
    },
    "RefusedAnswer": {
        "type": (
            "What kind of problem it is, as a URI (RFC 9457).",
            "https://iana.org/assignments/http-problem-types#quota-exceeded",
        ),
        "title": (
            "The kind of problem in a few words.",
            "Request cannot be satisfied as assigned quota has been exceeded",
        ),
        "status": ("The HTTP status.", 429),
        "detail": (
            "What happened, for people.",
            "orders-reads: the balance is -11 of 50 units and refills by 100 per second; this request needs 1",
        ),
        "granted": ("Always false in this answer.", False),
        "policy": ("The policy that refused; of several, the one that takes longest to pass.", "orders-reads"),
        "reason": ("Why it refused.", "work"),
        "retry": ("Whether to try again: `after` the time in `retry_after_ms`, or `never`.", "after"),
        "retry_after_ms": ("When to try again, in milliseconds; 0 if never.", 120),
        "limits": (
            "Every limit of the request, also those that would have passed.",
            [{"policy": "orders-reads", "mechanism": "work", "balance": 47.0, "capacity": 50.0, "rate": 100.0}],
        ),
        "violated-policies": ("The policies that refused.", ["orders-reads"]),
        "degraded": ("Only present if true: decided without the store.", True),
        "overloaded": ("Only present if true: the protected service is overloaded; slow down.", True),
        "state": (
            "Only present with overload control: calm, degraded, recovering or overloaded.",
            "overloaded",
        ),
        "refused_share": (
            "Only present with overload control: the share of this class's requests that it refuses, from 0 to 1.",
            0.4,
        ),
        "drawn_share": (
            "Only present where requests of this class are refused by draw: the share that is drawn.",
            0.4,
        ),
    },
    "SettledAnswer": {
        "work": ("The work that counts: of this settle, or of the first one if this is a duplicate.", 12.0),
        "adjusted": (
            "The correction of the balance: debited in addition to the charge, or refunded if below zero.",
            9.0,
        ),
        "uncollected": ("Work beyond `max_debt`, which no bucket was charged for.", 0.0),
        "stop": ("True if a long request should end, because its debt has passed `stop_debt`.", False),
        "duplicate": ("True if this reservation was settled before with the same work.", False),
        "late": ("True if the settle came after the deadline: it debits, but refunds nothing.", False),
        "expires_in_ms": ("After progress: how long the reservation is open from now on; otherwise 0.", 0),
        "limits": (
            "Every limit of the reservation, with what is left of it.",
            [{"policy": "orders-reads", "mechanism": "work", "balance": 47.0, "capacity": 50.0, "rate": 100.0}],
        ),
    },
    "Problem": {
        "type": ("What kind of problem it is, as a URI (RFC 9457).", "about:blank"),
        "title": ("The kind of problem in a few words.", "Unprocessable Content"),
        "status": ("The HTTP status.", 422),
        "detail": ("What happened, for people.", "work: found -1; allowed: a number from 0 to 9007199254740992"),
        "reason": ("What happened, for programs.", "invalid"),
        "retry": ("`now`: another node may have time; `after`: ask again later.", "after"),
        "policy": ("The policy concerned, if it is one.", "orders-reads"),
        "retry_after_ms": ("When to try again, in milliseconds, if that may help.", 1000),
        "errors": (
            "What is wrong with the request, field by field.",
            [{"field": "work", "found": "-1", "allowed": "a number from 0 to 9007199254740992"}],
        ),
        "first": (
            "If the reservation was settled before with another amount: the result of that settle.",
            {
                "work": 12.0,
                "adjusted": 9.0,
                "uncollected": 0.0,
                "stop": False,
                "duplicate": False,
                "late": False,
                "expires_in_ms": 0,
                "limits": [
                    {"policy": "orders-reads", "mechanism": "work", "balance": 47.0, "capacity": 50.0, "rate": 100.0}
                ],
            },
        ),
        "request_id": (
            "The `x-request-id` of the request, or one that was made. Log lines about the request have it.",
            "f4b1c9a2",
        ),
    },
    "FieldProblem": {
        "field": ("Where the mistake is; empty for the whole body.", "work"),
        "found": ("What was found there, cut short.", "-1"),
        "allowed": ("What is allowed there.", "a number from 0 to 9007199254740992"),
    },
    "PolicyList": {
        "revision": ("The revision of all policies and namespaces together.", 9),
        "namespaces": ("Declared namespaces by name.", {"orders": {"partitions": 4, "partition_by": ["customer"]}}),
        "policies": (
            "The policies, each with its namespace.",
            [
                {
                    "namespace": "default",
                    "name": "orders-reads",
                    "match": {"service": "orders"},
                    "per": ["customer"],
                    "rate": 100,
                    "capacity": 50,
                }
            ],
        ),
        "revisions": ("The revision of each policy, by `<namespace>/<name>`.", {"default/orders-reads": 9}),
        "owners": (
            "The owner of each policy, by `<namespace>/<name>`: `api`, or the name under which a file was applied.",
            {"default/orders-reads": "file"},
        ),
        "damaged": ("Stored policies that cannot be read and do not apply, with what is stored.", {}),
        "warnings": ("Backends of which the policies commit more than they can do.", []),
    },
    "Entry": {
        "kind": ("`policy` or `namespace`.", "policy"),
        "namespace": ("The namespace it belongs to.", "default"),
        "name": ("Its name.", "orders-reads"),
    },
    "KeptEntry": {
        "kind": ("`policy` or `namespace`.", "policy"),
        "namespace": ("The namespace it belongs to.", "default"),
        "name": ("Its name.", "orders-reads"),
        "owner": ("Who owns it.", "file"),
        "revision": ("The revision of its last change.", 7),
    },
    "AppliedSet": {
        "revision": ("The revision of all policies and namespaces after the change.", 9),
        "dry_run": ("True if nothing was changed.", False),
        "made": ("What was created.", [{"kind": "policy", "namespace": "default", "name": "orders-reads"}]),
        "changed": ("What was changed.", []),
        "removed": ("What was removed by `prune`.", []),
        "kept": ("What differs but belongs to another owner, and was left as it is.", []),
    },
    "CheckedSet": {
        "ok": ("Always true in this answer; an invalid set is a 422.", True),
        "warnings": ("Backends of which the policies of the set commit more than they can do.", []),
    },
    "PolicySetRequest": {
        "namespaces": ("Namespaces to declare, by name.", {"orders": {"partitions": 4, "partition_by": ["customer"]}}),
        "defaults": ("Fields for policies that do not set them.", {"per": ["customer"], "capacity": "2s"}),
        "policies": (
            "The policies of the set.",
            [
                {
                    "name": "orders-reads",
                    "match": {"service": "orders"},
                    "per": ["customer"],
                    "rate": 100,
                    "capacity": 50,
                }
            ],
        ),
        "owner": ("The owner for whom the set is applied.", "ci"),
        "prune": ("Remove policies of this owner that the set no longer contains.", False),
        "take_over": ("Replace differing policies of other owners, and own them.", False),
        "dry_run": ("Change nothing, and answer what would change.", True),
    },
    "RollbackRequest": {
        "revision": ("A revision from the policy's history.", 7),
    },
    "Revision": _REVISION,
    "PolicyHistory": {
        "policy": ("The policy's name.", "orders-reads"),
        "namespace": ("Its namespace.", "default"),
        "history": ("Its changes, newest first.", []),
    },
    "AuditPage": {
        "changes": ("Changes of policies and namespaces, newest first.", []),
        "cursor": ("Send it as `cursor` to get the next page; empty on the last one.", "9.1"),
    },
    "NamespaceList": {
        "revision": ("The revision of all policies and namespaces together.", 9),
        "namespaces": ("Declared namespaces by name.", {"orders": {"partitions": 4, "partition_by": ["customer"]}}),
        "revisions": ("The revision of each namespace, by name.", {"orders": 8}),
        "owners": ("The owner of each namespace, by name.", {"orders": "api"}),
    },
    "LostPolicy": {
        "namespace": ("Its namespace.", "default"),
        "name": ("Its name.", "orders-reads"),
    },
    "Loss": {
        "when": ("When the first loss was noticed (ISO 8601, UTC).", "2026-11-18T03:12:44.120+00:00"),
        "last": ("When the last loss was noticed (ISO 8601, UTC).", "2026-11-18T03:12:44.120+00:00"),
        "times": ("The number of losses since the last acknowledgement.", 1),
        "revision_before": ("The revision before the loss.", 41),
        "revision_after": ("The revision after it.", 0),
        "policies": ("Policies that are gone, at most 100.", [{"namespace": "default", "name": "orders-reads"}]),
        "more": ("The number of lost policies that are not listed.", 0),
    },
    "AcknowledgedLoss": {
        "who": ("The API key that acknowledged it.", "ops"),
        "when": ("When it was acknowledged (ISO 8601, UTC).", "2026-11-18T03:12:44.120+00:00"),
        "loss": (
            "The loss.",
            {
                "when": "2026-11-18T03:12:44.120+00:00",
                "last": "2026-11-18T03:12:44.120+00:00",
                "times": 1,
                "revision_before": 41,
                "revision_after": 0,
                "policies": [],
                "more": 0,
            },
        ),
    },
    "LossStatus": {
        "lost": ("True from a loss until somebody acknowledges it.", True),
        "loss": ("The loss that nobody has acknowledged yet.", LOSS_EXAMPLE),
        "acknowledged": (
            "The last loss that was acknowledged.",
            {
                "who": "ops",
                "when": "2026-11-18T03:12:44.120+00:00",
                "loss": {
                    "when": "2026-11-18T03:12:44.120+00:00",
                    "last": "2026-11-18T03:12:44.120+00:00",
                    "times": 1,
                    "revision_before": 41,
                    "revision_after": 0,
                    "policies": [],
                    "more": 0,
                },
            },
        ),
    },
    "LossAcknowledged": {
        "acknowledged": ("False if there was no loss to acknowledge.", True),
    },
    "ClassState": {
        "refused_share": ("The share of the class's requests that is refused, from 0 to 1: set, or measured.", 0.4),
        "rate": ("Requests per second that the class may send; 0 if not limited.", 0.0),
        "limit": ("In flight, from which on the class is refused; 0 if not limited.", 0.0),
        "asked": ("Requests of the class.", 352.0),
        "refused": ("Requests of the class refused by overload control.", 12.0),
        "timed": ("Settles of the class; each has taken a known time.", 340.0),
        "late": ("Settles of the class that took longer than its target.", 17.0),
    },
    "OverloadState": {
        "quality": ("How good answers should be, from 0 to 1.", 1.0),
        "overloaded": ("True while callers are asked to slow down.", True),
        "state": ("How the protected service fares: calm, degraded, recovering or overloaded.", "overloaded"),
        "classes": (
            "The state of each class.",
            {
                "sheddable": {
                    "refused_share": 0.4,
                    "rate": 0.0,
                    "limit": 0.0,
                    "asked": 352.0,
                    "refused": 12.0,
                    "timed": 340.0,
                    "late": 17.0,
                }
            },
        ),
    },
    "Bucket": {
        "namespace": ("Its namespace.", "default"),
        "bucket": (
            "Its name in the store: the policy, then the values of its key, percent-encoded.",
            "orders-reads:c1",
        ),
        "policy": ("The policy it belongs to.", "orders-reads"),
        "mechanism": ("What it counts now.", "work"),
        "balance": ("Units left; below zero it is debt.", 47.0),
        "capacity": ("The most units that it holds; for a quota, the quota.", 50.0),
        "rate": ("Units refilled per second; 0 for a quota.", 100.0),
        "updated_ms": ("The store's time of its last use, in milliseconds since 1970.", 1767225600000.0),
        "requests": ("Requests since the bucket began.", 1200.0),
        "admitted": ("Granted requests since it began.", 1100.0),
        "refused": ("Refused requests since it began.", 100.0),
        "work_charged": ("Units charged by acquires since it began.", 3300.0),
        "work_settled": ("Units reported by settles since it began.", 3512.0),
        "settles": ("Final settles since it began.", 1090.0),
        "uncollected": ("Work beyond `max_debt` since it began.", 0.0),
        "second_attempts": ("Requests since it began that said they were tried for the second time.", 40),
        "further_attempts": ("Requests since it began that were tried more often than that.", 8),
        "in_flight": ("Reservations that are open; absent where they are not counted.", 3.0),
        "overload": (
            "What overload control does to it; absent without an `overload` block.",
            {"quality": 1.0, "overloaded": False, "state": "calm", "classes": {}},
        ),
    },
    "BucketPage": {
        "buckets": ("The buckets of this page.", []),
        "cursor": ("Send it as `cursor` to get the next page; empty on the last one.", "c:17"),
        "unreadable": ("Keys whose value is not a readable bucket.", []),
    },
    "Owner": {
        "controller": ("The controller's name.", "host-17-a1b2c3"),
        "fence": ("The number of its lease. It grows each time a controller takes the partition.", 3),
        "expires_in_ms": ("When its lease ends unless it is renewed.", 1912.0),
    },
    "CapCycle": {
        "at_ms": ("The store's time of the cycle, in milliseconds since 1970.", 1767225600000.0),
        "committed": ("C: the committed work per second.", 100.0),
        "work_rate": ("L: the smoothed work per second.", 97.4),
        "work_per_request": ("f: the smoothed work per request.", 5.0),
        "rejection_rate": ("The smoothed share of requests that were rejected.", 0.61),
        "rule": ("The rule that was applied: `lower`, `raise`, `set`, `hold` or `start`.", "raise"),
        "before": ("The cap before, in requests per second.", 20.0),
        "after": ("The cap after, in requests per second.", 20.1),
        "sentence": (
            "The same in words.",
            "97.4 units/s, 2.6 below the rate: 2.6 ÷ 5 units/request, over some cycles: 20 → 20.1 rps",
        ),
    },
    "OverloadStep": {
        "at_ms": ("The store's time of the step, in milliseconds since 1970.", 1767225600000.0),
        "controller": (
            "Which part of overload control: `expectations`, `response_time` or `utilisation`.",
            "expectations",
        ),
        "rule": ("The rule that was applied.", "raise"),
        "before": ("The value before.", 10.0),
        "after": ("The value after.", 20.0),
        "sentence": ("The same in words.", "12 % missed 200 ms (threshold 5 %): M 10 → 20"),
    },
    "OverloadReasoning": {
        "state": ("How the bucket fares: `calm`, `degraded`, `recovering` or `overloaded`.", "overloaded"),
        "overloaded": ("True while callers are asked to slow down.", True),
        "quality": ("How good answers should be, from 0 to 1.", 1.0),
        "in_flight": ("Requests that were granted and are not settled; null if they are not counted.", 37.0),
        "limits": (
            "How many requests of all classes may be in flight before a class is refused; null if not limited.",
            {"critical": 38.0, "sheddable": 34.0},
        ),
        "target_ms": ("The target of response times; null without one.", 1000.0),
        "late_share": ("The share of recent answers that were late, from 0 to 1; null without a measurement.", 0.11),
        "percentile_ms": ("The percentile of recent response times; null if the policy keeps no histogram.", 984.0),
        "refused_shares": (
            "The share of each class that is refused, from 0 to 1.",
            {"critical": 0.2, "sheddable": 0.8},
        ),
        "rates": (
            "Requests per second of each class, by the published rules; null if not limited.",
            {"critical": None, "sheddable": 12.5},
        ),
        "steps": ("The last steps, oldest first.", []),
    },
    "SteeredBucket": {
        "namespace": ("Its namespace.", "default"),
        "bucket": (
            "Its name in the store: the policy, then the values of its key, percent-encoded.",
            "orders-reads:c1",
        ),
        "policy": ("The policy it belongs to.", "orders-reads"),
        "mechanism": ("What it counts now: `work`, `requests` or `quota`.", "requests"),
        "mechanism_reason": ("Why.", "set by the policy"),
        "committed": ("The bucket's share of the committed rate, in units per second; null for a quota.", 1000.0),
        "cap": ("The cap, in requests per second; null if it counts work.", 80.6),
        "charge": ("The learned charge; null if nothing was learned.", 12.4),
        "charge_error": ("How far real work is from the learned charge: 0.5 is half as much again.", 0.02),
        "share": ("The share of a divided limit that is lent to this partition; null for an equal part.", 0.31),
        "share_ends_in_ms": ("When that share ends unless it is renewed.", 9200.0),
        "cycles": ("The last cycles of its cap, oldest first.", []),
        "overload": ("What overload control does to it; null without an `overload` block.", None),
    },
    "ControllerPage": {
        "owner": (
            "The controller that owns the partition; null if none does.",
            {"controller": "host-17-a1b2c3", "fence": 3, "expires_in_ms": 1912.0},
        ),
        "buckets": ("The steered buckets of this page.", []),
        "cursor": ("Send it as `cursor` to get the next page; empty on the last one.", ""),
        "unreadable": ("Keys whose value is not a readable bucket.", []),
    },
    "UncoveredRequests": {
        "namespace": ("The namespace that the requests name.", "ordres"),
        "namespace_known": ("False if nobody declared the namespace and no policy is in it.", False),
        "dimensions": ("The dimensions that the requests have.", ["costumer", "service"]),
        "nearest": ("For unknown dimensions: the known name that was probably meant.", {"costumer": "customer"}),
        "count": ("How many there were since this process started; too high by at most `count_error`.", 1207),
        "count_error": ("How much too high `count` may be.", 0),
        "first_seen_ms": ("When the first one came, in milliseconds since 1970.", 1767225600000.0),
        "last_seen_ms": ("When the last one came, in milliseconds since 1970.", 1767229200000.0),
        "examples": (
            "Some of the descriptors, with values cut to 64 characters.",
            [{"service": "orders", "costumer": "c1"}],
        ),
    },
    "UncoveredList": {
        "uncovered": ("The most frequent first.", []),
    },
    "Health": {
        "status": ("Always `ok`.", "ok"),
    },
    "Load": {
        "load": (
            "The share of one processor that this process used in the last second: at 1.0 it cannot do more.",
            0.42,
        ),
        "waiting": ("The number of operations that wait for the store.", 3),
    },
    "Readiness": {
        "status": ("Always `ready`.", "ready"),
        "warnings": ("What an operator should change.", []),
    },
    "NotReady": {
        "type": (
            "What kind of problem it is, as a URI (RFC 9457).",
            "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity",
        ),
        "title": (
            "The kind of problem in a few words.",
            "Request cannot be satisfied due to temporary server capacity constraints",
        ),
        "status": ("The HTTP status.", 503),
        "detail": ("The reasons in one line.", "the policies are not loaded yet"),
        "reason": ("Always `not_ready`.", "not_ready"),
        "reasons": ("Why the node should get no traffic yet.", ["the policies are not loaded yet"]),
        "warnings": ("What an operator should change.", []),
    },
    "Change": {
        "kind": ("`policy` or `namespace`.", "policy"),
        "namespace": ("The namespace; null for entries that have none.", "default"),
        "name": ("The name of the policy or namespace.", "orders-reads"),
        **_REVISION,
    },
}
