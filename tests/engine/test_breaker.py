from limiter.engine.breaker import FAILURES_MAX, PAUSE_MAX_S, PAUSE_MIN_S, PROBE_MAX_S, TOGETHER_S, Breaker


def failing(times: int, *, draw: float = 0.5) -> Breaker:
    """One that failed so often, the last time at 100 s."""
    breaker = Breaker()
    for number in range(times):
        breaker.fail(100.0 - (times - 1 - number) * 2 * TOGETHER_S, draw=draw)
    return breaker


def opened() -> Breaker:
    return failing(FAILURES_MAX)


def test_a_few_failures_change_nothing() -> None:
    assert failing(FAILURES_MAX - 1).allows(100.0)
    assert not opened().allows(100.0)


def test_a_call_that_carries_many_operations_fails_once() -> None:
    breaker = Breaker()
    for number in range(100):
        breaker.fail(100.0 + number * TOGETHER_S / 200, draw=0.5)
    assert breaker.failures == 1
    assert breaker.allows(100.0)


def test_a_success_between_failures_starts_the_count_again() -> None:
    breaker = Breaker()
    for number in range(3 * FAILURES_MAX):
        breaker.fail(100.0 + number, draw=0.5)
        breaker.succeed()
    assert breaker.allows(200.0)


def test_after_many_failures_nobody_asks_until_the_pause_is_over() -> None:
    breaker = opened()
    assert not breaker.allows(100.0 + PAUSE_MIN_S - 0.001)
    assert breaker.allows(100.0 + PAUSE_MIN_S)


def test_one_probes_for_all() -> None:
    breaker = opened()
    assert [breaker.allows(101.0) for _ in range(3)] == [True, False, False]


def test_a_probe_that_succeeds_closes_and_one_that_fails_doubles_the_pause() -> None:
    breaker = opened()
    assert breaker.allows(101.0)
    breaker.fail(101.0, draw=0.5)
    assert not breaker.allows(101.0 + 2 * PAUSE_MIN_S - 0.001)
    assert breaker.allows(101.0 + 2 * PAUSE_MIN_S)
    breaker.succeed()
    assert breaker.allows(101.0)


def test_the_pause_grows_no_further_than_its_bound() -> None:
    breaker, now_s = opened(), 100.0
    for _ in range(20):
        now_s += 10.0
        assert breaker.allows(now_s)
        breaker.fail(now_s, draw=0.5)
    assert breaker.open_until_s - now_s == PAUSE_MAX_S


def test_draws_spread_the_probes_of_many_nodes() -> None:
    early, late = failing(FAILURES_MAX, draw=0.0), failing(FAILURES_MAX, draw=0.999)
    assert late.open_until_s > early.open_until_s + 0.9 * PAUSE_MIN_S


def test_calls_that_were_under_way_when_it_opened_do_not_prolong_it() -> None:
    breaker = opened()
    until_s = breaker.open_until_s
    breaker.fail(100.09, draw=0.9)
    assert breaker.open_until_s == until_s


def test_f_s15_a_probe_that_was_never_sent_leaves_its_turn_to_the_next() -> None:
    breaker = opened()
    assert breaker.allows(101.0)
    breaker.forgo()
    assert [breaker.allows(101.0) for _ in range(2)] == [True, False]


def test_f_s15_a_probe_without_an_outcome_is_over_after_the_longest_deadline() -> None:
    breaker = opened()
    assert breaker.allows(101.0)
    assert not breaker.allows(101.0 + PROBE_MAX_S - 0.001)
    assert breaker.allows(101.0 + PROBE_MAX_S)
