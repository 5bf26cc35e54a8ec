"""Settings: `HEADGATE_…` environment variables, read once and checked together.

An unknown variable with the prefix is refused by name: a misspelt one would otherwise be ignored in silence.
"""

import difflib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, SettingsConfigDict

from limiter.api_keys import KeyEntryError, is_loopback, read_keys
from limiter.model.policy.criticality import Criticality
from limiter.model.policy.fields.kinds import is_name
from limiter.store.link.urls import parse

PREFIX = "HEADGATE_"
SERVICE_LINK = "HEADGATE_SERVICE_HOST"
SECRET_MIN_CHARACTERS = 16
LEASE_CYCLES_MIN = 4
"""Each cycle renews the lease, so it has to outlast a few late cycles."""


class SettingsError(Exception):
    """Settings that cannot be used: one line per problem, each naming its variable."""


class Settings(BaseSettings):
    """The settings. The field `data_dir` is the variable `HEADGATE_DATA_DIR`, and so on.

    A field that may hold a password is a `SecretStr`, so that no log or traceback shows it.
    """

    # An empty variable counts as unset: that is how one is "removed" in most deployment files.
    model_config = SettingsConfigDict(env_prefix=PREFIX, env_ignore_empty=True, frozen=True)

    data_dir: Path = Field(default=Path(".headgate"), description="Where the embedded store keeps its data.")
    redis_url: SecretStr | None = Field(default=None, description="The store. Unset: an embedded one.")
    secret: SecretStr | None = Field(default=None, description="Signs reservations; the same on every node.")
    deadline_ms: int = Field(default=100, ge=1, le=5_000, description="For every decision, the store's part included.")
    late_ms: int = Field(
        default=60_000, ge=0, le=86_400_000, description="How long after its deadline a reservation may be settled."
    )
    repeat_refusals_ms: int = Field(
        default=50, ge=0, le=50, description="How long a node may repeat a refusal without asking the store; 0: never."
    )
    policies: Path | None = Field(default=None, description="A policy file, applied at start.")
    policies_owner: str = Field(default="file", description="Who owns what the file applies; another than `api`.")
    policies_take_over: bool = Field(default=False, description="The file replaces what others own.")
    policies_prune: bool = Field(default=False, description="The file removes what it applied and no longer contains.")
    uncovered: Literal["approve", "refuse"] = Field(default="approve", description="What no policy covers.")
    default_criticality: Criticality = Field(default=Criticality.CRITICAL, description="Of requests that name none.")

    cycle_ms: int = Field(default=100, ge=20, le=5_000, description="From one cycle of the controller to the next.")
    lease_ms: int = Field(default=2_000, ge=400, le=60_000, description="How long a controller owns what it renews.")

    host: str = Field(default="127.0.0.1", min_length=1, description="The address to listen on.")
    port: int = Field(default=8080, ge=0, le=65_535, description="The port to listen on; 0: one that is free.")
    workers: int = Field(default=1, ge=1, le=256, description="Processes that serve the API, each with its engine.")
    api_keys: str = Field(default="", description="name:role:sha256[:namespace], separated by commas.")
    tls_certificate: Path | None = Field(default=None, description="Serve over TLS with this certificate (PEM).")
    tls_key: Path | None = Field(default=None, description="The certificate's private key (PEM).")
    fast_lane: bool = Field(default=True, description="Answer the data plane beneath FastAPI.")
    body_max_bytes: int = Field(default=1_048_576, ge=1_024, le=67_108_864, description="Of one request.")
    body_timeout_s: float = Field(default=10.0, gt=0, le=300, description="For a request to arrive whole.")
    rate_limit_headers: Literal["draft", "legacy", "x", "none"] = Field(
        default="draft", description="RateLimit and RateLimit-Policy, or RateLimit-Limit and so on, or X-RateLimit-…."
    )
    access_log: bool = Field(default=False, description="Log a line for every request.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="warning", description="The least important lines that are logged."
    )
    log_format: Literal["text", "json"] = Field(default="text", description="How log lines are written.")
    metrics_open: bool = Field(default=False, description="GET /metrics needs no key, where there are keys.")
    metrics_port: int | None = Field(
        default=None, ge=1, le=65_535, description="Where a controller shows its metrics; unset: nowhere."
    )
    metrics_dir: Path | None = Field(
        default=None,
        description="The directory where processes of a node share metrics; set where several are started.",
    )
    otel: str | None = Field(
        default=None, pattern=r"^https?://[^\s/]+", description="An OpenTelemetry collector, as in http://host:4318."
    )

    @classmethod
    def load(cls) -> Self:
        """Read the settings from the environment; raise `SettingsError` with everything that is wrong with them."""
        if SERVICE_LINK in os.environ:
            raise SettingsError(
                f"{SERVICE_LINK}, and HEADGATE_PORT with it, comes from Kubernetes, for a Service called headgate: put "
                "enableServiceLinks: false into the spec of the pod"
            )
        problems = list(_unknown_variables(cls.variables()))
        try:
            settings = cls()
        except ValidationError as error:
            problems += map(_problem, error.errors(include_url=False))
        if problems:
            # Not chained: the original shows the values.
            raise SettingsError("\n".join(problems)) from None
        return settings

    @classmethod
    def variables(cls) -> list[str]:
        """Return the names of all variables."""
        return [PREFIX + name.upper() for name in cls.model_fields]

    @field_validator("redis_url")
    @classmethod
    def _is_a_store_url(cls, url: SecretStr | None) -> SecretStr | None:
        if url is not None:
            parse(url.get_secret_value())
        return url

    @field_validator("policies_owner")
    @classmethod
    def _is_an_owner(cls, owner: str) -> str:
        if owner == "api" or not is_name(owner):
            raise ValueError(
                "it must be 1 to 64 letters, digits, '.', '_' or '-', and not api, which owns what people put"
            )
        return owner

    @field_validator("secret")
    @classmethod
    def _is_long_enough(cls, secret: SecretStr | None) -> SecretStr | None:
        if secret is not None and len(secret.get_secret_value()) < SECRET_MIN_CHARACTERS:
            raise ValueError(f"it must have at least {SECRET_MIN_CHARACTERS} characters")
        return secret

    @field_validator("api_keys")
    @classmethod
    def _are_keys(cls, entries: str) -> str:
        try:
            read_keys(entries)
        except KeyEntryError as error:
            raise ValueError(str(error)) from None
        return entries

    @model_validator(mode="after")
    def _belong_together(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("HEADGATE_TLS_CERTIFICATE and HEADGATE_TLS_KEY belong together: set both or neither")
        if self.lease_ms < LEASE_CYCLES_MIN * self.cycle_ms:
            raise ValueError(
                f"HEADGATE_LEASE_MS is {self.lease_ms}: it must last at least {LEASE_CYCLES_MIN} cycles of "
                f"HEADGATE_CYCLE_MS, {LEASE_CYCLES_MIN * self.cycle_ms}"
            )
        return self

    def check_exposure(self) -> None:
        """Raise `SettingsError` if other machines could reach the API without an API key."""
        if not read_keys(self.api_keys) and not is_loopback(self.host):
            raise SettingsError(
                f"HEADGATE_HOST is {self.host!r}, which others can reach, and there are no API keys: make one with "
                "`headgate keys new` and put its entry into HEADGATE_API_KEYS, or listen on 127.0.0.1"
            )


def _unknown_variables(known: list[str]) -> Iterator[str]:
    for name in sorted(os.environ):
        if name.upper().startswith(PREFIX) and name.upper() not in known:
            # Without the prefix, which would make all names similar.
            fields = [variable.removeprefix(PREFIX) for variable in known]
            nearest = difflib.get_close_matches(name.upper().removeprefix(PREFIX), fields, n=1)
            hint = f"did you mean {PREFIX}{nearest[0]}?" if nearest else f"the settings are {', '.join(known)}"
            yield f"{name} is not a setting; {hint}"


def _problem(error: ErrorDetails) -> str:
    """Return one line for one field. It shows the value only if that cannot be a secret."""
    if not error["loc"]:  # a check of several settings together
        return str(error["ctx"]["error"])
    field = str(error["loc"][0])
    variable = PREFIX + field.upper()
    if "error" in error.get("ctx", {}):  # raised by one of our validators
        return f"{variable}: {error['ctx']['error']}"
    wanted = Settings.model_fields[field].description if error["type"] == "string_pattern_mismatch" else error["msg"]
    assert wanted, f"{field} has a description"
    return f"{variable} is {error['input']!r}: {wanted[:1].lower()}{wanted[1:]}"
