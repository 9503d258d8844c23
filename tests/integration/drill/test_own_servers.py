"""A drill on servers that the user keeps touches none of their databases, and leaves neither databases nor roles."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

import restore.restore
from embedded.fleet import EmbeddedFleet
from fleet.config import load_fleet
from fleet.progress import Silent
from restore.crash_points import RestoreCrashPoint
from restore.drill.drill import run_drill
from restore.drill.place import DrillUnfitError
from restore.request import RestoreRequest
from storage.errors import UnreachableError, UsageError
from tests.commands.in_process import run_here
from tests.commands.snapshot_runs import Ready
from tests.integration.drill.drilled import HOLDING, NAME, Drilled, write_fleet
from tests.integration.refusing import NoSpark, execute
from tests.run.soak import draw

ROOT, SECONDS_MAX = Path(__file__).parents[3], 120
ROLE = "driller"
ADVICE = re.compile("--resume|--abandon")


def left_on(shared_fleet: EmbeddedFleet) -> list[object]:
    """Every database and every role of the servers."""
    found: list[object] = []
    for node in shared_fleet.primaries:
        with psycopg.connect(node.dsn("postgres")) as connection:
            found += connection.execute("SELECT datname FROM pg_database ORDER BY 1").fetchall()
            found += connection.execute("SELECT rolname FROM pg_roles ORDER BY 1").fetchall()
    return found


def describe(path: Path, shared_fleet: EmbeddedFleet, role: str) -> Path:
    """The file of servers of one's own: the shared fleet's, whose databases are named in vain."""
    nodes = "".join(
        f'\n[[node]]\nid = "{node.id}"\ndsn = "{make_conninfo(node.dsn(), user=role)}"\n'
        for node in shared_fleet.primaries
    )
    path.write_text(f'name = "spare"\nstore = "/nowhere"\n{nodes}')
    return path


@contextmanager
def role_on(shared_fleet: EmbeddedFleet, statement: str) -> Iterator[None]:
    """A role of the servers, made by the statement."""
    try:
        for node in shared_fleet.primaries:
            execute(node.dsn("postgres"), statement)
        yield
    finally:
        for node in shared_fleet.primaries:
            execute(node.dsn("postgres"), f"DROP ROLE IF EXISTS {ROLE}")


def test_a_superuser_drills_by_a_role_without_privileges_and_nothing_is_left(
    drilled: Drilled, shared_fleet: EmbeddedFleet, tmp_path: Path
) -> None:
    before = left_on(shared_fleet)
    fleet = load_fleet(write_fleet(drilled, tmp_path, HOLDING))
    to, junit = describe(tmp_path / "spare.toml", shared_fleet, "postgres"), tmp_path / "drill.xml"
    words = ("restore", NAME, "--drill", "--to", str(to), "--junit", str(junit))
    code, document = run_here(fleet, *words, spark=drilled.spark)
    assert (code, document["result"]) == (0, "holds"), document
    assert [one["rows"] for one in document["nodes"]] == drilled.rows
    (suite,) = ElementTree.parse(junit).getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("6", "0")
    assert left_on(shared_fleet) == before


def test_a_role_that_may_no_more_than_a_restore_drills_as_itself(
    drilled: Drilled, shared_fleet: EmbeddedFleet, tmp_path: Path
) -> None:
    fleet = load_fleet(write_fleet(drilled, tmp_path, HOLDING))
    to = describe(tmp_path / "spare.toml", shared_fleet, ROLE)
    with role_on(shared_fleet, f"CREATE ROLE {ROLE} LOGIN CREATEDB"):
        before = left_on(shared_fleet)
        # What superusers of the source own takes one, unless it all belongs to the role.
        code, document = run_here(fleet, "restore", NAME, "--drill", "--to", str(to), spark=drilled.spark)
        assert (code, document["error"]) == (3, "target-unfit")
        assert "--no-owner" in document["hint"]
        code, document = run_here(fleet, "restore", NAME, "--drill", "--to", str(to), "--no-owner", spark=drilled.spark)
        assert (code, document["result"]) == (0, "holds"), document
        assert left_on(shared_fleet) == before


def test_roles_with_powers_and_files_without_a_shard_are_refused(
    drilled: Drilled, shared_fleet: EmbeddedFleet, tmp_path: Path
) -> None:
    fleet = load_fleet(write_fleet(drilled, tmp_path, HOLDING))
    own = load_fleet(describe(tmp_path / "spare.toml", shared_fleet, ROLE))
    statement = f"CREATE ROLE {ROLE} LOGIN CREATEDB IN ROLE pg_read_server_files"
    with (
        role_on(shared_fleet, statement),
        pytest.raises(DrillUnfitError, match="could use what role driller may: pg_read_server_files"),
    ):
        run_drill(fleet, RestoreRequest(NAME), NoSpark(), Silent(), own=own)
    (tmp_path / "spare.toml").write_text(own.path.read_text().rpartition("\n[[node]]")[0])
    with pytest.raises(UsageError, match="has no primary s2"):
        run_drill(fleet, RestoreRequest(NAME), NoSpark(), Silent(), own=load_fleet(own.path))


@pytest.mark.parametrize("on_own_servers", draw([False, True]))
def test_a_drill_that_the_store_ends_advises_nothing_and_leaves_nothing(
    drilled: Drilled,
    shared_fleet: EmbeddedFleet,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    on_own_servers: bool,
) -> None:
    def lose(*_: object) -> None:
        raise UnreachableError("the store is away", hint="try later")

    before = left_on(shared_fleet)
    fleet = load_fleet(write_fleet(drilled, tmp_path, HOLDING))
    to = ("--to", str(describe(tmp_path / "spare.toml", shared_fleet, "postgres")))
    monkeypatch.setattr(restore.restore, "decide_restore", lose)
    words = ("restore", NAME, "--drill", *to[: 2 * on_own_servers])
    code, document = run_here(fleet, *words, spark=drilled.spark)
    assert (code, ADVICE.search(document["hint"]), "unfinished" in document["details"]) == (6, None, False)
    assert left_on(shared_fleet) == before


@pytest.mark.parametrize("signal_name", draw(["SIGINT", "SIGKILL"]))
def test_an_interrupted_drill_drops_what_it_has_made_and_the_next_one_what_a_killed_one_has_left(
    drilled: Drilled, shared_fleet: EmbeddedFleet, tmp_path: Path, signal_name: str
) -> None:
    before = left_on(shared_fleet)
    path = write_fleet(drilled, tmp_path, HOLDING)
    to = describe(tmp_path / "spare.toml", shared_fleet, "postgres")
    point = [signal_name, RestoreCrashPoint.LOADING, "1"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.signalled_command", *point, "--", "--fleet", str(path),
         "restore", NAME, "--drill", "--to", str(to)],
        capture_output=True, text=True, timeout=SECONDS_MAX, cwd=ROOT, stdin=subprocess.DEVNULL, check=False,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )  # fmt: skip
    if signal_name == "SIGINT":
        assert (done.returncode, left_on(shared_fleet)) == (130, before), done.stderr
        assert "what the drill had made is removed" in done.stderr
        assert ADVICE.search(done.stderr) is None
        return
    assert done.returncode == -9, done.stderr
    left = [one for one in left_on(shared_fleet) if one not in before]
    assert len(left) == 2 * 2, left
    fleet, own = load_fleet(path), load_fleet(to)
    assert run_drill(fleet, RestoreRequest(NAME), Ready(drilled.spark), Silent(), own=own).result == "holds"
    assert left_on(shared_fleet) == before
