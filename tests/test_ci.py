"""CI hides nothing: a missing program fails there, is counted elsewhere, and is installed by one command."""

import ast
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.programs import OF_TOOLS, closing_line, find, packages

ROOT = Path(__file__).parents[1]
CLOSING = "========= 3 passed, 1 skipped in 2.31s ========="


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A tree with the scripts of CI, and a `bin` with programs that only say what they were asked to do."""
    shutil.copytree(ROOT / ".ci", tmp_path / "tree" / ".ci", ignore=shutil.ignore_patterns("*.lock"))
    (tmp_path / "bin").mkdir()
    for program in ("bash", "dirname", "mktemp", "tee", "grep", "tail", "rm", "chmod", "cat"):
        (tmp_path / "bin" / program).symlink_to(found(program))
    for program in packages().keys() - OF_TOOLS.keys():
        pretend(tmp_path, program, "exit 0")
    pretend(tmp_path, "id", "echo 0")
    pretend(tmp_path, "apt-get", 'echo "apt-get $*" >>"$SEEN"; test ! -x "$POLICY_RC_D" || echo quiet >>"$SEEN"')
    pretend(tmp_path, "make", f'echo "make $1 CI=$CI"; echo "{CLOSING.replace("3 passed", "$1 3 passed")}"')
    return tmp_path


def found(program: str) -> Path:
    path = find(program)
    assert path is not None
    return path


def pretend(checkout: Path, program: str, script: str) -> None:
    path = checkout / "bin" / program
    path.write_text(f"#!{found('bash')}\n{script}\n")
    path.chmod(0o755)


def run(checkout: Path, script: str) -> subprocess.CompletedProcess[str]:
    environment = {
        "PATH": str(checkout / "bin"),
        "SEEN": str(checkout / "seen"),
        "POLICY_RC_D": str(checkout / "policy-rc.d"),
    }
    command = [str(checkout / "tree" / ".ci" / script)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def seen(checkout: Path) -> list[str]:
    path = checkout / "seen"
    return path.read_text().splitlines() if path.exists() else []


def test_nothing_is_asked_of_the_package_manager_where_nothing_is_missing(checkout: Path) -> None:
    assert run(checkout, "install").returncode == 0
    assert seen(checkout) == []


def test_missing_programs_are_installed_after_one_update_and_start_no_service(checkout: Path) -> None:
    for program in ("redis-server", "openssl"):
        (checkout / "bin" / program).unlink()
    assert run(checkout, "install").returncode == 0
    update, _, install, _ = seen(checkout)
    assert update.startswith("apt-get update")
    assert install.endswith("--no-install-recommends openssl redis-server")
    assert seen(checkout)[1::2] == ["quiet", "quiet"], "services are forbidden to start meanwhile"
    assert not (checkout / "policy-rc.d").exists(), "and may start afterwards, as before"


def test_a_policy_on_services_that_is_there_already_stays(checkout: Path) -> None:
    (checkout / "bin" / "redis-server").unlink()
    (checkout / "policy-rc.d").write_text("#!/bin/sh\nexit 0\n")
    assert run(checkout, "install").returncode == 0
    assert (checkout / "policy-rc.d").read_text() == "#!/bin/sh\nexit 0\n"


def test_without_root_it_says_what_to_do(checkout: Path) -> None:
    (checkout / "bin" / "redis-server").unlink()
    pretend(checkout, "id", "echo 1000")
    tried = run(checkout, "install")
    assert tried.returncode == 1
    assert tried.stdout == "Missing packages: redis-server\n"
    assert tried.stderr == "Installing them needs root: sudo .ci/install\n"
    assert seen(checkout) == []


def test_ci_runs_both_parts_and_ends_with_their_closing_lines(checkout: Path) -> None:
    ran = run(checkout, "run")
    assert ran.returncode == 0
    told = [f"make {part} CI=true" for part in ("tools", "test", "long")]
    closing = [CLOSING.replace("3 passed", f"{part} 3 passed") for part in ("tools", "test", "long")]
    each = [line for pair in zip(told, closing, strict=True) for line in pair]
    assert ran.stdout.splitlines() == [*each, *closing[1:]]


def test_ci_fails_where_the_tools_cannot_be_had_and_runs_both_parts_all_the_same(checkout: Path) -> None:
    pretend(checkout, "make", f'echo "{CLOSING.replace("3 passed", "$1 3 passed")}"; test "$1" != tools')
    ran = run(checkout, "run")
    assert ran.returncode == 1
    assert "test 3 passed" in ran.stdout
    assert "long 3 passed" in ran.stdout


@pytest.mark.parametrize("part", ["test", "long"])
def test_ci_fails_where_one_part_fails_and_runs_the_other_all_the_same(checkout: Path, part: str) -> None:
    pretend(checkout, "make", f'echo "== 1 failed, 2 passed in 1.00s =="; test "$1" != {part}')
    ran = run(checkout, "run")
    assert ran.returncode == 1
    assert ran.stdout.count("1 failed") == 3 + 2, "each step, and the closing lines of both parts"


def test_ci_fails_where_tests_never_came_to_their_end(checkout: Path) -> None:
    """A `make test` that prints no closing line has not tested anything, whatever its status."""
    pretend(checkout, "make", "echo nothing")
    ran = run(checkout, "run")
    assert ran.returncode == 1
    assert ran.stdout.endswith("make test ended before its tests did\nmake long ended before its tests did\n")


def test_ci_fails_where_a_program_cannot_be_installed(checkout: Path) -> None:
    (checkout / "bin" / "redis-server").unlink()
    pretend(checkout, "apt-get", "exit 100")
    assert run(checkout, "run").returncode == 1


def test_every_package_is_named_once() -> None:
    names = [line.split()[0] for line in (ROOT / ".ci" / "programs").read_text().splitlines() if line[0] != "#"]
    assert names == sorted(set(names))
    assert "redis-server" in packages()


def suite_without_programs(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The tests of the Makefile where there is no make."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("CI", "PYTEST_"))}
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", "tests/test_makefile.py"]
    return subprocess.run(
        command,
        cwd=ROOT,
        env=kept | {"PATH": str(tmp_path)} | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_missing_program_is_counted_at_the_end_with_the_command_that_installs_it(tmp_path: Path) -> None:
    ran = suite_without_programs(tmp_path)
    assert ran.returncode == 0
    assert "tests were skipped for missing programs: make (" in ran.stdout
    assert "Install them: sudo .ci/install" in ran.stdout


def test_a_missing_program_fails_in_ci_and_names_the_package(tmp_path: Path) -> None:
    ran = suite_without_programs(tmp_path, CI="true")
    assert ran.returncode == 1
    assert "missing program: make (Debian package make); CI=true" in ran.stdout
    assert "skipped" not in ran.stdout.splitlines()[-1]


def test_the_closing_line_counts_by_program() -> None:
    reasons = ["Skipped: missing program: b (x)", "missing program: a (y)", "missing program: b (x)", "needs fork"]
    assert closing_line(reasons) == (
        "3 tests were skipped for missing programs: a (1), b (2). Install them: sudo .ci/install"
    )
    assert closing_line(["needs fork"]) is None
    of_both = closing_line([*reasons, "missing program: celery (z)"])
    assert of_both is not None
    assert of_both.endswith("celery (1). Install them: sudo .ci/install, make tools")


def test_no_test_skips_by_other_means() -> None:
    """Only `tests/support/programs.py` skips for a program, so CI sees every such skip. Systems are another matter."""
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if path == ROOT / "tests" / "support" / "programs.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("pytest.skip", "pytest.importorskip", "shutil.which"), f"{path}:{node.lineno}"
                of_system = "hasattr(os, 'fork')" in ast.unparse(node) or "/proc/self/" in ast.unparse(node)
                assert called != "pytest.mark.skipif" or of_system, path


def test_generated_examples_are_new_ones_in_ci_too() -> None:
    code = "import tests.conftest; from hypothesis import settings; print(settings.default.derandomize)"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"CI": "true"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout == "False\n"


def test_the_versions_that_are_promised_are_those_that_are_tried() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    promised = [name.rpartition(" ")[2] for name in project["classifiers"] if "Python :: 3." in name]
    assert promised == ["3.11", "3.12", "3.13"]
    assert all(version in (ROOT / "CONTRIBUTING.md").read_text() for version in promised)
