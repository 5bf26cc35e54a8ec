"""Log lines stay lines, whatever is in them (F-N3)."""

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE, STDOUT

import pytest

from api.transport.access import log_request
from api.transport.logs import JsonFormatter, TextFormatter
from tests.support.command import HEADGATE, environment, run_headgate
from tests.support.servers import free_port

EVIL = "a\nERROR forged: line\r\x1b[31m\u202e\u2028\x00"


def record(message: str, *arguments: object, error: bool = False) -> logging.LogRecord:
    try:
        raise ValueError("why")
    except ValueError:
        info = sys.exc_info() if error else None
    made = logging.LogRecord("headgate", logging.WARNING, "file", 1, message, arguments, info)
    made.created, made.process = 86_400.25, 4242
    return made


START = "1970-01-02T00:00:00.250+00:00 4242 WARNING headgate: "


def test_text_is_one_line_without_anything_to_act_upon() -> None:
    line = TextFormatter().format(record("key %s", EVIL))
    assert line == START + "key a\\nERROR forged: line\\r\\x1b[31m\\u202e\\u2028\\x00"


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
    assert first.endswith(" ERROR headgate: failed")
    assert all(line.startswith("  ") and line.isprintable() for line in others)


def test_a_request_s_id_is_shown() -> None:
    line = record("failed")
    line.request_id = "abc"
    assert TextFormatter().format(line) == START + "failed (request abc)"
    assert json.loads(JsonFormatter().format(line))["request_id"] == "abc"


def test_times_in_json_are_utc_and_say_so_beside_the_process() -> None:
    told = json.loads(JsonFormatter().format(record("failed")))
    assert (told["time"], told["pid"]) == ("1970-01-02T00:00:00.250+00:00", 4242)


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_a_traceback_is_kept(formatter: logging.Formatter) -> None:
    assert "ValueError: why" in formatter.format(record("failed", error=True))


ACCESS = {"client": "10.0.0.7:50", "method": "POST", "path": "/v1/acquire", "status": 429, "duration_ms": 1.25}


def test_a_line_of_the_access_log_says_what_came_of_the_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headgate.access")
    body = b'{"status": 429, "reason": "rate", "policy": "reads", "limits": []}'
    headers = [(b"x-request-id", b"abc")]
    log_request(("10.0.0.7", 50), ("POST", "/v1/acquire"), 429, (headers, body), took_s=0.00125)
    log_request(("10.0.0.7", 50), ("GET", "/healthz"), 200, ([], b"{}"), took_s=0.00125)
    log_request(None, ("-", "-"), 400, ([], b"no JSON"), took_s=0.0)
    refused, granted, odd = caplog.records
    shown = TextFormatter().format(refused)
    assert shown.endswith("10.0.0.7:50 POST /v1/acquire 429 in 1.2 ms: rate, policy reads (request abc)")
    told = json.loads(JsonFormatter().format(refused))
    assert {name: told[name] for name in (*ACCESS, "reason", "policy", "request_id")} == {
        **ACCESS, "reason": "rate", "policy": "reads", "request_id": "abc",
    }  # fmt: skip
    assert granted.getMessage() == "10.0.0.7:50 GET /healthz 200 in 1.2 ms"
    assert odd.getMessage() == " - - 400 in 0.0 ms"


def test_with_json_every_line_is_json(tmp_path: Path) -> None:
    """Lines of the start, the supervisor's lines on a worker that dies, and the controller's lines."""
    given = environment(data_dir=tmp_path, log_format="json", log_level="info", workers=2, port=free_port())
    lines = list[str]()
    with subprocess.Popen([*HEADGATE, "up"], env=given, stdout=PIPE, stderr=STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            worker = 0
            for line in process.stdout:
                lines.append(line)
                told = json.loads(line)
                if told["logger"] == "uvicorn.error":
                    worker = told["pid"]
                if told["message"] == "ready":
                    assert worker
                    os.kill(worker, signal.SIGKILL)
                if "a worker ended with -9" in told["message"]:
                    process.terminate()
        finally:
            process.kill()
    assert any('"message":"ready"' in line for line in lines)
    assert all(json.loads(line)["time"] for line in lines)


def test_with_json_complaints_about_settings_are_json_too() -> None:
    ended = run_headgate("api", log_format="json", port="many")
    (line,) = ended.stderr.splitlines()
    assert (ended.returncode, ended.stdout) == (2, "")
    assert json.loads(line)["message"].startswith("HEADGATE_PORT is 'many'")


def test_the_level_decides_which_lines_are_logged(tmp_path: Path) -> None:
    code = "import logging, sys; from api.transport import logs; logs.configure('text', sys.argv[1]); "
    code += "[getattr(logging.getLogger('any'), it)(it) for it in ('debug', 'info', 'warning', 'error')]"
    for number, level in enumerate(levels := ["debug", "info", "warning", "error"]):
        command = [sys.executable, "-c", code, level]
        told = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60, check=True).stderr
        assert [line.split()[-1] for line in told.splitlines()] == levels[number:]
