"""Buckets with versioning or Object Lock: a delete frees the bytes, or says what keeps them.

`make test` runs them on one server, `make all` on each.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from cutline.storage.open import open_store
from cutline.storage.probe import probe_store
from cutline.storage.s3 import S3Store
from cutline.storage.store import DeletionRefusedError, ObjectExistsError, ObjectStore, is_key
from tests.run.soak import first
from tests.s3.proxy import s3_proxy
from tests.s3.server import S3Server, in_folder
from tests.stores.contract import ObjectStoreContract

KINDS = ["versitygw", "s3"]
LOCK_SECONDS = 5
KEY = "a/object"


@pytest.fixture(scope="module", params=first(KINDS))
def server(request: pytest.FixtureRequest) -> S3Server:
    found: S3Server = request.getfixturevalue(request.param)
    return found


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket, seen by the store and by its operator."""

    name: str
    store: ObjectStore
    client: Any

    def versions(self, key: str = "") -> list[tuple[str, bool]]:
        """Return the key of every version and whether it is a delete marker; at most one page."""
        found = self.client.list_object_versions(Bucket=self.name, Prefix=key)
        versions = [(one["Key"], False) for one in found.get("Versions", [])]
        return versions + [(one["Key"], True) for one in found.get("DeleteMarkers", [])]

    def lock(self, key: str, mode: str = "COMPLIANCE") -> datetime:
        """Lock the current version of an object for LOCK_SECONDS; return the time when the lock ends."""
        until = (datetime.now(UTC) + timedelta(seconds=LOCK_SECONDS)).replace(microsecond=0)
        version = self.client.head_object(Bucket=self.name, Key=key)["VersionId"]
        retention = {"Mode": mode, "RetainUntilDate": until}
        self.client.put_object_retention(Bucket=self.name, Key=key, VersionId=version, Retention=retention)
        return until


def new_bucket(server: S3Server, **kind: Any) -> Bucket:
    name = f"versions-{uuid.uuid4().hex[:12]}"
    return Bucket(name, open_store(server.bucket(name, **kind), server.options), server.client)


@pytest.fixture(scope="module")
def shared_versioned(server: S3Server) -> Bucket:
    return new_bucket(server, versioned=True)


@pytest.fixture
def versioned(server: S3Server) -> Bucket:
    return new_bucket(server, versioned=True)


@pytest.fixture
def locking(server: S3Server) -> Bucket:
    return new_bucket(server, lock=True)


class TestVersionedStore(ObjectStoreContract):
    @pytest.fixture
    def store(self, shared_versioned: Bucket) -> Iterator[ObjectStore]:
        folder = uuid.uuid4().hex
        store = in_folder(shared_versioned.store, folder)
        yield store
        for key in store.list(""):
            store.delete(key)
        assert [key for key, _ in shared_versioned.versions(folder) if is_key(key)] == []


def test_deleting_frees_the_bytes_of_every_version(versioned: Bucket) -> None:
    versioned.store.create(KEY, b"x")
    versioned.store.create(f"{KEY}-of-another-key", b"x")
    versioned.store.delete(KEY)
    assert versioned.versions(KEY) == [(f"{KEY}-of-another-key", False)]
    versioned.store.create(KEY, b"again")
    assert versioned.store.read(KEY) == b"again"


def test_an_object_hidden_by_a_delete_marker_is_not_listed_and_a_delete_frees_it(versioned: Bucket) -> None:
    versioned.store.create(KEY, b"x")
    versioned.client.delete_object(Bucket=versioned.name, Key=KEY)
    assert versioned.store.list("") == versioned.store.inventory("") == versioned.store.list_children("a") == []
    assert not versioned.store.exists(KEY)
    versioned.store.delete(KEY)
    assert versioned.versions() == []


@dataclass(frozen=True, slots=True)
class Interceptor:
    """Wraps a client, so that a test sees and changes requests and answers."""

    client: Any
    change: Callable[[Callable[..., Any], str, dict[str, Any]], Any]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    def ask(self, method: str, **parameters: Any) -> Any:
        return self.change(self.client.ask, method, parameters)


def intercepted(store: ObjectStore, ask: Callable[[Callable[..., Any], str, dict[str, Any]], Any]) -> ObjectStore:
    assert isinstance(store, S3Store)
    return replace(store, client=Interceptor(store.client, ask))  # type: ignore[arg-type]  # it has what is used


def test_no_earlier_version_reappears(versioned: Bucket) -> None:
    """Somebody else overwrote, hid and restored the object, with more than one page of versions."""
    for number in range(4):
        versioned.client.put_object(Bucket=versioned.name, Key=KEY, Body=b"%d" % number)
    versioned.client.delete_object(Bucket=versioned.name, Key=KEY)
    versioned.client.put_object(Bucket=versioned.name, Key=KEY, Body=b"newest")
    seen: set[bytes] = set()

    def ask(call: Callable[..., Any], method: str, parameters: dict[str, Any]) -> Any:
        answer = call(method, **parameters, **({"MaxKeys": 3} if method == "list_object_versions" else {}))
        seen.add(versioned.store.read(KEY) if versioned.store.exists(KEY) else b"")
        return answer

    intercepted(versioned.store, ask).delete(KEY)
    assert seen == {b"newest", b""}
    assert versioned.versions() == []


