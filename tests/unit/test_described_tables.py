"""What the DDL says of tables, and how a commit may contradict it. The store was written from PostgreSQL's servers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from cutline.check.new_part import NewPart
from cutline.check.report import Findings, SnapshotReport
from cutline.check.verify import check_stored_ddl
from cutline.nodes.groups import Group
from cutline.snapshots.ddl import ddl_archive
from cutline.snapshots.ddl.described_tables import Described, contradictions, describe, read_table
from cutline.snapshots.ddl.dump import read_stored_ddl
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import DDL, WITHOUT_ROWS, DefinitionChanges
from cutline.snapshots.records.proven_chains import read_chain
from cutline.storage.open import open_store

KEPT = Path(__file__).parents[1] / "kept" / "plain"
SHARD = "s1"


@pytest.fixture(scope="module")
def chain() -> Chain:
    return read_chain(open_store(f"file://{KEPT}", {}), "daily")


@pytest.fixture(scope="module")
def ddl(chain: Chain) -> Described:
    return describe(read_stored_ddl(open_store(f"file://{KEPT}", {}), chain, SHARD))


def with_groups(chain: Chain, change: Callable[[Group], Group | None]) -> Chain:
    """The chain as if its commits had listed the newest definitions, changed."""
    changed = [change(group) for group in chain.groups(SHARD)]
    groups = chain.full.groups | {SHARD: tuple(group for group in changed if group)}
    increments = tuple(structs.replace(increment, definition_changes=None) for increment in chain.increments)
    return replace(chain, full=structs.replace(chain.full, groups=groups), increments=increments)


def renamed(group: Group, names: dict[str, str]) -> Group:
    columns = tuple(structs.replace(column, name=names.get(column.name, column.name)) for column in group.columns)
    return structs.replace(group, columns=columns)


def test_a_commit_and_its_ddl_agree(chain: Chain, ddl: Described) -> None:
    assert contradictions(chain, SHARD, ddl) == []
    assert contradictions(with_groups(chain, lambda group: group), SHARD, ddl) == []


def test_columns_of_one_type_whose_names_are_exchanged_are_found(chain: Chain, ddl: Described) -> None:
    names = {"id": "account", "account": "id"}
    exchanged = with_groups(chain, lambda group: renamed(group, names) if group.table == "entry" else group)
    assert contradictions(exchanged, SHARD, ddl) == [
        "table public.entry has columns account, id, remark in the commit, but id, account, remark in the DDL"
    ]


def test_another_type_key_table_or_sequence_is_found(chain: Chain, ddl: Described) -> None:
    def other_type(group: Group) -> Group:
        columns = tuple(
            structs.replace(column, type="integer") if column.type == "bigint" else column for column in group.columns
        )
        return structs.replace(group, columns=columns)

    column = "of table public.entry has type integer in the commit, but bigint in the DDL"
    assert contradictions(with_groups(chain, other_type), SHARD, ddl) == [
        f"column id {column}",
        f"column account {column}",
    ]
    wide = with_groups(chain, lambda group: structs.replace(group, key_width=2) if group.table == "entry" else group)
    assert contradictions(wide, SHARD, ddl) == [
        "table public.entry has key account, id in the commit, but not in the DDL"
    ]
    fewer = with_groups(chain, lambda group: group if group.table != "long" else None)
    assert contradictions(fewer, SHARD, ddl) == ["the commit lists no rows of table public.long"]
    others = with_groups(
        chain, lambda group: structs.replace(group, table=f"{group.table}_2") if group.table == "long" else group
    )
    assert contradictions(others, SHARD, ddl) == [
        "the DDL does not create table public.long_2",
        "the commit lists no rows of table public.long",
    ]
    (*before, last) = chain.increments
    none = replace(chain, increments=(*before, structs.replace(last, sequences=last.sequences | {SHARD: ()})))
    assert contradictions(none, SHARD, ddl) == ["the commit has no value for sequence public.entry_id_seq"]
    (sequence,) = last.sequences[SHARD]
    sequences = {SHARD: (sequence, structs.replace(sequence, name="other"))}
    more = replace(chain, increments=(*before, structs.replace(last, sequences=last.sequences | sequences)))
    assert contradictions(more, SHARD, ddl) == ["the DDL does not create sequence public.other"]


def found_in(chain: Chain, monkeypatch: pytest.MonkeyPatch, after: int | None = None, earlier: int = 0) -> list[str]:
    """The contradictions that a check of the chain, or of what is new after an increment, finds.

    It reads the contents of each DDL once, and of `earlier` DDL of the checked part.
    """
    read: list[int] = []
    read_contents = ddl_archive.read_contents
    monkeypatch.setattr(ddl_archive, "read_contents", lambda body: read.append(1) or read_contents(body))
    findings = Findings(SnapshotReport(chain.name, chain.last.increment))
    part = NewPart(chain, after)
    check_stored_ddl(open_store(f"file://{KEPT}", {}), part, findings)
    monkeypatch.undo()
    listed = [entry for commit in part.commits for entry in commit.own_objects if entry.kind == DDL]
    assert len(read) == len(listed) + earlier
    assert findings.report.compared.objects == sum(
        entry.kind in WITHOUT_ROWS for commit in part.commits for entry in commit.own_objects
    )
    assert {conflict.kind for conflict in findings.report.conflicts} <= {"definition"}
    return [conflict.detail for conflict in findings.report.conflicts]


def test_a_commit_without_ddl_of_its_own_is_compared_with_the_newest(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restore would use that DDL, so it would refuse what the check accepts."""
    assert found_in(chain, monkeypatch) == []
    before, last = chain.increments[:-1], chain.last
    valueless = {"sequences": last.sequences | {SHARD: ()}, "definition_changes": None}
    changed = replace(chain, increments=(*before, structs.replace(last, **valueless)))
    assert found_in(changed, monkeypatch) == ["the commit has no value for sequence public.entry_id_seq"]


