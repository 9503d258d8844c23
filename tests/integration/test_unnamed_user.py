"""Commands run as a user for whom the system has no name, as in a container that runs as any uid."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from psycopg.conninfo import make_conninfo

from cutline.fleet.own_process import own_label
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet, dropping_slots
from tests.integration.refusing import execute
from tests.run.quick_spark import SETTINGS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cutline.embedded.fleet import EmbeddedFleet

ROOT = Path(__file__).parents[2]
UID = 12345
COMMAND_SECONDS_MAX = 600
can_change_user = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0 or shutil.which("setpriv") is None,
    reason="needs root and setpriv(1): another user",
)


# That user may read all, as this Python or this tree may be in root's own folder, and write only what is its own.
READS_ALL = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
AS_USER = ("setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", *READS_ALL)


BY_SPARK = "from tests.run.by_spark import work_by_spark; work_by_spark(); from cutline.cli.main import main; main()"


def can_run(python: str) -> bool:
    """Whether that user may run this Python: from a shell, as setpriv(1) itself may enter every folder."""
    words = [*AS_USER, "sh", "-c", '"$0" -c "import cutline.cli.main, pyspark"', python]
    return subprocess.run(words, env={"PYTHONPATH": str(ROOT)}, capture_output=True, check=False).returncode == 0


def run_as_user(folder: Path, fleet: Path, *words: str, by_spark: bool = False) -> tuple[int, dict[str, Any], str]:
    """Run the command as that user; return its exit code, its document and its stderr."""
    code = BY_SPARK if by_spark else "from cutline.cli.main import main; main()"
    done = subprocess.run(
        [*AS_USER, sys.executable, "-c", code, "--fleet", str(fleet), "--json", *words],
        capture_output=True, text=True, timeout=COMMAND_SECONDS_MAX, check=False, cwd="/",
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "TMPDIR": str(folder / "tmp")},
    )  # fmt: skip
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


def give(folder: Path) -> None:
    """Make the folder that user's own, with all that is in it and a folder for temporary files."""
    (folder / "tmp").mkdir(exist_ok=True)
    for path in (folder, *folder.rglob("*")):
        os.chown(path, UID, UID)


@can_change_user
def test_a_check_runs_as_a_user_without_a_name_or_a_home(shared_fleet: EmbeddedFleet, spark: SparkSession) -> None:
    if not can_run(sys.executable):
        pytest.skip("another user may not read this Python or this tree")
    # Not below pytest's own folder, which is root's.
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        settings = "".join(f"{json.dumps(name)} = {json.dumps(value)}\n" for name, value in SETTINGS.items())
        more = f'[spark]\nmaster = "local[1]"\n{settings}'
        fleet = configure_fleet(shared_fleet, folder / "fleet.toml", f"file://{folder}/store", more=more)
        with dropping_slots(fleet):
            runs = Runs(fleet, Ready(spark))
            runs.init()
            runs.full("any")
            give(folder)
            code, document, said = run_as_user(folder, folder / "fleet.toml", "check", "any", by_spark=True)
        assert code == 0, said
        assert document["result"] == "valid"
        assert list((folder / "tmp").iterdir()) == []


@can_change_user
def test_only_servers_of_its_own_need_a_user_with_a_name(shared_fleet: EmbeddedFleet) -> None:
    """initdb refuses a user without a name, so a drill says what to do, and a check what it has not done."""
    if not can_run(sys.executable):
        pytest.skip("another user may not read this Python or this tree")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        fleet = configure_fleet(shared_fleet, folder / "fleet.toml", f"file://{folder}/store")
        target = folder / "target.toml"
        target.write_text((folder / "fleet.toml").read_text().replace("/bank?", "/unnamed?"))
        (folder / "roleless.toml").write_text((folder / "fleet.toml").read_text().replace("postgres@/", "/"))
        (folder / "store").mkdir()
        give(folder)

        def run(*words: str) -> tuple[int, dict[str, Any]]:
            return run_as_user(folder, folder / "fleet.toml", *words)[:2]

        with dropping_slots(fleet):
            for words in (["init"], ["create", "any"], ["create", "any", "--incremental"], ["status", "--nodes"],
                          ["restore", "any", "--to", str(target), "--yes"]):  # fmt: skip
                code, document = run(*words)
                assert code == 0, document
            code, document = run("drill", "any")
            assert code == 3, document
            assert f"user id {UID}" in document["message"]
            assert f"cutline:x:{UID}:" in document["hint"]
            assert "--to FILE" in document["hint"]
            code, document = run("check", "any", "--restorable")
            assert code == 0, document
            assert document["restorable"]["ddl"] == "read"
            assert f"user id {UID}" in document["restorable"]["ddl_detail"]
            # libpq takes the name of the role from the user's, which is not there.
            code, document, _ = run_as_user(folder, folder / "roleless.toml", "init")
            assert code == 6, document
            assert "user=" in document["hint"]
            assert "PGUSER" in document["hint"]
        for node in fleet.primaries:
            execute(make_conninfo(node.dsn, dbname="postgres"), "DROP DATABASE unnamed WITH (FORCE)")


@can_change_user
def test_a_label_has_the_number_of_a_user_without_a_name() -> None:
    code = (
        f"import os; from cutline.fleet.own_process import own_label; os.setuid({UID}); print(own_label('create', 'a'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("cutline create a ")
    assert f"{UID}@" in done.stdout
    assert own_label("create", "a").startswith("cutline create a ")