@pytest.mark.parametrize("keeps_versions", [False, True])
def test_a_stale_listing_of_versions_does_not_keep_an_object(server: S3Server, *, keeps_versions: bool) -> None:
    bucket = new_bucket(server, versioned=keeps_versions)
    bucket.store.create(KEY, b"x")

    def ask(call: Callable[..., Any], method: str, parameters: dict[str, Any]) -> Any:
        return {} if method == "list_object_versions" else call(method, **parameters)

    intercepted(bucket.store, ask).delete(KEY)
    assert bucket.versions() == []
    intercepted(bucket.store, ask).delete(KEY)


def test_a_delete_without_permission_to_list_versions_never_hides_one(server: S3Server) -> None:
    never, later, always = new_bucket(server), new_bucket(server), new_bucket(server, versioned=True)
    with s3_proxy(server.endpoint_url) as proxy:
        proxy.forbidden = frozenset({"ListObjectVersions"})
        options = server.options | {"endpoint_url": proxy.endpoint_url}
        for bucket in (never, later, always):
            bucket.store.create(KEY, b"x")
        later.client.put_bucket_versioning(Bucket=later.name, VersioningConfiguration={"Status": "Enabled"})
        open_store(f"s3://{never.name}", options).delete(KEY)
        assert never.versions() == []
        for bucket in (later, always):
            store = open_store(f"s3://{bucket.name}", options)
            with pytest.raises(DeletionRefusedError, match=r"versions, which can't be listed: .* 403 AccessDenied"):
                store.delete(KEY)
            store.delete("never/was")
            assert bucket.store.read(KEY) == b"x"
            assert bucket.versions() == [(KEY, False)]


@pytest.mark.parametrize("status", ["Enabled", "Suspended"])
def test_an_object_older_than_the_versioning_of_its_bucket_is_freed_too(server: S3Server, status: str) -> None:
    bucket = new_bucket(server)
    bucket.store.create(KEY, b"x")
    for wanted in ("Enabled", status):
        bucket.client.put_bucket_versioning(Bucket=bucket.name, VersioningConfiguration={"Status": wanted})
    bucket.store.create("a/later", b"x")
    for key in (KEY, "a/later"):
        bucket.store.delete(key)
        assert not bucket.store.exists(key)
    assert bucket.versions() == []


def test_a_locked_object_stays_readable_until_its_lock_expires(locking: Bucket) -> None:
    """In either mode, and also under a later version that is not locked; all locks share one wait."""
    keys = {f"{mode}/object": mode for mode in ("COMPLIANCE", "GOVERNANCE")}
    for key in (*keys, KEY):
        locking.store.create(key, b"x")
    until = locking.lock(KEY)
    locking.client.put_object(Bucket=locking.name, Key=KEY, Body=b"newer")
    with pytest.raises(DeletionRefusedError):
        locking.store.delete(KEY)
    assert locking.store.read(KEY) == b"newer"
    for key, mode in keys.items():
        until = locking.lock(key, mode)
        message = rf"{key} .*{mode}.* until {until:%Y-%m-%d %H:%M:%S} UTC"
        with pytest.raises(DeletionRefusedError, match=message) as raised:
            locking.store.delete(key)
        assert raised.value.until == until
        assert raised.value.details["until"] == raised.value.until.isoformat()
        assert locking.store.read(key) == b"x"
        assert locking.versions(key) == [(key, False)]
    assert locking.store.list("") == sorted([*keys, KEY])
    sleep_until(until)
    for key in (*keys, KEY):
        locking.store.delete(key)
    assert locking.versions() == []


def sleep_until(until: datetime) -> None:
    time.sleep(max((until - datetime.now(UTC)).total_seconds(), 0) + 0.1)


def test_a_legal_hold_is_distinguished_from_a_lock_with_an_end(locking: Bucket) -> None:
    locking.store.create(KEY, b"x")
    version = locking.client.head_object(Bucket=locking.name, Key=KEY)["VersionId"]
    target = {"Bucket": locking.name, "Key": KEY, "VersionId": version}
    locking.client.put_object_legal_hold(**target, LegalHold={"Status": "ON"})
    with pytest.raises(DeletionRefusedError, match="legal hold") as raised:
        locking.store.delete(KEY)
    assert raised.value.until is None
    assert locking.store.read(KEY) == b"x"
    locking.client.put_object_legal_hold(**target, LegalHold={"Status": "OFF"})
    locking.store.delete(KEY)
    assert locking.versions() == []


@pytest.mark.parametrize("retention", ["COMPLIANCE", "GOVERNANCE"])
def test_a_bucket_that_locks_every_object_passes_the_probe(server: S3Server, retention: str) -> None:
    bucket = new_bucket(server, retention=retention)
    probe_store(bucket.store)
    with pytest.raises(ObjectExistsError):
        bucket.store.create(bucket.store.list("")[0], b"x")


def test_every_put_has_the_checksum_that_locked_buckets_require(s3: S3Server) -> None:
    name = f"versions-{uuid.uuid4().hex[:12]}"
    url = s3.bucket(name)
    with s3_proxy(s3.endpoint_url) as proxy:
        store = open_store(url, s3.options | {"endpoint_url": proxy.endpoint_url})
        store.create(KEY, b"x")
    (headers,) = proxy.put_headers
    assert any(name.lower().startswith("x-amz-checksum-") for name in headers), headers
