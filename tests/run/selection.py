"""Select the tests of a run: the fixed set of `make test`, the rest of them, or all, which is the default.

The fixed set excludes tests with the mark `rest`, which `first` and `first_of_each` of tests/run/soak.py give to cases
of a table. Of the modules that tests/run/fixed_set.txt lists, it contains only the tests named there, or all but the
tests that are named with a minus. `make test` and `make rest` together run every test once, as `make all` does in one
run. `--whole=MODULE` adds all tests of a module (tests/run/changed.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest

LEFT_OUT = "- "


def read_fixed_set(text: str) -> dict[str, set[str]]:
    """Return the names of tests by module; those that are left out begin with LEFT_OUT."""
    found: dict[str, set[str]] = {}
    module = ""
    for line in text.splitlines():
        if line.startswith(" "):
            found[module].add(line.strip())
        elif line and not line.startswith("#"):
            module = line
            found[module] = set()
    return found


FIXED: dict[str, set[str]] = read_fixed_set(Path(__file__).with_name("fixed_set.txt").read_text())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases", choices=["test", "rest", "all"], default="all",
        help="the fixed set of `make test`, the others, or all tests (default)",
    )  # fmt: skip
    parser.addoption(
        "--whole", action="append", default=[], help="a module of which all tests are run; may be repeated"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "rest: not in the fixed set of `make test`; `make rest` and `make all` run it")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the other tests; pytest counts them in its summary."""
    cases = config.getoption("cases")
    if cases != "all":
        whole = config.getoption("whole")
        kept = [
            item for item in items if is_fixed(item) == (cases == "test") or item.nodeid.partition("::")[0] in whole
        ]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


def is_fixed(item: pytest.Item) -> bool:
    """Whether `make test` runs the test."""
    return item.get_closest_marker("rest") is None and is_named(item.nodeid)


def is_named(nodeid: str) -> bool:
    """Whether fixed_set.txt lists the test, by its name or as a case, or leaves out only others of its module."""
    module, _, name = nodeid.partition("::")
    if module not in FIXED:
        return True
    names = {name, name.partition("[")[0]}
    left_out = {line.removeprefix(LEFT_OUT) for line in FIXED[module] if line.startswith(LEFT_OUT)}
    return not names & left_out if left_out else bool(names & FIXED[module])
