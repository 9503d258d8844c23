"""The S3 servers that the same tests run on: moto's, versitygw, MinIO, and one that the user may name.

    SNAPSHOT_TEST_S3=http://127.0.0.1:9000/bucket/folder    your own server (https as well)
    SNAPSHOT_TEST_S3=s3://bucket/folder                     AWS, or what AWS_ENDPOINT_URL names
    SNAPSHOT_TEST_S3_OPTIONS='{"key": "…", "secret": "…"}'  more store_options; default: AWS_ACCESS_KEY_ID, …

The bucket must exist. The tests store everything in a new folder below it, which they delete at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import urlsplit

from cutline.storage.errors import SnapshotError
from cutline.storage.open import open_store
from tests.run.soak import first

NAMED_URL = os.environ.get("SNAPSHOT_TEST_S3", "")
NAMED_OPTIONS = os.environ.get("SNAPSHOT_TEST_S3_OPTIONS", "{}")
# Each is the name of a fixture of tests/integration. Only named_s3 is a server that the tests don't start.
REAL_KINDS = ["versitygw", "named_s3"] if NAMED_URL else ["versitygw"]
KINDS = ["s3", "minio", *REAL_KINDS]
_OWN = ["s3", *["versitygw"] * bool(shutil.which("go"))]
# The server for whole chains: the one that is not a test double, if it can be built.
ONE_KIND = _OWN[-1]
# The servers behind a proxy that loses requests. Its faults are the same for each, so `make test` has one of them, and
# the one that the user names.
_FIRST = [ONE_KIND, *REAL_KINDS[1:]]
PROXIED_KINDS = first([*_FIRST, *(kind for kind in KINDS if kind not in _FIRST)], len(_FIRST))


class S3Place(Protocol):
    """A server for the objects of tests: `options` are the store_options, `endpoint_url` is "" for AWS."""

    @property
    def endpoint_url(self) -> str: ...

    @property
    def options(self) -> dict[str, object]: ...

    def bucket(self, name: str) -> str:
        """Create a place for a test and return its URL for open_store."""
        ...


@dataclass(frozen=True, slots=True)
class NamedS3:
    """A server that the user runs; the bucket of a test is a folder there."""

    url: str
    options: dict[str, object]
    folder: str = field(default_factory=lambda: f"cutline-test-{uuid.uuid4().hex}")

    @property
    def endpoint_url(self) -> str:
        from_environment = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
        return str(self.options.get("endpoint_url", from_environment))

    def bucket(self, name: str) -> str:
        return f"{self.url}/{self.folder}/{name}"

    def clean(self) -> list[str]:
        """Delete what the tests stored; return a message for each object that could not be deleted."""
        store = open_store(f"{self.url}/{self.folder}", self.options)
        left: list[str] = []
        for key in store.list(""):
            try:
                store.delete(key)
            except SnapshotError as error:
                left.append(error.message)
        return left


@contextlib.contextmanager
def named_s3() -> Iterator[NamedS3]:
    """The server that the environment names; fails if objects can't be deleted at the end."""
    server = parse_named_s3(NAMED_URL, NAMED_OPTIONS)
    try:
        yield server
    finally:
        left = server.clean()
        assert not left, f"left below {server.bucket('')}: {left}"


def parse_named_s3(url: str, options_json: str) -> NamedS3:
    """Parse the two environment variables; raises ValueError."""
    options = json.loads(options_json)
    if not isinstance(options, dict):
        raise ValueError("SNAPSHOT_TEST_S3_OPTIONS is not a JSON object")
    address = urlsplit(url)
    if address.scheme in ("http", "https"):
        options = {"endpoint_url": f"{address.scheme}://{address.netloc}"} | options
        url = f"s3:/{address.path}"
    if not url.removeprefix("s3://").strip("/") or not url.startswith("s3://"):
        raise ValueError("SNAPSHOT_TEST_S3 names no bucket: s3://bucket/folder or http://host:port/bucket/folder")
    return NamedS3(url.rstrip("/"), options)
