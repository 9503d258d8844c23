"""Cutline's dependencies are declared and locked with hashes, and their licences are listed."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.test_tidy import MODULES, PACKAGES

ROOT = Path(__file__).parent.parent
INSTALLED = os.environ.get("CUTLINE_PROGRAM", "")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCKED = dict(re.findall(r"^([A-Za-z0-9_.-]+)==(\S+) \\$", (ROOT / "requirements.lock").read_text(), re.MULTILINE))
# py4j comes with pyspark, which uses it to reach the JVM.
PART_OF = {"py4j": "pyspark"}


def names(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(one).name) for one in requirements}


def imported_by_the_product() -> Iterator[str]:
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from (alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield str(node.module).partition(".")[0]


def test_every_imported_package_is_declared() -> None:
    foreign = {name for name in imported_by_the_product() if name not in {*sys.stdlib_module_names, "cutline"}}
    distributions = packages_distributions()
    # What sends spans is imported only if they are asked for.
    declared = names([*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["otel"]])
    undeclared = {
        name
        for name in foreign
        if not {canonicalize_name(one) for one in distributions[PART_OF.get(name, name)]} & declared
    }
    assert undeclared == set()


@pytest.mark.skipif(not INSTALLED, reason="make wheel runs it with the program that the wheel installs")
def test_the_wheel_installs_one_package_and_one_program() -> None:
    ask = "import importlib.metadata as m; print(*m.files('cutline'), sep='\\n')"
    # Without the working directory, which has the metadata of the tree.
    command = [Path(INSTALLED).with_name("python"), "-I", "-c", ask]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    tops = {name.partition("/")[0] for name in listed if not name.startswith("..")}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"cutline"}
    assert [Path(name).name for name in listed if name.startswith("..")] == ["snapshot"]
    assert {f"cutline/{path.relative_to(ROOT)}" for path in MODULES} <= set(listed)


def test_every_folder_at_the_top_is_linked_into_the_package() -> None:
    links = {path.name: path.readlink() for path in (ROOT / "cutline").iterdir() if path.is_symlink()}
    assert links == {name: Path("..") / name for name in PACKAGES}


def test_every_declared_package_is_locked() -> None:
    extras = PROJECT["optional-dependencies"]
    declared = names([*PROJECT["dependencies"], *extras["test"], *extras["dev"]])
    locked = {canonicalize_name(name) for name in LOCKED}
    assert declared <= locked, "run: make lock"
    for one in [*PROJECT["dependencies"], *extras["test"], *extras["dev"]]:
        wanted = Requirement(one)
        version = next(v for name, v in LOCKED.items() if canonicalize_name(name) == canonicalize_name(wanted.name))
        assert wanted.specifier.contains(version), f"{one}: {version} is locked; run: make lock"


def test_every_locked_package_has_hashes_and_no_index_is_named() -> None:
    text = (ROOT / "requirements.lock").read_text()
    assert text.count("==") == len(LOCKED) >= 50
    for block in re.split(r"^(?=[a-z0-9])", text, flags=re.MULTILINE)[1:]:
        assert "--hash=sha256:" in block, block.splitlines()[0]
    assert "--index-url" not in text
    assert "--find-links" not in text


def test_the_licence_of_every_locked_dependency_is_listed() -> None:
    # The servers of the tests, which the lock file does not have, come after these.
    text = (ROOT / "THIRD_PARTY.md").read_text().partition("## Servers of the tests")[0]
    rows = re.findall(r"^\| (\S+) +\| (\S+) +\| (.+?) +\|$", text, re.MULTILINE)
    listed = {canonicalize_name(name): version for name, version, _ in rows if name != "Name"}
    locked = {canonicalize_name(name): version for name, version in LOCKED.items()}
    assert listed == locked, "run: make lock"
    assert all(licence not in ("", "UNKNOWN") for _, _, licence in rows)
