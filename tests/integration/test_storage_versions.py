"""Buckets that keep versions, and buckets with Object Lock: deleting frees the bytes or says what keeps them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from storage.fsspec_store import FsspecStore
from storage.open import open_store
from storage.probe import probe_store
from storage.store import DeletionRefusedError, ObjectExistsError, ObjectStore
from tests.object_store_contract import ObjectStoreContract
from tests.s3_proxy import s3_proxy
from tests.s3_server import S3Server, in_folder

KINDS = ["s3", "versitygw"]
LOCK_SECONDS = 5
KEY = "a/object"


@pytest.fixture(scope="module", params=KINDS)
def server(request: pytest.FixtureRequest) -> S3Server:
    found: S3Server = request.getfixturevalue(request.param)
    return found


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket as the store sees it, and as its operator does."""

    name: str
    store: ObjectStore
    client: Any

    def kept(self, key: str = "") -> list[tuple[str, bool]]:
        """All that the bucket keeps, as keys and whether they are markers; at most a page."""
        found = self.client.list_object_versions(Bucket=self.name, Prefix=key)
        kept = [(one["Key"], False) for one in found.get("Versions", [])]
        return kept + [(one["Key"], True) for one in found.get("DeleteMarkers", [])]

    def lock(self, key: str, mode: str = "COMPLIANCE") -> datetime:
        """Keep the current version of an object for LOCK_SECONDS; until when."""
        until = (datetime.now(UTC) + timedelta(seconds=LOCK_SECONDS)).replace(microsecond=0)
        version = self.client.head_object(Bucket=self.name, Key=key)["VersionId"]
        retention = {"Mode": mode, "RetainUntilDate": until}
        self.client.put_object_retention(Bucket=self.name, Key=key, VersionId=version, Retention=retention)
        return until


def bucket_of(server: S3Server, **kind: Any) -> Bucket:
    name = f"versions-{uuid.uuid4().hex[:12]}"
    return Bucket(name, open_store(server.bucket(name, **kind), server.options), server.client)


@pytest.fixture(scope="module")
def shared_versioned(server: S3Server) -> Bucket:
    return bucket_of(server, versioned=True)


@pytest.fixture
def versioned(server: S3Server) -> Bucket:
    return bucket_of(server, versioned=True)


@pytest.fixture
def locking(server: S3Server) -> Bucket:
    return bucket_of(server, lock=True)


class TestVersionedStore(ObjectStoreContract):
    @pytest.fixture
    def store(self, shared_versioned: Bucket) -> Iterator[ObjectStore]:
        folder = uuid.uuid4().hex
        store = in_folder(shared_versioned.store, folder)
        yield store
        for key in store.list(""):
            store.delete(key)
        assert shared_versioned.kept(folder) == []


def test_deleting_frees_the_bytes_of_every_version(versioned: Bucket) -> None:
    versioned.store.create(KEY, b"x")
    versioned.store.create(f"{KEY}-of-another-key", b"x")
    versioned.store.delete(KEY)
    assert versioned.kept(KEY) == [(f"{KEY}-of-another-key", False)]
    versioned.store.create(KEY, b"again")
    assert versioned.store.read(KEY) == b"again"


def test_what_somebody_hid_is_not_listed_and_is_freed_by_deleting_it(versioned: Bucket) -> None:
    versioned.store.create(KEY, b"x")
    versioned.client.delete_object(Bucket=versioned.name, Key=KEY)
    assert versioned.store.list("") == versioned.store.inventory("") == versioned.store.list_children("a") == []
    assert not versioned.store.exists(KEY)
    versioned.store.delete(KEY)
    assert versioned.kept() == []


@dataclass(frozen=True, slots=True)
class Between:
    """Stands before a file system, and lets a test see and change what the server is asked and answers."""

    filesystem: Any
    ask: Callable[[Callable[..., Any], str, dict[str, Any]], Any]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.filesystem, name)

    def call_s3(self, method: str, **parameters: Any) -> Any:
        return self.ask(self.filesystem.call_s3, method, parameters)


def asked(store: ObjectStore, ask: Callable[[Callable[..., Any], str, dict[str, Any]], Any]) -> ObjectStore:
    assert isinstance(store, FsspecStore)
    return replace(store, filesystem=Between(store.filesystem, ask))


def test_no_earlier_version_reappears(versioned: Bucket) -> None:
    """Somebody else overwrote, hid and restored the object; more than a page of it."""
    for number in range(4):
        versioned.client.put_object(Bucket=versioned.name, Key=KEY, Body=b"%d" % number)
    versioned.client.delete_object(Bucket=versioned.name, Key=KEY)
    versioned.client.put_object(Bucket=versioned.name, Key=KEY, Body=b"newest")
    seen: set[bytes] = set()

    def ask(call: Callable[..., Any], method: str, parameters: dict[str, Any]) -> Any:
        answer = call(method, **parameters, **({"MaxKeys": 3} if method == "list_object_versions" else {}))
        seen.add(versioned.store.read(KEY) if versioned.store.exists(KEY) else b"")
        return answer

    asked(versioned.store, ask).delete(KEY)
    assert seen == {b"newest", b""}
    assert versioned.kept() == []


