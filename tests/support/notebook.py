"""Python snippets of a page, run one after the other in one program as `python -m asyncio` does."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence

from tests.support.documents import HERE, ROOT, Block

RUNNER = """
import ast, asyncio, inspect, json, sys

async def main(snippets):
    names = {"__name__": "__main__"}
    for place, text in snippets:
        code = compile(text, place, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if inspect.iscoroutine(begun := eval(code, names)):
            await begun

asyncio.run(main(json.load(sys.stdin)))
"""


def run_notebook(address: str, snippets: Sequence[Block], *more: str) -> str:
    """What snippets printed, and code after them; `address` is where the service really is. A warning is a failure."""
    texts = [(str(block), block.text) for block in snippets] + [("test", text) for text in more]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", RUNNER],
        input=json.dumps(texts).replace(HERE, address),
        cwd=ROOT,
        env=os.environ | {"HEADGATE_URL": f"http://{address}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert not done.stderr, done.stderr[-3000:]
    return done.stdout
