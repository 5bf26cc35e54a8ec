"""Ledgers that these tests run against: the model and the scripts."""

import pytest

from limiter.model.ledger.ledger import Ledger
from tests.support.stores import Decides, ScriptStore


@pytest.fixture(params=["model", "scripts", "general"])
def ledger(request: pytest.FixtureRequest) -> Decides:
    """The model, then the scripts on a real server: as they are, and without their plain case."""
    if request.param == "model":
        return Ledger()
    return ScriptStore(request.getfixturevalue("valkey"), general=request.param == "general")
