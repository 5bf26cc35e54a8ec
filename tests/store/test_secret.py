import asyncio
from contextlib import aclosing

import pytest

from limiter.store.link.connect import open_link
from limiter.store.secret import SECRET_SIZE, shared_secret
from limiter.store.store_errors import StoreUnavailable
from tests.support.fake import FakeServer
from tests.support.servers import Cluster, Server


async def agree_on_a_secret(url: str) -> set[bytes]:
    links = [await open_link(url) for _ in range(8)]
    found = await asyncio.gather(*(shared_secret(link, None, timeout_s=5) for link in links))
    for link in links:
        await link.aclose()
    return set(found)


async def test_nodes_that_start_together_agree_on_a_secret(server: Server) -> None:
    (secret,) = await agree_on_a_secret(server.url)
    assert len(secret) == SECRET_SIZE
    assert await agree_on_a_secret(server.url) == {secret}


async def test_nodes_agree_on_a_secret_on_a_cluster(cluster: Cluster) -> None:
    assert len(await agree_on_a_secret(cluster.url)) == 1


async def test_a_configured_secret_is_used_and_not_stored(valkey: Server) -> None:
    link = await open_link(valkey.url)
    assert await shared_secret(link, "from the environment", timeout_s=5) == b"from the environment"
    await link.aclose()
    assert valkey.client().dbsize() == 0


async def test_a_secret_that_is_gone_at_once_is_a_store_that_cannot_be_used() -> None:
    """Another program may flush the store at any moment."""
    async with FakeServer({"SET": b"+OK\r\n", "GET": b"$-1\r\n"}) as fake, aclosing(await open_link(fake.url)) as link:
        with pytest.raises(StoreUnavailable, match="lost the shared secret"):
            await shared_secret(link, None, timeout_s=5)
