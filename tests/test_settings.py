"""Settings come from the environment, whole or not at all."""

from pathlib import Path

import pytest

from limiter.settings import Settings, SettingsError


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.variables():
        monkeypatch.delenv(name, raising=False)


def refusal() -> str:
    with pytest.raises(SettingsError) as refused:
        Settings.load()
    return str(refused.value)


def test_without_variables_the_store_is_embedded() -> None:
    settings = Settings.load()
    assert settings.redis_url is None
    assert settings.secret is None
    assert settings.data_dir == Path(".headgate")
    assert settings.deadline_ms == 100


def test_variables_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADGATE_DATA_DIR", "/var/lib/headgate")
    monkeypatch.setenv("HEADGATE_REDIS_URL", "redis://store:6380/1")
    monkeypatch.setenv("HEADGATE_DEADLINE_MS", "50")
    settings = Settings.load()
    assert settings.data_dir == Path("/var/lib/headgate")
    assert settings.redis_url is not None
    assert settings.redis_url.get_secret_value() == "redis://store:6380/1"
    assert settings.deadline_ms == 50


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADGATE_REDIS_URL", "")
    assert Settings.load().redis_url is None


def test_a_misspelt_variable_is_refused_with_the_nearest_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADGATE_REDIS_URI", "redis://store")
    assert refusal() == "HEADGATE_REDIS_URI is not a setting; did you mean HEADGATE_REDIS_URL?"


def test_a_variable_like_no_other_is_refused_with_all_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADGATE_XQZ", "1")
    assert refusal() == f"HEADGATE_XQZ is not a setting; the settings are {', '.join(Settings.variables())}"


def test_other_programs_variables_are_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADGATEKEEPER", "1")
    Settings.load()


def test_a_wrong_value_is_named_with_what_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADGATE_DEADLINE_MS", "0")
    assert refusal() == "HEADGATE_DEADLINE_MS is '0': input should be greater than or equal to 1"


def test_every_problem_is_listed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADGATE_DEADLINE_MS", "soon")
    monkeypatch.setenv("HEADGATE_DATADIR", "/tmp")
    lines = refusal().splitlines()
    assert lines[0] == "HEADGATE_DATADIR is not a setting; did you mean HEADGATE_DATA_DIR?"
    assert lines[1].startswith("HEADGATE_DEADLINE_MS is 'soon': ")


def test_a_lease_outlasts_a_few_cycles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADGATE_CYCLE_MS", "1000")
    monkeypatch.setenv("HEADGATE_LEASE_MS", "3000")
    allowed = "it must last at least 4 cycles of HEADGATE_CYCLE_MS, 4000"
    assert refusal() == f"HEADGATE_LEASE_MS is 3000: {allowed}"


def test_a_short_secret_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADGATE_SECRET", "hunter2")
    assert refusal() == "HEADGATE_SECRET: it must have at least 16 characters"


@pytest.mark.parametrize(
    "url",
    [
        "http://user:hunter2@store",
        "redis://user:hunter2@store:port",
        "redis://user:hunter2@",
        "redis://user:hun/hunter2@store",
        "redis://user:hun#hunter2@store",
        "redis://user:hun?hunter2@store",
        "rediss://store?ssl_password=hunter2&timeout=5",
        "redis+sentinel://user:hunter2@store:26379",
    ],
)
def test_a_bad_store_url_is_refused_without_its_password(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("HEADGATE_REDIS_URL", url)
    message = refusal()
    assert message.startswith("HEADGATE_REDIS_URL: ")
    assert "redis+sentinel://host:port,host:port/service" in message  # the forms there are
    assert "hunter2" not in message
    assert "\n" not in message


def test_secrets_do_not_show_when_settings_are_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADGATE_SECRET", "hunter2-hunter2-hunter2")
    monkeypatch.setenv("HEADGATE_REDIS_URL", "redis://user:hunter2@store")
    assert "hunter2" not in repr(Settings.load())


@pytest.mark.parametrize("owner", ["api", "", "a b", "x" * 65])
def test_an_owner_of_a_file_is_a_name_and_not_the_api_s(monkeypatch: pytest.MonkeyPatch, owner: str) -> None:
    monkeypatch.setenv("HEADGATE_POLICIES_OWNER", owner)
    if owner:
        assert "1 to 64 letters, digits" in refusal()
    else:
        assert Settings.load().policies_owner == "file"


def test_variables_of_a_kubernetes_service_are_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADGATE_SERVICE_HOST", "10.0.0.1")
    assert "enableServiceLinks: false" in refusal()
