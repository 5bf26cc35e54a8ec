"""The wheel of Headgate, built from this tree, and environments that it is installed into."""

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PIP = ("-m", "pip", "--disable-pip-version-check")


def run(command: Sequence[str | Path], *, cwd: Path, status: int = 0) -> str:
    """Run a command, without this environment's Python and settings, until this status; the text that it printed."""
    hidden = ("HEADGATE_", "PYTHON", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    finished = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    assert finished.returncode == status, finished.stdout
    return finished.stdout


def build_wheel(directory: Path) -> Path:
    """Build with what is installed here: needs no network."""
    options = ["--no-deps", "--no-build-isolation", "--wheel-dir"]
    run([sys.executable, *PIP, "wheel", *options, directory, ROOT], cwd=directory)
    (built,) = directory.glob("headgate-*.whl")
    return built


def with_pinned_packages(wheel: Path, directory: Path) -> Path:
    """The `bin` directory of a new environment with the service and exactly the pinned packages."""
    venv.create(directory, with_pip=True)
    pip: list[str | Path] = [directory / "bin" / "python", *PIP, "install"]
    run([*pip, "--require-hashes", "-r", ROOT / ".ci" / "run.lock"], cwd=directory)
    run([*pip, "--no-index", f"{wheel}[server]"], cwd=directory)
    return directory / "bin"


def with_packages_from_here(wheel: Path, directory: Path, *packages: str) -> Path:
    """The `bin` directory of a new environment with the light client, these packages and those that they need.

    The packages are linked from this environment, so nothing is downloaded; pip refuses a wheel that needs another.
    """
    venv.create(directory, with_pip=False)
    installed = Path(sysconfig.get_path("purelib", vars={"base": str(directory), "platbase": str(directory)}))
    for name in needed_by(*packages):
        here = distribution(name)
        for top in {file.parts[0] for file in here.files or () if ".." not in file.parts} - {"__pycache__"}:
            (installed / top).symlink_to(Path(str(here.locate_file(top))))
    python = directory / "bin" / "python"
    run([sys.executable, *PIP, "--isolated", "--python", python, "install", "--no-index", wheel], cwd=directory)
    return directory / "bin"


def needed_by(*requirements: str) -> set[str]:
    """The packages that they draw in, themselves included, as they are installed here."""
    found: set[tuple[str, str]] = set()
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        wanted = waiting.pop()
        for extra in ("", *wanted.extras):
            here = (canonicalize_name(wanted.name), extra)
            if here in found:
                continue
            found.add(here)
            needs = map(Requirement, distribution(wanted.name).requires or ())
            waiting += [one for one in needs if one.marker is None or one.marker.evaluate({"extra": extra})]
    return {name for name, _ in found}
