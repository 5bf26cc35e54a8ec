"""The `headgate` command: what it prints, how it ends, and that it never shows a traceback or a password."""

import signal
from pathlib import Path

import pytest

from tests.support import eventually
from tests.support.command import headgate_up, run_headgate
from tests.support.servers import Server, free_port, running


def test_the_version_is_printed() -> None:
    told = run_headgate("--version")
    assert (told.returncode, told.stdout) == (0, "headgate 0.2.0\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_up_starts_an_embedded_store_and_ends_with_it(tmp_path: Path, number: signal.Signals) -> None:
    with headgate_up({"data_dir": str(tmp_path)}) as (process, printed):
        assert printed[0] == "headgate 0.2.0: ready\n"
        assert printed[1].split() == ["store", "Valkey", "9.1.2", "at", f"unix://{tmp_path}/valkey.sock"]
        process.send_signal(number)
        assert process.wait(timeout=20) == 0
    assert not (tmp_path / "valkey.sock").exists()  # the store removed it: it ended in order


def test_up_uses_the_store_that_the_settings_name(tmp_path: Path) -> None:
    with running("valkey", tmp_path, config={"requirepass": "hunter2"}) as server:
        url = f"redis://:hunter2@127.0.0.1:{server.port}"
        with headgate_up({"redis_url": url}) as (process, printed):
            assert printed[1].endswith(f"at redis://***@127.0.0.1:{server.port}\n")
            process.terminate()
            assert process.wait(timeout=20) == 0


def test_a_second_instance_on_a_data_directory_is_refused(tmp_path: Path) -> None:
    """F-S12"""
    with headgate_up({"data_dir": str(tmp_path)}) as (process, _):
        refused = run_headgate("up", data_dir=str(tmp_path))
        assert refused.returncode == 1
        assert refused.stderr.startswith(f"headgate: {tmp_path} is in use by process {process.pid}: ")
        assert refused.stderr.count("\n") == 1


def test_bad_settings_end_with_2_and_a_line_each() -> None:
    refused = run_headgate("up", redis_uri="redis://store", deadline_ms="0")
    assert refused.returncode == 2
    assert refused.stderr.splitlines() == [
        "headgate: HEADGATE_REDIS_URI is not a setting; did you mean HEADGATE_REDIS_URL?",
        "headgate: HEADGATE_DEADLINE_MS is '0': input should be greater than or equal to 1",
    ]


def test_tls_files_that_cannot_be_read_end_with_2() -> None:
    refused = run_headgate("up", redis_url="rediss://store?ssl_ca_certs=/nowhere")
    assert refused.returncode == 2
    assert refused.stderr.startswith("headgate: HEADGATE_REDIS_URL: cannot set up TLS")
    assert refused.stderr.count("\n") == 1


def test_f_s2_a_store_out_of_reach_is_named_and_waited_for() -> None:
    with headgate_up({"redis_url": f"redis://user:hunter2@127.0.0.1:{free_port()}"}) as (process, printed):
        assert printed[0] == "headgate 0.2.0: serving, and waiting for its store\n"
        assert printed[1].startswith("  store  not reached yet (")
        assert "hunter2" not in printed[1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0


def test_a_store_that_cannot_serve_ends_with_1_and_one_line(valkey: Server) -> None:
    """F-S13"""
    valkey.command("ACL", "SETUSER", "clerk", "reset", "on", ">word", "~*", "+@all", "-@scripting")
    try:
        refused = run_headgate("up", redis_url=f"redis://clerk:word@127.0.0.1:{valkey.port}")
    finally:
        valkey.command("ACL", "DELUSER", "clerk")
    assert refused.returncode == 1
    assert refused.stderr.startswith("headgate: the store user lacks rights")
    assert refused.stderr.count("\n") == 1


def test_killing_it_leaves_no_store_behind(tmp_path: Path) -> None:
    """F-S12"""
    with headgate_up({"data_dir": str(tmp_path)}) as (process, _):
        process.kill()
        process.wait()
    eventually(lambda: not (tmp_path / "valkey.sock").exists(), what="the store ended, in order")
