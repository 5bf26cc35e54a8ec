"""A policy store on each kind of server in turn."""

from collections.abc import AsyncIterator

import pytest

from limiter.store.link.connect import Link, open_link
from limiter.store.policies.policy_store import PolicyStore
from tests.support.servers import Server


@pytest.fixture
async def link(server: Server) -> AsyncIterator[Link]:
    link = await open_link(server.url)
    yield link
    await link.aclose()


@pytest.fixture
def store(link: Link) -> PolicyStore:
    return PolicyStore(link)
