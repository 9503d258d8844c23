"""A definition of a table, as segments name it that were written under definitions no commit lists yet."""

from __future__ import annotations

from fleet.lsn import Lsn
from fleet.record import Count, Record
from fleet.tables.groups import Group


class Definition(Record, frozen=True):
    """A definition of the table `oid`; by its name alone where `oid` is 0.

    `copied_from` is where the node's base copy under this definition begins to count, None where there is none of
    its own. `is_gone`: the table no longer exists.
    """

    oid: Count
    group: Group
    copied_from: Lsn | None = None
    is_gone: bool = False
