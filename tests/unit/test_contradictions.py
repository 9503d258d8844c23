"""What the DDL says of tables, and how a commit may contradict it. The store was written from PostgreSQL's servers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from msgspec.structs import replace

from cutline.nodes.groups import Group
from cutline.nodes.left_out import LeftOut, LeftOutKind
from cutline.snapshots.ddl.contradictions import compare_tables, contradictions
from cutline.snapshots.ddl.ddl_archive import DdlArchive, NewEntry, rewrite
from cutline.snapshots.ddl.described_ddl import describe
from cutline.snapshots.ddl.dump import read_stored_ddl
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import DatabasePrivilege, DatabaseSetting
from cutline.snapshots.records.proven_chains import read_chain
from cutline.storage.open import open_store
from tests.unit.made_definitions import altered

KEPT = Path(__file__).parents[1] / "kept" / "plain"
SHARD = "s1"


@pytest.fixture(scope="module")
def chain() -> Chain:
    return read_chain(open_store(f"file://{KEPT}", {}), "daily")


@pytest.fixture(scope="module")
def ddl(chain: Chain) -> DdlArchive:
    return read_stored_ddl(open_store(f"file://{KEPT}", {}), chain, SHARD)


def with_groups(chain: Chain, change: Callable[[Group], Group | None]) -> Chain:
    """The chain as if its commits had listed the newest definitions, changed."""
    changed = [change(group) for group in chain.groups(SHARD)]
    groups = chain.full.groups | {SHARD: tuple(group for group in changed if group)}
    tables = chain.full.tables | {SHARD: tuple(chain.tables(SHARD).values())}
    increments = tuple(structs.replace(increment, definition_changes=None) for increment in chain.increments)
    return replace(chain, full=structs.replace(chain.full, groups=groups, tables=tables), increments=increments)


def renamed(group: Group, names: dict[str, str]) -> Group:
    columns = tuple(structs.replace(column, name=names.get(column.name, column.name)) for column in group.columns)
    return structs.replace(group, columns=columns)


def test_a_commit_and_its_ddl_agree(chain: Chain, ddl: DdlArchive) -> None:
    assert contradictions(chain, SHARD, ddl) == []
    assert contradictions(with_groups(chain, lambda group: group), SHARD, ddl) == []


def test_columns_of_one_type_whose_names_are_exchanged_are_found(chain: Chain, ddl: DdlArchive) -> None:
    names = {"id": "account", "account": "id"}
    exchanged = with_groups(chain, lambda group: renamed(group, names) if group.table == "entry" else group)
    assert contradictions(exchanged, SHARD, ddl) == [
        "table public.entry has columns account, id, remark in the commit, but id, account, remark in the DDL"
    ]


def test_another_type_key_table_or_sequence_is_found(chain: Chain, ddl: DdlArchive) -> None:
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


def test_another_bound_of_a_sequence_is_found(chain: Chain, ddl: DdlArchive) -> None:
    (sequence,) = chain.sequences(SHARD)

    def bounded(smallest: int, largest: int) -> Chain:
        changed = structs.replace(sequence, smallest=smallest, largest=largest)
        return with_last(chain, sequences={SHARD: (changed,), "s2": ()})

    name, largest = "sequence public.entry_id_seq", 2**63 - 1
    assert contradictions(bounded(1, largest), SHARD, ddl) == []
    assert contradictions(bounded(-1, 2**31 - 1), SHARD, ddl) == [
        f"the smallest value of {name} is -1 in the commit, but 1 in the DDL",
        f"the largest value of {name} is {2**31 - 1} in the commit, but {largest} in the DDL",
    ]


def test_an_extension_that_the_database_did_not_have_is_found(chain: Chain, ddl: DdlArchive) -> None:
    entry = NewEntry("EXTENSION", "pgcrypto", 'CREATE EXTENSION IF NOT EXISTS "pgcrypto" WITH SCHEMA "public";\n')
    more = DdlArchive.of(rewrite(ddl.body, ddl.contents, {}, first=[entry]))
    facts = chain.database_facts(SHARD)
    assert facts is not None
    listed = structs.replace(facts, extensions=facts.extensions | {"pgcrypto": "1.3"})
    assert contradictions(with_last(chain, databases={SHARD: listed}), SHARD, more) == []
    assert contradictions(chain, SHARD, more) == ["the commit does not list extension pgcrypto"]


def test_ddl_that_no_server_could_run_is_found(chain: Chain, ddl: DdlArchive) -> None:
    cut_off = altered(ddl, {"INDEX account_twice": (");", "")})
    assert contradictions(chain, SHARD, cut_off) == ["the statement for INDEX public.account_twice is cut off"]


@pytest.mark.parametrize(
    ("values", "detail"),
    [
        # character varying(8), numeric(6,2) and timestamp(3) as format_type prints them (PostgreSQL's pg_type.dat).
        ({"type": "bigint", "type_oid": 701}, "bigint, whose oid is 20, but the commit says 701"),
        ({"type": "bigint[]", "type_oid": 20}, "bigint[], whose oid is 1016, but the commit says 20"),
        ({"type": "character varying(8)", "type_oid": 1043, "type_modifier": 104}, "modifier is 12"),
        ({"type": "numeric(6,2)[]", "type_oid": 1231, "type_modifier": 7}, f"modifier is {(6 << 16) + 2 + 4}"),
        ({"type": "numeric(3,-2)", "type_oid": 1700, "type_modifier": 7}, f"modifier is {(3 << 16) + 0x7FE + 4}"),
        ({"type": "timestamp(3) with time zone", "type_oid": 1184, "type_modifier": 4}, "modifier is 3"),
        ({"type": "interval(2)", "type_oid": 1186, "type_modifier": 2}, f"modifier is {(0x7FFF << 16) + 2}"),
        ({"type": "text", "type_oid": 25, "type_modifier": 12}, "modifier is -1"),
        ({"type": '"char"', "type_oid": 18}, ""),
        ({"type": "interval day to second(3)", "type_oid": 1186, "type_modifier": 67_895_299}, ""),
        ({"type": "public.geometry(Point,4326)", "type_oid": 17_000, "type_modifier": 1_107_460}, ""),
        ({"type": "public.mood", "type_oid": 16_386}, ""),
        ({"type": "public.mood", "type_oid": 16_387}, "public.mood, whose oid is 16386, but the commit says 16387"),
    ],
)
def test_the_oid_and_modifier_of_a_type_are_those_of_its_name(
    chain: Chain, ddl: DdlArchive, values: dict[str, Any], detail: str
) -> None:
    def change(group: Group) -> Group:
        columns = tuple(structs.replace(one, **values) if one.name == "n" else one for one in group.columns)
        return structs.replace(group, columns=columns)

    named = altered(ddl, {"TABLE long": ('"n" integer', f'"n" {values["type"]}')})
    found = contradictions(with_groups(chain, change), SHARD, named)
    assert len(found) == bool(detail)
    assert not detail or (detail in found[0] and "column n of table public.long has type" in found[0])


def test_a_table_that_is_unlogged_in_the_commit_only_is_found(chain: Chain, ddl: DdlArchive) -> None:
    out = tuple(LeftOut(SHARD, LeftOutKind.UNLOGGED_TABLE, name, "why") for name in ("public.long", "public.aside"))
    left_out = with_last(with_groups(chain, lambda group: group if group.table != "long" else None), left_out=out)
    assert contradictions(left_out, SHARD, ddl) == ["table public.long is unlogged in the commit, but not in the DDL"]
    unlogged = altered(ddl, {"TABLE long": ("CREATE TABLE", "CREATE UNLOGGED TABLE")})
    assert contradictions(left_out, SHARD, unlogged) == []
    assert contradictions(chain, SHARD, unlogged) == ["the DDL does not create table public.long"]
    # The rules may exclude it as well.
    rules = structs.replace(chain.full.rules, exclude=("public.long",))
    excluding = replace(left_out, full=structs.replace(left_out.full, rules=rules))
    assert contradictions(excluding, SHARD, ddl) == []


def test_the_encoding_is_the_one_in_which_ddl_is_dumped(chain: Chain, ddl: DdlArchive) -> None:
    """A restore would convert names and comments from it."""
    latin = altered(ddl, {"ENCODING ENCODING": ("SQL_ASCII", "LATIN1")})
    assert contradictions(chain, SHARD, latin) == [
        "the DDL's encoding is set by \"SET client_encoding = 'LATIN1';\", but it was dumped as SQL_ASCII"
    ]


def with_properties(chain: Chain, **values: Any) -> Chain:
    (*_, last) = chain.increments
    facts = last.databases[SHARD]
    assert facts.properties is not None
    properties = structs.replace(facts.properties, **values)
    return with_last(chain, databases=last.databases | {SHARD: structs.replace(facts, properties=properties)})


@pytest.mark.parametrize(
    ("values", "detail"),
    [
        ({"owner": "clerk"}, "the database has owner clerk in the commit, but postgres in the DDL"),
        ({"comment": "ours"}, "the database has comment ours in the commit, but none in the DDL"),
        ({"connection_limit": 7}, "the database has connection limit 7 in the commit, but -1 in the DDL"),
        ({"is_template": True}, "the database has template flag True in the commit, but False in the DDL"),
        (
            {"privileges": (DatabasePrivilege("postgres", "", "CONNECT"),)},
            "the database has privileges CONNECT of PUBLIC in the commit, but CONNECT of PUBLIC, TEMPORARY of PUBLIC,"
            " CONNECT of postgres, CREATE of postgres, TEMPORARY of postgres in the DDL",
        ),
        (
            {"settings": (DatabaseSetting("work_mem", "8MB"),)},
            "setting work_mem of the database is 8MB in the commit, but not set in the DDL",
        ),
        # A terminal snapshot sets this one itself. The DDL has other forms of the next two.
        ({"settings": (DatabaseSetting("default_transaction_read_only", "on"),)}, ""),
        ({"settings": (DatabaseSetting("local_preload_libraries", ""),)}, ""),
        ({"settings": (DatabaseSetting("application_name", "a\\b"),)}, ""),
    ],
)
def test_properties_of_the_database_that_its_ddl_does_not_have_are_found(
    chain: Chain, ddl: DdlArchive, values: dict[str, Any], detail: str
) -> None:
    found = contradictions(with_properties(chain, **values), SHARD, ddl)
    if "owner" in values:
        # Its default privileges are those of the owner.
        found = [one for one in found if "privileges" not in one]
    assert found == ([detail] if detail else [])


def test_an_extension_that_the_ddl_does_not_create_is_found(chain: Chain, ddl: DdlArchive) -> None:
    facts = chain.last.databases[SHARD]
    more = structs.replace(facts, extensions=facts.extensions | {"hstore": "1.8"})
    assert contradictions(with_last(chain, databases={SHARD: more}), SHARD, ddl) == [
        "the DDL does not create extension hstore"
    ]


def test_the_server_is_the_one_that_was_dumped(chain: Chain, ddl: DdlArchive) -> None:
    """Between two increments, somebody may update it to another minor version."""

    def of_version(version: int, *, increments: bool) -> list[str]:
        baseline = tuple(structs.replace(one, server_version=version) for one in chain.full.baseline)
        full = structs.replace(chain.full, baseline=baseline)
        first = read_stored_ddl(open_store(f"file://{KEPT}", {}), Chain(full), SHARD)
        changed = replace(chain, full=full) if increments else Chain(full)
        return [one for one in contradictions(changed, SHARD, ddl if increments else first) if "version" in one]

    assert of_version(160015, increments=False) == of_version(160001, increments=True) == []
    said = "the server has version {} in the commit, but the DDL was dumped from version {}"
    assert of_version(160001, increments=False) == [said.format("16.1", "16.15")]
    assert of_version(150001, increments=True) == [said.format("15", "16")]


def with_last(chain: Chain, **values: Any) -> Chain:
    """The chain with other values in its newest commit."""
    (*before, last) = chain.increments
    return replace(chain, increments=(*before, structs.replace(last, **values)))


def test_ddl_of_another_database_is_found(chain: Chain, ddl: DdlArchive) -> None:
    """As if somebody had put that of another server there, or had given the copies another encoding."""
    of_database = {
        "DATABASE bank": ("ENCODING = 'UTF8' LOCALE_PROVIDER = libc", "ENCODING = 'LATIN1' LOCALE_PROVIDER = icu")
    }
    assert contradictions(chain, SHARD, altered(ddl, of_database)) == [
        "the database has encoding UTF8 in the commit, but LATIN1 in the DDL",
        "the database has locale provider c in the commit, but i in the DDL",
    ]
    baseline = tuple(structs.replace(one, database_oid=5) for one in chain.full.baseline)
    other = replace(chain, full=structs.replace(chain.full, baseline=baseline))
    assert contradictions(other, SHARD, ddl) == ["the database has oid 5 in the commit, but 16384 in the DDL"]


def test_another_table_of_the_same_name_is_found(chain: Chain, ddl: DdlArchive) -> None:
    states = {
        shard: tuple(structs.replace(state, oid=state.oid + 1) for state in states)
        for shard, states in chain.full.tables.items()
    }
    changed = replace(chain, full=structs.replace(chain.full, tables=states))
    found = contradictions(changed, SHARD, ddl)
    oid = {
        group.name: state.oid
        for group, state in ((group, chain.tables(SHARD)[group.name]) for group in chain.groups(SHARD))
    }
    # Increments list the states of the tables that they changed.
    same = {name for name, state in changed.tables(SHARD).items() if state.oid == oid[name]}
    assert found == [
        f"table {name} has oid {oid[name] + 1} in the commit, but {oid[name]} in the DDL"
        for name in sorted(oid.keys() - same)
    ]
    assert found


def test_other_labels_of_an_enum_are_found(chain: Chain, ddl: DdlArchive) -> None:
    fewer = altered(ddl, {"TYPE mood": ("'sad',\n    'happy'", "'sad'")})
    assert contradictions(chain, SHARD, fewer) == [
        "an enum type of table public.account has labels happy, sad in the commit, but sad in the DDL"
    ]


def test_sequences_that_count_differently_or_have_impossible_values_are_found(chain: Chain, ddl: DdlArchive) -> None:
    other = altered(ddl, {"SEQUENCE entry_id_seq": ("INCREMENT BY 1", "INCREMENT BY 2")})
    name = "sequence public.entry_id_seq"
    assert contradictions(chain, SHARD, other) == [f"{name} has increment 1 in the commit, but 2 in the DDL"]
    cycling = altered(ddl, {"SEQUENCE entry_id_seq": ("CACHE 1;", "CACHE 1\n    CYCLE;")})
    assert contradictions(chain, SHARD, cycling) == [f"{name} cycles in the DDL, but not in the commit"]
    (sequence,) = chain.sequences(SHARD)
    zero = with_last(chain, sequences={SHARD: (structs.replace(sequence, last_value=0),), "s2": ()})
    assert contradictions(zero, SHARD, ddl) == [
        f"{name} has value 0 in the commit, but the DDL allows values from 1 to 9223372036854775807"
    ]


def test_a_role_that_nobody_knows_to_create_is_found(chain: Chain, ddl: DdlArchive) -> None:
    owned = altered(ddl, {"TABLE long": ('"id" integer', '"id" integer')}, owner="clerk")
    assert contradictions(chain, SHARD, owned) == [
        "the DDL names role clerk as an owner, but the commit does not list it"
    ]
    predefined = altered(ddl, {"TABLE long": ('"id" integer', '"id" integer')}, owner="pg_database_owner")
    assert contradictions(chain, SHARD, predefined) == []


def test_the_replica_identity_is_compared_whatever_it_is(chain: Chain, ddl: DdlArchive) -> None:
    keyless = altered(ddl, {"TABLE unkeyed": ("REPLICA IDENTITY FULL", "REPLICA IDENTITY NOTHING")})
    assert contradictions(chain, SHARD, keyless) == [
        "table public.unkeyed has replica identity full in the commit, but not in the DDL"
    ]
    by_index = with_groups(
        chain, lambda group: structs.replace(group, identity="index") if group.table == "entry" else group
    )
    assert contradictions(by_index, SHARD, ddl) == ["table public.entry has key id in the commit, but not in the DDL"]
    primary = 'PRIMARY KEY ("id");'
    identity = '\n\nALTER TABLE ONLY "public"."entry" REPLICA IDENTITY USING INDEX "entry_pkey";'
    indexed = altered(ddl, {"CONSTRAINT entry entry_pkey": (primary, f"{primary}{identity}")})
    assert contradictions(by_index, SHARD, indexed) == []


def test_inherited_columns_are_compared_by_their_names(chain: Chain, ddl: DdlArchive) -> None:
    """A child has its parent's columns first, wherever the source has them."""
    text = '(\n    "id" bigint NOT NULL,\n    "account" bigint,\n    "remark" "text"\n)'
    child = '(\n    "account" bigint,\n    "remark" "text"\n)\nINHERITS ("public"."long")'
    inherited = altered(ddl, {"TABLE entry": (text, child), "TABLE long": ('    "v" "text",\n    "n" integer\n', "")})
    ours = "account, id, remark"
    # The parent has lost two columns, and its comma.
    assert contradictions(
        with_groups(chain, lambda group: group if group.table != "long" else None), SHARD, inherited
    ) == ["the commit lists no rows of table public.long"]
    of_other = altered(ddl, {"TABLE entry": (text, child)})
    assert contradictions(chain, SHARD, of_other) == [
        f"table public.entry has columns {ours} in the commit, but account, id, n, remark, v in the DDL"
    ]


