"""A restored database sorts as its source does: it has the same locale provider and locale."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from embedded.fleet import EmbeddedFleet
from fleet.config import Node
from fleet.nodes.baseline import ICU, LIBC, NodeIdentity, find_node
from fleet.nodes.connections import connect, with_database
from fleet.record import fields_of, from_builtins
from restore.obstacles.obstacles import Obstacles
from restore.obstacles.server import check_locales
from restore.targets.databases import create_database, drop_database
from restore.targets.target import TargetUnfitError, target_of
from snapshots.records.database_facts import DatabaseFacts, UsedCollation

# Collations that the DDL creates, for columns.
COLLATIONS = (
    UsedCollation("public", "swedish", ICU, ("sv-SE",), is_own=True),
    UsedCollation("public", "other", LIBC, ("yy_YY",), is_own=True),
    UsedCollation("public", "plain", LIBC, ("C",), is_own=True),
)
OPERATION = "20260101T000000Z-abcdef0123"
LOCALE = "SELECT datlocprovider, datlocale, daticurules, datcollate, datctype FROM pg_database WHERE datname = %s"


@pytest.mark.parametrize(
    "options",
    [
        "LOCALE_PROVIDER libc LC_COLLATE 'C' LC_CTYPE 'C'",
        "LOCALE_PROVIDER builtin BUILTIN_LOCALE 'C.UTF-8'",
    ],
)
def test_a_restored_database_has_the_locale_of_its_source(shared_fleet: EmbeddedFleet, options: str) -> None:
    maintenance = Node("s1", shared_fleet.primaries[0].dsn("postgres"))
    source = with_database(maintenance, "sorted_source")
    target = target_of("s1", with_database(maintenance, "sorted"), (), OPERATION)
    with connect(maintenance) as connection:
        connection.execute(f"CREATE DATABASE sorted_source TEMPLATE template0 ENCODING 'UTF8' {options}")
        try:
            with connect(source) as found:
                identity = find_node(source, found).identity
            create_database(target, connection, from_builtins(fields_of(identity), NodeIdentity))
            expected = connection.execute(LOCALE, ("sorted_source",)).fetchone()
            assert connection.execute(LOCALE, (target.loading,)).fetchone() == expected
        finally:
            connection.execute("DROP DATABASE sorted_source")
            drop_database(target, connection, target.loading)


def test_a_target_that_lacks_the_locale_is_refused_by_name(shared_fleet: EmbeddedFleet) -> None:
    maintenance = Node("s1", shared_fleet.primaries[0].dsn("postgres"))
    target = target_of("s1", with_database(maintenance, "sorted"), (), OPERATION)
    with connect(maintenance) as connection:
        identity = find_node(maintenance, connection).identity
        found: list[str] = []
        # The embedded server is built without ICU.
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
    lacks = "node s1 lacks what the snapshot's databases sort by:"
    assert found == [f"{lacks} support for ICU", f"{lacks} locale xx_XX", f"{lacks} locale yy_YY, support for ICU"]
