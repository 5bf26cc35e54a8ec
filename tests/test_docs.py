"""What the documents say is tried out."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from limiter.store.embedded import EmbeddedStore

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *ROOT.glob("docs/**/*.md")])


async def test_the_readme_s_first_acquire_and_settle_does_what_it_says(tmp_path: Path) -> None:
    (program, printed) = re.search(
        r"```python\n(.*?)```\n\n```\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
    ).groups()  # type: ignore[union-attr]
    async with EmbeddedStore(tmp_path / ".headgate"):
        ran = subprocess.run(  # noqa: ASYNC221
            [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
    assert (ran.stdout, ran.stderr) == (printed, "")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_within_the_documents_leads_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\((?!https?://)([^)#]+)(?:#[^)]*)?\)", document.read_text()):
        assert (document.parent / target).exists(), target
