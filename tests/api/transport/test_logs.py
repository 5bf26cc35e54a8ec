"""Log lines stay lines, whatever is in them (F-N3)."""

import json
import logging
import sys

import pytest

from api.transport.logs import JsonFormatter, TextFormatter

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
    assert line.isprintable()
    told = json.loads(line)
    assert (told["level"], told["logger"], told["message"]) == ("warning", "headgate", f"key {EVIL}")


def test_a_traceback_as_text_cannot_pass_for_a_line_of_ours() -> None:
    try:
        raise ValueError(EVIL)
    except ValueError:
        shown = logging.LogRecord("headgate", logging.ERROR, "file", 1, "failed", (), sys.exc_info())
    first, *others = TextFormatter().format(shown).split("\n")
    assert first == "ERROR headgate: failed"
    assert all(line.startswith("  ") and line.isprintable() for line in others)


def test_a_request_s_id_is_shown() -> None:
    line = record("failed")
    line.request_id = "abc"
    assert TextFormatter().format(line) == "WARNING headgate: failed (request abc)"
    assert json.loads(JsonFormatter().format(line))["request_id"] == "abc"


def test_times_in_json_are_utc_and_say_so() -> None:
    line = record("failed")
    line.created = 86_400.25
    assert json.loads(JsonFormatter().format(line))["time"] == "1970-01-02T00:00:00.250+00:00"


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_a_traceback_is_kept(formatter: logging.Formatter) -> None:
    assert "ValueError: why" in formatter.format(record("failed", error=True))
