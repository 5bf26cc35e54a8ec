"""The image: pinned, small in what it may do, and made of files that exist. Building it needs more than a test has."""

import re
import tomllib
from pathlib import Path

from packaging.utils import canonicalize_name

from tests.support.dockerfile import healthcheck, instructions, of_the_image
from tests.support.rendering import ROOT
from tests.support.wheels import needed_by

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_base_is_pinned_to_a_version_and_a_digest() -> None:
    argument = next(it.text for it in instructions() if it.name == "ARG")
    assert re.fullmatch(r"PYTHON=python:3\.11\.\d+-slim-\w+@sha256:[0-9a-f]{64}", argument)
    bases = [it.words[0] for it in instructions() if it.name == "FROM"]
    assert bases == ["${PYTHON}", "${PYTHON}"], "an environment moves only between images of the same Python"


def test_the_image_does_not_run_as_root() -> None:
    (user,) = of_the_image("USER")
    assert re.fullmatch(r"[1-9]\d{3,}:[1-9]\d{3,}", user.text), "by number: Kubernetes cannot look names up"
    for copied in of_the_image("COPY"):
        assert "--chown=" not in copied.text or f"--chown={user.text}" in copied.text


def test_packages_come_from_the_lock_file_with_their_hashes() -> None:
    runs = [it.arguments for it in instructions() if it.name == "RUN"]
    locked, ours = [arguments for arguments in runs if arguments[0] == "pip" and "install" in arguments]
    assert locked[-2:] == ["-r", ".ci/image.lock"]
    assert {"--require-hashes", "--only-binary"} <= set(locked)
    assert {"--no-deps", "--no-index"} <= set(ours)


def test_the_image_has_the_tested_versions_and_those_for_traces() -> None:
    run, tested, image = (pins(ROOT / ".ci" / f"{name}.lock") for name in ("run", "test", "image"))
    assert image.items() <= tested.items(), "the same versions and hashes"
    assert run.items() <= image.items()
    extras = PROJECT["project"]["optional-dependencies"]
    assert needed_by(*PROJECT["project"]["dependencies"], *extras["server"], *extras["otel"]) <= set(image)


def pins(lock: Path) -> dict[str, str]:
    """Each package of a lock file, with its version and hashes."""
    entries = re.split(r"^(?=[A-Za-z0-9])", lock.read_text(), flags=re.MULTILINE)
    return {canonicalize_name(entry.partition("==")[0].partition("[")[0]): entry for entry in entries if entry}


def test_build_tools_are_not_left_in_the_image() -> None:
    (removed,) = [it.arguments for it in instructions() if it.name == "RUN" and "uninstall" in it.arguments]
    assert removed[removed.index("--yes") + 1 :] == PROJECT["dependency-groups"]["build"]


def test_every_file_that_is_copied_exists_and_nothing_else_is_needed() -> None:
    copied = [
        source for it in instructions() if it.name == "COPY" and "--from=" not in it.text for source in it.words[:-1]
    ]
    assert all((ROOT / source).exists() for source in copied)
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {
        *wheel["packages"],
        *wheel["force-include"],
        PROJECT["project"]["readme"],
        *PROJECT["project"]["license-files"],
    }
    assert {*needed, "pyproject.toml", ".ci/image.lock"} == set(copied)


def test_nothing_in_it_needs_a_shell() -> None:
    assert all(it.text.startswith("[") for it in instructions() if it.name in ("RUN", "ENTRYPOINT", "CMD"))
    assert healthcheck() == ["python", "-m", "limiter.cli.liveness"]


def test_it_runs_the_api_by_default() -> None:
    (entrypoint,) = of_the_image("ENTRYPOINT")
    (command,) = of_the_image("CMD")
    assert (entrypoint.arguments, command.arguments) == (["headgate"], ["api"])
