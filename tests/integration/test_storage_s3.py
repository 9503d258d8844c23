from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from storage.fsspec_store import FsspecStore
from storage.open import open_store
from storage.s3_multipart import MULTIPART_BYTES_MIN, PART_BYTES
from storage.store import ObjectExistsError, ObjectStore
from tests.object_store_contract import ObjectStoreContract
from tests.s3_kinds import KINDS, S3Place
from tests.s3_server import S3Server, in_folder

EXECUTORS_SECONDS_MAX = 120
EXECUTORS_JOB = """
import pickle, sys
from pyspark.sql import SparkSession

ANSWERS = "number bigint, process_id bigint, body string, error string"

def create_and_read(pair, batches):
    import os
    import pyarrow
    from storage.errors import SnapshotError
    from storage.open import open_store
    store = open_store(*pair)
    for batch in batches:
        for number in batch.column("id").to_pylist():
            error = ""
            try:
                store.create(f"executors/{number % 20:02}", b"%d" % number)
            except SnapshotError as refused:
                error = refused.slug
            body = store.read(f"executors/{number % 20:02}").decode()
            yield pyarrow.RecordBatch.from_pylist(
                [{"number": number, "process_id": os.getpid(), "body": body, "error": error}]
            )

pairs = pickle.loads(bytes.fromhex(sys.argv[1]))
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
try:
    for pair in pairs:
        rows = spark.range(0, 40, 1, 4).mapInArrow(lambda batches: create_and_read(pair, batches), ANSWERS)
        print(rows.toPandas().to_json(orient="records"))
finally:
    spark.stop()
"""


@pytest.fixture(scope="module", params=KINDS)
def opened(request: pytest.FixtureRequest) -> ObjectStore:
    server: S3Place = request.getfixturevalue(request.param)
    return open_store(server.bucket("contract"), server.options)


class TestS3Store(ObjectStoreContract):
    @pytest.fixture
    def store(self, opened: ObjectStore) -> ObjectStore:
        return in_folder(opened, f"{uuid.uuid4().hex}/folder")


def test_a_large_object_comes_in_parts_and_once_too(s3: S3Server) -> None:
    store = open_store(s3.bucket(f"test-{uuid.uuid4().hex}"), s3.options)
    body = os.urandom(MULTIPART_BYTES_MIN + 1)
    store.create("large", body)
    for other in (b"x" * MULTIPART_BYTES_MIN, b"small"):
        with pytest.raises(ObjectExistsError):
            store.create("large", other)
    assert store.read("large") == body
    # S3 marks what was uploaded in parts by a hyphen and their number.
    assert tag_of(store, "large").endswith(f"-{MULTIPART_BYTES_MIN // PART_BYTES + 1}")
    store.create("less", body[: MULTIPART_BYTES_MIN - 1])
    assert "-" not in tag_of(store, "less")
    assert store.unfinished() == []


def tag_of(store: ObjectStore, key: str) -> str:
    assert isinstance(store, FsspecStore)
    return str(store.filesystem.info(store.path(key))["ETag"]).strip('"')


def test_executors_open_a_store_by_url_and_options(s3: S3Server, tmp_path: Path) -> None:
    pairs = [
        (s3.bucket(f"test-{uuid.uuid4().hex}") + "/folder", s3.options),
        (f"file://{tmp_path}/store", {}),
    ]
    root = Path(__file__).resolve().parents[2]
    completed = subprocess.run(
        [sys.executable, "-c", EXECUTORS_JOB, pickle.dumps(pairs).hex()],
        capture_output=True,
        text=True,
        timeout=EXECUTORS_SECONDS_MAX,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(root), "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable},
    )
    assert completed.returncode == 0, completed.stderr[-4000:]
    answers = [json.loads(line) for line in completed.stdout.splitlines()]
    assert len(answers) == len(pairs)
    for pair, rows in zip(pairs, answers, strict=True):
        assert len({row["process_id"] for row in rows}) > 1
        won = {row["number"] % 20: str(row["number"]) for row in rows if not row["error"]}
        assert len(won) == sum(row["error"] == "object-exists" for row in rows) == 20
        assert all(row["body"] == won[row["number"] % 20] for row in rows)
        assert len(open_store(*pair).list("executors")) == 20
