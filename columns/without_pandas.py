"""Keep pyarrow from importing pandas, which takes a second of processor time and which nothing here uses.

pyarrow tries the import once in each process, when it first converts a Python object, and remembers whether it
succeeded. pyspark may still import pandas itself.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

import pyarrow as pa

PANDAS = "pandas"


class _HidingPandas(MetaPathFinder):
    def find_spec(
        self, name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == PANDAS:
            raise ImportError(f"{PANDAS} is not needed", name=PANDAS)
        return None


def settle() -> None:
    """Let pyarrow find that there is no pandas, unless something has imported it already."""
    if PANDAS in sys.modules:
        return
    hiding = _HidingPandas()
    sys.meta_path.insert(0, hiding)
    try:
        pa.array([0])
    finally:
        sys.meta_path.remove(hiding)
