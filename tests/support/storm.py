"""Many clients that start at once, in a process of their own: each connects, acquires, works a while, settles, ends.

`python -m tests.support.storm PORT CLIENTS WORK_S` prints how many answers had which status.
"""

import asyncio
import json
import resource
import sys
from collections import Counter

import uvloop

PATIENT_S = 60.0
HEAD = "POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"


def allow_connections() -> None:
    """Let this process, and those that it starts, have as many connections as the system permits."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _call(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, body: dict[str, object]
) -> tuple[int, dict[str, object]]:
    raw = json.dumps(body)
    writer.write((HEAD.format(path=path, length=len(raw)) + raw).encode())
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
    return int(head.split(" ", 2)[1]), json.loads(await reader.readexactly(length))


async def _client(port: int, number: int, work_s: float, seen: Counter[str]) -> None:
    try:
        async with asyncio.timeout(PATIENT_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            descriptor = {"service": "crowd", "customer": f"c{number % 100}"}
            status, answer = await _call(reader, writer, "/v1/acquire", {"descriptor": descriptor, "work": 1})
            seen[f"acquire {status}"] += 1
            if status == 200:
                await asyncio.sleep(work_s)
                body = {"reservation": answer["reservation"], "work": 1}
                status, answer = await _call(reader, writer, "/v1/settle", body)
                seen[f"settle {status}"] += 1
            if status != 200:
                seen[str(answer.get("detail"))] += 1
            writer.close()
    except (OSError, TimeoutError, EOFError) as error:
        seen[type(error).__name__] += 1


async def _storm(port: int, clients: int, work_s: float) -> None:
    seen: Counter[str] = Counter()
    await asyncio.gather(*(_client(port, number, work_s, seen) for number in range(clients)))
    sys.stdout.write(json.dumps(seen))


if __name__ == "__main__":
    allow_connections()
    uvloop.run(_storm(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
