"""The kinds that `check` accepts although a reader of the store can detect them: missed.txt."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

PATH = Path(__file__).with_name("missed.txt")


def read_missed() -> frozenset[str]:
    """Return the ids of the kinds that are known to be missed."""
    return frozenset(line for line in PATH.read_text(encoding="utf-8").splitlines() if line)


def write_missed(ids: Iterable[str]) -> None:
    """Record the kinds that are missed now, in this order."""
    PATH.write_text("".join(f"{one}\n" for one in ids), encoding="utf-8")
