"""In which section a restore runs the entries of an archive."""

from __future__ import annotations

from cutline.restore.ddl.entries import read_archive
from cutline.snapshots.ddl.ddl_archive import AFTER_ROWS, BEFORE_ROWS, DdlArchive
from tests.unit.made_archives import MadeEntry, made_archive

NO_SECTION = 1


def test_what_depends_on_a_postponed_entry_is_postponed_too_unless_a_table_needs_it() -> None:
    """A function whose body depends on a key, a default that calls it, and a comment on that."""
    made = [
        MadeEntry("TABLE", section=BEFORE_ROWS),
        MadeEntry("CONSTRAINT", section=AFTER_ROWS, dependencies=(1,)),
        MadeEntry("FUNCTION", section=AFTER_ROWS, dependencies=(2,)),
        MadeEntry("DEFAULT", section=BEFORE_ROWS, dependencies=(1, 3)),
        MadeEntry("COMMENT", section=NO_SECTION, dependencies=(4,)),
        MadeEntry("VIEW", section=BEFORE_ROWS, dependencies=(1,)),
        MadeEntry("INDEX", section=AFTER_ROWS, dependencies=(1,)),
    ]
    assert late(made) == [2, 3, 4, 5, 7]
    # What a table needs comes before its rows: here a domain that calls the function, which needs the key.
    domain = MadeEntry("DOMAIN", section=BEFORE_ROWS, dependencies=(3,))
    table = MadeEntry("TABLE", section=BEFORE_ROWS)
    assert late([*made, domain, table, MadeEntry("COMMENT", section=NO_SECTION, dependencies=(9,))]) == [7]


def late(made: list[MadeEntry]) -> list[int]:
    """The numbers of the entries that run after the rows."""
    return [one.number for one in read_archive(DdlArchive(*made_archive(made))).entries if one.section == AFTER_ROWS]