def test_in_other_encodings_inherited_columns_with_other_letters_are_counted(chain: Chain, ddl: DdlArchive) -> None:
    """The two forms of such a name don't sort alike."""
    text = '(\n    "id" bigint NOT NULL,\n    "account" bigint,\n    "remark" "text"\n)'
    child = '(\n    "account" bigint\n)\nINHERITS ("public"."long")'
    parent = ('    "v" "text",\n    "n" integer\n', '    "\\xa4" "text"\n')
    described = describe(altered(ddl, {"TABLE entry": (text, child), "TABLE long": parent}))
    (group,) = (group for group in chain.groups(SHARD) if group.table == "entry")
    ours = renamed(group, {"remark": "\u20ac"})
    assert compare_tables(described, [ours], only_ascii=True) == []
    assert compare_tables(described, [renamed(ours, {"account": "amount"})], only_ascii=True) == [
        "table public.entry has columns ?, amount, id in the commit, but ?, account, id in the DDL"
    ]


def test_only_the_chosen_tables_are_compared_for_a_restore_of_some(chain: Chain, ddl: DdlArchive) -> None:
    renamed_column = altered(ddl, {"TABLE entry": ('"remark"', '"comment"')})
    chosen = [group for group in chain.groups(SHARD) if group.table == "account"]
    assert contradictions(chain, SHARD, renamed_column, chosen) == []
    assert len(contradictions(chain, SHARD, renamed_column)) == 1
