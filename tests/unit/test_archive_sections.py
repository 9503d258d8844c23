"""In which section a restore runs the entries of an archive."""

from __future__ import annotations

from restore.ddl.archive import read_archive
from snapshots.ddl.archive import AFTER_ROWS, BEFORE_ROWS
from tests.unit.made_archives import MadeEntry, made_archive

NO_SECTION = 1


def test_what_depends_on_a_postponed_entry_is_postponed_too_but_never_a_table() -> None:
    """A function whose body depends on a key, a default that calls it, a comment on that; a table that does, too."""
    made = [
        MadeEntry("TABLE", section=BEFORE_ROWS),
        MadeEntry("CONSTRAINT", section=AFTER_ROWS, dependencies=(1,)),
        MadeEntry("FUNCTION", section=AFTER_ROWS, dependencies=(2,)),
        MadeEntry("DEFAULT", section=BEFORE_ROWS, dependencies=(1, 3)),
        MadeEntry("COMMENT", section=NO_SECTION, dependencies=(4,)),
        MadeEntry("VIEW", section=BEFORE_ROWS, dependencies=(1,)),
        MadeEntry("TABLE", section=BEFORE_ROWS, dependencies=(3,)),
        MadeEntry("COMMENT", section=NO_SECTION, dependencies=(7,)),
    ]
    entries = read_archive(made_archive(made)[0]).entries
    assert [entry.section == AFTER_ROWS for entry in entries] == [False, True, True, True, True, False, False, False]
