"""A restore into tables that exist whose database, or what it kept there, is gone: neither end lies."""

from __future__ import annotations

import psycopg
import pytest

from cutline.nodes.connections import NodeUnreachableError
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.rows.filled_tables import TablesUnfitError
from cutline.restore.targets.databases import RestoreCrashPoint
from cutline.restore.unfinished.unfinished import UnfinishedRestoreError
from tests.integration.refusing import execute
from tests.integration.restoring.ending import abandon, resume
from tests.integration.restoring.filled import acting_at, assert_empty, leave, load, tables_to_fill
from tests.integration.restoring.target_place import (
    DATABASE,
    NAME,
    Place,
    maintenance_of,
    open_restores,
)

WITHOUT_REPLACE = RestoreRequest(NAME)


def lose(*_: object) -> None:
    raise NodeUnreachableError("node s2: it is gone")


def test_a_filled_database_that_is_gone_keeps_both_ends_from_lying(place: Place) -> None:
    with tables_to_fill(place):
        leave(place, RestoreCrashPoint.ROWS_LOADED, 1)
        execute(maintenance_of(place, 1), f"ALTER DATABASE {DATABASE} RENAME TO hidden", f"CREATE DATABASE {DATABASE}")
        try:
            for end in (abandon, resume):
                with pytest.raises(
                    UnfinishedRestoreError, match=f"the restore's schema in database {DATABASE} is missing"
                ):
                    end(place)
            assert len(open_restores(place)) == 1
        finally:
            execute(
                maintenance_of(place, 1), f"DROP DATABASE {DATABASE}", f"ALTER DATABASE hidden RENAME TO {DATABASE}"
            )
        abandon(place)
        assert_empty(place)


def test_a_resumed_filling_that_had_begun_to_be_undone_knows_again_what_is_lost(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tables of one database were emptied when those of the next were in use."""

    def refuse(*_: object) -> None:
        raise TablesUnfitError("refused")

    with tables_to_fill(place):
        with monkeypatch.context() as patch:
            patch.setattr("cutline.restore.run.loading.finish_databases", refuse)
            patch.setattr("cutline.restore.rows.filling.LOCK_SECONDS_MAX", 1)
            with psycopg.connect(place.dsns()[1]) as other:
                watching = acting_at(RestoreCrashPoint.ROWS_LOADED, lambda: other.execute("SELECT FROM item"))
                with pytest.raises(TablesUnfitError):
                    load(place, watching)
        assert any("could not be undone" in note for note in watching.notes)
        with monkeypatch.context() as patch:
            patch.setattr("cutline.restore.run.loading.finish_databases", lose)
            with pytest.raises(NodeUnreachableError):
                resume(place)
        execute(maintenance_of(place, 0), f"ALTER DATABASE {DATABASE} RENAME TO hidden", f"CREATE DATABASE {DATABASE}")
        try:
            with pytest.raises(UnfinishedRestoreError, match=f"the restore's schema in database {DATABASE} is missing"):
                abandon(place)
        finally:
            execute(
                maintenance_of(place, 0), f"DROP DATABASE {DATABASE}", f"ALTER DATABASE hidden RENAME TO {DATABASE}"
            )
        abandon(place)
        assert_empty(place)
