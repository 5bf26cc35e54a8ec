"""Close the listening socket without resetting connections that have arrived (F-H8).

    drop new connections ──► accept those that have arrived already ──► close

When the last process that holds a listening socket closes it, the kernel resets every connection that still waits to
be accepted, with whatever the client has sent on it. So new connections are stopped first: a filter on the socket
drops the packets that would open one, and nothing else. Such a client tries again a second later, as TCP does, and
is refused cleanly then. Without such filters (they exist on Linux), a connection made in the instant of closing is
reset.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import select
import socket
import struct
import sys
from collections.abc import Sequence

log = logging.getLogger(__name__)

HANDSHAKE_S = 0.1
"""Time for the last packet of connections that are being opened: more than a round trip within a data centre."""

LOOK_EVERY_S = 0.02
LOOKS_MAX = 100
"""After this many looks, connections that are not accepted yet are given up: a node that accepts so slowly has worse
troubles."""

_SO_ATTACH_FILTER = 26

# A classic BPF program over the TCP header: drop packets with SYN (bit 1 of byte 13), let all others through.
_LOAD_BYTE, _JUMP_IF_SET, _RETURN = 0x30, 0x45, 0x06
_SYN = 0x02
_NO_NEWCOMERS = b"".join(
    struct.pack("=HBBI", code, if_so, if_not, operand)
    for code, if_so, if_not, operand in (
        (_LOAD_BYTE, 0, 0, 13),
        (_JUMP_IF_SET, 0, 1, _SYN),
        (_RETURN, 0, 0, 0),
        (_RETURN, 0, 0, 0xFFFF_FFFF),
    )
)
_INSTRUCTION_BYTES = 8


def turn_away(sockets: Sequence[socket.socket]) -> None:
    """Let no new connections begin, for any process that shares the sockets; repeating it is harmless."""
    if sys.platform != "linux":
        return
    program = ctypes.create_string_buffer(_NO_NEWCOMERS, len(_NO_NEWCOMERS))
    filter_ = struct.pack("@HP", len(_NO_NEWCOMERS) // _INSTRUCTION_BYTES, ctypes.addressof(program))
    for bound in sockets:
        try:
            bound.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filter_)
        except OSError as error:
            log.info(
                "cannot filter new connections (%s): a client that connects while the socket closes may be reset", error
            )


async def last_call(sockets: Sequence[socket.socket]) -> None:
    """Refuse new connections, and wait until those that had arrived before are accepted."""
    turn_away(sockets)
    await asyncio.sleep(HANDSHAKE_S)
    for _ in range(LOOKS_MAX):
        nobody_waits = not _is_anybody_waiting(sockets)
        await asyncio.sleep(LOOK_EVERY_S)  # the last accepted sockets still have to become connections
        if nobody_waits:
            break


def _is_anybody_waiting(sockets: Sequence[socket.socket]) -> bool:
    door = select.poll()
    for bound in sockets:
        door.register(bound, select.POLLIN)
    return bool(door.poll(0))
