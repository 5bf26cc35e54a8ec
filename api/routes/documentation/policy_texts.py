"""A description and an example of each field of a policy and of a namespace, for the OpenAPI document.

The texts are those of docs/policies.md; a test compares the two.
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
                "or a share of a second's requests. With `mechanism: auto`, the time that `capacity` is worth "
                "unless given"
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
            "what an acquire without `work` is charged. With `mechanism: auto`, `learned` unless given",
            "learned",
        ),
        "learning": (
            "how a learned charge follows the real work; only with `charge: learned`",
            {"target": "p90"},
        ),
        "learn_by": (
            (
                "a charge is learned separately for each combination of their values within a bucket: up to 16 of "
                "them, the others share one"
            ),
            ["operation"],
        ),
        "work_unit": (
            (
                "how much of the caller's own measure is one unit of work: `work` of acquires, progress and "
                "settles is divided by it, before weights. Answers are in units of work; only `work` of a settle's "
                "answer is as it was reported"
            ),
            2048,
        ),
        "round": (
            "with `work_unit`: whether parts of a unit count as a whole one",
            "none",
        ),
        "min_work": (
            (
                "the least work of one request: the cap is at most four times the rate divided by it. If not "
                "given, it is measured. Like `burst` and `steering`, only with `mechanism: requests` or `auto`"
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
        "in_flight": (
            (
                "how many reservations of a bucket may be open at once. A settle frees its place at once; a "
                "reservation that is not settled frees it after its time to live and within twice the longest one "
                "of the bucket, and progress renews it. If the limit is divided over partitions, each has its share "
                "of the places, at least one. Refusals: `reason: in_flight`"
            ),
            20,
        ),
        "block": (
            "denies a key for a time after too many refusals: 403, `reason: blocked`",
            {"after": 100, "in": "1m", "for": "10m"},
        ),
        "local": (
            "whether holders of leases may decide by themselves, each on its part of this limit",
            {"allowed": True},
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
            (
                "a settle that differs from the charge by no more than this changes nothing; `{debit: …, refund: …}` "
                "for each side separately"
            ),
            {"debit": 0, "refund": "10%"},
        ),
        "reserve": (
            "the balance that a request of the class needs; below zero it may borrow",
            {"sheddable": "50%", "critical_plus": "-20%"},
        ),
        "weights": (
            (
                "units of this limit per unit of work. Values that are not listed weigh 1; weights of several "
                "dimensions multiply. Under a cap of requests (`mechanism: requests`, and `auto` while it counts "
                "requests) a request of weight 3 takes three tokens; with either mechanism it counts as three "
                "requests in the bucket's statistics"
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
        "rules": (
            (
                "the rules by which the cap moves: ours, which also hold for requests that last seconds, or the "
                "plain published ones. Both side by side"
            ),
            "published",
        ),
        "initial": (
            (
                "the first cap: the rate, the rate divided by `max_work`, a share of the rate, or a number. With "
                "`max_work`, `C/F` unless given"
            ),
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
                "the lowest cap, but never more than the rate divided by the largest work of a request, declared "
                "or measured. If neither `floor` nor `initial` is given, the floor is at most the first cap; a "
                "default `initial` is at least the floor"
            ),
            1,
        ),
        "cycle": (
            "how often the cap moves, where that is less often than the controller's own cycle",
            "1s",
        ),
        "smoothing": (
            "the weight of the newest sample in each average",
            {"work_rate": 0.5},
        ),
        "auto": (
            "when a bucket of `mechanism: auto` counts requests",
            {"rate_high": 100},
        ),
    },
    "Smoothing": {
        "work_per_request": (
            (
                "the weight of the newest sample in the work per request, once requests contradict the mean "
                "(`rules: published`: always)"
            ),
            0.5,
        ),
        "work_rate": (
            "the weight of the newest sample in the work per second",
            0.2,
        ),
        "rejection": (
            "the weight of the newest sample in the share of refused requests",
            0.5,
        ),
    },
    "Auto": {
        "rate_high": (
            "requests become counted from this rate on",
            100,
        ),
        "rate_low": (
            "requests stay counted down to this rate",
            40,
        ),
        "even": (
            (
                "requests become counted while neither their work nor their rate varies by more than this share "
                "of the mean, over the last requests and over the last minute"
            ),
            0.3,
        ),
        "uneven": (
            "requests stay counted up to this variation of the last requests",
            0.6,
        ),
        "patience_s": (
            "how long all of that must hold before requests become counted",
            10,
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
    "Local": {
        "allowed": (
            "whether parts of this limit are lent",
            True,
        ),
        "bound": (
            "the most units that all parts together may hold beyond the capacity",
            "10%",
        ),
        "lease_s": (
            "how long a part is lent; a holder renews it three times in that time",
            5,
        ),
        "need": (
            (
                "a part of less capacity than this many requests is not lent: the holder asks for each request "
                "instead. Twice this must fit into capacity and bound"
            ),
            2,
        ),
    },
    "Overload": {
        "expectations": (
            "refuses by class while callers wait longer than they expect",
            {"expected_latency_ms": 200, "threshold": "5%"},
        ),
        "response_time": (
            "limits what is in flight so that a percentile of the response times stays at a target",
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
        "outcomes": (
            "settles with one of these outcomes count as late, however fast they were",
            ["error", "timeout"],
        ),
        "draw_by": (
            (
                "requests with the same values of these dimensions are admitted or refused together while a "
                "throttle stands"
            ),
            ["session"],
        ),
    },
    "Expectations": {
        "expected_latency_ms": (
            "the expected response time, unless the request gives one; 0.1 to 3600000",
            500,
        ),
        "expected_by": (
            (
                "other defaults by client, operation or type, or by class (`criticality`); the first table that "
                "lists the request's value counts"
            ),
            {"operation": {"report": 5000}},
        ),
        "expected_min_ms": (
            "no request expects less, whatever it gives",
            50,
        ),
        "mode": (
            (
                "`damped`: large steps up, small steps down. `ideal`: M follows from the number of requests that "
                "may be in flight"
            ),
            "ideal",
        ),
        "rules": (
            "`bounded`: no step moves more than a part of the requests. `published`: the plain published steps",
            "published",
        ),
        "threshold": (
            (
                "the share of late answers in the window above which the bucket is overloaded; not with mode "
                "`ideal`, unless by the published rules"
            ),
            "10%",
        ),
        "ideal_target": (
            "mode `ideal`: the share of answers that is to come in time",
            "95%",
        ),
        "min_samples": (
            "fewer answers than this say nothing",
            50,
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
            "the rise of M after an overloaded interval, at most",
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
            "published rules, mode `ideal`: the band in which the least slack is held",
            [10, 50],
        ),
        "ideal_step": (
            "published rules, mode `ideal`: the move of M while the bucket is not overloaded",
            0.1,
        ),
    },
    "ResponseTime": {
        "target_ms": (
            "the target for `percentile` of the response times, 0.1 to 3600000",
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
            "the percentile that is held at the target: with 90, one answer in ten may take longer",
            99,
        ),
        "rules": (
            ("`in_flight`: a limit on the requests in flight. `published`: a rate per class, by the published rules"),
            "published",
        ),
        "initial": (
            "rules `in_flight`: how many requests may be in flight until anything is known",
            5,
        ),
        "in": (
            "whether a request counts as one or as its charge, in flight and in rates",
            "work",
        ),
        "percentiles": (
            "whether the record keeps a histogram, so that the percentile is shown; 2912 bytes more",
            True,
        ),
        "nreq": (
            "published rules: a class is adjusted after this many answers, or after `timeout_s`",
            20,
        ),
        "timeout_s": (
            "published rules: a class is adjusted after this time, or after `nreq` answers",
            0.2,
        ),
        "alpha": (
            "published rules: the weight of the old value in the smoothed percentile",
            0.5,
        ),
        "err_d": (
            "published rules: the rate is cut if the percentile is above the target by more than this share",
            0.1,
        ),
        "err_i": (
            "published rules: the rate is raised if the percentile is below the target by more than this share",
            -0.3,
        ),
        "adj_d": (
            "published rules: a cut divides the rate by this",
            1.5,
        ),
        "adj_i": (
            "published rules: a rate rises by `−(err − c_i) · adj_i` requests/s",
            6,
        ),
        "c_i": (
            "published rules: see `adj_i`",
            0,
        ),
        "rate_min": (
            "published rules: the lowest rate of a class",
            1,
        ),
        "rate_max": (
            "published rules: the highest rate of a class",
            500,
        ),
        "rate_initial": (
            "published rules: the first rate of a class",
            20,
        ),
        "adjlo_d": (
            "published rules: the rates of lower classes are divided by this when they yield",
            4,
        ),
        "lc_thresh": (
            ("published rules: how often a class waits while all lower ones are at their floor; then it is cut itself"),
            5,
        ),
        "degrade": (
            "whether `quality` is lowered before anybody is refused; with `only`, nobody is refused",
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
        "backends": (
            "what stands behind the limits, so that overbooking is seen",
            {"db": {"rate": 2000, "policies": ["reads", "writes"]}},
        ),
    },
    "Backend": {
        "rate": (
            "the work that the backend can do",
            "2000/s",
        ),
        "policies": (
            "the policies that commit it; if not given, all of the namespace",
            ["reads", "writes"],
        ),
    },
}
