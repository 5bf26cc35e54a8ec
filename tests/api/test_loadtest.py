"""The benchmark measures what it says: its generator works, and its judgement is right."""

import pytest
import uvloop

from loadtest import http_bench
from loadtest.generator import Load, _Generator
from loadtest.http_bench import Line, judge, render, render_markdown, variants
from tests.support.live import Lane, LiveApi


def test_the_generator_gets_answers(both: dict[Lane, LiveApi]) -> None:
    for batch, path in ((1, "/v1/acquire"), (10, "/v1/batch")):
        load = uvloop.run(_Generator(both["fast"].base + path, batch, customers=10**9).run(4, 0.3))
        assert load.errors == 0
        assert load.requests_per_s > 10
        assert 0 < load.p50_ms <= load.p99_ms


@pytest.fixture(autouse=True)
def aim(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same whatever puts the load on."""
    monkeypatch.setattr(http_bench, "TO_YARDSTICK_MIN", 8)


def judged(
    a: float, b: float, c: float, d: float, p99_ms: float = 5.0, errors: int = 0, *, decided: bool = True
) -> bool:
    return lines(a, b, c, d, p99_ms, errors, decided=decided)[1]


def lines(
    a: float, b: float, c: float, d: float, p99_ms: float = 5.0, errors: int = 0, *, decided: bool = True
) -> tuple[list[Line], bool]:
    rows = variants()
    for row, rate in zip(rows, (a, b, c, d / 100), strict=True):
        row.loads.append(Load(rate, 1.0, p99_ms, errors))
        row.probes = [True, decided]
    return judge(rows, ceiling_per_s=100_000, memory_mb=200)


def test_aims_are_judged() -> None:
    assert judged(1000, 5000, 8000, 50_000)
    assert not judged(1001, 5000, 8000, 50_000)
    assert not judged(1000, 5400, 8000, 50_000)
    assert not judged(1000, 5000, 8000, 49_000)
    assert not judged(1000, 5000, 8000, 50_000, p99_ms=11)
    assert not judged(1000, 5000, 8000, 50_000, errors=1)
    assert not judged(1000, 5000, 8000, 50_000, decided=False)


def test_the_table_is_printed_for_people_and_for_documents() -> None:
    found = lines(1000, 5000, 8000, 49_000)[0]
    assert render(found).row_count == 6
    told = render_markdown(found).splitlines()
    assert len(told) == 8
    assert {row.count("|") for row in told} == {7}
    assert told[4].startswith("| (c) fast lane | 8,000 | 5.0 | 0 | 100% | 8.0× (a) (at least 8×), ")
    assert told[5].endswith("| 0.49 of the store alone (at least 0.5) **missed** |"), "nothing is hidden"
