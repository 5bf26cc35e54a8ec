"""Policies as tests put them into a store, and what they read back."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from limiter.model.policy.policy import Policy
from limiter.model.policy.policy_set import PolicySet
from limiter.model.policy.reading import dump, read_policy, read_policy_set
from limiter.store.policies.policy_store import PolicyStore, StoredPolicies


def policy(name: str = "reads", **fields: object) -> Policy:
    return read_policy({"name": name, "rate": 100, **fields})


def policy_set(*policies: Policy, **namespaces: int) -> PolicySet:
    spread = {name: {"partitions": partitions, "partition_by": ["customer"]} for name, partitions in namespaces.items()}
    return read_policy_set({"namespaces": spread, "policies": [dump(policy) for policy in policies]})


def rates(stored: StoredPolicies) -> dict[str, object]:
    return {policy.name: policy.rate for policy in stored.policies.policies}


@asynccontextmanager
async def watching(store: PolicyStore) -> AsyncIterator[list[StoredPolicies]]:
    """The policies that a watching node receives, in order."""
    received: list[StoredPolicies] = []

    async def take(stored: StoredPolicies) -> None:
        received.append(stored)

    task = asyncio.create_task(store.watch(take))
    try:
        yield received
        assert not task.done()
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
