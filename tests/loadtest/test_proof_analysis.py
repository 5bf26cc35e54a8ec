"""The proof's findings in the attempts of a run."""

import pytest

from loadtest.locust.attempts import Attempt
from loadtest.probe import Probed
from loadtest.proof.analysis import Death, Findings, analyse, bucket_levels, calm_from_s, judge
from loadtest.proof.document import document, picture
from loadtest.proof.proof_plan import SHARED, SHORT, TENANT

BEGAN_S = 100.0
KILLED_S = 108.0


def granted(at_s: float, work: float = 1.0, *, tenant: str = "t0", is_degraded: bool = False) -> Attempt:
    return Attempt(
        at_s=at_s, call="acquire", node="a", tenant=tenant, criticality="critical", latency_ms=5.0, status=200,
        work=work, demanded=work, is_degraded=is_degraded,
    )  # fmt: skip


def failed(at_s: float, *, is_final: bool = False) -> Attempt:
    return Attempt(
        at_s=at_s, call="settle", node="a", tenant="t0", criticality="critical", latency_ms=5.0, status=0,
        reason="connection refused", is_final=is_final,
    )  # fmt: skip


def quiet() -> list[Attempt]:
    """A unit every tenth of a second, and a second and a half without the store."""
    times = [BEGAN_S + n / 10 for n in range(180)]
    return [granted(at_s, is_degraded=KILLED_S < at_s < KILLED_S + 1.55) for at_s in times]


PRIMARY = Death(victim="primary", name="p", at_s=KILLED_S, recovery="…", recovered_after_s=9.0)


def probed(*latencies_ms: float) -> list[Probed]:
    return [Probed(BEGAN_S, "a", latency_ms, 200) for latency_ms in latencies_ms]


def found_in(attempts: list[Attempt], death: Death = PRIMARY, *latencies_ms: float) -> Findings:
    return analyse(attempts, probed(*(latencies_ms or (5.0,))), [death], SHORT, began_s=BEGAN_S)


def broken(attempts: list[Attempt], death: Death = PRIMARY, *latencies_ms: float) -> list[str]:
    return [check.name for check in judge(found_in(attempts, death, *latencies_ms)) if not check.holds]


def test_a_quiet_run_holds_and_a_primary_is_got_over_with_the_last_answer_without_it() -> None:
    found = found_in(quiet())
    assert broken(quiet()) == []
    assert found.deaths[0].recovered_after_s == pytest.approx(1.5)
    assert [second.admitted for second in found.seconds[:17]] == [10.0] * 17


def test_the_first_calm_ends_a_recovery_and_a_later_trouble_is_another() -> None:
    assert calm_from_s([1.0, 2.5, 3.0, 6.0], 0.0) == 3.0
    assert calm_from_s([5.0], 0.0) == 0.0
    assert calm_from_s([], 7.0) == 7.0


def test_a_bucket_may_owe_less_before_a_failover_than_after_it() -> None:
    burst = TENANT.slack + TENANT.rate
    before, after = [granted(KILLED_S - 3, burst)], [granted(KILLED_S + 3, burst)]
    (_, tenant) = bucket_levels(before, failover_s=KILLED_S)
    assert not tenant.holds
    (_, tenant) = bucket_levels(after, failover_s=KILLED_S)
    assert tenant.holds
    (_, tenant) = bucket_levels([granted(KILLED_S + 3, 2 * burst)], failover_s=KILLED_S)
    assert not tenant.holds
    assert tenant.overall_max == pytest.approx(2 * TENANT.slack + TENANT.capacity + TENANT.rate / 4)


def test_all_tenants_together_are_held_to_the_shared_limit() -> None:
    burst = [granted(KILLED_S - 3, TENANT.slack, tenant=f"t{n}") for n in range(6)]
    shared, *tenants = bucket_levels(burst, failover_s=KILLED_S)
    assert shared.before_failover == 6 * TENANT.slack > shared.before_max
    assert shared.limit is SHARED
    assert all(tenant.holds for tenant in tenants)


def test_each_fault_is_reported() -> None:
    late_ms = SHORT.late_ms + 1
    assert broken(quiet(), PRIMARY, 5.0, late_ms) == [f"promise 4: the probe's calls beyond {SHORT.late_ms:g} ms"]
    read_late = granted(BEGAN_S + 5)
    read_late.latency_ms = late_ms
    assert broken([*quiet(), read_late]) == [], "the users' process may have been late itself"
    assert broken([*quiet(), failed(BEGAN_S + 2)]) == []
    assert broken([*quiet(), failed(BEGAN_S + 2, is_final=True)]) == ["requests failed at every node"]
    assert broken([*quiet(), granted(BEGAN_S + 2, 500.0)]) == ["promise 3: buckets beyond their bound"]
    lasting = Death(victim="controller", name="c", at_s=KILLED_S, recovery="owned by another")
    assert broken(quiet(), lasting) == ["controller killed: owned by another"]


def test_the_page_and_the_picture_show_the_run() -> None:
    found = found_in([*quiet(), failed(BEGAN_S + 2)])
    page = document(found, judge(found), picture="proof.svg")
    assert "| settle: connection refused | 1 |" in page
    assert "| primary | 8.0 s | … | 1.5 s |" in page
    assert "All of it held." in page
    assert ">primary<" in picture(found)
