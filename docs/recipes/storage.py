"""A storage service that settles bytes: the policy says that 2 KB are one unit of work.

headgate up --policies docs/recipes/policies.yaml
uvicorn --app-dir docs/recipes storage:app --port 8000
curl -T README.md http://127.0.0.1:8000/files/c1/readme
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import StreamingResponse

from headgate import Headgate, Throttled

gate = Headgate()
files: dict[tuple[str, str], bytes] = {}


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    async with gate:
        yield


app = FastAPI(lifespan=lifespan)
app.add_exception_handler(Throttled, lambda _, refusal: Response(refusal.reason, refusal.status))


@app.put("/files/{customer}/{name}")
async def put(customer: str, name: str, request: Request) -> dict[str, int]:
    size = int(request.headers.get("content-length", 2048))
    grant = await gate.acquire({"service": "storage", "customer": customer, "operation": "write"}, work=size)
    content = b"".join([chunk async for chunk in grant.stream(request.stream(), work=len)])
    if grant.stopped:  # more arrived than was announced, and the debt has passed the policy's bound
        raise HTTPException(429, "too much at once")
    files[customer, name] = content
    return {"bytes": len(content)}


@app.get("/files/{customer}/{name}")
async def get(customer: str, name: str) -> StreamingResponse:
    content = files[customer, name]
    grant = await gate.acquire({"service": "storage", "customer": customer, "operation": "read"}, work=len(content))
    chunks: Iterator[bytes] = (content[at : at + 65_536] for at in range(0, len(content), 65_536))
    return StreamingResponse(grant.stream_sync(chunks, work=len))
