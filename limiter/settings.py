"""Settings: `HEADGATE_…` environment variables, read once, checked whole.

A variable that is no setting is refused by name: a misspelt one would otherwise be ignored in silence.
"""

import difflib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, SettingsConfigDict

from limiter.store.urls import parse

PREFIX = "HEADGATE_"
SECRET_MIN_CHARACTERS = 16


class SettingsError(Exception):
    """Settings that cannot be used: one line per problem, each naming its variable."""


class Settings(BaseSettings):
    """What can be set from outside. The field `data_dir` is the variable `HEADGATE_DATA_DIR`, and so on.

    Whatever may hold a password is a `SecretStr`, so that no log or traceback shows it.
    """

    # An empty variable counts as unset: that is how one is "removed" in most deployment files.
    model_config = SettingsConfigDict(env_prefix=PREFIX, env_ignore_empty=True, frozen=True)

    data_dir: Path = Field(default=Path(".headgate"), description="Where the embedded store keeps its data.")
    redis_url: SecretStr | None = Field(default=None, description="The store. Unset: an embedded one.")
    secret: SecretStr | None = Field(default=None, description="Signs reservations; the same on every node.")
    deadline_ms: int = Field(default=100, ge=1, le=5_000, description="For every decision, the store's part included.")

    @classmethod
    def load(cls) -> Self:
        """The settings in the environment, or `SettingsError` with everything that is wrong with them."""
        problems = list(_unknown_variables(cls.variables()))
        try:
            settings = cls()
        except ValidationError as error:
            problems += map(_problem, error.errors(include_url=False))
        if problems:
            # Not chained: the original shows what was entered.
            raise SettingsError("\n".join(problems)) from None
        return settings

    @classmethod
    def variables(cls) -> list[str]:
        """Every variable that there is."""
        return [PREFIX + name.upper() for name in cls.model_fields]

    @field_validator("redis_url")
    @classmethod
    def _is_a_store_url(cls, url: SecretStr | None) -> SecretStr | None:
        if url is not None:
            parse(url.get_secret_value())
        return url

    @field_validator("secret")
    @classmethod
    def _is_long_enough(cls, secret: SecretStr | None) -> SecretStr | None:
        if secret is not None and len(secret.get_secret_value()) < SECRET_MIN_CHARACTERS:
            raise ValueError(f"it must have at least {SECRET_MIN_CHARACTERS} characters")
        return secret


def _unknown_variables(known: list[str]) -> Iterator[str]:
    for name in sorted(os.environ):
        if name.upper().startswith(PREFIX) and name.upper() not in known:
            # Without the prefix, which would make everything alike.
            fields = [variable.removeprefix(PREFIX) for variable in known]
            nearest = difflib.get_close_matches(name.upper().removeprefix(PREFIX), fields, n=1)
            hint = f"did you mean {PREFIX}{nearest[0]}?" if nearest else f"the settings are {', '.join(known)}"
            yield f"{name} is not a setting; {hint}"


def _problem(error: ErrorDetails) -> str:
    """One line for one field. What was entered is shown only where it cannot be a secret."""
    field = str(error["loc"][0])
    variable = PREFIX + field.upper()
    if "error" in error.get("ctx", {}):  # raised by a validator of ours
        return f"{variable}: {error['ctx']['error']}"
    return f"{variable} is {error['input']!r}: {error['msg'][:1].lower()}{error['msg'][1:]}"
