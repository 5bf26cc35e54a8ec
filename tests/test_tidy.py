"""Tidy is a test: what a machine checks stays true."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from limiter.store import scripts
from limiter.store.scripts import load_script, load_source, scripts_directory

ROOT = Path(__file__).resolve().parent.parent
OURS = sorted(path for folder in ("headgate", "limiter", "api") for path in (ROOT / folder).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
SCRIPTS = sorted(path.stem for path in scripts_directory().glob("*.lua"))

PURE = {
    "__future__", "base64", "binascii", "bisect", "calendar", "collections", "copy", "dataclasses", "datetime", "enum",
    "functools", "hashlib", "hmac", "ipaddress", "itertools", "math", "msgspec", "operator", "pydantic",
    "pydantic_core", "re", "struct", "typing", "zlib", "zoneinfo",
}  # fmt: skip
FUNCTION_LINES_MAX = 70


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported(path: Path) -> Iterator[str]:
    for found in ast.walk(parsed(path)):
        if isinstance(found, ast.Import):
            yield from (alias.name for alias in found.names)
        elif isinstance(found, ast.ImportFrom):
            assert found.level == 0, f"{shown(path)}: import by the full name"
            assert found.module is not None
            # `from limiter.store import keys` imports limiter.store.keys.
            yield from (f"{found.module}.{alias.name}" for alias in found.names)


def of_ours(module: str) -> bool:
    return module.split(".")[0] in ("headgate", "limiter", "api", "loadtest", "tests")


@pytest.mark.parametrize("path", [path for path in OURS if "limiter/model" in shown(path)], ids=shown)
def test_the_model_is_pure(path: Path) -> None:
    """No I/O, no clock, no randomness: time and draws are arguments."""
    roots = {module.split(".")[0] for module in imported(path) if not of_ours(module)}
    assert roots <= PURE
    clocks = re.findall(r"\.(?:now|utcnow|today)\(", path.read_text())
    assert not clocks


WALL_CLOCK = re.compile(r"time\.time(?:_ns)?\(|from time import .*\btime\b|datetime\.(?:now|utcnow)\(")


def test_no_code_of_ours_asks_the_wall_clock() -> None:
    """F-T4: a node whose clock is wrong is like any other."""
    found = {shown(path): asked[0] for path in OURS if (asked := WALL_CLOCK.search(path.read_text())) is not None}
    # There only as long as no store has ever been heard of.
    assert set(found) <= {"limiter/store/clock.py"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_says_what_it_is_and_promises(name: str) -> None:
    source = (scripts_directory() / f"{name}.lua").read_text()
    assert source.startswith("#!lua"), "the shebang makes the server check keys and flags"
    header = header_of(source)
    assert header.startswith(f"{name}: ")
    for word in ("KEYS", "ARGV", "RETURNS", "HOLDS"):
        assert re.search(rf"^{word}\b", header, re.MULTILINE), word


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_uses_the_keys_and_arguments_that_its_header_lists(name: str) -> None:
    source = load_source(name).decode()
    header, body = header_of(source), without_comments(source)
    keys = {int(number) for number in re.findall(r"^KEYS\[(\d+)\]", header, re.MULTILINE)}
    arguments = {int(number) for number in re.findall(r"^ARGV\[(\d+)\]", header, re.MULTILINE)}
    # The values of all keys, read by one MGET, are in raws by the same numbers.
    assert {int(number) for number in re.findall(r"\b(?:KEYS|raws)\[(\d+)\]", body)} == keys
    assert {int(number) for number in re.findall(r"\bARGV\[(\d+)\]", body)} == arguments
    first = [int(number) for number in re.findall(r"^KEYS\[(\d+)\.\.\]", header, re.MULTILINE)]
    assert first == [int(number) + 1 for number in re.findall(r"^local BEFORE = (\d+) *$", body, re.MULTILINE)]


def header_of(source: str) -> str:
    found = re.search(r"\A#!lua[^\n]*\n--\[\[ (.*?)\]\]", source, re.DOTALL)
    assert found is not None, "a header follows the first line"
    return found[1]


def without_comments(source: str) -> str:
    return re.sub(r"--[^\n]*", "", re.sub(r"--\[\[.*?\]\]", "", source, flags=re.DOTALL))


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_has_a_typed_face_and_a_test(name: str) -> None:
    face = f"{name.title().replace('_', '')}Script"
    assert getattr(scripts, face).name == name
    assert f"lua/{name}.lua" in getattr(scripts, face).__doc__
    assert any(re.search(rf"\b{face}\b", path.read_text()) for path in TESTS)


def test_included_parts_of_scripts_exist_and_are_used() -> None:
    used = {part for name in SCRIPTS for part in re.findall(r"^-- #include (\S+)$", source_of(name), re.MULTILINE)}
    assert used == {f"lib/{path.name}" for path in (scripts_directory() / "lib").glob("*.lua")}
    assert all(b"#include" not in load_source(name) for name in SCRIPTS), "spliced in"


@pytest.mark.parametrize("name", SCRIPTS)
def test_constants_are_put_where_they_are_used_and_nowhere_else(name: str) -> None:
    source, sent = load_source(name).decode(), load_script(name).decode()
    constants = set(re.findall(r"\b[A-Z_]+\b", " ".join(names for names, _ in scripts._CONSTANTS.findall(source))))
    texts = re.findall(r"'[^'\n]*'", without_comments(source))
    assert not constants & set(re.findall(r"\w+", " ".join(texts))), "a text is not to change"
    assert not constants & set(re.findall(r"\w+", without_comments(sent)))
    assert sent.count("\n") == source.count("\n"), "errors name the lines of the source"


def source_of(name: str) -> str:
    return (scripts_directory() / f"{name}.lua").read_text()


# connect.py asks the server about itself with a key that holds nothing.
SPELL_KEYS = {"limiter/store/keys.py"}


def test_keys_are_spelled_in_one_module() -> None:
    for path in OURS:
        for found in ast.walk(parsed(path)):
            if isinstance(found, ast.Constant) and isinstance(found.value, str | bytes):
                text = found.value if isinstance(found.value, str) else found.value.decode("latin-1")
                assert not text.startswith("hg:") or shown(path) in SPELL_KEYS, f"{shown(path)}:{found.lineno}"


@pytest.mark.parametrize("path", [path for path in TESTS if "support" not in path.parts], ids=shown)
def test_no_test_sleeps_for_time_to_pass(path: Path) -> None:
    for found in ast.walk(parsed(path)):
        if isinstance(found, ast.Call) and ast.unparse(found.func) in ("sleep", "time.sleep", "asyncio.sleep"):
            assert ast.unparse(found.args[0]) == "0", f"{shown(path)}:{found.lineno}"


def test_no_module_imports_from_a_test_module() -> None:
    """Shared helpers are in tests/support, where a change to one test does not break another."""
    inside = re.compile(r"tests\.(?:.*\.)?(?:test_|conftest\b)")
    found = [f"{shown(path)}: {module}" for path in TESTS for module in imported(path) if inside.match(module)]
    assert not found


def test_functions_fit_a_screen() -> None:
    for path in OURS:
        for found in ast.walk(parsed(path)):
            if isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
                assert found.end_lineno is not None
                lines = found.end_lineno - found.lineno + 1
                assert lines <= FUNCTION_LINES_MAX, f"{shown(path)}: {found.name} has {lines} lines"


RIDDLES = re.compile(r"(?:What|Who|Whoever|Whose|Whatever|Whether)\b")
NOT_REWRITTEN: tuple[str, ...] = ()
"""Folders whose docstrings may still begin so. The list may only shrink."""


@pytest.mark.parametrize("path", [path for path in OURS if not shown(path).startswith(NOT_REWRITTEN)], ids=shown)
def test_a_docstring_names_its_subject(path: Path) -> None:
    """A noun or a verb begins it, not "what" or "who": `The balance left`, not `What is left`."""
    texts = [
        found.value.value
        for found in ast.walk(parsed(path))
        if isinstance(found, ast.Expr) and isinstance(found.value, ast.Constant) and isinstance(found.value.value, str)
    ]
    assert not [text for text in texts if RIDDLES.match(text)]
