"""What the user asks of `restore`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """What to restore: a snapshot, and `groups` by pattern (none: all).

    `increment`: at this one; `at`: at the newest cut not after this moment; with neither at the newest.

    `replace`: put existing databases aside. `create_roles`: create the roles that a target lacks. `use_backup_copies`:
    take the rows that a primary's copy lacks from a standby's.
    """

    name: str
    increment: int | None = None
    at: datetime | None = None
    groups: tuple[str, ...] = ()
    replace: bool = False
    create_roles: bool = False
    use_backup_copies: bool = False
