"""A drill's servers see nothing of the machine and of the command that starts them, whoever runs in them."""

from __future__ import annotations

import errno
import json
import os
import pwd
import shutil
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

import pytest

import cutline.restore.drill.servers
from cutline.embedded import confine
from cutline.embedded.fleet import stop_fleet
from cutline.embedded.sandbox import Confinement, UnconfinedError, find_confinement, start_sandboxed
from cutline.embedded.server import ServerFailedError
from cutline.fleet.config import DrillTable
from cutline.fleet.progress import Noting, Silent
from cutline.nodes.programs import SERVER_PROGRAMS, shared_temporary_directory
from cutline.restore.drill.servers import check_confinement
from tests.integration.sandbox_look import SECRET, SHOWN
from tests.other_user import needs_root
from tests.run.soak import first
from tests.servers.installed import MAJORS, REQUIRED, SERVERS, require_server

ROOT, SECONDS_MAX = Path(__file__).parents[2], 120
needs_setpriv = pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv(1)")
# An ordinary user with a name, who may read this Python and this tree wherever they are.
ORDINARY = pwd.getpwnam("nobody")
AS_ORDINARY = (
    "setpriv", f"--reuid={ORDINARY.pw_uid}", f"--regid={ORDINARY.pw_gid}", "--clear-groups",
    "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search",
)  # fmt: skip
# Root as most containers have it.
WITHOUT_NAMESPACES = ("setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin")
MISSING = "No such file or directory"
READ_MEMORY = """
import ctypes, os, sys
sys.path.insert(0, sys.argv[1])
import confine

class Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]

libc, body = ctypes.CDLL(None, use_errno=True), ctypes.create_string_buffer(16)
here, there = Vector(ctypes.addressof(body), 16), Vector(int(sys.argv[3]), 16)
if sys.argv[4] == "confined":
    confine.enter_namespaces({})
size = libc.process_vm_readv(int(sys.argv[2]), ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
print("read" if size == 16 else os.strerror(ctypes.get_errno()))
"""


def leave(lacking: str) -> NoReturn:
    """Skip the test for what the system lacks; where that is required, as in CI, fail."""
    if REQUIRED:
        pytest.fail(lacking)
    pytest.skip(lacking)


def look_as(
    words: tuple[str, ...],
    folder: Path,
    programs: Path | None = None,
    libraries: Path | None = None,
    home: Path | None = None,
) -> dict[str, Any]:
    command = [*words, sys.executable, "-m", "tests.integration.sandbox_look", str(folder)]
    done = subprocess.run(
        command + ([str(programs)] if programs else []),
        capture_output=True, text=True, timeout=SECONDS_MAX, cwd=ROOT, check=False,
        env=os.environ
        | {"TMPDIR": str(folder)}
        | ({"LD_LIBRARY_PATH": str(libraries)} if libraries else {})
        | ({"HOME": str(home)} if home else {}),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert SHOWN not in "\n".join(found["variables"])
    assert SECRET not in "\n".join(found["secret"])
    assert ("written" in found["writing"], "mounted" in found["mounting"]) == (False, False)
    assert "password authentication failed" in found["refused"]
    return found


def assert_sees_nothing(found: dict[str, Any]) -> None:
    if not found["namespaces"]:
        lacking = f"the kernel gives no namespaces: {found['lacking']}"
        leave(lacking)
    assert MISSING in found["secret"][0]
    assert found["network"] == []
    assert set(found["root"]).isdisjoint({"home", "root", "run", "sys", "opt", "srv"})
    assert found["proc"] == ["/proc", "/proc/self", "/proc/self/exe"]
    assert sum(MISSING in line for line in found["sockets"]) == 2, found["sockets"]


@needs_root
@pytest.mark.parametrize("major", first([None, *sorted(SERVERS)], 2))
def test_a_server_of_root_is_a_user_of_its_own_and_sees_nothing(tmp_path: Path, major: int | None) -> None:
    found = look_as((), tmp_path, SERVERS[major].programs if major else None)
    assert_sees_nothing(found)
    assert found["user"] != os.geteuid()
    with pytest.raises(KeyError):
        pwd.getpwuid(found["user"])


@pytest.mark.parametrize("major", first(MAJORS))
def test_a_build_may_be_moved_and_linked_together_and_what_is_beside_it_is_not_seen(major: int) -> None:
    """Links to programs in `bin`, which lead to a build that has its libraries and shared files elsewhere."""
    build = require_server(major, icu=True).programs.parent
    with TemporaryDirectory(dir=shared_temporary_directory()) as folder:
        place = Path(folder)
        place.chmod(0o711)
        for name in ("bin", "moved/bin", "moved/lib", "libraries"):
            (place / name).mkdir(parents=True)
        (place / "named").symlink_to("moved")
        for name in SERVER_PROGRAMS:
            shutil.copy((build / "bin" / name).resolve(), place / "moved/bin" / name)
            (place / "bin" / name).symlink_to(f"../named/bin/{name}")
        for file in (build / "lib").iterdir():
            (place / ("libraries" if file.name.startswith("libossp") else "moved/lib") / file.name).symlink_to(file)
        (place / "moved/share").symlink_to(build / "share")
        found = look_as((), place, place / "bin", place / "libraries")
    assert found["uuid"] == ""
    assert_sees_nothing(found)


@needs_root
@needs_setpriv
def test_a_server_of_root_without_namespaces_is_a_user_of_its_own(tmp_path: Path) -> None:
    found = look_as(WITHOUT_NAMESPACES, tmp_path)
    assert (found["namespaces"], found["user"] in (0, ORDINARY.pw_uid)) == (False, False)
    assert "Permission denied" in found["secret"][0]


@needs_root
@needs_setpriv
def test_a_server_of_an_ordinary_user_sees_nothing(tmp_path: Path) -> None:
    """Its data are below TMPDIR, however long the path of that; its socket is where the path is short enough."""
    with TemporaryDirectory(dir=shared_temporary_directory()) as place:
        folder = Path(place, "a_folder_for_temporary_files_on_another_disk" * 3)
        folder.mkdir()
        for one in (place, folder):
            os.chown(one, ORDINARY.pw_uid, ORDINARY.pw_gid)
        found = look_as(AS_ORDINARY, folder)
        assert list(folder.glob("servers/*")) == []
    assert (found["data"].startswith(f"{folder}/"), found["socket"].startswith(f"{folder}/")) == (True, False)
    assert not Path(found["socket"]).parent.parent.exists()
    assert_sees_nothing(found)
    assert found["user"] == ORDINARY.pw_uid


@needs_root
@needs_setpriv
@pytest.mark.skipif(not os.access("/usr/local", os.W_OK), reason="needs to write below /usr/local")
def test_a_server_of_an_ordinary_user_sees_nothing_of_the_systems_that_is_not_for_everybody() -> None:
    """PostgreSQL's user has its home beside its programs, in /usr/local/pgsql, as the manual has it."""
    build = require_server(MAJORS[-1]).programs.parent
    with TemporaryDirectory(dir="/usr/local") as folder, TemporaryDirectory(dir=shared_temporary_directory()) as place:
        home, elsewhere = Path(folder, "pgsql"), Path(folder, "etc")
        for name in ("bin", "lib", "share"):
            shutil.copytree(build / name, home / name)
        for path, mode in (
            (home / "open", 0o644), (home / ".pgpass", 0o600), (home / "data/base", 0o644), (elsewhere / "key", 0o640),
            (elsewhere / "for_all", 0o644),
        ):  # fmt: skip
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"{SECRET} of {path.name}\n")
            path.chmod(mode)
        for path in (Path(place), home, *home.rglob("*"), *elsewhere.iterdir()):
            os.chown(path, ORDINARY.pw_uid, ORDINARY.pw_gid, follow_symlinks=False)
        Path(folder).chmod(0o755)
        found = look_as(AS_ORDINARY, Path(place), home / "bin", home=home)
    assert_sees_nothing(found)
    assert found["user"] == ORDINARY.pw_uid
    assert found["home"] == [
        "bin", "lib", "share", f"cat: {home}/.pgpass: {MISSING}", f"{SECRET} of for_all"
    ]  # fmt: skip


