"""A crawler that waits politely: ten requests a second to each host, however many crawlers run.

headgate up --policies docs/recipes/policies.yaml
python docs/recipes/crawler.py http://127.0.0.1:8080/healthz http://127.0.0.1:8080/readyz
"""

import asyncio
import sys
from urllib.parse import urlsplit

import aiohttp

from headgate import Headgate, Throttled


async def fetch(gate: Headgate, session: aiohttp.ClientSession, url: str) -> str:
    try:
        async with gate.acquire({"service": "crawler", "host": urlsplit(url).netloc}), session.get(url) as answer:
            return f"{answer.status} {len(await answer.read())} bytes"
    except Throttled as refusal:
        return f"not fetched within a minute: {refusal}"


async def main(urls: list[str]) -> None:
    async with Headgate(on_refused="wait", wait_s=60) as gate, aiohttp.ClientSession() as session:
        for url, said in zip(urls, await asyncio.gather(*(fetch(gate, session, url) for url in urls)), strict=True):
            print(url, said)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
