"""Servers that tests share: started once per test process, emptied before each test that uses them.

Generated examples come from one seed for the whole run, shown with the failures: `pytest --hypothesis-seed=…` makes the
same ones again.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support import programs
from tests.support.servers import Cluster, Server, flush, running, start_cluster

# The time to make examples depends more on a busy machine than on the test. And with CI=true Hypothesis would
# make the same examples in every run.
settings.register_profile(
    "headgate", suppress_health_check=[HealthCheck.too_slow], print_blob=True, derandomize=False, deadline=None
)
settings.load_profile("headgate")

SEED_BITS = 32


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Choose the seed before Hypothesis asks for it; the workers of a parallel run are given the same."""
    if config.getoption("hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(random.SystemRandom().getrandbits(SEED_BITS))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Keep the promise of `@pytest.mark.needs("program", …)`."""
    for marker in item.iter_markers("needs"):
        for program in marker.args:
            programs.need(program)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say how to make the same examples again, and which programs are missing, once, after all the single skips."""
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        terminalreporter.write_line(f"generated examples: pytest --hypothesis-seed={config.option.hypothesis_seed}")
    skipped = terminalreporter.stats.get("skipped", [])
    line = programs.closing_line(report.longrepr[2] for report in skipped if isinstance(report.longrepr, tuple))
    if line is not None:
        terminalreporter.write_line(line, yellow=True)


@pytest.fixture(scope="session")
def valkey_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The bundled Valkey, kept for the session; not emptied between tests."""
    with running("valkey", tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture(scope="session")
def redis7_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The installed Redis, kept for the session; not emptied between tests."""
    with running("redis", tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="session")
def cluster_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three Valkey primaries in a cluster, kept for the session; not emptied between tests."""
    with start_cluster("valkey", tmp_path_factory.mktemp("cluster")) as cluster:
        assert isinstance(cluster, Cluster)
        yield cluster


@pytest.fixture
def valkey(valkey_process: Server) -> Server:
    """The bundled Valkey, empty."""
    flush(valkey_process)
    return valkey_process


@pytest.fixture
def redis7(redis7_process: Server) -> Server:
    """The installed Redis, empty; skips where there is none."""
    flush(redis7_process)
    return redis7_process


@pytest.fixture
def durable(tmp_path: Path) -> Iterator[Server]:
    """A server that writes to its append-only file before it answers.

    With `everysec` it answers first while an earlier fsync is still running, and a SIGKILL then loses what it answered.
    """
    with running("valkey", tmp_path / "durable", config={"appendonly": "yes", "appendfsync": "always"}) as server:
        yield server


@pytest.fixture(params=["valkey", "redis7"])
def server(request: pytest.FixtureRequest) -> Server:
    """Each kind of server in turn, empty."""
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Server)
    return found


@pytest.fixture
def cluster(cluster_processes: Cluster) -> Cluster:
    """Three Valkey primaries in a cluster, empty, all slots served."""
    for node in cluster_processes.nodes:
        if not node.alive:
            node.start()
    cluster_processes.wait_until_ok()
    cluster_processes.flush()
    return cluster_processes
