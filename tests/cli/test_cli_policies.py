"""`headgate policies …` and `headgate inspect`: what they print and how they end."""

import getpass
from pathlib import Path

import pytest
from typer.testing import Result

from limiter.store import keys
from limiter.store.keys import Slot
from tests.support.command import headgate, lines_of, run_headgate
from tests.support.operations import ask, quota_terms, request_terms, work_terms
from tests.support.servers import Server, free_port, running
from tests.support.stores import ScriptStore

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "policies.example.yaml"
BAD = Path(__file__).parents[1] / "model" / "policy" / "policies" / "bad"


def complaint_of(result: Result, code: int = 1) -> str:
    """The one line that a failure prints."""
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    (line,) = result.stderr.splitlines()
    return line.removeprefix("headgate: ")


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """Two states of the same policies."""
    before, after = tmp_path / "before.yaml", tmp_path / "after.yaml"
    before.write_text("policies: [{name: reads, rate: 100}, {name: writes, rate: 10, shadow: true}]")
    after.write_text(
        "namespaces: {wide: {partitions: 4, partition_by: [customer]}}\n"
        "policies: [{name: reads, rate: 5/m}, {name: lists, rate: 1}]"
    )
    return before, after


def test_a_good_file_is_checked_without_a_store() -> None:
    assert lines_of(headgate("policies", "check", EXAMPLE)) == [f"{EXAMPLE}: 6 policies, all valid"]


def test_r17_a_file_that_commits_more_than_a_backend_can_do_is_valid_with_a_warning(
    valkey: Server, tmp_path: Path
) -> None:
    path = tmp_path / "overbooked.yaml"
    path.write_text(
        "namespaces: {default: {backends: {db: {rate: 2000}}}}\n"
        "policies: [{name: reads, rate: 1500}, {name: writes, rate: 600}]"
    )
    checked = headgate("policies", "check", path)
    assert (checked.exit_code, checked.stdout) == (0, f"{path}: 2 policies, all valid\n")
    assert "warning: namespace default: backend db can do 2000 units/s" in checked.stderr
    applied = headgate("policies", "apply", path, url=valkey.url)
    assert (applied.exit_code, applied.stderr) == (0, checked.stderr)


def test_f_p1_a_bad_file_ends_with_1_and_a_line_for_each_problem() -> None:
    """F-P1"""
    path = BAD / "several-faults.yaml"
    for command in ("check", "apply", "diff"):
        refused = headgate("policies", command, path)
        expected = path.with_suffix(".txt").read_text().splitlines()
        assert (refused.exit_code, refused.stdout) == (1, "")
        assert refused.stderr.splitlines() == [f"headgate: {path}: {line}" for line in expected]


def test_a_file_is_applied_and_listed(valkey: Server) -> None:
    *names, last = lines_of(headgate("policies", "apply", EXAMPLE, url=valkey.url))
    assert names[:2] == ["+ default/customer-work", "+ default/customer-writes"]
    assert last == "6 policies, in force (revision 1)"
    assert lines_of(headgate("policies", "apply", EXAMPLE, url=valkey.url)) == [
        "6 policies, nothing to change (revision 1)"
    ]
    title, *rows = lines_of(headgate("policies", "list", url=valkey.url))
    assert title.split() == ["policy", "namespace", "match", "per", "limit", "owner", "revision"]
    assert rows[0].split() == ["anonymous", "default", "customer=null", "5/s", "work", "file", "1"]
    assert rows[4].split() == ["monthly-allowance", "default", 'customer="*"', "customer", "1000000", "work", "per",
                               "month", "file", "1"]  # fmt: skip
    assert "work, shadow" in rows[5]


def test_namespaces_are_listed_behind_the_policies(valkey: Server, files: tuple[Path, Path]) -> None:
    headgate("policies", "apply", files[1], url=valkey.url)
    *_, title, row = lines_of(headgate("policies", "list", url=valkey.url))
    assert title.split() == ["namespace", "partitions", "by", "owner", "revision"]
    assert row.split() == ["wide", "4", "customer", "file", "1"]


