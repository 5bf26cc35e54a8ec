"""The documents' figures come from one run: what is measured ends up between the marks, and nowhere else."""

from pathlib import Path

from limiter.cli.bench import Row
from loadtest import client_bench
from loadtest.client_bench import Way, ways
from loadtest.generator import Load
from loadtest.http_bench import variants
from loadtest.report import PERFORMANCE, README, ROOT, Figures, write
from loadtest.road_bench import scenarios


def figures(acquires_per_s: float) -> Figures:
    rows = variants()
    for row, rate in zip(rows, (1000.0, 5000.0, acquires_per_s, 600.0), strict=True):
        row.loads.append(Load(rate, 1.0, 5.0, 0))
        row.probes = [True]
    scripts = [
        Row("one call", "acquires/s", [9000.0]),
        Row("memory per bucket", "bytes", [272.0], "at most 300"),
        Row("memory per settled reservation", "bytes", [116.0]),
    ]
    road = scenarios()
    for name, scenario in road.items():
        scenario.node_us, scenario.store_us = [10.0 if name == "grant" else 2.0], [1.0]
        scenario.loads.append(Load(1000.0, 0.5, 5.0, 0))
    made = client_ways(client_us=20.0)
    return Figures("Two cores.", scripts, rows, 100_000, 200, road=road, ways=made, local_per_s=500_000)


def client_ways(client_us: float) -> dict[str, Way]:
    found = ways()
    for name, way in found.items():
        way.pairs_per_s, way.client_us = [8000.0 if name == "coalesced" else 1000.0], [120.0]
        way.node_us, way.store_us = [12.0 if name == "keyless" else 20.0], [9.0]
    found["coalesced"].client_us = [client_us]
    return found


def copied(directory: Path) -> dict[Path, str]:
    (directory / "docs").mkdir()
    pages = {page: (ROOT / page).read_text() for page in (PERFORMANCE, README)}
    for page, text in pages.items():
        (directory / page).write_text(text)
    return pages


def test_every_table_has_its_place(tmp_path: Path) -> None:
    copied(tmp_path)
    write(figures(11_000), tmp_path)
    performance, readme = (tmp_path / PERFORMANCE).read_text(), (tmp_path / README).read_text()
    assert "| (c) fast lane | 11,000 | 5.0 | 0 | 100% | 11.0× (a)" in performance
    assert "| memory per bucket | 272 bytes | at most 300 |" in performance
    assert (
        "| a refusal on one hot, empty bucket | 2.0 | 1.0 | 3.0 | 0.50 | 0.27 of a grant (at most 0.4) |" in performance
    )
    assert (
        "| the library, 256 tasks | 8,000 | 20 | 20 | 9 | "
        "6.0× one request each in a second of the client's processor (at least 5×), 8.0× by the clock |" in performance
    )
    assert "| keys cost 8.0 + 0.0 µs in node and store |" in performance
    assert "<!-- machine -->\nTwo cores.\n<!-- /machine -->" in performance
    assert "| Headgate | 11,000 | 5.0 ms |\n| Headgate, 100 to a request | 60,000 | 5.0 ms |" in readme
    assert readme.count("| a bucket in the store |") == readme.count("| a bucket in the store | 272 bytes |  |") == 1


def test_a_page_keeps_all_but_its_tables_and_a_second_run_changes_nothing(tmp_path: Path) -> None:
    before = copied(tmp_path)
    write(figures(11_000), tmp_path)
    once = {page: (tmp_path / page).read_text() for page in before}
    write(figures(11_000), tmp_path)
    for page, text in before.items():
        assert [line for line in once[page].splitlines() if line.startswith("#")] == [
            line for line in text.splitlines() if line.startswith("#")
        ]
        assert (tmp_path / page).read_text() == once[page]


def test_the_result_says_whether_every_aim_was_reached() -> None:
    assert figures(11_000).hold
    assert not figures(7900).hold


def test_the_clients_aims_are_judged() -> None:
    assert client_bench.judge(client_ways(24.0), 400_000)[1]
    for missed in (client_bench.judge(client_ways(25.0), 400_000), client_bench.judge(client_ways(24.0), 399_000)):
        assert not missed[1]
        assert "**missed**" in client_bench.render_markdown(missed[0])
