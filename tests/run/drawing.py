"""Draw some of the tests that take long together: the same in every whole run, others with another CUTLINE_SEED.

`--drawn=rest` runs those that such a run leaves out, so that both together run every test once (`make all`). A run of
such a folder or module by its name has all of them, and so has the long form (`make soak`). What is drawn from is in
tests/run/drawn.py. A new test changes the draw of no other but the one whose turn it takes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import PurePosixPath

import pytest

from tests.run.drawn import DRAWS
from tests.run.soak import SEED, SOAK_SECONDS
from tests.run.units import unit_of

PLACES = sorted((place for draw in DRAWS for place in draw.places), key=len, reverse=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--drawn`."""
    parser.addoption("--drawn", choices=["some", "rest"], default="some", help="those drawn (default) or the others")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that are not drawn; pytest counts them in its summary."""
    if SOAK_SECONDS:
        return
    dropped = left_out([item.nodeid for item in items], config.args, SEED, drawn=config.getoption("drawn"))
    if dropped:
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in dropped])
        items[:] = [item for item in items if item.nodeid not in dropped]


def left_out(tests: Sequence[str], arguments: Sequence[str], seed: int, *, drawn: str) -> set[str]:
    """The tests that a run does not have: those that are not drawn, or with `drawn="rest"` all others."""
    dropped = not_drawn(tests, arguments, seed)
    return set(tests) - dropped if drawn == "rest" else dropped


def not_drawn(tests: Sequence[str], arguments: Sequence[str], seed: int) -> set[str]:
    """The tests that a run with these arguments does not draw."""
    found: dict[str, list[str]] = {}
    for test in tests:
        place = place_of(test)
        if place is not None and not is_named(place, arguments):
            found.setdefault(place, []).append(test)
    dropped: set[str] = set()
    for draw in DRAWS:
        every = [test for place in draw.places for test in found.get(place, [])]
        kinds = sorted({one.partition("::")[0] for one in every}) if draw.whole_modules else every
        by_lot = sorted(kinds, key=lambda kind: hashlib.sha256(f"{seed} {kind}".encode()).digest())
        chosen = set(by_lot[: -(-len(kinds) // draw.of)])
        dropped |= {one for one in every if chosen.isdisjoint((one, one.partition("::")[0]))}
    return dropped


def place_of(test: str) -> str | None:
    """The longest place of a draw that the test is in."""
    return next((one for one in PLACES if test == one or test.startswith((f"{one}/", f"{one}::", f"{one}["))), None)


def is_named(place: str, arguments: Sequence[str]) -> bool:
    """Whether the run is one of this module, or of the folder that shares servers with it."""
    module = place.partition("::")[0]
    names = {PurePosixPath(one).name for one in (module, unit_of(place))}
    return any(not names.isdisjoint(PurePosixPath(one.partition("::")[0]).parts) for one in arguments)
