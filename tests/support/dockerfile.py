"""The Dockerfile, read into instructions."""

import json
import re
from dataclasses import dataclass

from tests.support.rendering import ROOT


@dataclass(frozen=True)
class Instruction:
    stage: int
    """0 before the first FROM."""
    name: str
    text: str

    @property
    def arguments(self) -> list[str]:
        """The arguments of an instruction in the form that needs no shell."""
        found: list[str] = json.loads(self.text)
        return found

    @property
    def words(self) -> list[str]:
        return [word for word in self.text.split() if not word.startswith("--")]


def instructions() -> list[Instruction]:
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    found: list[Instruction] = []
    stage = 0
    for line in re.sub(r"\\\n", " ", "\n".join(lines)).splitlines():
        if line.strip():
            name, _, text = line.partition(" ")
            stage += name == "FROM"
            found.append(Instruction(stage, name, " ".join(text.split())))
    return found


def of_the_image(name: str) -> list[Instruction]:
    """Those of the last stage: what ends up in the image."""
    everything = instructions()
    return [it for it in everything if it.stage == everything[-1].stage and it.name == name]


def healthcheck() -> list[str]:
    """The command that Docker asks with."""
    (found,) = of_the_image("HEALTHCHECK")
    arguments: list[str] = json.loads(found.text.partition(" CMD ")[2])
    return arguments
