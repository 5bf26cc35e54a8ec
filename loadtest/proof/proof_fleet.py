"""The fleet of a proof: a cluster with replicas, API nodes, controllers, all on loopback, and their deaths."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from secrets import token_hex

from redis.crc import key_slot
from redis.exceptions import RedisError

from limiter.engine.planner import Planner
from limiter.engine.policy_file import load_policy_file
from loadtest.headgate_processes import Process, await_ready, is_ready
from loadtest.locust.caller import SERVICE
from loadtest.proof.analysis import Death
from loadtest.proof.proof_plan import API_NODES, CONTROLLERS, LEASE_MS, PARTITIONS, PRIMARIES, Victim
from tests.support.servers import Cluster, Server, free_port, start_cluster

HOT_TENANT = "t0"
WATCH_EVERY_S = 0.05


class Fleet:
    """All running processes, and ways to kill some. Deaths are watched until recovery."""

    def __init__(self, cluster: Cluster, policies: Path, *, deadline_ms: int) -> None:
        self.cluster = cluster
        self.deaths: list[Death] = []
        self._policies = policies
        self._secret = token_hex(32)
        self._deadline_ms = deadline_ms
        self._ports = [free_port() for _ in range(API_NODES)]
        self._apis = [self._start_api(port) for port in self._ports]
        self._controllers = [
            Process("controller", redis_url=cluster.url, lease_ms=LEASE_MS) for _ in range(CONTROLLERS)
        ]
        self._watchers: list[threading.Thread] = []
        self._is_over = threading.Event()

    def _start_api(self, port: int) -> Process:
        settings = {"redis_url": self.cluster.url, "policies": self._policies, "deadline_ms": self._deadline_ms}
        return Process("api", port=port, secret=self._secret, **settings)

    @property
    def addresses(self) -> list[str]:
        """The addresses of the API nodes, dead ones included."""
        return [f"http://127.0.0.1:{port}" for port in self._ports]

    def await_ready(self) -> None:
        """Wait until every node serves and every partition is steered."""
        for process in self._apis:
            await_ready(process.address)
        names = {process.controller for process in self._controllers}
        give_up_s = time.monotonic() + 30
        while not names >= set(self._owners()) or "" in self._owners():
            assert time.monotonic() < give_up_s, "partitions have no owner"
            time.sleep(WATCH_EVERY_S)

    def kill(self, victim: Victim) -> None:
        """Kill one process, and begin to watch its recovery."""
        {"controller": self._kill_controller, "api node": self._kill_api, "primary": self._kill_primary}[victim]()

    def _kill_controller(self) -> None:
        """Kill the owner of the busiest partition."""
        name = self._owners()[self._hot_partition()]
        process = next(one for one in self._controllers if one.controller == name)
        at_s = time.time()
        process.kill()
        recovery = "all partitions owned by another"
        self._watch(Death(victim="controller", name=name, at_s=at_s, recovery=recovery), lambda: self._lost(name))

    def _kill_api(self) -> None:
        """Kill the last node; another on the same address is started at once, as a supervisor would."""
        at_s = time.time()
        self._apis[-1].kill()
        self._apis[-1] = self._start_api(self._ports[-1])
        address = self.addresses[-1]
        death = Death(victim="api node", name=address, at_s=at_s, recovery="its successor is ready")
        self._watch(death, lambda: is_ready(address))

    def _kill_primary(self) -> None:
        """Kill the primary that holds the busiest partition."""
        planner = Planner(load_policy_file(self._policies))
        slot, _ = planner.cover("default", {"service": SERVICE, "tenant": HOT_TENANT})
        primary = self.cluster.owner(key_slot(slot.prefix))
        replica = self.cluster.nodes[PRIMARIES + self.cluster.nodes.index(primary)]
        at_s = time.time()
        primary.kill()
        recovery = "the last answer without the store"
        death = Death(victim="primary", name=f"127.0.0.1:{primary.port}", at_s=at_s, recovery=recovery)
        self._watch(death, lambda: _is_primary(replica))

    def _watch(self, death: Death, is_over: Callable[[], bool]) -> None:
        place = len(self.deaths)
        self.deaths.append(death)

        def watch() -> None:
            while not self._is_over.wait(WATCH_EVERY_S):
                if is_over():
                    self.deaths[place] = replace(death, recovered_after_s=time.time() - death.at_s)
                    return

        self._watchers.append(threading.Thread(target=watch))
        self._watchers[-1].start()

    def _hot_partition(self) -> int:
        planner = Planner(load_policy_file(self._policies))
        return planner.cover("default", {"service": SERVICE, "tenant": HOT_TENANT})[0].partition

    def _owners(self) -> list[str]:
        """Return the owner of each partition; '' if it has none, or it cannot be found out."""
        return [_owner(self.addresses[0], partition) for partition in range(PARTITIONS)]

    def _lost(self, name: str) -> bool:
        """True if a dead controller owns nothing any more, and others own everything."""
        return not {name, ""} & set(self._owners())

    def end(self) -> None:
        """Stop watching, and end all processes."""
        self._is_over.set()
        for watcher in self._watchers:
            watcher.join()
        for process in (*self._controllers, *self._apis):
            process.stop()


@contextmanager
def running_fleet(directory: Path, policies: Path, *, deadline_ms: int) -> Iterator[Fleet]:
    """Yield a fleet that is ready; end it in any case."""
    with ExitStack() as ending:
        cluster = start_cluster("valkey", directory, primaries=PRIMARIES, replicas_per_primary=1)
        ending.callback(cluster.close)
        fleet = Fleet(cluster, policies, deadline_ms=deadline_ms)
        ending.callback(fleet.end)
        fleet.await_ready()
        yield fleet


def _owner(address: str, partition: int) -> str:
    try:
        with urllib.request.urlopen(f"{address}/v1/controller?partition={partition}&limit=1", timeout=2) as answer:  # noqa: S310
            owner = json.load(answer)["owner"]
    except OSError:
        return ""
    return str(owner["controller"]) if owner else ""


def _is_primary(server: Server) -> bool:
    try:
        return bool(server.command("ROLE")[0] == b"master")
    except RedisError:
        return False
