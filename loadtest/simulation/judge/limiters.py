"""Laws for a limit of work.

requests, auto, work    the product's three mechanisms, the charge of the last two learned
published               the product's cap by the published rules
static                  a cap that somebody set who knew the mean cost
"""

from __future__ import annotations

from typing import Any

from loadtest.simulation.flow import Limiter
from loadtest.simulation.steered import Steered
from loadtest.simulation.yardsticks import StaticCap

OURS = ("requests", "auto")
LAWS = (*OURS, "work", "published", "static")


def limiter(law: str, *, rate: float, cost: float, partitions: int = 1, **more: Any) -> Limiter:
    """A limiter for a committed rate; only a static cap is told the mean cost."""
    if law == "static":
        return StaticCap(rate / cost)
    document: dict[str, Any] = {"rate": rate, "mechanism": "requests" if law == "published" else law, **more}
    if law == "published":
        document["steering"] = {"rules": "published", **document.get("steering", {})}
    elif law != "requests":
        document["charge"] = "learned"
    return Steered(document, partitions=partitions)


def share_text(share: float) -> str:
    """A share of C."""
    return f"{share:.1%}"
