"""The `overload` block: its defaults, what it comes to, and that it reads back as it was put."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limiter.model.overload.expectations import ExpectationParams, Mode
from limiter.model.overload.in_flight_limit import LimitParams
from limiter.model.overload.overload_block import Expectations, Overload, ResponseRules, ResponseTime, Utilisation
from limiter.model.overload.quality import QualityParams
from limiter.model.overload.response_time import ResponseTimeParams
from limiter.model.overload.utilisation import UtilisationParams
from limiter.model.policy.criticality import RANKS, Criticality
from limiter.model.policy.problems import PolicyError
from limiter.model.policy.reading import dump, read_policy

PUBLISHED = ResponseRules.PUBLISHED


def overload(**parts: object) -> Overload:
    block = read_policy({"name": "p", "rate": 1, "overload": parts}).overload
    assert block is not None
    return block


def test_a_policy_without_the_block_has_none() -> None:
    assert read_policy({"name": "p", "rate": 1}).overload is None


def test_the_defaults_are_those_of_the_steps() -> None:
    block = overload(expectations={}, response_time={}, utilisation={})
    assert block.all_ranks() == RANKS
    assert block.expectations is not None
    assert block.response_time is not None
    assert block.utilisation is not None
    assert block.expectations.params(RANKS) == ExpectationParams()
    assert block.response_time.params(RANKS) == ResponseTimeParams()
    assert block.utilisation.params(RANKS) == UtilisationParams()


def test_shares_become_numbers() -> None:
    assert Expectations(threshold="12.5%").params(RANKS).threshold == 0.125
    utilisation = Utilisation(target="80%", targets={"queue_age_s": 0.5, "cpu": "90%"}).params(RANKS)
    assert (utilisation.target, utilisation.targets) == (0.8, {"queue_age_s": 0.5, "cpu": 0.9})


def test_ranks_that_are_not_named_are_the_usual_ones() -> None:
    block = overload(utilisation={}, ranks={"sheddable": 10})
    assert block.all_ranks() == {**RANKS, Criticality.SHEDDABLE: 10}


@pytest.mark.parametrize(("ranks", "throttle_max"), [({}, 100), ({"critical": 2}, 50), ({"critical": 0}, 50)])
def test_the_throttle_ends_where_it_can_refuse_no_more(ranks: dict[str, float], throttle_max: float) -> None:
    block = overload(expectations={}, ranks=ranks)
    assert block.expectations is not None
    assert block.expectations.params(block.all_ranks()).throttle_max == throttle_max


def test_without_classes_nobody_yields() -> None:
    assert set(ResponseTime(classes=False).params(RANKS).ranks.values()) == {1.0}
    assert ResponseTime().params(RANKS).ranks == RANKS


def test_s8_the_rate_begins_limited() -> None:
    assert ResponseTime(rules=PUBLISHED, rate_max=70).params(RANKS).rate_initial == 70, "at most the upper bound"
    assert ResponseTime(rules=PUBLISHED).params(RANKS).rate_initial == 100
    assert ResponseTime(rules=PUBLISHED, rate_initial=7).params(RANKS).rate_initial == 7


def test_a_band_in_the_way_matters_to_the_ideal_mode_only() -> None:
    assert overload(expectations={"expected_latency_ms": 10}).expectations is not None
    assert overload(expectations={"expected_latency_ms": 10, "mode": "ideal"}).expectations is not None
    with pytest.raises(PolicyError, match="ideal_band_ms: found \\[5, 20\\]; allowed: a band below"):
        overload(expectations={"expected_latency_ms": 10, "mode": "ideal", "rules": "published"})


def test_the_limit_goes_by_the_share_that_may_be_late() -> None:
    assert ResponseTime().limit_params() == LimitParams()
    assert ResponseTime(percentile=99, initial=5).limit_params() == LimitParams(allowed=0.01, initial=5)
    assert ResponseTime(targets_ms={Criticality.CRITICAL: 300}).targets_by_class() == (1000, 300, 1000, 1000)


def test_s11_degradation_alone_or_before_refusals() -> None:
    assert ResponseTime().quality_params() is None
    assert ResponseTime(degrade=True, quality_min=0.3).quality_params() == QualityParams(0.3, 0.1, 0.02)
    assert ResponseTime(degrade="only").params(RANKS).is_refusing is False


numbers = st.integers(1, 10**6)
expectations = st.fixed_dictionaries(
    {},
    optional={
        "expected_latency_ms": numbers,
        "expected_by": st.dictionaries(
            st.sampled_from(["operation", "client"]), st.dictionaries(st.text(), numbers, min_size=1)
        ),
        "mode": st.just(str(Mode.DAMPED)),
        "threshold": st.integers(0, 100).map("{}%".format),
        "step_up": st.integers(2, 100),
        "calm_intervals": st.integers(0, 10),
    },
)
response_time = st.fixed_dictionaries(
    {},
    optional={
        "target_ms": numbers,
        "targets_ms": st.dictionaries(st.sampled_from(Criticality).map(str), numbers),
        "percentile": st.integers(1, 99),
        "initial": numbers,
        "in": st.sampled_from(["requests", "work"]),
        "degrade": st.booleans(),
    },
)
utilisation = st.fixed_dictionaries(
    {}, optional={"target": st.sampled_from(["80%", 1, 2.5]), "targets": st.dictionaries(st.just("cpu"), numbers)}
)


@given(
    st.fixed_dictionaries(
        {"utilisation": utilisation}, optional={"expectations": expectations, "response_time": response_time}
    )
)
def test_a_block_reads_back_as_it_was_put(block: dict[str, object]) -> None:
    document = {"name": "p", "rate": 1, "overload": block}
    policy = read_policy(document)
    assert dump(policy) == document
    assert read_policy(dump(policy)) == policy
