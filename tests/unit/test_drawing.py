"""Every run has at least one test of each kind, the same every time; all that is drawn from is in `make soak`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.run.drawing import left_out, not_drawn, place_of
from tests.run.drawn import DRAWS, Draw

ROOT = Path(__file__).parents[2]
MODULES = sorted(path for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__))
LONG_FORMS = re.findall(r"(?m)^(?:SAMPLED :=|soak:|fuzz:).*\n(?:[ \t].*\n)*", (ROOT / "Makefile").read_text())
VARIANTS = 9


def named(module: Path) -> str:
    return module.relative_to(ROOT).as_posix()


def in_a_long_form(module: Path) -> bool:
    """Whether `make soak` or `make fuzz` runs the module, by its name or by that of its folder."""
    words = set(re.split(r"[\s,)]+", "".join(LONG_FORMS)))
    places = (module, *(one for one in module.parents if one.is_relative_to(ROOT / "tests")))
    if f"--ignore={named(module)}" in words:
        # It has a line of its own.
        places = (module,)
    return any({one.name, named(one)} & words for one in places)


def collected(draw: Draw) -> list[str]:
    """Names of tests as in a collection: so many of every place."""
    ends = {True: "[{}]", False: "::test_{}"}
    if draw.whole_modules:
        return [f"{place}/test_{number}.py::test_one" for place in draw.places for number in range(VARIANTS)]
    files = [place if "::" in place or place.endswith(".py") else f"{place}/test_any.py" for place in draw.places]
    return [file + ends["::" in file].format(number) for file in files for number in range(VARIANTS)]


@pytest.mark.parametrize("draw", DRAWS, ids=lambda draw: draw.places[0])
def test_one_of_so_many_is_run_and_every_one_by_some_seed(draw: Draw) -> None:
    tests = collected(draw)
    left = [set(tests) - not_drawn(tests, ["tests"], seed) for seed in range(200)]
    assert {len(one) for one in left} == {-(-len(tests) // draw.of)}
    assert set().union(*left) == set(tests)
    assert not_drawn(tests[:1], ["tests"], 1) == set()


@pytest.mark.parametrize("draw", DRAWS, ids=lambda draw: draw.places[0])
def test_a_run_by_the_name_of_a_module_or_of_its_folder_has_all_of_it(draw: Draw) -> None:
    tests = collected(draw)
    for place in draw.places:
        module = place.partition("::")[0]
        of_place = [test for test in tests if place_of(test) == place]
        assert of_place
        assert not_drawn(of_place, [module, f"{module}::test_one"], 1) == set()
    folder = "tests/integration/restoring"
    assert not_drawn([f"{folder}/test_restore_walk.py::test_{number}" for number in range(9)], [folder], 1) == set()


def test_a_module_is_drawn_as_a_whole() -> None:
    tests = [f"tests/integration/test_{number}.py::test_{each}" for number in range(9) for each in range(4)]
    left = [test for test in tests if test not in not_drawn(tests, ["tests"], 1)]
    assert len({test.partition("::")[0] for test in left}) == 5
    assert len(left) == 20


def test_some_and_the_rest_are_every_test_once() -> None:
    tests = [f"tests/integration/test_{number}.py::test_{each}" for number in range(9) for each in range(4)]
    tests.append("tests/unit/test_lsn.py::test_one")
    some, rest = (
        [test for test in tests if test not in left_out(tests, ["tests"], 1, drawn=drawn)] for drawn in ("some", "rest")
    )
    assert sorted(some + rest) == sorted(tests)
    assert len(rest) == 16


def test_every_place_is_there() -> None:
    for place in (place for draw in DRAWS for place in draw.places):
        path, _, test = place.partition("::")
        assert (ROOT / path).exists(), place
        assert not test or f"\ndef {test}(" in (ROOT / path).read_text(), place


def test_whatever_draws_is_in_a_long_form() -> None:
    places = [place for draw in DRAWS for place in draw.places]
    drawing = [
        module
        for module in MODULES
        if re.search(r"from tests\.run\.soak import .*\bdraw\b", module.read_text())
        or any(one.startswith(named(module)) or named(module).startswith(f"{one}/") for one in places)
    ]
    assert [named(module) for module in drawing if not in_a_long_form(module)] == []
