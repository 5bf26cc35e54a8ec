"""An LLM gateway that streams: tokens are the work, and a reader who leaves has paid for what was streamed.

headgate up --policies docs/recipes/policies.yaml
uvicorn --app-dir docs/recipes llm_gateway:app --port 8000
curl -N 'http://127.0.0.1:8000/chat?customer=c1&prompt=Tell+me+a+story'
"""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from headgate import Headgate, Throttled

gate = Headgate()


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    async with gate:
        yield


app = FastAPI(lifespan=lifespan)


@app.exception_handler(Throttled)
async def refused(_: Request, refusal: Throttled) -> JSONResponse:
    headers = {"Retry-After": str(math.ceil((refusal.retry_after_ms or 1000) / 1000))}
    return JSONResponse({"reason": refusal.reason}, refusal.status, headers)


async def model(prompt: str, tokens_max: int) -> AsyncIterator[str]:
    """Stands for a real model."""
    for number in range(tokens_max):
        await asyncio.sleep(0.01)
        yield f"{prompt.split()[number % len(prompt.split())]} "


@app.get("/chat")
async def chat(customer: str, prompt: str, tokens_max: int = 100) -> StreamingResponse:
    grant = await gate.acquire({"service": "llm", "customer": customer}, work=len(prompt.split()) + tokens_max)
    grant.progress(len(prompt.split()))
    return StreamingResponse(grant.stream(model(prompt, tokens_max), work=lambda token: 1), media_type="text/plain")
