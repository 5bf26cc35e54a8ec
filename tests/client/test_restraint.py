"""What a client does not send: each throttle by itself, and none because of another."""

from limiter.client.adaptive import AdaptiveThrottle
from limiter.client.restraint import Restraint

KEY, TARGET = ("default", (("service", "a"),)), ("default", "a", None)


def never() -> float:
    return 0.999999


def always() -> float:
    return 0.0


def feed(restraint: Restraint, reason: str | None, number: int, now_s: float, *, is_decided: bool = True) -> None:
    for _ in range(number):
        assert not restraint.rejects(KEY, TARGET, now_s, never, is_promised=False)
        restraint.learn(KEY, TARGET, now_s, reason, 0.0, is_decided=is_decided)


def test_refusals_by_a_limit_reject_that_descriptor_alone() -> None:
    restraint = Restraint(AdaptiveThrottle())
    feed(restraint, "work", 100, 1.0)
    assert restraint.rejects(KEY, TARGET, 1.0, always, is_promised=False)
    assert not restraint.rejects(("default", ()), TARGET, 1.0, always, is_promised=False)
    assert not restraint.rejects(KEY, TARGET, 1.0, always, is_promised=True), "it was promised room"
    assert restraint.probabilities(1.0) == {None: 0.0}
    assert not restraint.rejects(KEY, TARGET, 12.0, always, is_promised=False), "a limit has room again soon"


def test_overload_rejects_whatever_is_for_that_target() -> None:
    restraint = Restraint(AdaptiveThrottle())
    feed(restraint, "overload", 100, 1.0)
    assert restraint.probabilities(1.0)[None] > 0.9
    assert restraint.rejects(("default", ()), TARGET, 1.0, always, is_promised=False)
    assert not restraint.rejects(KEY, ("default", "b", None), 1.0, always, is_promised=False)


def test_a_limit_that_refuses_nothing_is_not_remembered() -> None:
    restraint = Restraint(AdaptiveThrottle())
    feed(restraint, None, 100, 1.0)
    assert len(restraint._by_limit) == 0


def test_calls_without_a_decision_are_not_the_targets_fault() -> None:
    restraint = Restraint(AdaptiveThrottle())
    feed(restraint, None, 100, 1.0, is_decided=False)
    assert restraint.is_away(1.0, 0.0)
    assert not restraint.is_away(1.0, 0.999)
    assert not restraint.rejects(KEY, TARGET, 1.0, always, is_promised=False)
    assert not restraint.is_away(7.0, 0.0), "and soon forgotten"


def test_one_failed_batch_among_many_is_no_absence() -> None:
    restraint = Restraint(AdaptiveThrottle())
    feed(restraint, None, 100, 1.0)
    feed(restraint, None, 60, 1.0, is_decided=False)
    assert not restraint.is_away(1.0, 0.0)


def test_a_caller_who_gives_up_says_something_about_the_target() -> None:
    restraint = Restraint(AdaptiveThrottle())
    feed(restraint, "given_up", 100, 1.0)
    assert restraint.probabilities(1.0)[None] > 0.9
    assert not restraint.is_away(1.0, 0.0)