def test_what_is_new_is_compared_with_earlier_ddl_only_if_it_differs_from_the_commit_that_was_checked(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier check has compared that DDL with the commit that it checked."""
    checked = chain.last.increment
    idle = structs.replace(chain.last, increment=checked + 1, definition_changes=None, extension_rows=())
    same = replace(chain, increments=(*chain.increments, idle))
    assert found_in(same, monkeypatch, after=checked) == []
    valueless = structs.replace(idle, sequences=idle.sequences | {SHARD: ()})
    found = found_in(replace(chain, increments=(*chain.increments, valueless)), monkeypatch, checked, earlier=1)
    assert found == ["the commit has no value for sequence public.entry_id_seq"]
    (long,) = (group for group in chain.groups(SHARD) if group.table == "long")
    without = structs.replace(idle, definition_changes=DefinitionChanges(gone={SHARD: (long.number,)}))
    found = found_in(replace(chain, increments=(*chain.increments, without)), monkeypatch, checked, earlier=1)
    assert found == ["the commit lists no rows of table public.long"]


def test_a_contradiction_that_stays_is_reported_once(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    fewer = with_groups(chain, lambda group: group if group.table != "long" else None)
    assert found_in(fewer, monkeypatch).count("the commit lists no rows of table public.long") == 1


def test_of_a_statement_only_stored_columns_are_read() -> None:
    """As pg_dump 18 writes it: a default may contain anything, and a generated column has no stored value."""
    text = """CREATE TABLE "s"."a ""b" (
    "id" bigint NOT NULL,
    "of ""x"", y" character varying(3) DEFAULT 'a,
    "no" text (' COLLATE "C",
    "n" numeric(10,2) DEFAULT "s"."f"(1, (2)),
    "at" timestamp(3) with time zone,
    "twice" integer GENERATED ALWAYS AS (("id" * 2)) STORED,
    "auto" integer NOT NULL,
    "e" "s"."E" DEFAULT E'\\\\',
    CONSTRAINT "c" CHECK (("id" > 0))
);

ALTER TABLE ONLY "s"."a ""b" ALTER COLUMN "e" SET STORAGE EXTERNAL;
"""
    table = read_table(text)
    assert table is not None
    assert table.is_whole
    assert [(column.name, column.type) for column in table.columns] == [
        ("id", "bigint"), ('of "x", y', "character varying(3)"), ("n", "numeric(10,2)"),
        ("at", "timestamp(3) with time zone"), ("auto", "integer"), ("e", "s.E"),
    ]  # fmt: skip
    root = read_table('CREATE TABLE "s"."r" (\n    "id" bigint\n)\nPARTITION BY RANGE ("id");\n')
    assert root is None
    child = read_table('CREATE TABLE "s"."c" (\n    "own" bigint\n)\nINHERITS ("s"."p");\n')
    assert child is not None
    assert (child.is_whole, [column.name for column in child.columns]) == (False, ["own"])
    typed = read_table('CREATE TABLE "s"."t" OF "s"."ty"\nPARTITION BY RANGE ("a");\n')
    assert typed is None
    of_type = read_table('CREATE TABLE "s"."t" OF "s"."ty" (\n    "a" WITH OPTIONS NOT NULL\n);\n')
    assert of_type is not None
    assert (of_type.is_whole, of_type.columns) == (False, ())
    empty = read_table('CREATE TABLE "s"."none" (\n);\n')
    assert empty is not None
    assert empty.columns == ()
