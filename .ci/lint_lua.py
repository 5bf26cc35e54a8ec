"""Lint the Lua scripts as they are sent: their parts spliced in, their constants put in place.

`luacheck` (the Debian package is in .ci/programs) is used where it is installed; with CI=true it has to be.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from limiter.store.scripts import load_script, scripts_directory

OPTIONS = [
    "--std", "lua51", "--read-globals", "redis", "struct", "KEYS", "ARGV", "--no-max-line-length", "--no-color",
    # Shared parts bring functions that a script does not call; a comparison is written so that NaN fails it; names are
    # used again in inner blocks, as the plain form of a script and the general one speak of the same things.
    "--ignore", "211", "581", "4..",
]  # fmt: skip


def main() -> int:
    """Lint every script."""
    found = shutil.which("luacheck")
    if found is None:
        sys.stderr.write("luacheck is not installed: the Lua scripts were not linted. Install it: sudo .ci/install\n")
        return 1 if os.environ.get("CI") == "true" else 0
    with tempfile.TemporaryDirectory() as directory:
        for script in scripts_directory().glob("*.lua"):
            (Path(directory) / script.name).write_bytes(load_script(script.stem))
        return subprocess.run([found, *OPTIONS, "--quiet", "."], cwd=directory, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
