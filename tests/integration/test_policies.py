"""Snapshots created where deletes are forbidden and read where writes are, under the policies of docs/storage.md.

versitygw enforces them itself, with its own users. moto's server lets everybody do everything, so proxies enforce them.
The bucket of the whole chain, which a short run has on one of the two only, also locks every object for a day.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import psycopg
import pytest

from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet
from cutline.fleet.crash_points import CrashPoint
from cutline.fleet.progress import Silent
from cutline.nodes.connections import with_database
from cutline.restore.plan.plan import plan_restore
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.run.restore import restore_fleet
from cutline.snapshots.operations.open_operations import read_open_intents
from cutline.snapshots.removal.gc import collect_garbage
from cutline.storage.open import open_store
from cutline.storage.store import DeletionRefusedError, ObjectStore, WritingRefusedError
from tests.commands.in_process import run_here
from tests.commands.snapshot_runs import (
    Ready,
    Runs,
    configure_fleet,
    dropping_slots,
    removing_new_transfers,
    run_command,
    sorted_copies,
)
from tests.commands.watching import Watching
from tests.run.soak import first
from tests.s3.kinds import ONE_KIND
from tests.s3.policies import ROLES, bucket_policy, forbidden_operations, unwritable_keys
from tests.s3.proxy import s3_proxy
from tests.s3.server import S3Server
from tests.s3.versitygw import create_user

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).resolve().parents[2]
NAME, DIED = "kept", "died"
FOLDER = "some/folder"
RESTORED = "restored"
# Several commands run as processes, each of which starts a JVM, on a machine that may be busy.
CHAIN_SECONDS_MAX = 900
ROWS = "generate_series(1, 20)"
COMMAND_SECONDS_MAX = 600


@dataclass(frozen=True, slots=True)
class BucketFolder:
    """A folder of a bucket, and each role's store_options for it; `client` has the operator's permissions."""

    client: Any
    bucket: str
    options: dict[str, dict[str, object]]

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{FOLDER}"

    def store(self, role: str) -> ObjectStore:
        return open_store(self.url, self.options[role])

    def version_keys(self) -> list[str]:
        """Return the keys of all versions in the folder; there must be no delete markers."""
        found = self.client.list_object_versions(Bucket=self.bucket)
        assert not found["IsTruncated"]
        assert not found.get("DeleteMarkers")
        return sorted(one["Key"].removeprefix(f"{FOLDER}/") for one in found.get("Versions", []))


def enforce_with_users(server: S3Server, bucket: str, _: ExitStack) -> dict[str, dict[str, object]]:
    """Create a versitygw user for each role, with only the permissions of the bucket's policy."""
    users = {role: f"{role}-{uuid.uuid4().hex[:8]}" for role in ROLES}
    for user in users.values():
        create_user(server, user, f"secret-of-{user}")
    server.client.put_bucket_policy(Bucket=bucket, Policy=bucket_policy(bucket, FOLDER, users))
    return {role: server.options | {"key": user, "secret": f"secret-of-{user}"} for role, user in users.items()}


def enforce_with_proxies(server: S3Server, _: str, stack: ExitStack) -> dict[str, dict[str, object]]:
    """Start a proxy for each role that refuses every request for which the role has no permission."""
    options = {}
    for role in ROLES:
        proxy = stack.enter_context(s3_proxy(server.endpoint_url))
        proxy.forbidden, proxy.unwritable = forbidden_operations(role), unwritable_keys(role)
        options[role] = server.options | {"endpoint_url": proxy.endpoint_url}
    return options


ENFORCE = {"s3": enforce_with_proxies, "versitygw": enforce_with_users}
# The servers for the whole chain: in a short run only one, the real one if it can be built.
OF_CHAIN = first([ONE_KIND, *(kind for kind in ENFORCE if kind != ONE_KIND)])
RETENTION = {"s3": "COMPLIANCE", "versitygw": "GOVERNANCE"}
NewFolder: TypeAlias = Callable[[str], BucketFolder]


@pytest.fixture(params=ENFORCE)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def new_folder(request: pytest.FixtureRequest, kind: str) -> Iterator[NewFolder]:
    """Return a function that creates a bucket that keeps versions, and locks them if a retention is given."""
    server: S3Server = request.getfixturevalue(kind)
    with ExitStack() as stack:

        def make(retention: str) -> BucketFolder:
            bucket = f"policies-{uuid.uuid4().hex[:12]}"
            server.bucket(bucket, versioned=True, retention=retention)
            return BucketFolder(server.client, bucket, ENFORCE[kind](server, bucket, stack))

        yield make


@pytest.fixture
def cleanup(shared_fleet: EmbeddedFleet) -> Iterator[None]:
    """Drop the databases that a test restored, and delete the rows that it inserted."""
    with removing_new_transfers(shared_fleet.dsns()):
        yield
    for node in shared_fleet.primaries:
        with psycopg.connect(node.dsn("postgres"), autocommit=True) as connection:
            connection.execute(f"DROP DATABASE IF EXISTS {RESTORED} WITH (FORCE)".encode())


