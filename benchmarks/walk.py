"""Trace three commands through the modules: count the modules entered, and show the calls that go up.

A module's floor is the length of the longest chain of imports below it. A call goes up if the called module is on the
same floor as the caller's module, or on a higher floor. Callbacks and Protocol implementations are called upwards by
design.

    python -m benchmarks.walk
"""

from __future__ import annotations

import ast
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType

from cutline.cli.main import run

ROOT = Path(__file__).parent.parent
COMMANDS = {
    "create --incremental": ("create", "walk", "--incremental"),
    "restore": ("restore", "walk", "--replace", "--yes"),
    "check": ("check", "walk"),
}


@dataclass(slots=True)
class Walk:
    """The modules that a command enters, and its calls from module to module, each counted once."""

    modules: set[str] = field(default_factory=set)
    calls: set[tuple[str, str]] = field(default_factory=set)

    def climbs(self, floors: dict[str, int]) -> list[tuple[str, str]]:
        """Return the calls into a module that is not on a lower floor than the caller."""
        return sorted(call for call in self.calls if floors[call[1]] >= floors[call[0]])


def main() -> None:
    """Walk the three commands on an embedded fleet of two shards, and print the counts and every call that goes up."""
    floors = floors_of(ROOT)
    with tempfile.TemporaryDirectory(prefix="cutline-walk-") as folder:
        fleet_toml = f"{folder}/fleet/fleet.toml"
        common = ("--fleet", fleet_toml, "--quiet")
        try:
            _run(("demo", "up", f"{folder}/fleet", "--shards", "2", "--backups", "1"))
            _run((*common, "init"))
            _run((*common, "create", "walk"))
            for title, command in COMMANDS.items():
                with traced_calls(set(floors)) as walk:
                    _run((*common, *command))
                if not walk.modules:
                    raise SystemExit(f"no call was traced in {ROOT}")
                climbs = walk.climbs(floors)
                print(f"{title}: {len(walk.modules)} modules, {len(walk.calls)} calls between them, {len(climbs)} up")
                for caller, called in climbs:
                    print(f"    {caller} ({floors[caller]}) -> {called} ({floors[called]})")
        finally:
            _run(("demo", "down", f"{folder}/fleet", "--delete"))


def _run(command: tuple[str, ...]) -> None:
    code = run(list(command))
    if code:
        raise SystemExit(f"snapshot {' '.join(command)} ended with exit code {code}")


@contextmanager
def traced_calls(modules: set[str]) -> Iterator[Walk]:
    """Record the calls between `modules` while the block runs, including those in threads that it starts."""
    walk = Walk()
    name_of = _names(modules)

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event != "call" or (called := name_of(frame.f_code.co_filename)) is None:
            return
        walk.modules.add(called)
        caller = frame.f_back
        while caller is not None and name_of(caller.f_code.co_filename) is None:
            caller = caller.f_back
        source = name_of(caller.f_code.co_filename) if caller is not None else None
        if source is not None and source != called and frame.f_code.co_name != "<module>":
            walk.calls.add((source, called))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield walk
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def _names(modules: set[str]) -> Callable[[str], str | None]:
    @cache
    def name_of(filename: str) -> str | None:
        try:
            parts = Path(filename).relative_to(ROOT).with_suffix("").parts
        except ValueError:
            return None
        name = ".".join(parts).removesuffix(".__init__")
        return name if name in modules else None

    return name_of


def floors_of(root: Path) -> dict[str, int]:
    """Return the floor of every product module, from top-level imports; ignore imports that would form a cycle."""
    paths = {
        ".".join(("cutline", *path.relative_to(root).with_suffix("").parts)).removesuffix(".__init__"): path
        for package in (root / "cutline").iterdir()
        for path in (root / package.name).rglob("*.py")
    }
    imports = {name: _imports(path, paths) - {name} for name, path in paths.items()}
    floors: dict[str, int] = {}

    def floor(name: str, above: tuple[str, ...]) -> int:
        if name not in floors:
            below = [floor(other, (*above, name)) for other in imports[name] if other not in above]
            floors[name] = 1 + max(below, default=0)
        return floors[name]

    for name in paths:
        floor(name, ())
    return floors


def _imports(path: Path, paths: dict[str, Path]) -> set[str]:
    modules = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            modules |= {
                name if (name := f"{node.module}.{alias.name}") in paths else node.module for alias in node.names
            }
        elif isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
    return {name for name in modules if name in paths}


if __name__ == "__main__":
    main()
