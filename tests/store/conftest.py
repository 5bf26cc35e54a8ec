"""What most of these tests are run against."""

import pytest

from limiter.model.bucket.ledger import Ledger
from tests.support.stores import Decides, ScriptStore


@pytest.fixture(params=["model", "scripts"])
def ledger(request: pytest.FixtureRequest) -> Decides:
    """The model, then the scripts on a real server."""
    return Ledger() if request.param == "model" else ScriptStore(request.getfixturevalue("valkey"))
