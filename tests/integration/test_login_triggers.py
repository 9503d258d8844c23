"""A login trigger that fails ends every session: the error names it, and what makes it work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import psycopg
import pytest

from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet
from cutline.nodes.connections import LoginTriggerError, connect
from tests.integration.own_shard import database_on
from tests.integration.refusing import execute

pytestmark = pytest.mark.postgresql(18, reason="15 and 16 have no login triggers")


@pytest.fixture
def own(shared_fleet: EmbeddedFleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with database_on(shared_fleet, "logging_in", tmp_path_factory.mktemp("logging_in")) as fleet:
        yield replace(fleet, nodes=fleet.primaries)


def test_a_login_trigger_that_fails_is_named_by_its_function_with_the_error(own: Fleet) -> None:
    node = own.nodes[0]
    execute(
        node.dsn, "CREATE TABLE public.login_log (who text)",
        "CREATE FUNCTION public.on_login() RETURNS event_trigger LANGUAGE plpgsql AS"
        " $$ BEGIN INSERT INTO login_log VALUES (session_user); END $$",
        "CREATE EVENT TRIGGER logins ON login EXECUTE FUNCTION public.on_login()",
    )  # fmt: skip
    with pytest.raises(LoginTriggerError) as raised:
        connect(node)
    assert 'FATAL:  relation "login_log" does not exist' in raised.value.message
    assert "which calls public.on_login()" in raised.value.message
    assert raised.value.exit_code == 3
    # As any other session, and then as the hint says.
    execute(node.dsn, "ALTER FUNCTION public.on_login() SET search_path = public, pg_temp")
    connect(node).close()
    with psycopg.connect(node.dsn) as connection:
        assert connection.execute("SELECT count(*) FROM login_log").fetchone() == (3,)
