"""A check compares the DDL of a chain with its commits, with the DDL before it, and between shards.

Every change here is one that somebody could seal, or that a fault of Cutline's could write.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import zstandard
from msgspec import structs

from cutline.check.own_types import EnumType
from cutline.nodes.left_out import LeftOut, LeftOutKind
from cutline.snapshots.ddl import ddl_archive
from cutline.snapshots.ddl.ddl_archive import DdlArchive, NewEntry, rewrite
from cutline.snapshots.records.commit import (
    DDL,
    GLOBALS,
    Commit,
    DatabaseFacts,
    DatabasePrivilege,
    DatabaseProperties,
    DatabaseSetting,
    DefinitionChanges,
)
from cutline.storage.digest import digest
from tests.unit.made_definitions import MadeChain, altered, group_of

INDEX = 'CREATE INDEX "account_twice" ON "public"."account" USING "btree" ("public"."twice"("id"));'


@pytest.fixture
def made() -> MadeChain:
    return MadeChain.kept()


def test_a_chain_as_it_was_written_has_neither_conflicts_nor_doubts(made: MadeChain) -> None:
    findings, stored = made.unchanged().checked()
    assert (findings.report.conflicts, findings.report.doubts) == ([], [])
    assert findings.report.compared.objects == 8
    assert stored.newest.keys() == {"s1", "s2"}
    assert stored.own_types["s1"] == {16386: EnumType(frozenset({b"sad", b"happy"}))}
    assert stored.roles == {"s1": {"postgres"}, "s2": {"postgres"}}


def test_the_contents_of_each_archive_are_read_once(made: MadeChain, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    read_contents = ddl_archive.read_contents
    monkeypatch.setattr(ddl_archive, "read_contents", lambda body: read.append(1) or read_contents(body))
    assert made.conflicts == []
    assert len(read) == sum(one.kind == DDL for commit in made.chain.commits for one in commit.own_objects) == 6


def test_what_is_new_is_compared_with_all_ddl_and_only_new_objects_count(made: MadeChain) -> None:
    longer = made.unchanged()
    findings, stored = longer.checked(after=2)
    assert (findings.report.conflicts, findings.report.compared.objects) == ([], 0)
    assert stored == longer.checked()[1]
    assert longer.checked(after=1)[0].report.compared.objects == 2
    valueless = longer.with_commit(3, lambda one: structs.replace(one, sequences=one.sequences | {"s1": ()}))
    assert [conflict.detail for conflict in valueless.checked(after=2)[0].report.conflicts] == valueless.conflicts != []


def test_a_commit_without_ddl_of_its_own_is_compared_with_the_newest(made: MadeChain) -> None:
    """A restore would use that DDL, so it would refuse what the check accepts."""
    longer = made.unchanged().unchanged()
    state = longer.chain.tables("s1")["public.long"]
    other = structs.replace(state, oid=state.oid + 1)
    # The next increment has the right state again, but the one between is not restored.
    moved = longer.with_commit(
        3, lambda one: structs.replace(one, definition_changes=DefinitionChanges(tables={"s1": (other,)}))
    ).with_commit(4, lambda one: structs.replace(one, definition_changes=DefinitionChanges(tables={"s1": (state,)})))
    stored = made.chain.ddl_object("s1")
    assert stored is not None
    findings, _ = moved.checked()
    assert [(conflict.detail, conflict.object) for conflict in findings.report.conflicts] == [
        (
            f"increment 3: table public.long has oid {other.oid} in the commit, but {state.oid} in the DDL",
            stored.key,
        )
    ]


def test_a_contradiction_that_stays_is_reported_once(made: MadeChain) -> None:
    longer = made.unchanged().unchanged()
    valueless = longer.with_commit(3, lambda one: structs.replace(one, sequences=one.sequences | {"s1": ()}))
    valueless = valueless.with_commit(4, lambda one: structs.replace(one, sequences=one.sequences | {"s1": ()}))
    assert valueless.conflicts == [
        "increment 3 lists no new DDL, but sequence public.entry_id_seq is gone",
        "increment 4: the commit has no value for sequence public.entry_id_seq",
    ]
    listed = made.with_commit(2, lambda one: structs.replace(one, sequences=one.sequences | {"s1": ()})).unchanged()
    listed = listed.with_commit(3, lambda one: structs.replace(one, sequences=one.sequences | {"s1": ()}))
    assert listed.conflicts == ["the commit has no value for sequence public.entry_id_seq"]


def test_the_ddl_of_the_commit_before_in_the_place_of_the_newest_is_found(made: MadeChain) -> None:
    old = made.with_ddl("s1", 2, made.ddl("s1", 1))
    assert "the DDL is the archive that increment 1 lists, byte for byte" in old.conflicts
    # Two increments may have dumped the same in one second.
    (_, last) = old.chain.increments
    made_at = last.cut.made_at
    at_once = old.with_commit(1, lambda one: structs.replace(one, cut=structs.replace(one.cut, made_at=made_at)))
    assert not [detail for detail in at_once.conflicts if "byte for byte" in detail]


def test_the_ddl_before_and_after_a_change_during_a_full_snapshot_may_differ(made: MadeChain) -> None:
    """The commit lists both archives; the first is of the tables as they were copied."""
    full, (first, _) = made.chain.full, made.chain.increments
    changes = first.definition_changes
    assert changes is not None
    chain = made.with_commit(0, lambda one: structs.replace(one, definition_changes=changes, sequences=first.sequences))
    only = structs.replace(chain.chain.full, left_out=first.left_out)
    alone = MadeChain(made.store, type(made.chain)(only))
    assert alone.conflicts == []
    # The first archive is still compared with the base copy's tables.
    wrong = altered(made.ddl("s1", 0), {"TABLE entry": ('"note"', '"other"')})
    base = made.with_ddl("s1", 0, wrong).chain.full
    copied = tuple(structs.replace(one) for one in base.copied)
    changed = MadeChain(made.store, type(made.chain)(structs.replace(only, copied=copied)))
    assert [detail for detail in changed.conflicts if "id, account, note in the commit" in detail]
    assert full.copied


def test_new_ddl_of_the_same_catalogs_is_found(made: MadeChain) -> None:
    fingerprints = {shard: made.chain.up_to(1).fingerprint(shard) for shard in ("s1", "s2")}
    same = made.with_changes(2, fingerprints=fingerprints)
    assert same.conflicts == ["the commit lists new DDL, but the fingerprint of the catalogs has not changed"] * 2


def test_columns_that_changed_without_a_change_of_the_catalogs_are_found(made: MadeChain) -> None:
    ddl = altered(made.ddl("s1", 2), {"TABLE long": ('"id" integer NOT NULL', '"id" integer DEFAULT 7')})
    said = "but the commit says that its columns have not changed"
    assert made.with_ddl("s1", 2, ddl).conflicts == [
        f"table public.long: column id is not NOT NULL, {said}",
        f"table public.long: column id has a default, {said}",
    ]


def test_columns_that_an_alter_table_has_changed_are_not(made: MadeChain) -> None:
    ddl = altered(made.ddl("s1", 2), {"TABLE long": ('"id" integer NOT NULL', '"id" integer DEFAULT 7')})
    states = tuple(
        structs.replace(state, columns=state.columns.replace("1.", "1.9", 1))
        for name, state in made.chain.tables("s1").items()
        if name == "public.long"
    )
    changes = made.chain.increments[-1].definition_changes
    assert changes is not None
    tables = changes.tables | {"s1": (*changes.tables.get("s1", ()), *states)}
    assert made.with_ddl("s1", 2, ddl).with_changes(2, tables=tables).conflicts == []


def test_without_new_ddl_tables_sequences_and_what_is_left_out_stay_the_same(made: MadeChain) -> None:
    longer = made.unchanged()
    (sequence,) = longer.chain.sequences("s1")
    other = structs.replace(sequence, name="other", increment=2)
    out = LeftOut("s1", LeftOutKind.UNLOGGED_TABLE, "public.aside", "why")
    group = group_of(longer.chain, "s1", "long")
    changed = longer.with_commit(
        3,
        lambda one: structs.replace(
            one,
            sequences=one.sequences | {"s1": (other,)},
            left_out=(*one.left_out, out),
            definition_changes=DefinitionChanges(gone={"s1": (group.number,)}),
        ),
    )
    said = "increment 3 lists no new DDL, but"
    assert changed.conflicts[:4] == [
        f"{said} sequence public.entry_id_seq is gone",
        f"{said} sequence public.other is new",
        f"{said} table public.long is gone",
        f"{said} public.aside is newly listed as left out",
    ]
    # The state at the checked increment is compared with the newest DDL, too.
    assert "increment 3: the commit lists no rows of table public.long" in changed.conflicts


def test_an_unlogged_table_that_the_commit_does_not_leave_out_is_a_doubt(made: MadeChain) -> None:
    """Somebody may have made it logged and unlogged again while the parts were listed."""
    table = 'CREATE UNLOGGED TABLE "public"."aside" (\n    "id" integer\n);\n'
    ddl = made.ddl("s1", 2)
    with_table = DdlArchive.of(rewrite(ddl.body, ddl.contents, {}, first=[NewEntry("TABLE", "aside", table)]))
    # An entry that is added has no schema.
    name, out = ".aside", LeftOut("s1", LeftOutKind.UNLOGGED_TABLE, ".aside", "why")
    changed = made.with_ddl("s1", 2, with_table)
    (doubt,) = changed.doubts
    assert doubt.startswith(f"the DDL has unlogged tables that the commit does not list as left out: {name};")
    listed = changed.with_commit(2, lambda one: structs.replace(one, left_out=(*one.left_out, out)))
    assert listed.doubts == []


GRANT = 'GRANT SELECT ON TABLE "public"."long" TO "{}";\n'


def granting(made: MadeChain, role: str, increment: int = 2) -> MadeChain:
    """The chain as if the DDL of increment 2 granted a privilege to the role."""
    ddl, entry = made.ddl("s1", increment), NewEntry("ACL", "TABLE long", GRANT.format(role))
    return made.with_ddl("s1", increment, DdlArchive.of(rewrite(ddl.body, ddl.contents, {}, first=[entry])))


def test_a_role_that_has_privileges_is_one_that_the_commit_lists(made: MadeChain) -> None:
    said = "the DDL grants privileges or applies policies to reader, which the commit does not list"
    changed = granting(made, "reader")
    assert said in changed.conflicts
    changes = made.chain.increments[-1].definition_changes
    assert changes is not None
    with_reader = changes.roles | {"s1": (*changes.roles["s1"], "reader")}
    assert said not in changed.with_changes(2, roles=with_reader).conflicts


@pytest.mark.parametrize("role", ["postgres", "pg_monitor", "16400"])
def test_roles_that_pg_shdepend_does_not_list_may_have_privileges(made: MadeChain, role: str) -> None:
    """These are the bootstrap superuser and predefined roles. The DDL may name a role that was dropped by its oid."""
    changes = made.chain.increments[-1].definition_changes
    assert changes is not None
    found = granting(made, role).with_changes(2, roles=changes.roles | {"s1": ()}).conflicts
    assert not [one for one in found if "privileges" in one]


def test_a_full_snapshot_lists_the_grantees_of_its_ddl(made: MadeChain) -> None:
    full = granting(made, "reader", 0)
    said = "the DDL grants privileges or applies policies to reader, which the commit does not list"
    assert [one for one in full.conflicts if "privileges" in one] == [said]
    assert not [one for one in full.doubts if "privileges" in one]


def test_the_fleet_file_may_exclude_a_table_without_a_change_of_ddl(made: MadeChain) -> None:
    longer = made.unchanged()
    out = LeftOut("s1", LeftOutKind.EXCLUDED_TABLE, "public.long", "excluded by public.long: it is restored empty")
    group = group_of(longer.chain, "s1", "long")
    excluding = longer.with_commit(
        3,
        lambda one: structs.replace(
            one, left_out=(*one.left_out, out), definition_changes=DefinitionChanges(gone={"s1": (group.number,)})
        ),
    )
    assert (excluding.conflicts, excluding.doubts) == ([], [])


def test_a_full_snapshot_without_ddl_is_found_although_increments_have_ddl(made: MadeChain) -> None:
    def change(full: Any) -> Commit:
        return structs.replace(full, copied=tuple(one for one in full.copied if (one.kind, one.node) != (DDL, "s2")))

    found = [(one.detail, one.node) for one in made.with_commit(0, change).checked()[0].report.conflicts]
    assert ("the full snapshot lists no DDL", "s2") in found


def test_a_sequence_that_a_commit_lists_twice_is_found(made: MadeChain) -> None:
    def change(one: Any) -> Commit:
        (value,) = one.sequences["s1"]
        other = structs.replace(value, last_value=value.last_value + 7)
        return structs.replace(one, sequences=one.sequences | {"s1": (value, other)})

    assert "increment 2 has several values of sequence public.entry_id_seq" in made.with_commit(2, change).conflicts


def with_globals(made: MadeChain, change: Callable[[dict[str, Any]], object]) -> MadeChain:
    """The chain with changed globals of a server."""
    listed = next(one for one in made.chain.full.copied if (one.kind, one.node) == (GLOBALS, "s1"))
    document = msgspec.json.decode(zstandard.decompress(made.store.read(listed.key)))
    change(document)
    body = zstandard.compress(msgspec.json.encode(document))
    made.store.delete(listed.key)
    made.store.create(listed.key, body)

    def replaced(full: Any) -> Commit:
        copied = (
            structs.replace(one, size=len(body), digest=digest(body)) if one == listed else one for one in full.copied
        )
        return structs.replace(full, copied=tuple(copied))

    return made.with_commit(0, replaced)


def test_roles_that_the_globals_lack_are_found(made: MadeChain) -> None:
    def change(document: dict[str, Any]) -> None:
        document["roles"] = [role for role in document["roles"] if role["name"] != "postgres"]

    assert {one.rpartition(": ")[2] for one in with_globals(made, change).conflicts} == {
        "the stored roles of the server lack postgres, which the database needs",
        "the stored roles of the server lack postgres, which the DDL needs",
    }


def test_damaged_ddl_is_one_conflict_and_its_shard_is_compared_no_further(made: MadeChain) -> None:
    stored = made.chain.ddl_object("s1")
    assert stored is not None
    made.store.delete(stored.key)
    findings, known = made.unchanged().checked()
    assert [(one.kind, one.object) for one in findings.report.conflicts] == [("missing", stored.key)]
    assert known.newest.keys() == {"s2"}


def test_settings_that_the_ddl_does_not_have_are_found(made: MadeChain) -> None:
    def with_settings(*settings: DatabaseSetting) -> MadeChain:
        facts = DatabaseFacts(1, properties=DatabaseProperties(owner="postgres", settings=settings))
        return made.with_commit(2, lambda one: structs.replace(one, databases={"s1": facts, "s2": facts}))

    set_to = "ALTER DATABASE \"bank\" SET \"search_path\" TO '$user', 'shop';\n"
    before = "LOCALE = 'C';"
    ddl = altered(made.ddl("s1", 2), {"DATABASE bank": (before, f"{before}\n{set_to}")})
    differing = MadeChain(made.store, with_settings().with_ddl("s1", 2, ddl).chain)
    assert differing.conflicts == [
        "setting search_path of the database is not set in the commit, but $user, shop in the DDL"
    ]
    same = with_settings(DatabaseSetting("search_path", '"$user", shop'))
    findings, _ = MadeChain(made.store, same.with_ddl("s1", 2, ddl).chain).checked()
    assert [one.node for one in findings.report.conflicts] == ["s2"]


def test_an_increment_without_ddl_has_the_properties_of_the_newest(made: MadeChain) -> None:
    def change(commit: Any) -> Commit:
        facts = commit.databases["s1"]
        properties = structs.replace(facts.properties, comment="other")
        return structs.replace(
            commit, databases=commit.databases | {"s1": structs.replace(facts, properties=properties)}
        )

    longer = made.unchanged().unchanged()
    said = "the database has comment other in the commit, but none in the DDL"
    assert longer.with_commit(3, change).conflicts == [f"increment 3: {said}"]


def test_a_role_of_the_database_that_the_globals_lack_is_found(made: MadeChain) -> None:
    def change(commit: Any) -> Commit:
        facts = commit.databases["s1"]
        privileges = (DatabasePrivilege("postgres", "nobody", "CREATE"), DatabasePrivilege("postgres", "", "CONNECT"))
        properties = structs.replace(facts.properties, privileges=privileges)
        return structs.replace(
            commit, databases=commit.databases | {"s1": structs.replace(facts, properties=properties)}
        )

    said = "increment 3: the stored roles of the server lack nobody, which the database needs"
    assert said in made.unchanged().with_commit(3, change).conflicts


def test_globals_that_name_a_role_that_they_lack_are_found(made: MadeChain) -> None:
    def change(document: dict[str, Any]) -> None:
        document["memberships"] = [
            {"role": "pg_monitor", "member": "postgres", "grantor": ""},
            {"role": "postgres", "member": "nobody", "grantor": "postgres"},
        ]

    assert with_globals(made, change).conflicts == ["the globals of the server name nobody, which is no role of it"]


@pytest.mark.parametrize(("type_", "oid", "value"), [("integer", 23, "x"), ("uuid", 2950, "1"), ("boolean", 16, "3")])
def test_a_value_of_older_rows_that_its_type_refuses_is_found(
    made: MadeChain, type_: str, oid: int, value: str
) -> None:
    def typed(commit: Any) -> Commit:
        changes = commit.definition_changes
        groups = {
            shard: tuple(
                structs.replace(
                    group,
                    columns=tuple(
                        structs.replace(one, type=type_, type_oid=oid, missing=value) if one.name == "later" else one
                        for one in group.columns
                    ),
                )
                for group in of_shard
            )
            for shard, of_shard in changes.groups.items()
        }
        return structs.replace(commit, definition_changes=structs.replace(changes, groups=groups))

    said = f"the value of older rows: column later of public.account contains a value that type {type_} does not"
    found = [one.partition(" accept")[0] for one in made.with_commit(1, typed).conflicts]
    assert found.count(said) == 2


def test_an_excluded_table_that_is_not_listed_as_left_out_is_a_doubt(made: MadeChain) -> None:
    rules = structs.replace(made.chain.full.rules, exclude=("public.long",))
    unlisted = made.with_commit(0, lambda one: structs.replace(one, rules=rules))
    group = group_of(made.chain, "s1", "long")
    gone = unlisted.with_changes(2, gone={shard: (group.number,) for shard in ("s1", "s2")})
    said = "the commit does not say that it leaves out public.long"
    assert gone.doubts == [said, said]


def test_what_was_the_same_on_all_shards_and_no_longer_is_is_a_doubt(made: MadeChain) -> None:
    ddl = altered(made.ddl("s2", 2), {"INDEX account_twice": (INDEX, INDEX.replace("CREATE", "CREATE UNIQUE"))})
    grown = made.with_ddl("s2", 2, ddl)
    assert grown.conflicts == []
    assert grown.doubts == [
        "INDEX public.account_twice was the same on all shards up to increment 1; since increment 2, it is different on"
        " s2"
    ]


def test_the_owner_of_an_object_that_was_the_same_is_compared(made: MadeChain) -> None:
    owned = altered(made.ddl("s1", 2), {"FUNCTION twice(integer)": ("", "")}, owner="other")
    assert made.with_ddl("s1", 2, owned).doubts == [
        "the owner of FUNCTION public.twice(integer) was the same on all shards up to increment 1; since increment 2,"
        " it is different on s1"
    ]


def with_more(ddl: DdlArchive, *entries: NewEntry) -> DdlArchive:
    return DdlArchive.of(rewrite(ddl.body, ddl.contents, {}, first=entries))


MORE = 'CREATE FUNCTION "public"."more"() RETURNS integer LANGUAGE "sql" AS \'SELECT 1\';\n'


def test_an_object_that_no_shard_had_is_a_doubt_until_all_have_it(made: MadeChain) -> None:
    more = NewEntry("FUNCTION", "more()", MORE)
    grown = made.with_ddl("s2", 2, with_more(made.ddl("s2", 2), more))
    assert grown.conflicts == []
    assert grown.doubts == [
        "FUNCTION more() was on no shard up to increment 1; since increment 2, it is only on s2",
    ]
    both = grown.with_ddl("s1", 2, with_more(made.ddl("s1", 2), more))
    assert (both.conflicts, both.doubts) == ([], [])
    # Shards may have different functions from the beginning, and then others.
    other = NewEntry("FUNCTION", "other()", MORE.replace("more", "other"))
    for increment in (0, 1):
        grown = grown.with_ddl("s1", increment, with_more(made.ddl("s1", increment), other))
    assert grown.doubts == []


def test_a_new_object_that_is_another_on_each_shard_never_was_the_same(made: MadeChain) -> None:
    """It reaches the first shard before increment 1, and the other, in another form, before increment 2."""
    more, another = (NewEntry("FUNCTION", "more()", MORE.replace("SELECT 1", f"SELECT {n}")) for n in (1, 2))
    for increment in (1, 2):
        made = made.with_ddl("s2", increment, with_more(made.ddl("s2", increment), more))
    assert len(made.doubts) == 1
    assert made.with_ddl("s1", 2, with_more(made.ddl("s1", 2), another)).doubts == []


def test_an_object_of_each_shard_that_a_shard_drops_was_not_new(made: MadeChain) -> None:
    """As a function that returns the number of its shard."""
    for increment, shards in enumerate((("s1", "s2"), ("s1", "s2"), ("s2",))):
        for number, shard in ((n, one) for n, one in enumerate(("s1", "s2")) if one in shards):
            more = NewEntry("FUNCTION", "more()", MORE.replace("SELECT 1", f"SELECT {number}"))
            made = made.with_ddl(shard, increment, with_more(made.ddl(shard, increment), more))
    assert made.doubts == [
        "the owner of FUNCTION more() was the same on all shards up to increment 1; since increment 2, it is missing"
        " from s1"
    ]


def test_shards_with_tables_of_their_own_have_other_objects_of_their_own(made: MadeChain) -> None:
    """As Citus names the tables on each worker, and the indexes of these."""
    table = NewEntry("TABLE", "own", 'CREATE TABLE "public"."own" (\n    "id" integer\n);\n')
    index = NewEntry("INDEX", "own_id", 'CREATE INDEX "own_id" ON "public"."own" USING "btree" ("id");\n')
    assert made.with_ddl("s2", 2, with_more(made.ddl("s2", 2), table, index)).doubts == []


def test_what_never_was_the_same_on_all_shards_is_not(made: MadeChain) -> None:
    for increment in (0, 1, 2):
        other = INDEX.replace("CREATE", "CREATE UNIQUE")
        ddl = altered(made.ddl("s2", increment), {"INDEX account_twice": (INDEX, other)})
        made = made.with_ddl("s2", increment, ddl)
    assert (made.conflicts, made.doubts) == ([], [])


def with_older_value(made: MadeChain, shard: str, value: str) -> MadeChain:
    """The chain with another value of older rows in the column that its first increment adds."""
    changes = made.chain.increments[0].definition_changes
    assert changes is not None
    groups = tuple(
        structs.replace(
            group,
            columns=tuple(
                structs.replace(column, missing=value) if column.name == "later" else column for column in group.columns
            ),
        )
        for group in changes.groups[shard]
    )
    return made.with_changes(1, groups=changes.groups | {shard: groups})


def test_an_older_value_that_is_not_the_default_is_a_doubt(made: MadeChain) -> None:
    changed = with_older_value(made, "s2", "for no row")
    assert changed.conflicts == []
    assert [doubt.partition(":")[0] for doubt in changed.doubts] == [
        "older rows have for no row in added column later, but its default in the DDL is 'for all rows'",
        "older rows have different values in added column later, whose default is 'for all rows'",
    ]


def test_the_ddl_of_a_shard_is_listed_in_all_increments(made: MadeChain) -> None:
    listed = [sum(one.kind == DDL for one in commit.own_objects) for commit in made.chain.commits]
    assert listed == [2, 2, 2]


def test_ddl_of_a_standby_is_found_and_not_read(made: MadeChain) -> None:
    extra = structs.replace(made.chain.full.copied[-1], kind=GLOBALS, node="s1-b1", key="nowhere")
    odd = made.with_commit(0, lambda one: structs.replace(one, copied=(*one.copied, extra)))
    assert odd.conflicts == ["the commit lists globals of node s1-b1, which is no primary"]
