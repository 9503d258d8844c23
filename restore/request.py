"""What the user asks of `restore`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """What to restore: a snapshot, and `groups` by pattern (none: all).

    `increment`: at this one; `at`: at the newest cut not after this moment; with neither at the newest.

    `routes` (restore/routing/routes.py) divide the rows of tables among targets that are not the snapshot's shards.

    `replace`: put existing databases aside. `create_roles`: create the roles that a target lacks.
    """

    name: str
    increment: int | None = None
    at: datetime | None = None
    groups: tuple[str, ...] = ()
    routes: tuple[str, ...] = ()
    replace: bool = False
    create_roles: bool = False
