"""Policy files: what can be written, and what each fault is answered with."""

from pathlib import Path

import pytest

from limiter.engine.policy_file import FILE_BYTES_MAX, load_policy_file
from limiter.model.policy.policy_set import PolicySet
from limiter.model.policy.problems import PolicyError

ROOT = Path(__file__).resolve().parents[3]
BAD = sorted((Path(__file__).parent / "policies" / "bad").glob("*.yaml"))
GOOD = sorted((Path(__file__).parent / "policies" / "good").glob("*.yaml"))
JARGON = ("Input should", "valid dictionary", "instance of", "function-", "pydantic", "_type", "union[", "None", "True")


def load(tmp_path: Path, text: str) -> PolicySet:
    path = tmp_path / "policies.yaml"
    path.write_text(text)
    return load_policy_file(path)


def problems_of(path: Path) -> list[str]:
    with pytest.raises(PolicyError) as caught:
        load_policy_file(path)
    assert str(caught.value) == "\n".join(caught.value.problems)
    return caught.value.problems


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
def test_f_p1_each_fault_has_its_message(path: Path) -> None:
    """F-P1: file, policy, field, what was found and what is allowed, on one line each."""
    expected = path.with_suffix(".txt").read_text().splitlines()
    assert problems_of(path) == [f"{path}: {line}" for line in expected]


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
def test_no_message_speaks_of_how_it_is_checked(path: Path) -> None:
    text = path.with_suffix(".txt").read_text()
    assert not [word for word in JARGON if word in text]
    assert all(len(line) < 500 and line.isascii() and line.isprintable() for line in text.splitlines())


def test_every_message_belongs_to_a_file() -> None:
    assert len(BAD) > 70
    assert {path.stem for path in BAD} == {path.stem for path in BAD[0].parent.glob("*.txt")}


@pytest.mark.parametrize("path", [*GOOD, ROOT / "docs" / "policies.example.yaml"], ids=lambda path: path.stem)
def test_a_good_file_is_read(path: Path) -> None:
    assert load_policy_file(path).policies


def test_plain_words_mean_what_they_look_like() -> None:
    path = next(path for path in GOOD if path.stem == "every-way-to-write-it")
    words = load_policy_file(path).policies[0]
    assert words.match == {"country": "NO", "power": "off", "opened": "12:30", "since": "2026-01-01"}
    assert words.rate == 1000.0


def test_a_name_of_a_file_may_be_text(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("policies: []")
    assert load_policy_file(str(tmp_path / "p.yaml")) == PolicySet()


def test_a_byte_order_mark_is_overlooked(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_bytes(b"\xef\xbb\xbfpolicies: []\n")
    assert load_policy_file(tmp_path / "p.yaml") == PolicySet()


def test_f_p1_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none.yaml"
    assert problems_of(path) == [f"{path}: cannot be read: No such file or directory; allowed: a YAML or JSON file"]
    assert problems_of(tmp_path) == [f"{tmp_path}: cannot be read: Is a directory; allowed: a YAML or JSON file"]


def test_a_file_beyond_all_bounds_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "huge.yaml"
    path.write_bytes(b"#" * (FILE_BYTES_MAX + 1))
    assert problems_of(path) == [f"{path}: is larger than 16 MiB; allowed: a smaller file"]


def test_a_repeated_alias_costs_nothing(tmp_path: Path) -> None:
    """Entities that multiply: each names the one before many times."""
    lines = ["a0: &a0 [x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 20))]
    with pytest.raises(PolicyError, match="a19: no such field"):
        load(tmp_path, "\n".join(lines))
    with pytest.raises(PolicyError, match="policy number 1: found a list"):
        load(tmp_path, "policies: &a [*a]")


@pytest.mark.parametrize(
    ("text", "found"),
    [("0x10", 16), ("0o17", 15), ("010", 10), ("-5", -5), ("+5", 5), (".5", 0.5), ("5.", 5.0), ("1e-3", 0.001)],
)
def test_numbers(tmp_path: Path, text: str, found: float) -> None:
    policies = load(tmp_path, f"policies: [{{name: a, rate: 1, minimum: {text}}}]").policies
    assert policies[0].minimum == found
