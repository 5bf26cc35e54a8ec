"""Log lines: as text or as JSON, always one line each, with the request's id if there is one."""

from __future__ import annotations

import logging
import re
import sys
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Literal

import msgspec

ALWAYS = ("headgate.access", "headgate.start")
"""Loggers whose lines are written at every level: a setting, or the start itself, asked for them."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def escaped(text: str) -> str:
    """Escape everything in a text that a terminal or a log reader might act upon (F-N3)."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def _escaped_in_json(text: str) -> str:
    """Escape the same within JSON, from which it can be read back."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class TextFormatter(logging.Formatter):
    """`time process LEVEL logger: message`, with an indented traceback below if there is one."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        return _time(record)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  the framework's name
        record.message = escaped(record.message)
        line = super().formatMessage(record)
        request_id = _request_id(record)
        return f"{line} (request {escaped(request_id)})" if request_id else line

    def formatException(self, ei: Any) -> str:  # noqa: N802
        """Return the traceback, indented: text of a client in it must not look like a log line."""
        return "\n".join(f"  {escaped(line)}" for line in super().formatException(ei).split("\n"))


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "pid": record.process,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if request_id := _request_id(record):
            line["request_id"] = request_id
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _escaped_in_json(msgspec.json.encode(line).decode("utf-8"))


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


def _request_id(record: logging.LogRecord) -> str:
    return str(getattr(record, "request_id", ""))


def configure(log_format: Literal["text", "json"], level: str = "warning") -> None:
    """Log everything in this form, to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    for name in ALWAYS:
        logging.getLogger(name).setLevel(logging.INFO)


def keep_lines_whole() -> None:
    """Log warnings and the error that ends this process, too, so that all of its lines have one form."""
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logging.getLogger("headgate").critical("ended by an unhandled error", exc_info=(kind, error, trace))
