"""Try the README's two commands as a stranger would: HEAD cloned into a temporary folder, everything from nothing.

`make run` until it is ready and has answered one acquire and one settle, then `make test`. Says how long each took.
Needs nothing but Python and git; uncommitted changes are not part of HEAD and so are not tried.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.request import Request, urlopen

ROOT = Path(__file__).resolve().parents[1]
READY_WITHIN_S = 600.0  # everything is downloaded and installed first
STOPPED_WITHIN_S = 40.0


def main() -> None:
    """Clone, run, test; the exit status is 0 only if all of it went well."""
    with tempfile.TemporaryDirectory(prefix="headgate-fresh-") as folder:
        clone = Path(folder) / "headgate"
        subprocess.run(["git", "clone", "--quiet", "--no-local", str(ROOT), str(clone)], check=True)
        head = subprocess.check_output(["git", "-C", str(clone), "log", "-1", "--format=%h %s"], text=True)
        say(f"cloned {head.strip()}")
        ready_s = try_make_run(clone)
        began_s = time.monotonic()
        tested = subprocess.run(["make", "test"], cwd=clone, env=environment(), check=False)
        say(f"make run: first answers after {ready_s:.0f} s; make test: {time.monotonic() - began_s:.0f} s")
    if tested.returncode:
        sys.exit("fresh: make test failed")


def try_make_run(clone: Path) -> float:
    """Start it, acquire and settle once, stop it; the seconds until it had answered both."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    began_s = time.monotonic()
    process = subprocess.Popen(
        ["make", "run"], cwd=clone, env=environment(HEADGATE_PORT=str(port)), start_new_session=True
    )
    try:
        wait_until_ready(process, port)
        granted = post(port, "acquire", {"descriptor": {"service": "orders", "operation": "read", "customer": "c1"}})
        post(port, "settle", {"reservation": granted["reservation"], "work": 2})
        took_s = time.monotonic() - began_s
    finally:
        stop(process)
    say(f"make run: ready, acquired and settled after {took_s:.0f} s, stopped")
    return took_s


def wait_until_ready(process: subprocess.Popen[bytes], port: int) -> None:
    """Poll `/readyz`; ends the program if `make run` ends first, or takes too long."""
    give_up_s = time.monotonic() + READY_WITHIN_S
    while True:
        try:
            with urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5):
                return
        except OSError:
            if process.poll() is not None:
                sys.exit(f"fresh: make run ended with status {process.returncode} before it was ready")
            if time.monotonic() > give_up_s:
                sys.exit(f"fresh: make run was not ready after {READY_WITHIN_S:.0f} s")
            time.sleep(0.1)


def post(port: int, operation: str, body: dict[str, object]) -> dict[str, str]:
    """What it answered; any status but 200 is an error."""
    url, sent = f"http://127.0.0.1:{port}/v1/{operation}", json.dumps(body).encode()
    with urlopen(Request(url, sent, {"Content-Type": "application/json"}), timeout=10) as answer:
        read: dict[str, str] = json.load(answer)
        return read


def stop(process: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C in a terminal does: a signal to make and all that it started."""
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(STOPPED_WITHIN_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        sys.exit(f"fresh: make run did not stop within {STOPPED_WITHIN_S:.0f} s")


def environment(**added: str) -> dict[str, str]:
    """This one, without settings and without an environment of Python that is active here."""
    hidden = ("HEADGATE_", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if not name.startswith(hidden)} | added


def say(line: str) -> None:
    """Say it at once: what runs meanwhile prints for itself."""
    print(f"fresh: {line}", flush=True)


if __name__ == "__main__":
    main()
