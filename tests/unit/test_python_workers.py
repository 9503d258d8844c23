"""What freeze_modules does to the garbage collector of the process."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from types import ModuleType

import pytest

from cutline.columns.python_workers import freeze_modules


class Node:
    """An object that can be part of a cycle."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let every test begin with a module that was imported since the last freeze; undo the freezes.

    The objects of other tests are frozen before: visiting them would take seconds.
    """
    gc.freeze()
    monkeypatch.setitem(sys.modules, "imported_since", ModuleType("imported_since"))
    freeze_modules()
    monkeypatch.setitem(sys.modules, "imported_since_then", ModuleType("imported_since_then"))
    yield
    gc.unfreeze()


def test_present_objects_are_not_visited_by_later_collections() -> None:
    here = Node()
    freeze_modules()
    assert not any(one is here for one in gc.get_objects())


def test_garbage_is_collected_before_it_would_be_kept() -> None:
    gone = weakref.ref(Node())
    freeze_modules()
    assert gone() is None


def test_later_garbage_is_still_collected() -> None:
    freeze_modules()
    gone = weakref.ref(Node())
    gc.collect()
    assert gone() is None


def test_nothing_is_frozen_again_until_a_module_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    freeze_modules()
    later = Node()
    freeze_modules()
    assert any(one is later for one in gc.get_objects())
    monkeypatch.setitem(sys.modules, "imported_later", ModuleType("imported_later"))
    freeze_modules()
    assert not any(one is later for one in gc.get_objects())
