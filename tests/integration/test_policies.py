"""Snapshots taken where deleting is forbidden, and read where writing is: under the policies of docs/storage.md.

versitygw enforces them itself, users and all. Before moto's server, which lets everybody do everything, a proxy does.
The bucket of the whole chain, which in short is on one of the two, also locks every object for a day.
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

from embedded.fleet import EmbeddedFleet
from fleet.config import Fleet
from fleet.nodes.connections import with_database
from fleet.progress import Silent
from restore.plan import plan_restore
from restore.request import RestoreRequest
from restore.restore import restore_fleet
from snapshots.operations.crash_points import Point
from snapshots.operations.operation import pending
from snapshots.removal.gc import collect_garbage
from storage.open import open_store
from storage.store import DeletionRefusedError, ObjectStore, WritingRefusedError
from tests.commands.in_process import run_here
from tests.s3.policies import ROLES, bucket_policy, forbidden_operations
from tests.s3_kinds import ONE_KIND
from tests.s3_proxy import s3_proxy
from tests.s3_server import S3Server
from tests.snapshot_runs import Ready, Runs, chains_dropped, described, run_command, sorted_copies, transfers_taken_back
from tests.soak import SOAK_SECONDS
from tests.versitygw import create_user
from tests.watching import Watching

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).resolve().parents[2]
NAME, DIED = "kept", "died"
FOLDER = "some/folder"
RESTORED = "restored"
# Several commands as processes, each of which starts a JVM, on a machine that may be doing other things.
CHAIN_SECONDS_MAX = 900
ROWS = "generate_series(1, 20)"
COMMAND_SECONDS_MAX = 120


@dataclass(frozen=True, slots=True)
class Place:
    """A folder of a bucket, and the store_options by which each role reaches it; `client` is the operator's."""

    client: Any
    bucket: str
    options: dict[str, dict[str, object]]

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{FOLDER}"

    def store(self, role: str) -> ObjectStore:
        return open_store(self.url, self.options[role])

    def kept(self) -> list[str]:
        """The keys of all versions in the folder; there must be no markers."""
        found = self.client.list_object_versions(Bucket=self.bucket)
        assert not found["IsTruncated"]
        assert not found.get("DeleteMarkers")
        return sorted(one["Key"].removeprefix(f"{FOLDER}/") for one in found.get("Versions", []))


def enforced_by_users(server: S3Server, bucket: str, _: ExitStack) -> dict[str, dict[str, object]]:
    """Users of versitygw who may do what the bucket's policy says, and nothing else."""
    users = {role: f"{role}-{uuid.uuid4().hex[:8]}" for role in ROLES}
    for user in users.values():
        create_user(server, user, f"secret-of-{user}")
    server.client.put_bucket_policy(Bucket=bucket, Policy=bucket_policy(bucket, FOLDER, users))
    return {role: server.options | {"key": user, "secret": f"secret-of-{user}"} for role, user in users.items()}


def enforced_by_proxies(server: S3Server, _: str, stack: ExitStack) -> dict[str, dict[str, object]]:
    """A proxy for each role, which refuses the requests for which the role has no permission."""
    options = {}
    for role in ROLES:
        proxy = stack.enter_context(s3_proxy(server.endpoint_url))
        proxy.forbidden = forbidden_operations(role)
        options[role] = server.options | {"endpoint_url": proxy.endpoint_url}
    return options


ENFORCED = {"s3": enforced_by_proxies, "versitygw": enforced_by_users}
# Where the whole chain is taken: on the server that is no test double, where that can be.
OF_CHAIN = [*ENFORCED] if SOAK_SECONDS else [ONE_KIND]
RETENTION = {"s3": "COMPLIANCE", "versitygw": "GOVERNANCE"}
MakePlace: TypeAlias = Callable[[str], Place]


@pytest.fixture(params=ENFORCED)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make_place(request: pytest.FixtureRequest, kind: str) -> Iterator[MakePlace]:
    """Makes a bucket that keeps versions, and with a retention also locks them."""
    server: S3Server = request.getfixturevalue(kind)
    with ExitStack() as stack:

        def make(retention: str) -> Place:
            bucket = f"policies-{uuid.uuid4().hex[:12]}"
            server.bucket(bucket, versioned=True, retention=retention)
            return Place(server.client, bucket, ENFORCED[kind](server, bucket, stack))

        yield make


@pytest.fixture
def restored(shared_fleet: EmbeddedFleet) -> Iterator[None]:
    """The databases that a test restores, and the rows that it writes, taken away again."""
    with transfers_taken_back(shared_fleet.dsns()):
        yield
    for node in shared_fleet.primaries:
        with psycopg.connect(node.dsn("postgres"), autocommit=True) as connection:
            connection.execute(f"DROP DATABASE IF EXISTS {RESTORED} WITH (FORCE)".encode())


