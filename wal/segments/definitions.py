"""The definition of a table, as decoding needs it and as segments store it while no commit lists it."""

from __future__ import annotations

from cutline.fleet.lsn import Lsn
from cutline.fleet.record import Count, Record
from cutline.fleet.tables.groups import Group


class Definition(Record, frozen=True):
    """A definition of the table with this `oid`; if `oid` is 0, the table is identified by its name.

    `copied_from` is the position of the node's base copy under this definition, None if it has no separate base copy.
    `is_gone`: the table no longer exists.
    """

    oid: Count
    group: Group
    copied_from: Lsn | None = None
    is_gone: bool = False
