"""Work, lateness and refusals are counted, add up over workers, and are judged."""

import msgspec
import pytest

from loadtest.locust.attempts import Attempt, Call
from loadtest.locust.limits import WorkLimit, level_max, policy_file
from loadtest.locust.run_report import report
from loadtest.locust.run_tally import Second, Tally
from loadtest.locust.thresholds import judge
from loadtest.probe import Times

LIMIT = WorkLimit(name="shared", rate=100.0, capacity=50.0, debt_max=50.0)
LATE_MS = 200.0
QUICK = Times.of([5.0], late_ms=LATE_MS)


def attempt(call: Call = "acquire", status: int = 200, **more: object) -> Attempt:
    plain = {"at_s": 10.5, "node": "a", "tenant": "t0", "criticality": "critical", "latency_ms": 5.0}
    return msgspec.convert({**plain, "call": call, "status": status, **more}, Attempt)


def tallied(*attempts: Attempt) -> Tally:
    tally = Tally()
    for one in attempts:
        tally.count(one, late_ms=LATE_MS)
    return tally


def probed(*latencies_ms: float) -> Times:
    return Times.of([5.0] * 99 + list(latencies_ms), late_ms=LATE_MS)


def broken(tally: Tally, probed: Times = QUICK) -> list[str]:
    return [check.name for check in judge(tally, LIMIT, probed, late_ms=LATE_MS) if not check.holds]


def steady(admitted: float = 100.0, demanded: float = 150.0, seconds: int = 10) -> Tally:
    tally = tallied(*[attempt() for _ in range(1000)])
    tally.seconds = {at: Second(demanded, admitted, granted=100) for at in range(seconds)}
    return tally


def test_attempts_are_counted_for_what_they_are() -> None:
    tally = tallied(
        attempt(work=4.0, demanded=10.0),
        attempt("settle", work=6.0, settle_lag_ms=40.0),
        attempt(status=429, reason="work", criticality="sheddable"),
        attempt(status=0, reason="connection refused", is_final=False),
        attempt(status=503, reason="503 store_unavailable"),
        attempt(is_degraded=True, is_retry=True, latency_ms=250.0),
    )
    assert tally.seconds == {10: Second(demanded=10.0, admitted=10.0, granted=2, refused=1, failed=2)}
    assert tally.refusals == {"work": 1}
    assert tally.refused_share("sheddable") == 1.0
    assert tally.failures == {"connection refused": 1, "503 store_unavailable": 1}
    assert (tally.requests_failed, tally.retries, tally.degraded, tally.read_late) == (1, 1, 1, 1)
    assert tally.attempts == 6
    assert tally.settle_lag_p_ms(99) == pytest.approx(40.0, rel=0.25)


def test_two_workers_tallies_add_up_to_one() -> None:
    attempts = [attempt(at_s=10 + n % 3, work=1.0, latency_ms=n, status=429 if n % 2 else 200) for n in range(300)]
    whole, first, second = tallied(*attempts), tallied(*attempts[:100]), tallied(*attempts[100:])
    first.add(msgspec.json.decode(msgspec.json.encode(second), type=Tally))
    assert first == whole


def test_a_level_is_what_a_bucket_of_the_rate_would_owe() -> None:
    assert level_max([(0.0, 50.0), (0.5, 50.0), (1.0, 50.0)], 100.0) == 50.0
    assert level_max([(0.0, 50.0), (0.1, 50.0)], 100.0) == 90.0
    assert level_max([(0.0, 50.0), (0.0, -20.0), (0.0, 30.0)], 100.0) == 60.0, "a refund is given back"
    assert level_max([(0.0, -500.0), (0.0, 30.0)], 100.0) == 30.0, "and mints nothing"


def test_a_good_run_breaks_nothing() -> None:
    assert broken(steady()) == []


def test_each_fault_breaks_its_threshold() -> None:
    over = steady()
    over.seconds[5].admitted = 400.0
    assert broken(over) == ["work beyond the rate of shared"]
    assert broken(steady(admitted=70.0)) == ["limit used while saturated"]
    assert broken(steady(admitted=70.0, demanded=70.0)) == [], "nobody asked for more"
    failing, lost, lagging = steady(), steady(), steady()
    failing.failures["connection lost"] = 15
    assert broken(failing) == ["attempts failed"]
    lost.requests_failed = 1
    assert broken(lost) == ["requests failed for good"]
    assert broken(steady(), probed(5.0, 250.0)) == []
    assert broken(steady(), probed(250.0, 250.0)) == ["the probe's calls beyond 200 ms"]
    assert broken(steady(), Times.of([], late_ms=LATE_MS)) == ["the probe's calls beyond 200 ms"], "nobody asked"
    lagging.count(attempt("settle", settle_lag_ms=900.0), late_ms=LATE_MS)
    assert broken(lagging) == ["settle lag p99"]
    assert broken(Tally()) == ["decisions"]


def test_critical_requests_refused_more_often_than_sheddable_ones_are_a_fault() -> None:
    unfair = steady()
    unfair.asked_by_class |= {"sheddable": 500, "critical": 500}
    unfair.refusals["work"] = 100
    unfair.refused_by_class |= {"critical": 90, "sheddable": 10}
    assert broken(unfair) == ["sheddable refused"]


def test_the_report_names_what_broke() -> None:
    tally = steady(admitted=70.0)
    text = report("A run", tally, judge(tally, LIMIT, QUICK, late_ms=LATE_MS), LIMIT, QUICK)
    assert "| limit used while saturated | 70% | ≥ 80% | **broken** |" in text
    assert "| 9 | 150 | 70 | 70% | 100 | 0 | 0 |" in text


def test_limits_are_policies() -> None:
    assert "{name: shared, match: {service: shop}, per: [], rate: 100, capacity: 50, max_debt: 50," in policy_file(
        [LIMIT], service="shop"
    )
