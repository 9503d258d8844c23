"""Print which versions of Cutline's own requirements this environment has: `python -m tests.run.versions`."""

from __future__ import annotations

import platform
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def main() -> None:
    """Print a line with the version of Python and of every package that pyproject.toml names for users."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    names = [Requirement(one).name for one in project["dependencies"]]
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    sys.stdout.write(f"Python {platform.python_version()}: {versions}\n")


if __name__ == "__main__":
    main()
