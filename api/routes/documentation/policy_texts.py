"""What each field of a policy and of a namespace means, with an example, for the OpenAPI document.

The words are those of docs/policies.md; a test holds the two together.
"""

from __future__ import annotations

from typing import Any

POLICY_TEXTS: dict[str, dict[str, tuple[str, Any]]] = {
    "Policy": {
        "name": (
            "1 to 64 letters, digits, `.`, `_`, `-`",
            "orders-reads",
        ),
        "description": (
            "a note for people, up to 1000 characters",
            "Reads of one customer",
        ),
        "namespace": (
            "the namespace whose requests it covers",
            "tenant1",
        ),
        "match": (
            "the requests it covers: all patterns must match; `{}` matches everything",
            {"service": "orders", "operation": "read*", "ip": None},
        ),
        "per": (
            "one bucket for each combination of their values; without any, one bucket for all",
            ["customer"],
        ),
        "group": (
            "of all matching policies in a group, only the most specific applies: an override beats a default",
            "writes",
        ),
        "deny": (
            (
                "refuses every request it covers (403, reason `denied`) and consumes nothing; goes only with "
                "`match`, `group`, `shadow` and names"
            ),
            True,
        ),
        "mechanism": (
            (
                "what a bucket counts: work; requests, under a cap that the controller steers by their work; or "
                "the better of the two at the time"
            ),
            "auto",
        ),
        "count": (
            (
                "`requests`: a plain limit on requests. Each takes one token times its weight, whatever its work, "
                "settled or not; the rate is in requests"
            ),
            "requests",
        ),
        "rate": (
            "committed work units per second",
            "6000/m",
        ),
        "rates": (
            (
                "rates of single keys, by one dimension of `per`; `rate` holds for all others. A capacity or debt "
                "given as time or share follows the key's own rate"
            ),
            {"customer": {"c1": 500, "c2": "50/m"}},
        ),
        "capacity": (
            (
                "the most units a bucket holds, at least `minimum`. If not given and a second's units are less "
                "than `minimum`, it is `minimum`"
            ),
            "500ms",
        ),
        "burst": (
            (
                "the most request tokens that a bucket that counts requests holds: a number, a time at the cap, "
                "or a share of a second's requests"
            ),
            3,
        ),
        "steering": (
            "how the cap moves",
            {"initial": "C"},
        ),
        "minimum": (
            (
                "the balance that a request needs to be admitted; below zero, requests may borrow. If not given: "
                "1, and 0 for a quota"
            ),
            -20,
        ),
        "charge": (
            "what an acquire without `work` is charged",
            "learned",
        ),
        "learning": (
            "how a learned charge follows the real work; only with `charge: learned`",
            {"target": "p90"},
        ),
        "min_work": (
            (
                "the least work of one request, an upper bound for the cap. Like `burst` and `steering`, only "
                "with `mechanism: requests` or `auto`"
            ),
            1,
        ),
        "max_work": (
            (
                "the most work of one request. Bounds a learned charge, and is F in `initial: C/F`. A larger "
                "estimate, weights included, is refused as with `max_request`"
            ),
            512,
        ),
        "max_request": (
            ("a larger estimate, weights included, is refused for good: `reason: request_too_large`, `retry: never`"),
            400,
        ),
        "admit": (
            (
                "what the balance must cover: the minimum, or the whole charge. A quota is always `covered`. A "
                "learned charge above the capacity needs a full bucket"
            ),
            "covered",
        ),
        "block": (
            "denies a key for a time after too many refusals: 403, `reason: blocked`",
            {"after": 100, "in": "1m", "for": "10m"},
        ),
        "max_debt": (
            (
                "how far a charge or a settle may take a balance below zero. Work beyond is not collected, and "
                "answers say how much. If not given: the largest of `60s`, the capacity (or the quota), "
                "`max_work` and what `minimum` and `reserve` let requests borrow"
            ),
            "10s",
        ),
        "stop_debt": (
            "the debt from which progress calls are answered with `stop: true`",
            "2s",
        ),
        "settle_threshold": (
            "a settle that differs from the charge by no more than this changes nothing",
            "10%",
        ),
        "reserve": (
            "the balance that a request of the class needs; below zero it may borrow",
            {"sheddable": "50%", "critical_plus": "-20%"},
        ),
        "weights": (
            (
                "units of this limit per unit of work. Values that are not listed weigh 1; weights of several "
                "dimensions multiply. Under a cap of requests (`mechanism: requests`, and `auto` while it counts "
                "requests) a request of weight 3 takes three tokens, and counts as three requests in the bucket's "
                "statistics"
            ),
            {"operation": {"read": 1, "write": 3}},
        ),
        "quota": (
            "an absolute limit over a calendar period, instead of a rate or beside it",
            {"work": 1000000, "period": "month"},
        ),
        "overload": (
            "refuses requests while the service behind them is overloaded",
            {"expectations": {"expected_latency_ms": 200}},
        ),
        "criticality_by": (
            "the highest class that requests with these values may have, and their class if they claim none",
            {"plan": {"free": "sheddable"}},
        ),
        "default_criticality": (
            "the class of requests that claim none and are assigned none",
            "sheddable_plus",
        ),
        "on_store_failure": (
            (
                "while the store is away: admit everything, answer 503, let each node enforce its share, or "
                "(quotas only) continue from the last known balance. If not given: `local`, and `known` for a "
                "quota"
            ),
            "closed",
        ),
        "shadow": (
            "counts and reports, but refuses nothing",
            True,
        ),
    },
    "Quota": {
        "work": (
            "work per period; give this or `requests`",
            1000000,
        ),
        "requests": (
            "requests per period",
            5000,
        ),
        "period": (
            (
                "a calendar period: weeks begin on Monday, quarters in January. Multiples must divide an hour or "
                "a day evenly and begin at midnight"
            ),
            "day",
        ),
        "billing_day": (
            "the day on which months begin, otherwise the 1st; in a shorter month, its last day",
            15,
        ),
        "timezone": (
            "the time zone of the calendar",
            "Europe/Berlin",
        ),
    },
    "Steering": {
        "initial": (
            "the first cap: the rate, the rate divided by `max_work`, a share of the rate, or a number",
            "C",
        ),
        "lower_cycles": (
            "the cap falls by the excess work over this many cycles",
            6,
        ),
        "raise_cycles": (
            "the cap rises by the unused work over this many cycles",
            4,
        ),
        "safety": (
            "the margin of a cap that is set from the current work rate",
            1.5,
        ),
        "floor": (
            (
                "the lowest cap. If neither `floor` nor `initial` is given, the floor is at most the first cap; a "
                "default `initial` is at least the floor"
            ),
            1,
        ),
    },
    "Learning": {
        "target": (
            "the statistic of recent work per request that the charge follows",
            "p95",
        ),
        "margin": (
            "smaller deviations leave the charge alone",
            "20%",
        ),
        "initial": (
            "the charge until work has been settled; at most `max_work` and `max_request`",
            500,
        ),
    },
    "Block": {
        "after": (
            "a block begins after this many refusals within the time `in`",
            100,
        ),
        "in": (
            "the time within which the refusals count, from the first one",
            "1m",
        ),
        "for": (
            "how long the block lasts",
            "10m",
        ),
    },
    "Overload": {
        "expectations": (
            "refuses by class while callers wait longer than they expect",
            {"expected_latency_ms": 200, "threshold": "5%"},
        ),
        "response_time": (
            "limits the admission rate so that a percentile of response times stays at a target",
            {"target_ms": 1000, "percentile": 90},
        ),
        "utilisation": (
            "refuses by class while services report more load than the target (`POST /v1/signals`)",
            {"target": "80%"},
        ),
        "ranks": (
            "how readily each class is refused; by default 0, 1, 2 and 4 from `critical_plus` to `sheddable`",
            {"critical": 0.5},
        ),
    },
    "Expectations": {
        "expected_latency_ms": (
            "the expected response time, unless the request gives one",
            500,
        ),
        "expected_by": (
            "other defaults by client, operation or type; the first table that lists the request's value counts",
            {"operation": {"report": 5000}},
        ),
        "mode": (
            (
                "`damped`: large steps up, small steps down. `ideal`: the highest rate at which expectations are "
                "just met"
            ),
            "ideal",
        ),
        "threshold": (
            "the share of late answers in the window above which the bucket is overloaded",
            "10%",
        ),
        "window_s": (
            "how far back answers count",
            30,
        ),
        "interval_s": (
            "how often the throttle M moves",
            0.5,
        ),
        "step_up": (
            "the rise of M after an overloaded interval",
            20,
        ),
        "step_down": (
            "mode `damped`: the fall of M after a calm interval; less than `step_up`",
            0.5,
        ),
        "calm_intervals": (
            "mode `damped`: the number of calm intervals before M falls",
            5,
        ),
        "initial": (
            "the first and the lowest value of M",
            2,
        ),
        "ideal_band_ms": (
            "mode `ideal`: the band in which the least slack is held",
            [10, 50],
        ),
        "ideal_step": (
            "mode `ideal`: the largest move of M while the bucket is not overloaded",
            0.1,
        ),
    },
    "ResponseTime": {
        "target_ms": (
            "the target for `percentile` of the response times",
            300,
        ),
        "targets_ms": (
            "targets of single classes",
            {"sheddable": 5000},
        ),
        "classes": (
            "whether lower classes yield to higher ones",
            False,
        ),
        "percentile": (
            "the percentile that is held at the target",
            99,
        ),
        "nreq": (
            "a class is adjusted after this many answers, or after `timeout_s`",
            20,
        ),
        "timeout_s": (
            "a class is adjusted after this time, or after `nreq` answers",
            0.2,
        ),
        "alpha": (
            "the weight of the old value in the smoothed percentile",
            0.5,
        ),
        "err_d": (
            "the rate is cut if the percentile is above the target by more than this share",
            0.1,
        ),
        "err_i": (
            "the rate is raised if the percentile is below the target by more than this share",
            -0.3,
        ),
        "adj_d": (
            "a cut divides the rate by this",
            1.5,
        ),
        "adj_i": (
            "a rate rises by `−(err − c_i) · adj_i` requests/s",
            6,
        ),
        "c_i": (
            "see `adj_i`",
            0,
        ),
        "rate_min": (
            "the lowest rate of a class",
            1,
        ),
        "rate_max": (
            "the highest rate of a class",
            500,
        ),
        "rate_initial": (
            "the first rate of a class; `rate_max` unless given",
            100,
        ),
        "adjlo_d": (
            "the rates of lower classes are divided by this when they yield",
            4,
        ),
        "lc_thresh": (
            "how often a class waits while all lower ones are at their floor; then it is cut itself",
            5,
        ),
        "degrade": (
            "whether `quality` is lowered before anybody is refused",
            True,
        ),
        "quality_min": (
            "with `degrade`: the lowest quality",
            0.2,
        ),
        "quality_decrease": (
            "the fall of quality per adjustment",
            0.25,
        ),
        "quality_increase": (
            "the rise of quality per adjustment",
            0.05,
        ),
    },
    "Utilisation": {
        "target": (
            "the highest acceptable value of a reported signal, in its own unit",
            1.5,
        ),
        "targets": (
            "targets of single signals",
            {"queue_age_s": 2},
        ),
        "smoothing_s": (
            "the time constant of the smoothing",
            5,
        ),
        "stale_s": (
            "a signal that was not reported for longer is dropped; at least `smoothing_s`",
            30,
        ),
    },
    "Namespace": {
        "partitions": (
            "the number of partitions; an `Idempotency-Key` is known within one",
            4,
        ),
        "partition_by": (
            "the dimensions that decide which partition a request belongs to; required with several",
            ["customer"],
        ),
        "default_criticality": (
            "the class of requests that claim none, unless a policy gives one",
            "sheddable",
        ),
    },
}