def test_pruning_removes_what_the_file_does_not_name(valkey: Server, files: tuple[Path, Path]) -> None:
    before, after = files
    headgate("policies", "apply", before, url=valkey.url)
    assert lines_of(headgate("policies", "apply", after, "--prune", url=valkey.url)) == [
        "+ default/lists",
        "+ namespace wide",
        "~ default/reads",
        "- default/writes",
        "2 policies, in force (revision 2)",
    ]


def test_a_difference_is_shown_and_ends_with_1(valkey: Server, files: tuple[Path, Path]) -> None:
    before, after = files
    headgate("policies", "apply", before, url=valkey.url)
    assert lines_of(headgate("policies", "diff", before, url=valkey.url)) == []
    assert lines_of(headgate("policies", "diff", after, url=valkey.url), code=1) == [
        "+ default/lists",
        "~ default/reads",
        '    rate: 100 -> "5/m"',
        "- default/writes (no longer in the file; apply --prune would remove it)",
        "+ namespace wide",
    ]


def test_history_and_rollback(valkey: Server, files: tuple[Path, Path]) -> None:
    for file in files:
        headgate("policies", "apply", file, url=valkey.url)
    assert lines_of(headgate("policies", "rollback", "reads", "1", url=valkey.url)) == [
        "Rolled back default/reads to revision 1; its new revision is 3"
    ]
    title, newest, middle, oldest = lines_of(headgate("policies", "history", "reads", url=valkey.url))
    assert title.split() == ["revision", "when", "who", "owner", "action", "change"]
    assert newest.endswith('api    rollback  rate: "5/m" -> 100')
    assert middle.split()[0] == "2"
    assert oldest.split()[-2:] == ["apply", "made"]
    assert f"cli: {getpass.getuser()}" in oldest
    assert lines_of(headgate("policies", "diff", files[1], url=valkey.url), code=1)


def test_the_history_of_everything_is_the_audit_log(valkey: Server, files: tuple[Path, Path]) -> None:
    for file in files:
        headgate("policies", "apply", file, "--prune", url=valkey.url)
    title, *rows = lines_of(headgate("policies", "history", url=valkey.url))
    assert title.split() == ["revision", "when", "who", "owner", "action", "entry", "change"]
    assert sorted((row.split()[0], row.partition("apply")[2].split()[0]) for row in rows) == [
        ("1", "default/reads"), ("1", "default/writes"), ("2", "default/lists"), ("2", "default/reads"),
        ("2", "default/writes"), ("2", "namespace"),
    ]  # fmt: skip
    assert [row.split("  ")[-1] for row in rows if "writes" in row] == ["removed", "made"]
    assert len(lines_of(headgate("policies", "history", "--limit", "2", url=valkey.url))) == 3


def test_a_policy_that_does_not_exist_is_named(valkey: Server) -> None:
    told = complaint_of(headgate("policies", "history", "reads", url=valkey.url))
    assert told == "there is no policy default/reads"
    headgate("policies", "apply", EXAMPLE, url=valkey.url)
    told = complaint_of(headgate("policies", "rollback", "anonymous", "9", url=valkey.url))
    assert told == "there is no revision 9 of policy default/anonymous"


def test_a_damaged_policy_is_listed_beside_the_others(valkey: Server) -> None:
    headgate("policies", "apply", EXAMPLE, url=valkey.url)
    valkey.command("HSET", keys.POLICIES_CURRENT, "p:default/bad", "9 {}")
    listed = headgate("policies", "list", url=valkey.url)
    assert listed.exit_code == 0
    assert "headgate: the store's policy default/bad is damaged and not in force: " in listed.stderr


def test_nothing_that_a_terminal_obeys_is_printed(valkey: Server, tmp_path: Path) -> None:
    """F-N3"""
    file = tmp_path / "odd.yaml"
    file.write_text(r'policies: [{name: odd, rate: 1, match: {customer: "\e[2J\u202e[bold]"}}]')
    headgate("policies", "apply", file, url=valkey.url)
    valkey.command("SET", keys.bucket(Slot().prefix, "\x1b[2J"), "foreign")
    shown = headgate("policies", "list", url=valkey.url).output + headgate("inspect", url=valkey.url).output
    assert "[bold]" in shown
    assert "\x1b" not in shown
    assert "\u202e" not in shown


