"""Print this environment's versions of Cutline's requirements: `python -m tests.run.versions`."""

from __future__ import annotations

import platform
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def main() -> None:
    project = tomllib.loads(PROJECT.read_text())["project"]
    names = [Requirement(one).name for one in project["dependencies"]]
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    sys.stdout.write(f"Python {platform.python_version()}: {versions}\n")


if __name__ == "__main__":
    main()
