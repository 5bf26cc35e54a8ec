"""Log lines stay lines, whatever is in them (N3)."""

import json
import logging
import sys

import pytest

from api.logs import JsonFormatter, TextFormatter

EVIL = "a\nERROR forged: line\r\x1b[31m\u202e\u2028\x00"


def record(message: str, *arguments: object, error: bool = False) -> logging.LogRecord:
    try:
        raise ValueError("why")
    except ValueError:
        info = sys.exc_info() if error else None
    return logging.LogRecord("headgate", logging.WARNING, "file", 1, message, arguments, info)


def test_text_is_one_line_without_anything_to_act_upon() -> None:
    line = TextFormatter().format(record("key %s", EVIL))
    assert line == "WARNING headgate: key a\\nERROR forged: line\\r\\x1b[31m\\u202e\\u2028\\x00"


def test_json_is_one_line_and_gives_the_text_back() -> None:
    line = JsonFormatter().format(record("key %s", EVIL))
    assert line.isprintable() or "\n" not in line
    told = json.loads(line)
    assert (told["level"], told["logger"], told["message"]) == ("warning", "headgate", f"key {EVIL}")


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_a_traceback_is_kept(formatter: logging.Formatter) -> None:
    assert "ValueError: why" in formatter.format(record("failed", error=True))