def test_live_buckets_are_shown_readably(valkey: Server) -> None:
    month_us = (1_790_000_000_000_000, 4_000_000_000_000_000)
    ScriptStore(valkey).acquire(
        [
            ask(work_terms(rate=1e-9), bucket="reads:c1"),
            ask(request_terms(cap=1e-9, burst=3), bucket="calls:c1"),
            ask(quota_terms(1000, month_us), bucket="month:c1"),
        ],
        0,
    )
    valkey.command("SET", keys.bucket(Slot().prefix, "reads:bad"), "foreign")
    shown = headgate("inspect", url=valkey.url)
    title, *rows = (line.split() for line in shown.stdout.splitlines())
    assert title == ["bucket", "mechanism", "balance", "capacity", "rate", "requests", "admitted", "refused"]
    assert sorted(rows) == [
        ["calls:c1", "requests", "2", "3", "1e-09/s", "1", "1", "0"],
        ["month:c1", "quota", "998", "1000", "until", "2096-10-02", "07:06:40Z", "1", "1", "0"],
        ["reads:c1", "work", "48", "50", "1e-09/s", "1", "1", "0"],
    ]
    why = "its record is damaged, or another program wrote it"
    assert shown.stderr == f"headgate: bucket reads:bad cannot be read: {why}\n"


def test_buckets_of_one_policy_and_namespace_are_shown(valkey: Server, files: tuple[Path, Path]) -> None:
    headgate("policies", "apply", files[1], url=valkey.url)  # wide has four partitions
    for partition in range(4):
        asked = [ask(work_terms(), bucket=f"{name}:c{partition}") for name in ("reads", "writes")]
        ScriptStore(valkey, Slot("wide", partition)).acquire(asked, 0)
    shown = lines_of(headgate("inspect", "--namespace", "wide", "--policy", "reads", url=valkey.url))
    assert sorted(line.split()[0] for line in shown[1:]) == ["reads:c0", "reads:c1", "reads:c2", "reads:c3"]
    few = lines_of(headgate("inspect", "--namespace", "wide", "--limit", "3", url=valkey.url))
    assert len(few) == 1 + 3
    some = lines_of(headgate("inspect", "--namespace", "wide", "--contains", ":c2", url=valkey.url))
    assert len(some) == 1 + 2
    assert lines_of(headgate("inspect", url=valkey.url)) == ["no live buckets here"]


@pytest.mark.parametrize("arguments", [["policies", "list"], ["inspect"], ["policies", "history", "reads"]])
def test_without_a_store_the_message_says_what_to_do(arguments: list[str], tmp_path: Path) -> None:
    told = complaint_of(headgate(*arguments, data_dir=tmp_path))
    assert told.startswith(f"no store runs in {tmp_path}: start one with `headgate up`, or set HEADGATE_DATA_DIR")


def test_a_data_directory_with_a_long_path_is_named(tmp_path: Path) -> None:
    told = complaint_of(headgate("policies", "list", data_dir=tmp_path / ("x" * 100)))
    assert "is too long for a socket: set HEADGATE_REDIS_URL to the unix:// URL" in told


def test_a_store_that_is_away_ends_with_1(tmp_path: Path) -> None:
    told = complaint_of(headgate("policies", "list", url=f"redis://user:hunter2@127.0.0.1:{free_port()}"))
    assert told.startswith("cannot reach the store (")
    assert told.endswith("is it running where HEADGATE_REDIS_URL says?")
    assert "hunter2" not in told
    (tmp_path / "valkey.sock").touch()  # left behind by one that was killed
    assert f"is it running in {tmp_path}?" in complaint_of(headgate("inspect", data_dir=tmp_path))


