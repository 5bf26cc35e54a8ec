"""Which room may import which, as docs/architecture.md says; no room has too many modules, and no module two places."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("headgate", "limiter", "api", "loadtest")
OURS = (*PACKAGES, "tests")
MODULES = sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))
MODULES_MAX = 15

BASE = {"limiter/model", "limiter/runtime"}
CORE = BASE | {"limiter/store", "limiter/settings"}
ROOMS: dict[str, set[str]] = {
    "limiter": set(),
    "limiter/model": set(),
    "limiter/runtime": {"limiter/model"},
    "limiter/client": {"limiter/model"},
    "headgate": {"limiter/client"},
    "limiter/store": BASE,
    "limiter/settings": BASE | {"limiter/store"},
    "limiter/engine": CORE,
    "limiter/controller": CORE,
    "limiter/metrics": CORE,
    "api/data": BASE | {"limiter/engine", "limiter/settings"},
    "api/transport": BASE | {"api/data", "limiter/settings"},
    "api/routes": CORE | {"api/data", "limiter/engine", "limiter/metrics"},
    "api": CORE | {"api/data", "api/transport", "api/routes", "limiter/engine", "limiter/metrics"},
    "limiter/cli": CORE
    | {"headgate", "limiter/client", "limiter/engine", "limiter/controller", "limiter/metrics"}
    | {"api", "api/data", "api/transport", "api/routes"},
}
ROOMS["loadtest"] = set(ROOMS) | {"tests"}
"""No other import is allowed, wherever it stands: at the top, in a function, for types alone."""

ROOM_OF_MODULE = {"limiter/settings.py": "limiter/settings", "limiter/api_keys.py": "limiter/settings"}
"""Modules that are a room of their own."""

EXCEPTIONS = {("api/data/render.py", "limiter/store")}
"""One place says what each failure of the store means to a caller, beside all other failures."""


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


def room_of(path: str) -> str:
    """The room of a module or a folder, named by its path."""
    if path in ROOM_OF_MODULE:
        return ROOM_OF_MODULE[path]
    inside = [room for room in (*ROOMS, "tests") if path == room or path.startswith(f"{room}/")]
    assert inside, f"{path} is in no room"
    return max(inside, key=len)


@cache
def imported(path: Path) -> frozenset[str]:
    """The modules of ours that a module imports, by their paths."""
    return frozenset(_imported(path))


def _imported(path: Path) -> Iterator[str]:
    for found in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(found, ast.Import):
            names = [alias.name for alias in found.names]
        elif isinstance(found, ast.ImportFrom):
            assert found.level == 0, f"{shown(path)}: import by the full name"
            assert found.module is not None
            names = [f"{found.module}.{alias.name}" for alias in found.names]
        yield from (where(name) for name in names if name.split(".")[0] in OURS)


def where(name: str) -> str:
    """The path of the module, or of the package, that a dotted name lies in."""
    path = name.replace(".", "/")
    while path:
        if (ROOT / f"{path}.py").exists():
            return f"{path}.py"
        if (ROOT / path).is_dir():
            return path
        path = path.rpartition("/")[0]
    raise AssertionError(f"nothing of ours is called {name}")


@pytest.mark.parametrize("path", MODULES, ids=shown)
def test_a_room_imports_what_the_table_allows_and_nothing_else(path: Path) -> None:
    own = room_of(shown(path))
    for found in imported(path):
        room = room_of(found)
        allowed = room == own or room in ROOMS[own] or (shown(path), room) in EXCEPTIONS
        assert allowed, f"{shown(path)} imports {found}; {own} may import {', '.join(sorted(ROOMS[own])) or 'nothing'}"


def test_every_exception_is_needed() -> None:
    needed = {(shown(path), room_of(found)) for path in MODULES for found in imported(path)}
    assert needed >= EXCEPTIONS


def test_no_two_rooms_import_each_other() -> None:
    rooms = {room: found - {"tests"} for room, found in ROOMS.items()}
    while rooms:
        free = {room for room, found in rooms.items() if not found & rooms.keys()}
        assert free, f"a circle: {', '.join(rooms)}"
        rooms = {room: found for room, found in rooms.items() if room not in free}


def test_the_architecture_page_has_the_same_table() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| ((?:`[\w/.]+`,? ?)+)\|.*\| ([^|]*) \|$", page, re.MULTILINE)
    told = {
        ROOM_OF_MODULE.get(room, room.rstrip("/")): set(re.findall(r"`([\w/]+)`", may))
        for rooms, may in rows
        for room in re.findall(r"`([\w/.]+)`", rooms)
    }
    stated = ROOMS | {"limiter/cli": {"loadtest"}, "loadtest": set()}  # "everything but", "everything"
    del stated["limiter"]  # a docstring
    assert told == stated


@pytest.mark.parametrize("name", PACKAGES)
def test_no_folder_holds_more_modules_than_a_reader_can_keep_in_mind(name: str) -> None:
    folders = [ROOT / name, *(path for path in (ROOT / name).rglob("*") if path.is_dir())]
    for folder in folders:
        modules = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(modules) <= MODULES_MAX, shown(folder)


NAMED_TWICE: set[str] = set()
"""Names that two modules still have. The list may only shrink."""


def test_the_name_of_a_module_occurs_once() -> None:
    places = defaultdict(list)
    for path in MODULES:
        if path.stem not in ("__init__", "__main__"):
            places[path.stem].append(shown(path))
    named_twice = {name: found for name, found in places.items() if len(found) > 1}
    unknown = {name: found for name, found in named_twice.items() if name not in NAMED_TWICE}
    assert not unknown, "give one of them another name"
    assert named_twice.keys() == NAMED_TWICE, "take from NAMED_TWICE what occurs once"
