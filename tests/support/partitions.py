"""Limits divided over ten partitions: a customer in each of them, and the shares that they hold."""

from limiter.engine.planner import Planner
from limiter.model.bucket.bucket import share_of
from limiter.model.policy.policy_set import PolicySet
from limiter.store.keys import Slot
from tests.support.servers import Cluster, Server
from tests.support.steered import Look

TEN = {"partitions": 10, "partition_by": ["customer"]}


def customer_in(limits: PolicySet, partition: int) -> dict[str, str]:
    """A customer whose requests go to a partition."""
    planner = Planner(limits)
    asking = ({"customer": f"c{number}"} for number in range(10_000))
    return next(one for one in asking if planner.cover("default", one)[0].partition == partition)


def shares(server: Server | Cluster, limits: PolicySet) -> list[float]:
    """The share that each partition holds now."""
    params = Planner(limits).cover("default", {"customer": "c1"})[1][0].terms
    client = server.nodes[0] if isinstance(server, Cluster) else server
    seconds, microseconds = client.command("TIME")
    now_us = int(seconds) * 1_000_000 + int(microseconds)
    records = [Look(server, Slot("default", partition)).record("all") for partition in range(10)]
    return [0.1 if record is None else share_of(record, params, now_us) for record in records]
