"""The recipes' service as their tests see it."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import httpx

from tests.support.documents import ROOT

RECIPES = ROOT / "docs" / "recipes"
STANDING = {"llm-tokens": 6000, "storage": 1000, "web-milliseconds": 1000}
"""Policies whose buckets do not refill while a test looks at them, and their capacity."""


@dataclass(frozen=True)
class Service:
    """A node with the policies of the recipes."""

    url: str

    def environment(self, **more: str) -> dict[str, str]:
        """The environment of a program that asks this node."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HEADGATE_")}
        own = {"HEADGATE_URL": self.url, "PYTHONPATH": str(ROOT)}
        return kept | own | more

    def balance(self, **descriptor: str) -> float:
        """What is left in the bucket of the one policy that covers a descriptor."""
        body = {"descriptor": descriptor, "work": 0, "dry_run": True}
        answer = httpx.post(f"{self.url}/v1/acquire", json=body, trust_env=False).json()
        (limit,) = answer["limits"]
        return float(limit["balance"])


Serving = Callable[[list[str]], AbstractContextManager[str]]
"""Start a program that serves on the port that is given for PORT in its command; its address."""
