from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from cutline.storage.errors import SnapshotError
from cutline.storage.open import open_store
from cutline.storage.s3 import S3Store
from cutline.storage.s3_create import MULTIPART_BYTES_MIN, PART_BYTES
from cutline.storage.store import ObjectExistsError, ObjectStore
from tests.s3.kinds import KINDS, S3Place
from tests.s3.server import S3Server, in_folder
from tests.stores.contract import ObjectStoreContract

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ANSWERS = "number bigint, process_id bigint, body string, error string"


def create_and_read(pair: tuple[str, dict[str, object]], batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Create each of 20 objects from two tasks, with the task's number as body, and yield the results."""
    store = open_store(*pair)
    for batch in batches:
        for number in batch.column("id").to_pylist():
            error = ""
            try:
                store.create(f"executors/{number % 20:02}", b"%d" % number)
            except SnapshotError as refused:
                error = refused.slug
            body = store.read(f"executors/{number % 20:02}").decode()
            yield pa.RecordBatch.from_pylist(
                [{"number": number, "process_id": os.getpid(), "body": body, "error": error}]
            )


@pytest.fixture(scope="module", params=KINDS)
def opened(request: pytest.FixtureRequest) -> ObjectStore:
    server: S3Place = request.getfixturevalue(request.param)
    return open_store(server.bucket("contract"), server.options)


class TestS3Store(ObjectStoreContract):
    @pytest.fixture
    def store(self, opened: ObjectStore) -> ObjectStore:
        return in_folder(opened, f"{uuid.uuid4().hex}/folder")


def test_a_large_object_is_uploaded_in_parts_and_created_once(s3: S3Server) -> None:
    store = open_store(s3.bucket(f"test-{uuid.uuid4().hex}"), s3.options)
    body = os.urandom(MULTIPART_BYTES_MIN + 1)
    store.create("large", body)
    for other in (b"x" * MULTIPART_BYTES_MIN, b"small"):
        with pytest.raises(ObjectExistsError):
            store.create("large", other)
    assert store.read("large") == body
    # The ETag of a multipart upload ends in a hyphen and the number of parts.
    assert etag_of(store, "large").endswith(f"-{MULTIPART_BYTES_MIN // PART_BYTES + 1}")
    store.create("less", body[: MULTIPART_BYTES_MIN - 1])
    assert "-" not in etag_of(store, "less")
    assert store.unfinished() == []


def etag_of(store: ObjectStore, key: str) -> str:
    assert isinstance(store, S3Store)
    return str(store.client.ask("head_object", Bucket=store.root, Key=key)["ETag"]).strip('"')


@pytest.mark.parametrize("kind", ["s3", "folder"])
def test_executors_open_a_store_by_url_and_options(
    s3: S3Server, spark: SparkSession, tmp_path: Path, kind: str
) -> None:
    pair = (f"file://{tmp_path}/store", dict[str, object]())
    if kind == "s3":
        pair = (s3.bucket(f"test-{uuid.uuid4().hex}") + "/folder", s3.options)
    rows = spark.range(0, 40, 1, 4).mapInArrow(lambda batches: create_and_read(pair, batches), ANSWERS).collect()
    assert len({row["process_id"] for row in rows} - {os.getpid()}) > 1
    won = {row["number"] % 20: str(row["number"]) for row in rows if not row["error"]}
    assert len(won) == sum(row["error"] == "object-exists" for row in rows) == 20
    assert all(row["body"] == won[row["number"] % 20] for row in rows)
    assert len(open_store(*pair).list("executors")) == 20
