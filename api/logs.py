"""Log lines: as text or as JSON, one line each, whatever is in them."""

from __future__ import annotations

import logging
import re
from typing import Literal

import msgspec

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def escaped(text: str) -> str:
    """Text with everything that a terminal or a log reader might act upon spelled out (N3)."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class TextFormatter(logging.Formatter):
    """`LEVEL logger: message`, and a traceback below where there is one."""

    def __init__(self) -> None:
        super().__init__("%(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  the framework's name
        """The line."""
        record.message = escaped(record.message)
        return super().formatMessage(record)


class JsonFormatter(logging.Formatter):
    """One object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def configure(log_format: Literal["text", "json"]) -> None:
    """Have everything logged in this form, to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    access = logging.getLogger("uvicorn.access")
    access.setLevel(logging.INFO)
    access.propagate = True  # uvicorn turns this off where no access log is wanted
