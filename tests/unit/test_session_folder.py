"""A command's temporary files are in one private folder, which is gone when it ends, or when the next one starts."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import cutline.spark.session_folder as session_folder_module
from cutline.spark.session_folder import PREFIX, claimed_folder, delete_dead_sessions, session_folder
from tests.other_user import OTHER_UID, as_other_user, needs_root

PROGRAM = [sys.executable, "-c", "from cutline.cli.main import main; main()"]
# Prints its folder, makes files as a command does, and waits.
HOLDER = """
import os, sys, tempfile
from cutline.spark.session_folder import session_folder
with session_folder() as folder:
    tempfile.mkdtemp(prefix="cutline-ddl-")
    with open(os.path.join(os.environ["TMPDIR"], "of a child"), "w"):
        print(folder, flush=True)
    sys.stdin.read()
"""


@contextmanager
def holding(temporary: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"TMPDIR": str(temporary)},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())


def name_of_a_session(drawn: str, host: str = "", boot: str = "") -> str:
    """The name of a session folder of this host and boot, or of others."""
    own_host, own_boot = session_folder_module._host_and_boot()
    return f"{PREFIX}{host or own_host}{boot or own_boot}-{drawn}"


def run_a_command(temporary: Path) -> None:
    """One that begins a session and ends at once: there is no fleet file."""
    done = subprocess.run(
        [*PROGRAM, "list", "--fleet", os.devnull + "/absent"],
        env=os.environ | {"TMPDIR": str(temporary)},
        check=False,
        capture_output=True,
    )
    assert done.returncode == 2, done.stderr


def test_everything_is_in_a_private_folder_that_is_gone_at_the_end(temporary: Path) -> None:
    with holding(temporary) as (process, folder):
        assert list(temporary.iterdir()) == [folder]
        assert (folder.stat().st_mode & 0o777, folder.stat().st_uid) == (0o700, os.geteuid())
        assert len(list(folder.iterdir())) == 2
        process.communicate("")
    assert list(temporary.iterdir()) == []


def test_the_next_command_deletes_the_folder_of_a_killed_one_and_no_living_ones(temporary: Path) -> None:
    with holding(temporary) as (living, kept), holding(temporary) as (killed, dead):
        killed.kill()
        killed.wait()
        assert dead.exists()
        run_a_command(temporary)
        assert not dead.exists()
        assert len(list(kept.iterdir())) == 2
        living.communicate("")
    assert list(temporary.iterdir()) == []


def test_the_pid_of_a_killed_command_proves_nothing(temporary: Path) -> None:
    """Its child lives on, and so does its folder's content, but the lock ended with the command."""
    child = HOLDER.replace("    with open", "    import subprocess; subprocess.Popen(['sleep', '60'])\n    with open")
    with subprocess.Popen(
        [sys.executable, "-c", child],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        process.kill()
        try:
            process.wait()
            run_a_command(temporary)
            assert not folder.exists()
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_planted_links_are_not_followed(temporary: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    victim = tmp_path_factory.mktemp("victim")
    (victim / "file").touch()
    (temporary / name_of_a_session("link")).symlink_to(victim)
    dead = temporary / name_of_a_session("dead")
    dead.mkdir(mode=0o700)
    (dead / "link").symlink_to(victim)
    run_a_command(temporary)
    assert (victim / "file").exists()
    assert [path.name for path in temporary.iterdir()] == [name_of_a_session("link")]


@needs_root
def test_a_folder_of_another_user_is_neither_used_nor_deleted(temporary: Path) -> None:
    theirs = temporary / name_of_a_session("theirs")
    theirs.mkdir(mode=0o777)
    os.chown(theirs, OTHER_UID, OTHER_UID)
    with session_folder() as folder:
        assert folder != theirs
    assert theirs.exists()


@needs_root
def test_another_user_sees_nothing_of_it(temporary: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    shared = Path(tempfile.mkdtemp(dir="/tmp"))
    shared.chmod(0o1777)
    try:
        with claimed_folder(shared) as folder:
            (folder / "secret").write_text("x")
            seen = as_other_user(
                lambda: [os.access(folder, os.R_OK), os.access(folder, os.X_OK), os.access(folder / "secret", os.R_OK)],
                tmp_path_factory.mktemp("results") / "seen",
            )
            assert seen == [False, False, False]
            # They can find its name, and can't hold its lock either, which would keep it from being deleted.
            assert as_other_user(lambda: try_to_lock(shared), temporary / "seen") == "locked"
            assert as_other_user(lambda: try_to_lock(folder), temporary / "seen") == "PermissionError"
    finally:
        shutil.rmtree(shared)


def try_to_lock(folder: Path) -> str:
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return type(error).__name__
    return "locked"


def test_a_command_of_another_host_is_not_taken_for_dead(temporary: Path) -> None:
    """Hosts that share the folder don't see each other's locks."""
    kept = [name_of_a_session("x", host="aaaaa", boot="bbbbb"), f"{PREFIX}x", f"{PREFIX}x-y"]
    dead = [
        name_of_a_session("killed"),
        name_of_a_session("before_a_restart", boot="bbbbb"),
        name_of_a_session("of_another_container_on_this_kernel", host="aaaaa"),
    ]
    for name in (*kept, *dead):
        (temporary / name).mkdir(mode=0o700)
    delete_dead_sessions(temporary)
    assert {path.name for path in temporary.iterdir()} == set(kept)


def test_the_folder_of_a_killed_command_stays_until_its_jvm_has_started_or_never_will(temporary: Path) -> None:
    """A JVM that can't write there how to reach it would not end."""
    folder = temporary / name_of_a_session("killed")
    place = folder / "tmpabc"
    place.mkdir(parents=True, mode=0o700)
    delete_dead_sessions(temporary)
    assert place.exists()
    (place / "address").write_text("here")
    delete_dead_sessions(temporary)
    assert not folder.exists()
    place.mkdir(parents=True)
    an_hour_ago = time.time() - 3600
    os.utime(place, (an_hour_ago, an_hour_ago))
    delete_dead_sessions(temporary)
    assert not folder.exists()


def test_the_name_of_a_session_folder_has_the_host_and_the_boot(temporary: Path) -> None:
    with claimed_folder(temporary) as folder:
        assert folder.name.startswith(name_of_a_session(""))
    assert len({*session_folder_module._host_and_boot(), ""}) == 3


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--help"], 0), (["--version"], 0), ([], 2), (["demo", "up", "--help"], 0), (["list", "--help"], 0),
        (["create"], 2), (["list", "--bogus"], 2), (["demo", "up", "--bogus"], 2),
    ],
)  # fmt: skip
def test_help_and_mistakes_need_no_folder(temporary: Path, words: list[str], code: int) -> None:
    """A dead session's folder stays, which a command that runs deletes."""
    dead = temporary / name_of_a_session("dead")
    dead.mkdir(mode=0o700)
    temporary.chmod(0o777)
    done = subprocess.run([*PROGRAM, *words], check=False, capture_output=True, text=True)
    assert (done.returncode, "folder for temporary files" in done.stderr) == (code, False), done.stderr
    temporary.chmod(0o700)
    subprocess.run([*PROGRAM, *words], check=False, capture_output=True)
    assert dead.exists()
    run_a_command(temporary)
    assert not dead.exists()


# A command that succeeds, and is interrupted while its session folder is deleted.
INTERRUPTED_LATE = """
import os, shutil, signal, sys, types
import typer
from cutline.cli import main
from cutline.cli.output.results import emit

delete = shutil.rmtree
def delete_slowly(folder, **options):
    os.kill(os.getpid(), signal.Signals[sys.argv.pop()])
    delete(folder, **options)

def stand_in(context: typer.Context, signals: str) -> None:
    emit(context, {"schema": "cutline/stand-in/1"}, ["done"])
    shutil.rmtree = delete_slowly
    raise typer.Exit(4)

sys.modules["stand_in"] = types.SimpleNamespace(stand_in=stand_in)
main.COMMANDS["stand-in"] = main.CommandEntry("stand_in", "stand_in", "Stand in.")
main.main()
"""


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_an_interrupt_of_the_cleanup_changes_neither_exit_code_nor_output(temporary: Path, number: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_LATE, "--json", "stand-in", number],
        check=False,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, json.loads(done.stdout)["schema"]) == (4, "cutline/stand-in/1"), done.stdout
    assert list(temporary.iterdir()) == []


def test_a_folder_that_can_not_be_listed_is_used_all_the_same(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", refuse)
        delete_dead_sessions(temporary)
    with session_folder() as folder:
        assert folder.parent == temporary


def test_a_folder_that_another_command_takes_for_dead_is_made_again(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between making and locking it."""
    make = tempfile.mkdtemp
    made: list[str] = []

    def make_and_lose(*arguments: str, **options: str) -> str:
        made.append(make(*arguments, **options))
        if len(made) == 1:
            delete_dead_sessions(temporary)
            assert not Path(made[0]).exists()
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", make_and_lose)
    with claimed_folder(temporary) as folder:
        assert str(folder) == made[1]
        delete_dead_sessions(temporary)
        assert folder.exists()
