"""What the user asks of `restore`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """What to restore: a snapshot at an increment (None: the newest), and `groups` by pattern (none: all).

    `replace`: put existing databases aside. `create_roles`: create the roles that a target lacks.
    """

    name: str
    increment: int | None = None
    groups: tuple[str, ...] = ()
    replace: bool = False
    create_roles: bool = False
