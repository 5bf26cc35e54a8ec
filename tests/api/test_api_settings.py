"""Settings of the API: values that are accepted, and values that are refused."""

import pytest

from limiter.api_keys import KeyEntryError
from limiter.settings import Settings, SettingsError
from tests.support.command import run_headgate


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.variables():
        monkeypatch.delenv(name, raising=False)


def test_without_variables_the_api_is_for_this_machine() -> None:
    settings = Settings.load()
    assert (settings.host, settings.port, settings.workers, settings.fast_lane) == ("127.0.0.1", 8080, 1, True)
    assert (settings.uncovered, settings.default_criticality, settings.rate_limit_headers) == (
        "approve", "critical", "draft",
    )  # fmt: skip
    settings.check_exposure()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.1.2.3"])
def test_loopback_needs_no_keys(host: str) -> None:
    Settings(host=host).check_exposure()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.com", "127.0.0.1.example.com"])
def test_anywhere_else_does(host: str) -> None:
    with pytest.raises(SettingsError, match="which others can reach, and there are no API keys"):
        Settings(host=host).check_exposure()
    Settings(host=host, api_keys=f"a:caller:{'0' * 64}").check_exposure()


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("text", [",", " ", " , ", "\t"])
def test_blank_keys_are_not_the_same_as_none(monkeypatch: pytest.MonkeyPatch, text: str, host: str) -> None:
    """F-H16: they would let everybody in as an admin."""
    monkeypatch.setenv("HEADGATE_HOST", host)
    monkeypatch.setenv("HEADGATE_API_KEYS", text)
    with pytest.raises(SettingsError, match=r"^HEADGATE_API_KEYS: entry 1 is blank"):
        Settings.load()


def test_others_are_let_in_by_the_entries_and_not_by_the_text_of_the_setting() -> None:
    """F-H16"""
    unchecked = Settings.model_construct(host="0.0.0.0", api_keys=",")
    with pytest.raises(KeyEntryError):
        unchecked.check_exposure()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("API_KEYS", "a:owner:x", "HEADGATE_API_KEYS: entry 1 (a): the role must be one of caller, viewer, admin"),
        ("PORT", "65536", "HEADGATE_PORT is '65536': input should be less than or equal to 65535"),
        (
            "PORT",
            "http",
            "HEADGATE_PORT is 'http': input should be a valid integer, unable to parse string as an integer",
        ),
        (
            "OTEL",
            "collector:4318",
            "HEADGATE_OTEL is 'collector:4318': an OpenTelemetry collector, as in http://host:4318.",
        ),
        ("WORKERS", "0", "HEADGATE_WORKERS is '0': input should be greater than or equal to 1"),
        ("UNCOVERED", "maybe", "HEADGATE_UNCOVERED is 'maybe': input should be 'approve' or 'refuse'"),
        (
            "TLS_KEY",
            "key.pem",
            "HEADGATE_TLS_CERTIFICATE and HEADGATE_TLS_KEY belong together: set both or neither",
        ),
    ],
)
def test_a_setting_that_cannot_be_used_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    monkeypatch.setenv(f"HEADGATE_{name}", value)
    with pytest.raises(SettingsError) as refused:
        Settings.load()
    assert str(refused.value) == message


def test_variables_that_kubernetes_sets_for_a_service_are_not_taken_for_settings() -> None:
    links = {
        "service_host": "10.0.0.1",
        "service_port": "8080",
        "port": "tcp://10.0.0.1:8080",
        "port_8080_tcp": "tcp://10.0.0.1:8080",
    }
    refused = run_headgate("api", **links)
    assert refused.returncode == 2
    assert refused.stderr == (
        "headgate: HEADGATE_SERVICE_HOST, and HEADGATE_PORT with it, comes from Kubernetes, for a Service called "
        "headgate: put enableServiceLinks: false into the spec of the pod\n"
    )


def test_the_fast_lane_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADGATE_FAST_LANE", "off")
    assert Settings.load().fast_lane is False


def test_a_key_is_made_and_its_entry_can_be_configured() -> None:
    made = run_headgate("keys", "new", "shop", "--role", "viewer", "--namespace", "tenant1")
    assert made.returncode == 0
    key, entry = (line.split()[1] for line in made.stdout.splitlines())
    assert key.startswith("hg_")
    assert entry.startswith("shop:viewer:")
    Settings(api_keys=entry)


def test_a_key_of_no_role_is_refused_in_one_line() -> None:
    refused = run_headgate("keys", "new", "shop", "--role", "owner")
    assert (refused.returncode, refused.stderr) == (
        2, "headgate: entry 1 (shop): the role must be one of caller, viewer, admin\n",
    )  # fmt: skip
