"""The comment of a database is a restore's record only if nothing in it can be another statement."""

from __future__ import annotations

import pytest

from cutline.restore.targets.databases import DatabaseRecord, Phase, parse_record, record_text, without_record
from cutline.snapshots.records.commit import DatabaseProperties


def record(ledger: str | None) -> DatabaseRecord:
    return DatabaseRecord(
        operation="20261122T081034Z-ac5ee8b427", snapshot="daily", increment=1, digest="d", by="cutline",
        began_at="2026-11-22T08:10:34.000Z", version="1", groups=(), replace=False, create_roles=False,
        allow_refused_ddl=False, in_store=True, shards=("s1",), phase=Phase.LOADING, ledger=ledger,
    )  # fmt: skip


@pytest.mark.parametrize("ledger", [None, f"cutline_{'0a' * 16}.ledger", "cutline_restoring_0123456789.ledger"])
def test_a_record_is_read_as_it_was_written(ledger: str | None) -> None:
    assert parse_record(record_text(record(ledger))) == record(ledger)


@pytest.mark.parametrize(
    "ledger",
    [
        "pg_class",
        "cutline_a.ledger; SELECT 1",
        "cutline_a.ledger WHERE f()",
        "cutline_a.ledger\n",
        "cutline_a.other",
        "",
    ],
)
def test_a_ledger_of_another_name_makes_it_no_record(ledger: str) -> None:
    assert parse_record(record_text(record(ledger))) is None


@pytest.mark.parametrize(
    "comment",
    [
        record_text(record(None)),
        f"\n {record_text(record(None))}\t",
        record_text(record(None)).replace("cutline/restoring/1", "\\u0063utline\\/restoring/2"),
        record_text(record("pg_class")),
        '{"schema": "cutline/restoring/1"}',
    ],
)
def test_a_comment_in_the_form_of_a_record_is_not_given_to_a_database(comment: str) -> None:
    """Its owner on the source has chosen it; on the target it would be that of our role."""
    kept, left_out = without_record(DatabaseProperties(owner="app", comment=comment, is_template=True))
    assert (kept, len(left_out)) == (DatabaseProperties(owner="app", is_template=True), 1)


@pytest.mark.parametrize("comment", [None, "", "the bank's", '{"schema": "shop"}', "[" * 200_000, "{} cutline/"])
def test_any_other_comment_is_given(comment: str | None) -> None:
    properties = DatabaseProperties(owner="app", comment=comment)
    assert without_record(properties) == (properties, [])
