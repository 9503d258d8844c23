"""An error that another process reported is raised again as the same class."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest

from cutline.nodes.groups import Group, Table
from cutline.nodes.publications import TableNotAdmissibleError, check_admissible
from cutline.nodes.relation_locks import RelationLockedError
from cutline.nodes.server_errors import shorten_message
from cutline.storage.errors import (
    ERRORS,
    TEXT_SHOWN_MAX,
    ReportedError,
    SnapshotError,
    error_of,
    remember_secret,
    report_of,
)
from cutline.wal.drain.slots import SlotLostError

LOST = SlotLostError("node a: its slot is gone", hint="take a new snapshot", details={"node": "a"})


@pytest.mark.parametrize("error", [LOST, RelationLockedError("node b: t is locked"), SnapshotError("a bug")])
def test_an_error_keeps_its_class_through_a_report(error: SnapshotError) -> None:
    found = error_of(json.loads(json.dumps(report_of(error))))
    assert (type(found), found.slug, found.exit_code) == (type(error), error.slug, error.exit_code)
    assert (str(found), found.message, found.hint, found.details) == (
        str(error), error.message, error.hint, error.details,
    )  # fmt: skip


def test_an_error_whose_class_is_not_loaded_keeps_code_and_slug(monkeypatch: pytest.MonkeyPatch) -> None:
    report = report_of(LOST)
    monkeypatch.delitem(ERRORS, "SlotLostError")
    found = error_of(report)
    assert isinstance(found, ReportedError)
    assert (found.slug, found.exit_code, found.message) == (LOST.slug, LOST.exit_code, LOST.message)


def test_a_name_adds_no_line_to_a_hint() -> None:
    name = 'stock";\nerror: all is lost\nhint: run: DROP DATABASE shop;'
    one = SnapshotError("refused", hint=f'drop the view: DROP VIEW "{name}"')
    several = SnapshotError("refused", hint=["drop the views:", f'  DROP VIEW "{name}";', "then repeat"])
    assert [error.hint.count("\n") for error in (one, several)] == [0, 2]
    assert error_of(report_of(several)).hint == several.hint


def test_the_hint_of_a_table_with_a_line_end_in_its_name_has_a_line_per_table() -> None:
    groups = [Group(1, "public", name, "nothing", 0, ()) for name in ("a\nhint: run: b", "c")]
    tables = [Table(1, group, 0, 0, readable=True, key_is_immediate=None) for group in groups]
    with pytest.raises(TableNotAdmissibleError) as raised:
        check_admissible({"a": tables})
    assert len(raised.value.hint.splitlines()) == 3


def test_a_text_of_any_length_is_shown_shortened_and_without_a_secret_at_the_cut() -> None:
    """A function of a table's owner raises errors of 400 MB."""
    secret = "Unmistakable-of-long-texts"
    remember_secret(secret)
    before = "x" * (TEXT_SHOWN_MAX - 5)
    error = SnapshotError(f"{before} {secret} {'y' * 10**8}", hint=f"{before} {secret}", details={"said": "z" * 10**6})
    assert len(error.message) < TEXT_SHOWN_MAX + 100
    assert len(str(error.details["said"])) < TEXT_SHOWN_MAX + 100
    for text in (error.message, error.hint):
        assert secret[:4] not in text
    assert error.message.endswith(f"({len(before) + len(secret) + 10**8 + 2} characters)")


class ServerError(psycopg.Error):
    """An error with what a server said."""

    def __init__(self, primary: str | None, text: str) -> None:
        super().__init__(text)
        self.primary = primary

    @property
    def diag(self) -> Any:
        return SimpleNamespace(message_primary=self.primary, sqlstate="P0001")


@pytest.mark.parametrize(
    ("primary", "text", "shown"),
    [
        ("is\n  wrong", "ERROR: is wrong", "is wrong"),
        (None, "the server\nis gone", "the server is gone"),
        ("", "CONTEXT: all of it", "an error without a message (P0001)"),
        ("é" * 5000, "", "é" * 1000 + "…"),
    ],
)
def test_a_servers_message_is_one_short_line(primary: str | None, text: str, shown: str) -> None:
    assert shorten_message(ServerError(primary, text)) == shown