@needs_root
@needs_setpriv
def test_what_is_confined_of_an_ordinary_user_reads_no_memory_of_that_users_processes() -> None:
    """Its servers have the same user id. What is not confined may read it, unless the kernel forbids that to all."""
    folder = str(Path(confine.__file__).parent)
    with subprocess.Popen([*AS_ORDINARY[:4], "/bin/sleep", "60"]) as target:
        try:
            words = (folder, str(target.pid), str(stack_of(target.pid)))
            free, confined = (
                subprocess.run(
                    [*AS_ORDINARY, sys.executable, "-I", "-c", READ_MEMORY, *words, how],
                    capture_output=True, text=True, timeout=SECONDS_MAX, check=False,
                )
                for how in ("free", "confined")
            )  # fmt: skip
        finally:
            target.kill()
    if "unshare" in confined.stderr:
        leave(f"the kernel gives no namespaces: {confined.stderr}")
    # With all capabilities of its namespace, which a server has not.
    assert confined.stdout == f"{os.strerror(errno.EPERM)}\n", confined
    assert free.stdout in ("read\n", confined.stdout), free


def stack_of(process: int) -> int:
    deadline = time.monotonic() + SECONDS_MAX
    while "sleep" not in Path(f"/proc/{process}/comm").read_text():
        assert time.monotonic() < deadline
    (line,) = (one for one in Path(f"/proc/{process}/maps").read_text().splitlines() if one.endswith("[stack]"))
    return int(line.split("-")[1].split()[0], 16) - 64


def test_a_server_that_does_not_start_says_why_although_its_log_is_deleted_with_it(tmp_path: Path) -> None:
    (tmp_path / "probe").mkdir()
    confinement = find_confinement(tmp_path / "probe")
    if confinement.is_none:
        leave(confinement.lacking)
    place = tmp_path / "servers"
    try:
        with pytest.raises(ServerFailedError, match="node s1: its server did not start: ") as raised:
            start_sandboxed(place, ["s1"], confinement, None, {"max_connections": "nothing"})
    finally:
        stop_fleet(place, delete=True)
    assert "max_connections" in str(raised.value.details["log"])
    assert "log /" not in raised.value.hint


def test_where_nothing_confines_the_servers_a_drill_is_refused_or_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = Confinement(None, namespaces=False, lacking="unshare: no")
    monkeypatch.setattr(cutline.restore.drill.servers, "find_confinement", lambda _: nothing)
    with pytest.raises(UnconfinedError, match="unshare: no") as raised:
        check_confinement(tmp_path / "a", DrillTable(), Silent())
    assert "allow_unconfined = true" in raised.value.hint
    noting = Noting(Silent())
    assert check_confinement(tmp_path / "b", DrillTable(allow_unconfined=True), noting).is_none
    assert noting.notes == [
        "the drill's servers are not confined: they run as this user (allow_unconfined in fleet.toml)"
    ]