def test_wrong_usage_ends_with_2(tmp_path: Path) -> None:
    for arguments in (["policies", "apply"], ["policies", "rollback", "reads", "x"], ["inspect", "--limit", "0"]):
        assert headgate(*arguments).exit_code == 2
    assert complaint_of(headgate("policies", "list", url="http://store"), code=2).startswith("HEADGATE_REDIS_URL: ")


def test_it_finds_the_embedded_store_of_the_data_directory(tmp_path: Path) -> None:
    """Beside a running `headgate up`, in a process of its own."""
    with running("valkey", tmp_path / "server") as server:
        (tmp_path / "valkey.sock").symlink_to(server.socket)
        applied = run_headgate("policies", "apply", str(EXAMPLE), data_dir=tmp_path)
        assert (applied.returncode, applied.stderr) == (0, "")
        assert len(lines_of(headgate("policies", "list", data_dir=tmp_path))) == (1 + 6) + (1 + 1)


def test_policies_of_another_owner_are_not_overwritten_unless_taken_over(
    valkey: Server, files: tuple[Path, Path]
) -> None:
    """F-P13"""
    before, after = files
    headgate("policies", "apply", before, url=valkey.url)
    headgate("policies", "apply", after, url=valkey.url)
    headgate("policies", "rollback", "reads", "1", url=valkey.url)
    refused = headgate("policies", "apply", after, url=valkey.url)
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert refused.stderr.splitlines() == [
        "headgate: policy default/reads differs from the store, where it was changed over the API at revision 3",
        "headgate: nothing was applied; --take-over replaces what others own",
    ]
    assert lines_of(headgate("policies", "diff", after, url=valkey.url), code=1) == [
        "~ default/reads (api owns it; only apply --take-over would replace it)",
        '    rate: 100 -> "5/m"',
        "- default/writes (no longer in the file; apply --prune would remove it)",
    ]
    assert lines_of(headgate("policies", "apply", after, "--take-over", "--prune", url=valkey.url)) == [
        "~ default/reads", "- default/writes", "2 policies, in force (revision 4)"
    ]  # fmt: skip
    assert lines_of(headgate("policies", "diff", after, url=valkey.url)) == []


def test_each_file_has_its_owner(valkey: Server, files: tuple[Path, Path], tmp_path: Path) -> None:
    """P12"""
    headgate("policies", "apply", files[0], "--owner", "one", url=valkey.url)
    empty = tmp_path / "empty.yaml"
    empty.write_text("policies: []")
    assert lines_of(headgate("policies", "apply", empty, "--prune", "--owner", "two", url=valkey.url)) == [
        "0 policies, nothing to change (revision 1)"
    ]
    assert lines_of(headgate("policies", "diff", empty, url=valkey.url)) == [], "nothing of its own is there"
    assert len(lines_of(headgate("policies", "diff", empty, "--owner", "one", url=valkey.url), code=1)) == 2
    assert len(lines_of(headgate("policies", "apply", empty, "--prune", "--owner", "one", url=valkey.url))) == 3
    assert headgate("policies", "apply", empty, "--owner", "no name", url=valkey.url).exit_code == 2


def test_one_name_in_two_namespaces_is_shown_with_its_namespace(valkey: Server, tmp_path: Path) -> None:
    """P12"""
    file = tmp_path / "two.yaml"
    file.write_text("policies: [{name: reads, rate: 1}, {name: reads, namespace: tenant, rate: 2}]")
    headgate("policies", "apply", file, url=valkey.url)
    _, *rows = lines_of(headgate("policies", "list", "--namespace", "tenant", url=valkey.url))
    assert [row.split()[:2] for row in rows] == [["reads", "tenant"]]
    assert len(lines_of(headgate("policies", "history", "reads", "--namespace", "tenant", url=valkey.url))) == 2
    told = headgate("policies", "rollback", "reads", "1", "--namespace", "tenant", url=valkey.url)
    assert lines_of(told) == ["Rolled back tenant/reads to revision 1; its new revision is 2"]
    told = headgate("policies", "rollback", "reads", "1", "--namespace", "other", url=valkey.url)
    assert complaint_of(told) == "there is no policy other/reads"
