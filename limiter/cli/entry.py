"""The entry of the `headgate` command. It imports nothing of the service itself, which a light install lacks."""

import sys

EXIT_MISSING = 2
OURS = ("api", "headgate", "limiter")


def main() -> None:
    """Run the command line; without the extra `server`, one sentence says how to get it."""
    try:
        from limiter.cli import main as command_line  # its packages may be missing
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if not package or package in OURS:
            raise
        print(
            f"headgate: the service is not installed (there is no module {package!r}); "
            "run: pip install 'headgate[server]'",
            file=sys.stderr,
        )
        sys.exit(EXIT_MISSING)
    command_line.main()