def create_killed(fleet: Fleet, name: str) -> None:
    """A full snapshot that dies when its first slot is made: its intent stays, and its slots do."""
    program = [sys.executable, "-m", "tests.fault_command", "SIGKILL", Point.SLOT_MADE, "1", "--"]
    words = ["--fleet", str(fleet.path), "create", name, "--only-primary"]
    done = subprocess.run([*program, *words], capture_output=True, timeout=COMMAND_SECONDS_MAX, cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr


def test_who_creates_deletes_nothing_who_reads_writes_nothing_and_retention_frees(make_place: MakePlace) -> None:
    place = make_place("")
    place.store("create").create("a/object", b"x")
    for role in ("create", "read"):
        with pytest.raises(DeletionRefusedError, match=r"a/object .* 403 AccessDenied"):
            place.store(role).delete("a/object")
    with pytest.raises(WritingRefusedError, match="403 AccessDenied"):
        place.store("read").create("a/other", b"x")
    for role in ROLES:
        assert place.store(role).read("a/object") == b"x"
        assert [one.key for one in place.store(role).inventory("")] == place.store(role).list("") == ["a/object"]
        assert not place.store(role).exists("a/other")
    assert place.kept() == ["a/object"]
    place.store("retention").create("deleted/tombstone", b"x")
    place.store("retention").delete("a/object")
    assert place.store("retention").unfinished() == []
    assert place.kept() == ["deleted/tombstone"]


@pytest.mark.timeout(CHAIN_SECONDS_MAX)
@pytest.mark.parametrize("kind", OF_CHAIN, indirect=True)
def test_a_chain_is_taken_and_read_by_those_who_may_no_more_than_that(
    kind: str, make_place: MakePlace, shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path: Path, restored: None
) -> None:
    place = make_place(RETENTION[kind])
    creating, reading = (
        Runs(described(shared_fleet, tmp_path / f"{role}.toml", place.url, place.options[role]), Ready(spark))
        for role in ("create", "read")
    )
    with chains_dropped(creating.fleet):
        code, report = run_here(creating.fleet, "init")
        assert (code, "object probes/" in report["deleting_refused"]) == (0, True), report

        # Taken where nothing can be deleted, also after one that has to be settled.
        create_killed(creating.fleet, DIED)
        (died,) = pending(place.store("read"))
        garbage = f"snapshots/{DIED}/base/s1/{died.id}/part-0000.parquet"
        place.store("create").create(garbage, b"x")
        creating.full(NAME)
        assert pending(place.store("read")) == []
        for dsn in shared_fleet.dsns():
            with psycopg.connect(dsn) as connection:
                connection.execute(f"INSERT INTO transfer SELECT gen_random_uuid(), 1, 2, n FROM {ROWS} AS n".encode())
        assert creating.increment(NAME).counts["transactions"] == len(shared_fleet.dsns())

    # Read where nothing can be written.
    kept = place.kept()
    assert [run_here(reading.fleet, *words)[0] for words in (("list",), ("show", NAME))] == [0, 0]
    report = reading.check_one(NAME)
    assert (report.result, report.conflicts, report.skipped) == ("valid", [], [])
    target = replace(reading.fleet, nodes=tuple(with_database(node, RESTORED) for node in reading.fleet.primaries))
    watching = Watching()
    restore_fleet(plan_restore(reading.fleet, target, RestoreRequest(NAME)), reading.spark, watching)
    assert any("lease" in note and "403 AccessDenied" in note for note in watching.notes), watching.notes
    for source, copy in zip(shared_fleet.dsns(), target.primaries, strict=True):
        assert sorted_copies(copy.dsn) == sorted_copies(source)

    # One version of each object and nothing hidden, not by whoever may delete either, while they are locked.
    assert place.store("read").list("") == kept
    # moto's server does not lock what came in parts, as one of the probe's objects did.
    locked = [key for key in kept if not key.startswith("probes/")]
    for key in locked:
        with pytest.raises(DeletionRefusedError, match=key):
            place.store("retention").delete(key)
    collecting = described(shared_fleet, tmp_path / "retention.toml", place.url, place.options["retention"])
    report = collect_garbage(collecting, 0.0, Silent())
    assert ([one.key for one in report.refused], report.removed.objects, report.unknown) == ([garbage], 0, [])
    assert set(locked) <= set(place.store("read").list("")) == set(place.kept())

    # Deleted all the same: nobody sees it any more, and each object that its lock keeps is named.
    code, report = run_command(collecting, "delete", NAME, "--force")
    assert (code, report["state"]) == (3, "unfinished"), report
    assert {one["object"] for one in report["refused"]} == {
        key for key in locked if key.startswith(f"snapshots/{NAME}/")
    }
    assert run_here(reading.fleet, "list")[1]["snapshots"] == []
    assert run_here(collecting, "delete", NAME)[0] == 3
