"""The walk through the modules traces calls by the files that the product is imported from."""

from __future__ import annotations

from benchmarks.walk import ROOT, floors_of, traced_calls
from cutline.cli.output.tables import size_text


def test_a_call_from_one_module_into_another_is_traced() -> None:
    floors = floors_of(ROOT)
    with traced_calls(set(floors)) as walk:
        size_text(2048)
    assert "cutline.fleet.units" in walk.modules


def test_a_module_is_above_those_that_it_imports() -> None:
    floors = floors_of(ROOT)
    assert floors["cutline.wal.cut.resolve"] > floors["cutline.wal.cut.cut_values"] > floors["cutline.storage.errors"]
