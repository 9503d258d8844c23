"""A restored database sorts as its source does: it has the same locale provider and locale."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Node
from cutline.fleet.record import fields_of, from_json
from cutline.nodes.baseline import ICU, LIBC, NodeIdentity, find_node
from cutline.nodes.connections import connect, with_database
from cutline.restore.targets.databases import create_database, drop_database
from cutline.restore.targets.obstacles import Obstacles
from cutline.restore.targets.requirements import check_locales
from cutline.restore.targets.target import TargetUnfitError, target_of
from cutline.snapshots.records.commit import DatabaseFacts, UsedCollation
from tests.servers.fleets import fleet_of
from tests.servers.installed import MAJORS, require_server

# Collations that the DDL creates, for columns.
COLLATIONS = (
    UsedCollation("public", "swedish", ICU, ("sv-SE",), is_own=True),
    UsedCollation("public", "other", LIBC, ("yy_YY",), is_own=True),
    UsedCollation("public", "plain", LIBC, ("C",), is_own=True),
)
OPERATION = "20260101T000000Z-abcdef0123"
# 17 renamed the column of the locale.
LOCALE = """
SELECT datlocprovider, coalesce(to_jsonb(d) ->> 'datlocale', to_jsonb(d) ->> 'daticulocale'),
       to_jsonb(d) ->> 'daticurules', datcollate, datctype
  FROM pg_database AS d WHERE datname = %s
"""
BUILTIN_VERSION, ICU_RULES_VERSION = 17, 16


LIBC_C = "LOCALE_PROVIDER libc LC_COLLATE 'C' LC_CTYPE 'C'"
BUILTIN = "LOCALE_PROVIDER builtin BUILTIN_LOCALE 'C.UTF-8'"
SWEDISH = "LOCALE_PROVIDER icu ICU_LOCALE 'sv-SE' LC_COLLATE 'C' LC_CTYPE 'C'"


@pytest.mark.parametrize(
    ("major", "options"),
    [*((major, LIBC_C) for major in MAJORS), *((major, BUILTIN) for major in MAJORS if major >= BUILTIN_VERSION)],
)
def test_a_restored_database_has_the_locale_of_its_source(mixed_fleet: EmbeddedFleet, major: int, options: str) -> None:
    assert_same_locale(mixed_fleet.primaries[MAJORS.index(major)].dsn("postgres"), options)


@pytest.mark.parametrize("major", MAJORS)
def test_a_restored_database_sorts_by_icu_as_its_source_does(tmp_path: Path, major: int) -> None:
    rules = [f"{SWEDISH} ICU_RULES '&a < g'"] if major >= ICU_RULES_VERSION else []
    with fleet_of(tmp_path / "fleet", [require_server(major, icu=True)], schema=False) as fleet:
        assert not lacks_icu(Node("s1", fleet.primaries[0].dsn("postgres")))
        for options in (SWEDISH, *rules):
            assert_same_locale(fleet.primaries[0].dsn("postgres"), options)


def assert_same_locale(dsn: str, options: str) -> None:
    """A database that a restore makes has the locale of one that was made with these options."""
    maintenance = Node("s1", dsn)
    source = with_database(maintenance, "sorted_source")
    target = target_of("s1", with_database(maintenance, "sorted"), (), OPERATION)
    with connect(maintenance) as connection:
        connection.execute(f"CREATE DATABASE sorted_source TEMPLATE template0 ENCODING 'UTF8' {options}".encode())
        try:
            with connect(source) as found:
                identity = find_node(source, found).identity
            create_database(target, connection, from_json(json.dumps(fields_of(identity)), NodeIdentity))
            expected = connection.execute(LOCALE, ("sorted_source",)).fetchone()
            assert connection.execute(LOCALE, (target.loading,)).fetchone() == expected
        finally:
            connection.execute("DROP DATABASE sorted_source")
            drop_database(target, connection, target.loading)


@pytest.mark.parametrize("major", MAJORS)
def test_a_server_without_icu_is_recognised_on_every_version(mixed_fleet: EmbeddedFleet, major: int) -> None:
    """A catalog of 16 has a collation of ICU even without it."""
    node = Node("s1", mixed_fleet.primaries[MAJORS.index(major)].dsn("postgres"))
    assert lacks_icu(node)


def lacks_icu(node: Node) -> bool:
    """Whether a database that sorts by ICU would be refused for that."""
    obstacles = Obstacles()
    with connect(node) as connection:
        identity = replace(find_node(node, connection).identity, locale_provider=ICU, locale="sv-SE")
        check_locales(node, connection, identity, None, obstacles)
    return any(one.message.endswith("ICU support") for one in obstacles.found)


@pytest.mark.parametrize("major", MAJORS)
def test_a_target_that_lacks_the_locale_is_refused_by_name(mixed_fleet: EmbeddedFleet, major: int) -> None:
    maintenance = Node("s1", mixed_fleet.primaries[MAJORS.index(major)].dsn("postgres"))
    target = target_of("s1", with_database(maintenance, "sorted"), (), OPERATION)
    with connect(maintenance) as connection:
        identity = find_node(maintenance, connection).identity
        found: list[str] = []
        # These servers are built without ICU.
        for other in (replace(identity, locale_provider=ICU, locale="sv-SE"), replace(identity, collate="xx_XX")):
            with pytest.raises(TargetUnfitError, match="node s1"):
                create_database(target, connection, other)
            obstacles = Obstacles()
            check_locales(maintenance, connection, other, None, obstacles)
            found += [one.message for one in obstacles.found]
        obstacles = Obstacles()
        check_locales(maintenance, connection, identity, DatabaseFacts(0, collations=COLLATIONS), obstacles)
        found += [one.message for one in obstacles.found]
        assert connection.execute("SHOW lc_monetary").fetchone() == ("C",)
    lacks = "node s1 lacks locales or collations of the snapshot's databases:"
    assert found == [f"{lacks} ICU support", f"{lacks} locale xx_XX", f"{lacks} locale yy_YY, ICU support"]
