"""The command that a process runs, as signs and outcomes name it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Command:
    """`snapshot` is "" for all. `operation` is "" until the command says it by a Reading."""

    kind: str
    snapshot: str = ""
    operation: str = ""
