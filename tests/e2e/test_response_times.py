"""S9 over HTTP, with a real queue, store and controller, in real time: users who wait for one slow worker."""

import asyncio
import math
from pathlib import Path

import pytest

from limiter.model.overload.shedding import State
from tests.support.fleet import Visitors, api, controllers
from tests.support.servers import Server
from tests.support.steered import Look
from tests.support.users import Worker, use

TARGET_S = 1.0
USERS = 200
WARM_S, MEASURED_S = 15.0, 20.0
PATIENT_MS = 3000  # nothing here is about a slow store
POLICY = """
policies:
  - {name: guarded, match: {}, rate: 1000000, overload: {response_time: {target_ms: 1000}}}
"""


@pytest.mark.long
async def test_s9_two_hundred_users_of_a_backend_of_fifty_a_second_wait_for_about_the_target(
    valkey: Server, tmp_path: Path
) -> None:
    """Twice what the backend can do. Nobody told the controller what that is, and no settle says how long it took."""
    file = tmp_path / "policies.yaml"
    file.write_text(POLICY)
    look, backend, loop = Look(valkey), Worker(), asyncio.get_running_loop()
    with api(valkey.url, file, deadline_ms=PATIENT_MS) as node, controllers(valkey.url) as start:
        start()
        visitors = Visitors(node)
        began_s = loop.time()
        await use(visitors, backend, users=USERS, seconds=WARM_S + MEASURED_S)
        known = look.shedding("guarded")
        visitors.leave()
    late = sorted(latency for at_s, latency in backend.latencies if at_s > began_s + WARM_S)
    p90 = late[math.ceil(0.9 * len(late)) - 1]
    served = len(late) / MEASURED_S
    assert 0.85 <= p90 / TARGET_S <= 1.2
    assert served >= 0.9 * len(backend.latencies) / (WARM_S + MEASURED_S), "the worker was busy all the time"
    assert visitors.refused > 0
    assert known.state == State.OVERLOADED
    assert known.limits[1] < USERS / 2
