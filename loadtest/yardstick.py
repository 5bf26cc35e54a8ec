"""The yardstick: a simple rate limiter that Headgate is compared with.

A FastAPI route, a pydantic body, one redis-py script call for each request, a token bucket in a hash. Run with
`YARDSTICK_REDIS_URL=… uvicorn loadtest.yardstick:app`.
"""

import os

import redis.asyncio
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from pydantic import BaseModel

RATE = 1_000_000.0
CAPACITY = 1_000_000.0

TAKE = """
local now = redis.call('TIME')
local now_ms = now[1] * 1000 + now[2] / 1000
local rate, capacity, work = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local state = redis.call('HMGET', KEYS[1], 'balance', 'updated_ms')
local balance, updated_ms = tonumber(state[1]) or capacity, tonumber(state[2]) or now_ms
balance = math.min(capacity, balance + (now_ms - updated_ms) / 1000 * rate)
local granted = balance >= work
if granted then balance = balance - work end
redis.call('HSET', KEYS[1], 'balance', balance, 'updated_ms', now_ms)
redis.call('PEXPIRE', KEYS[1], 60000)
return {granted and 1 or 0, tostring(balance)}
"""

app = FastAPI()
store = redis.asyncio.Redis.from_url(os.environ.get("YARDSTICK_REDIS_URL", "redis://localhost"))
take = store.register_script(TAKE)


class Acquire(BaseModel):
    """The request."""

    descriptor: dict[str, str]
    work: float = 1.0


@app.post("/v1/acquire")
async def acquire(body: Acquire) -> JSONResponse:
    """Take from the customer's bucket, if it holds enough."""
    granted, balance = await take(keys=[f"bucket:{body.descriptor['customer']}"], args=[RATE, CAPACITY, body.work])
    return JSONResponse({"granted": bool(granted), "balance": float(balance)}, status_code=200 if granted else 429)
