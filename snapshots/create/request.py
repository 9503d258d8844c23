"""What the user asks of `create`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CreateRequest:
    """The options of one create. `include` and `exclude` are patterns on top of fleet.toml's.

    A `terminal` snapshot leaves the fleet read-only (snapshots/create/terminal.py). `large_objects`: copy them.
    `only_cut`: take a restore point, without rows.
    """

    name: str
    only_primary: bool = False
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    retries: int = 3
    wait_seconds: float = 60.0
    comment: str = ""
    terminal: bool = False
    large_objects: bool = False
    only_cut: bool = False
