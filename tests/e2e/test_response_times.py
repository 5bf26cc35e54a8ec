"""S9 with a real queue, a real store and a real controller, in real time: users who wait for one slow worker."""

import asyncio
import math

import pytest

from limiter.model.overload.shedding import State
from tests.support.servers import Server
from tests.support.steered import Look, policies
from tests.support.traffic import steering, traffic
from tests.support.users import Worker, use

TARGET_S = 1.0
USERS = 200
WARM_S, MEASURED_S = 15.0, 20.0


@pytest.mark.long
async def test_s9_two_hundred_users_of_a_backend_of_fifty_a_second_wait_for_about_the_target(valkey: Server) -> None:
    """Twice what the backend can do. Nobody told the controller what that is, and no settle says how long it took."""
    limits = policies(
        {"name": "guarded", "match": {}, "rate": 1e6, "overload": {"response_time": {"target_ms": 1000 * TARGET_S}}}
    )
    look, backend, loop = Look(valkey), Worker(), asyncio.get_running_loop()
    async with steering(valkey.url, limits), traffic(valkey.url, limits) as callers:
        began_s = loop.time()
        await use(callers, backend, users=USERS, seconds=WARM_S + MEASURED_S)
        known = look.shedding("guarded")
    late = sorted(latency for at_s, latency in backend.latencies if at_s > began_s + WARM_S)
    p90 = late[math.ceil(0.9 * len(late)) - 1]
    served = len(late) / MEASURED_S
    assert 0.85 <= p90 / TARGET_S <= 1.2
    assert served >= 0.9 * len(backend.latencies) / (WARM_S + MEASURED_S), "the worker was busy all the time"
    assert callers.refused > 0
    assert known.state == State.OVERLOADED
    assert known.limits[1] < USERS / 2