@pytest.mark.parametrize("keeps_versions", [False, True])
def test_a_late_listing_does_not_spare_an_object(server: S3Server, *, keeps_versions: bool) -> None:
    bucket = bucket_of(server, versioned=keeps_versions)
    bucket.store.create(KEY, b"x")

    def ask(call: Callable[..., Any], method: str, parameters: dict[str, Any]) -> Any:
        return {} if method == "list_object_versions" else call(method, **parameters)

    asked(bucket.store, ask).delete(KEY)
    assert bucket.kept() == []
    asked(bucket.store, ask).delete(KEY)


def test_who_may_not_list_versions_deletes_where_there_are_none_and_hides_none(server: S3Server) -> None:
    never, later, always = bucket_of(server), bucket_of(server), bucket_of(server, versioned=True)
    with s3_proxy(server.endpoint_url) as proxy:
        proxy.forbidden = frozenset({"ListObjectVersions"})
        options = server.options | {"endpoint_url": proxy.endpoint_url}
        for bucket in (never, later, always):
            bucket.store.create(KEY, b"x")
        later.client.put_bucket_versioning(Bucket=later.name, VersioningConfiguration={"Status": "Enabled"})
        open_store(f"s3://{never.name}", options).delete(KEY)
        assert never.kept() == []
        for bucket in (later, always):
            store = open_store(f"s3://{bucket.name}", options)
            with pytest.raises(DeletionRefusedError, match=r"keeps versions, and to list them .* 403 AccessDenied"):
                store.delete(KEY)
            store.delete("never/was")
            assert bucket.store.read(KEY) == b"x"
            assert bucket.kept() == [(KEY, False)]


@pytest.mark.parametrize("status", ["Enabled", "Suspended"])
def test_an_object_of_before_its_bucket_kept_versions_is_freed_too(server: S3Server, status: str) -> None:
    bucket = bucket_of(server)
    bucket.store.create(KEY, b"x")
    for wanted in ("Enabled", status):
        bucket.client.put_bucket_versioning(Bucket=bucket.name, VersioningConfiguration={"Status": wanted})
    bucket.store.create("a/later", b"x")
    for key in (KEY, "a/later"):
        bucket.store.delete(key)
        assert not bucket.store.exists(key)
    assert bucket.kept() == []


def test_a_locked_object_stays_whole_until_its_lock_expires(locking: Bucket) -> None:
    """By either mode, and a later version than the locked one as well; all in one wait."""
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
        said = rf"{key} .*{mode}.* until {until:%Y-%m-%d %H:%M:%S} UTC"
        with pytest.raises(DeletionRefusedError, match=said) as raised:
            locking.store.delete(key)
        assert raised.value.until == until
        assert raised.value.details["until"] == raised.value.until.isoformat()
        assert locking.store.read(key) == b"x"
        assert locking.kept(key) == [(key, False)]
    assert locking.store.list("") == sorted([*keys, KEY])
    sleep_until(until)
    for key in (*keys, KEY):
        locking.store.delete(key)
    assert locking.kept() == []


def sleep_until(until: datetime) -> None:
    time.sleep(max((until - datetime.now(UTC)).total_seconds(), 0) + 0.1)


def test_a_legal_hold_is_told_from_a_lock_with_an_end(locking: Bucket) -> None:
    locking.store.create(KEY, b"x")
    version = locking.client.head_object(Bucket=locking.name, Key=KEY)["VersionId"]
    place = {"Bucket": locking.name, "Key": KEY, "VersionId": version}
    locking.client.put_object_legal_hold(**place, LegalHold={"Status": "ON"})
    with pytest.raises(DeletionRefusedError, match="legal hold") as raised:
        locking.store.delete(KEY)
    assert raised.value.until is None
    assert locking.store.read(KEY) == b"x"
    locking.client.put_object_legal_hold(**place, LegalHold={"Status": "OFF"})
    locking.store.delete(KEY)
    assert locking.kept() == []


@pytest.mark.parametrize("retention", ["COMPLIANCE", "GOVERNANCE"])
def test_a_bucket_that_locks_every_object_passes_the_probe(server: S3Server, retention: str) -> None:
    bucket = bucket_of(server, retention=retention)
    probe_store(bucket.store)
    with pytest.raises(ObjectExistsError):
        bucket.store.create(bucket.store.list("")[0], b"x")


def test_every_put_carries_a_checksum_without_which_locked_buckets_take_none(s3: S3Server) -> None:
    name = f"versions-{uuid.uuid4().hex[:12]}"
    url = s3.bucket(name)
    with s3_proxy(s3.endpoint_url) as proxy:
        store = open_store(url, s3.options | {"endpoint_url": proxy.endpoint_url})
        store.create(KEY, b"x")
    (headers,) = proxy.puts_headers
    assert any(name.lower().startswith("x-amz-checksum-") for name in headers), headers