def kill_create(fleet: Fleet, name: str) -> None:
    """Kill the create of a full snapshot at its first slot: its intent and its slots stay."""
    program = [sys.executable, "-m", "tests.faults.signalled_command", "SIGKILL", CrashPoint.SLOT_MADE, "1", "--"]
    words = ["--fleet", str(fleet.path), "create", name, "--only-primary"]
    done = subprocess.run([*program, *words], capture_output=True, timeout=COMMAND_SECONDS_MAX, cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr


def test_create_can_not_delete_read_can_not_write_and_retention_can_delete(new_folder: NewFolder) -> None:
    folder = new_folder("")
    folder.store("create").create("a/object", b"x")
    for role in ("create", "read"):
        with pytest.raises(DeletionRefusedError, match=r"a/object .* 403 AccessDenied"):
            folder.store(role).delete("a/object")
    with pytest.raises(WritingRefusedError, match="403 AccessDenied"):
        folder.store("read").create("a/other", b"x")
    for role in ROLES:
        assert folder.store(role).read("a/object") == b"x"
        assert [one.key for one in folder.store(role).inventory("")] == folder.store(role).list("") == ["a/object"]
        assert not folder.store(role).exists("a/other")
    assert folder.version_keys() == ["a/object"]
    folder.store("retention").create("deleted/tombstone", b"x")
    folder.store("retention").delete("a/object")
    assert folder.store("retention").unfinished() == []
    assert folder.version_keys() == ["deleted/tombstone"]


@pytest.mark.parametrize("key", [
    "deleted/daily.json", "snapshots/daily/only-full.json", "snapshots/daily/repairs/0000000000000001.json",
    "snapshots/daily/pins/0000000000000001.json", "snapshots/daily/begins/0000000000000001.json",
    "keys/0000000000000002.json",
])  # fmt: skip
def test_who_creates_snapshots_can_not_mark_them_or_add_a_key(new_folder: NewFolder, key: str) -> None:
    folder = new_folder("")
    with pytest.raises(WritingRefusedError, match="403 AccessDenied"):
        folder.store("create").create(key, b"x")
    folder.store("create").create("snapshots/daily/snapshot.json", b"x")
    folder.store("retention").create(key, b"x")
    assert folder.version_keys() == sorted([key, "snapshots/daily/snapshot.json"])


@pytest.mark.timeout(CHAIN_SECONDS_MAX)
@pytest.mark.parametrize("kind", OF_CHAIN, indirect=True)
def test_a_chain_is_created_and_read_with_only_the_permissions_of_the_policies(
    kind: str, new_folder: NewFolder, shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path: Path, cleanup: None
) -> None:
    folder = new_folder(RETENTION[kind])
    creating, reading = (
        Runs(configure_fleet(shared_fleet, tmp_path / f"{role}.toml", folder.url, folder.options[role]), Ready(spark))
        for role in ("create", "read")
    )
    with dropping_slots(creating.fleet):
        code, report = run_here(creating.fleet, "init")
        assert (code, "object probes/" in report["deleting_refused"]) == (0, True), report

        # Create needs no delete permission, even if it has to settle an operation that died.
        kill_create(creating.fleet, DIED)
        (died,) = read_open_intents(folder.store("read"))
        garbage = f"snapshots/{DIED}/base/s1/{died.id}/part-0000.parquet"
        folder.store("create").create(garbage, b"x")
        creating.full(NAME)
        assert read_open_intents(folder.store("read")) == []
        for dsn in shared_fleet.dsns():
            with psycopg.connect(dsn) as connection:
                connection.execute(f"INSERT INTO transfer SELECT gen_random_uuid(), 1, 2, n FROM {ROWS} AS n".encode())
        assert creating.increment(NAME).counts["transactions"] == len(shared_fleet.dsns())

    # Reading needs no write permission.
    version_keys = folder.version_keys()
    assert [run_here(reading.fleet, *words)[0] for words in (("list",), ("show", NAME))] == [0, 0]
    report = reading.check_one(NAME)
    assert (report.result, report.conflicts, report.skipped) == ("valid", [], [])
    target = replace(reading.fleet, nodes=tuple(with_database(node, RESTORED) for node in reading.fleet.primaries))
    watching = Watching()
    restore_fleet(plan_restore(reading.fleet, target, RestoreRequest(NAME)), reading.spark, watching)
    assert any("lease" in note and "403 AccessDenied" in note for note in watching.notes), watching.notes
    for source, copy in zip(shared_fleet.dsns(), target.primaries, strict=True):
        assert sorted_copies(copy.dsn) == sorted_copies(source)

    # Every object has one version and no delete marker. While they are locked, even retention can't delete them.
    assert folder.store("read").list("") == version_keys
    # moto's server does not lock multipart uploads, and one of the probe's objects is one.
    locked = [key for key in version_keys if not key.startswith("probes/")]
    for key in locked:
        with pytest.raises(DeletionRefusedError, match=key):
            folder.store("retention").delete(key)
    collecting = configure_fleet(shared_fleet, tmp_path / "retention.toml", folder.url, folder.options["retention"])
    report = collect_garbage(collecting, 0.0, Silent())
    assert ([one.key for one in report.refused], report.removed.objects, report.unknown) == ([garbage], 0, [])
    assert set(locked) <= set(folder.store("read").list("")) == set(folder.version_keys())

    # The snapshot is deleted nevertheless: it is no longer listed, and each object that its lock keeps is named.
    code, report = run_command(collecting, "delete", NAME, "--force", "--yes")
    assert (code, report["state"]) == (3, "unfinished"), report
    assert {one["object"] for one in report["refused"]} == {
        key for key in locked if key.startswith(f"snapshots/{NAME}/")
    }
    assert run_here(reading.fleet, "list")[1]["snapshots"] == []
    assert run_here(collecting, "delete", NAME, "--yes")[0] == 3
