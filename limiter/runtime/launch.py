"""Run a program that must not outlive the process that started it.

Used as ``python launch.py <pid of the starter> program arguments…``; it becomes the program and keeps its
pid. This is a process of its own because `preexec_fn` is unsafe in a process with threads.

On Linux the kernel signals the program when the *thread* that started it ends (PR_SET_PDEATHSIG): start it
from a thread that lives as long as the program should. Elsewhere a forked watcher polls for its end.
"""

import ctypes
import os
import signal
import sys
import time

PR_SET_PDEATHSIG = 1
WATCH_EVERY_S = 0.2


def end_with(starter_pid: int) -> None:
    """Make this process, and the program that it becomes, end when the starter ends in any way."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    else:
        watch(starter_pid, os.getpid())
    # The starter may have ended before this took effect.
    if os.getppid() != starter_pid:
        sys.exit(f"process {starter_pid} ended before {sys.argv[2]} was started")


def watch(starter_pid: int, program_pid: int) -> None:
    """Fork a watcher that terminates the program once the starter is gone, and ends when either is."""
    if os.fork():
        return
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # the watcher must hold no lock and no pipe of the program
    while os.getppid() == program_pid:
        try:
            os.kill(starter_pid, 0)
        except ProcessLookupError:
            os.kill(program_pid, signal.SIGTERM)
            break
        time.sleep(WATCH_EVERY_S)
    os._exit(0)


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])  # noqa: S606  the program to run is the caller's choice
