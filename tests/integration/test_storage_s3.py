from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.open import open_store
from storage.store import ObjectExistsError, ObjectStore
from tests.object_store_contract import ObjectStoreContract
from tests.s3_server import S3Server, in_folder, s3_server

LARGE_BYTES = 110 * 2**20  # s3fs itself would send this in parts
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


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as running:
        yield running


@pytest.fixture(scope="module")
def opened(server: S3Server) -> ObjectStore:
    return open_store(server.bucket("contract"), server.options)


class TestS3Store(ObjectStoreContract):
    @pytest.fixture
    def store(self, opened: ObjectStore) -> ObjectStore:
        return in_folder(opened, f"contract/{uuid.uuid4().hex}/folder")


def test_a_large_object_is_one_conditional_put_too(server: S3Server) -> None:
    store = open_store(server.bucket(f"test-{uuid.uuid4().hex}"), server.options)
    body = os.urandom(2**20) * (LARGE_BYTES // 2**20)
    store.create("large", body)
    for other in (body, b"x" * LARGE_BYTES, b"small"):
        with pytest.raises(ObjectExistsError):
            store.create("large", other)
    assert store.read("large") == body
    # S3 marks what was uploaded in parts by a hyphen and their number.
    status = store.filesystem.info("/".join([store.root, "large"]))  # type: ignore[attr-defined]
    assert "-" not in status["ETag"]


def test_executors_open_a_store_by_url_and_options(server: S3Server, tmp_path: Path) -> None:
    pairs = [
        (server.bucket(f"test-{uuid.uuid4().hex}") + "/folder", server.options),
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
