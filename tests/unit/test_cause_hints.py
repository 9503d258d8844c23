"""A hint fits the cause: what repeating a command can't mend is not to be repeated, and no command is a placeholder."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any, cast

import psycopg
import pytest
from psycopg.pq import DiagnosticField

from cutline.cli.commands.restore_ends import naming_target
from cutline.fleet.config import Node
from cutline.fleet.messages import CHECK_NAMED, IN_STEPS
from cutline.nodes.connections import NodeDisruptedError
from cutline.nodes.server_errors import stopped_hint
from cutline.restore.plan.plan import RestorePlan
from cutline.restore.rows.load import LoadError, load_error
from cutline.restore.rows.refused_rows import (
    EQUAL_KEYS,
    INDEX_LIMIT,
    OTHER_PARTITION,
    OWN_CODE,
    OWN_RULES,
    PRIVILEGES,
    READS_OTHERS,
    SEE_LOG,
    WHICH_IS_RIGHT,
    WRONG_COUNT,
    hint_of,
)
from cutline.restore.run.loading import complete_hint
from cutline.restore.run.refused import EQUAL_KEYS as EQUAL_KEYS_LATER
from cutline.restore.run.refused import OF_SHARDS, OWNERS, ROW_CAUSES, _cause_of
from cutline.restore.run.rehearsal import CREATE_LACKING, CREATED_BY_OTHERS, REMOVE_CAUSE, remedy_of
from cutline.storage.errors import SnapshotError

NODE = Node("s1", "dbname=shop")


def refused(state: str, detail: str = "", constraint: str = "rule") -> psycopg.Error:
    """An error as the server sends it. PostgreSQL manual, "PostgreSQL Error Codes"."""
    fields = {
        DiagnosticField.SQLSTATE: state.encode(),
        DiagnosticField.MESSAGE_PRIMARY: b"no",
        DiagnosticField.MESSAGE_DETAIL: detail.encode() or None,
        DiagnosticField.TABLE_NAME: b"item",
        DiagnosticField.CONSTRAINT_NAME: constraint.encode() or None,
    }
    info = cast("Any", defaultdict(lambda: None, fields))
    try:
        return psycopg.errors.lookup(state)("no", info=info)
    except KeyError:
        return psycopg.errors.InternalError_("no", info=info)


@pytest.mark.parametrize(
    ("state", "what"),
    [
        ("23505", EQUAL_KEYS),  # unique_violation
        ("23505", WHICH_IS_RIGHT),
        ("23P01", EQUAL_KEYS),  # exclusion_violation
        ("23514", READS_OTHERS),  # check_violation
        ("23502", OWN_RULES),  # not_null_violation
        ("22P02", CHECK_NAMED),  # invalid_text_representation
        ("22P04", CHECK_NAMED),  # bad_copy_file_format: too many or too few fields
        ("22001", CHECK_NAMED),  # string_data_right_truncation
        ("42501", PRIVILEGES),  # insufficient_privilege
        ("42883", OWN_CODE),  # undefined_function
        ("P0001", OWN_CODE),  # raise_exception
        ("39000", OWN_CODE),  # external_routine_invocation_exception
        ("XX000", SEE_LOG),  # internal_error
        ("54000", INDEX_LIMIT),  # program_limit_exceeded, with the name of an index
    ],
)
def test_a_refused_row_has_the_hint_of_its_cause(state: str, what: str) -> None:
    lines = hint_of(refused(state))
    assert any(what in line for line in lines), lines
    assert ("server's log" in " ".join(lines)) == (what == SEE_LOG)


def test_a_row_of_another_partition_is_told_from_one_that_a_check_refuses() -> None:
    assert hint_of(refused("23514", constraint="")) == [OTHER_PARTITION, IN_STEPS]


def test_the_key_that_occurs_twice_is_shown_but_no_row() -> None:
    error = refused("23505", "Key (id)=(7) already exists.")
    found = load_error(NODE, error, hint_of(error))
    assert isinstance(found, LoadError)
    assert found.message == "node s1: no: Key (id)=(7) already exists. item"
    assert "repeat the command" not in found.hint.replace("stop it, then repeat the command", "")
    row = refused("23514", "Failing row contains (7, secret).")
    assert "secret" not in load_error(NODE, row, hint_of(row)).message
    # An error about something else than the rows is not theirs.
    assert isinstance(load_error(NODE, refused("53100"), hint_of(error)), NodeDisruptedError)


def planned(*, data_only: bool = False, steps: tuple[str, str] | None = None, routed: bool = False) -> RestorePlan:
    chain = SimpleNamespace(name="daily", last=SimpleNamespace(increment=3))
    request = SimpleNamespace(scope=SimpleNamespace(data_only=data_only))
    return cast("RestorePlan", SimpleNamespace(chain=chain, request=request, steps=steps, topology=routed or None))


def test_a_restore_completes_the_commands() -> None:
    hint = f"{WRONG_COUNT}\n{OWN_RULES}\n{IN_STEPS}"
    assert CHECK_NAMED in WRONG_COUNT
    in_steps = complete_hint(hint, planned(steps=("snapshot restore daily --schema-only", "snapshot restore daily X")))
    assert "run: snapshot check daily --increment 3" in in_steps
    assert in_steps.endswith(
        "in steps: snapshot restore daily --schema-only; change the table by hand; then: snapshot restore daily X"
    )
    assert complete_hint(hint, planned(data_only=True)).endswith("after the change, repeat the command")
    # Rows that go elsewhere have no steps.
    assert complete_hint(hint, planned()).endswith(IN_STEPS)
    assert "NAME" not in complete_hint(hint, planned())


def test_the_command_completes_what_no_restore_has_completed() -> None:
    with pytest.raises(SnapshotError) as raised, naming_target(None, "daily"):
        raise SnapshotError("no", hint=[CHECK_NAMED, "see: snapshot show NAME"])
    assert raised.value.hint == "snapshot check daily\nsee: snapshot show daily"


def test_what_the_rows_cause_after_the_load_is_told_from_what_the_target_lacks() -> None:
    assert _cause_of("23505", planned()) == EQUAL_KEYS_LATER
    # A key that is unique on each shard need not be unique in a target of several.
    assert _cause_of("23505", planned(routed=True)) == OF_SHARDS
    assert _cause_of("23503", planned()) == ROW_CAUSES["23503"]
    assert _cause_of("23514", planned()) == ROW_CAUSES["23"]
    assert _cause_of("22P02", planned()) == ROW_CAUSES["22"]
    # A function that an index calls as its table's owner is not allowed something, or does not find it.
    assert _cause_of("42501", planned()) == _cause_of("42883", planned()) == OWNERS
    # feature_not_supported: nothing about rows.
    assert _cause_of("0A000", planned()) == ""


@pytest.mark.parametrize(
    ("states", "remedy"),
    [
        # undefined_object, undefined_function, undefined_table, feature_not_supported (an extension), undefined_file
        (("42704", "42883", "42P01", "0A000", "58P01", "3F000"), CREATE_LACKING),
        # unique_violation, duplicate_object, duplicate_table, duplicate_schema
        (("23505", "42710", "42P07", "42P06"), CREATED_BY_OTHERS),
        # syntax_error, invalid_table_definition, internal_error
        (("42601", "42P16", "XX000"), REMOVE_CAUSE),
    ],
)
def test_what_an_empty_database_refuses_has_the_hint_of_its_cause(states: tuple[str, ...], remedy: str) -> None:
    assert {remedy_of(state) for state in states} == {remedy}


def test_a_missing_file_and_a_full_disk_are_no_reason_to_look_into_the_log() -> None:
    assert "missing or damaged" in stopped_hint("58P01")
    assert "missing or damaged" in stopped_hint("XX001")
    assert stopped_hint("53100").startswith("free space")
    assert "max_standby_streaming_delay" in stopped_hint("40001")
    assert stopped_hint("XX000") == stopped_hint("") == ""
