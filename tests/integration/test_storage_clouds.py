"""Google Cloud Storage and Azure Blob Storage, by their emulators: gcsfs and adlfs create exclusively, by one request.

Both file systems repeat requests themselves, so a put whose answer was lost finds the object that it stored.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event

import pytest

import cutline.storage.open
from cutline.storage.digest import digest
from cutline.storage.open import open_store
from cutline.storage.probe import probe_store
from cutline.storage.store import (
    AnswerLostError,
    DeletionRefusedError,
    ObjectExistsError,
    ObjectStore,
    StoreUnfitError,
    StoreUnreachableError,
)
from cutline.storage.storing import create_or_find
from tests.s3.proxy import ANSWER_LOST, REQUEST_LOST, Fault, S3Proxy, s3_proxy
from tests.s3.server import in_folder
from tests.stores.azurite import with_shared_access
from tests.stores.contract import ObjectStoreContract
from tests.stores.place import StorePlace

# gcsfs sends more than 50 MiB, and Azure's library more than 64 MiB, in parts.
LARGE_BYTES = 65 * 2**20
RACERS = 3
# How gcsfs and adlfs send a put: the names that the proxy has for these requests.
PUTS = {"gs": "POST", "az": "PutObject"}


@pytest.fixture(scope="module", params=["gs", "az"])
def place(request: pytest.FixtureRequest) -> StorePlace:
    found: StorePlace = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="module")
def bucket(place: StorePlace) -> str:
    return place.bucket("contract")


@pytest.fixture(scope="module")
def opened(place: StorePlace, bucket: str) -> ObjectStore:
    return open_store(bucket, place.options)


@pytest.fixture
def proxy(place: StorePlace) -> Iterator[S3Proxy]:
    with s3_proxy(place.endpoint_url) as running:
        yield running


@pytest.fixture
def through(place: StorePlace, bucket: str, proxy: S3Proxy) -> ObjectStore:
    """The store, reached by way of the proxy."""
    return in_folder(open_store(bucket, place.through(proxy.endpoint_url)), uuid.uuid4().hex)


class TestCloudStore(ObjectStoreContract):
    @pytest.fixture
    def store(self, opened: ObjectStore) -> ObjectStore:
        return in_folder(opened, f"{uuid.uuid4().hex}/folder")


def test_without_the_condition_of_its_request_a_put_overwrites_and_the_probe_refuses_that(
    place: StorePlace, bucket: str, proxy: S3Proxy
) -> None:
    options = place.through(proxy.endpoint_url)
    if place.protocol == "az":
        options = with_shared_access(options)
    store = in_folder(open_store(bucket, options), uuid.uuid4().hex)
    assert probe_store(store) is None
    assert {headers.get("If-None-Match") for headers in proxy.put_headers} == (
        {"*"} if place.protocol == "az" else set()
    )
    proxy.dropped_headers = frozenset({"if-none-match"})
    proxy.dropped_parameter = "ifGenerationMatch=0"
    with pytest.raises(StoreUnfitError, match="a second conditional put was accepted"):
        probe_store(store)
    assert store.list("") == []


def test_of_several_creators_of_a_large_object_exactly_one_wins(opened: ObjectStore) -> None:
    store, barrier, body = in_folder(opened, uuid.uuid4().hex), Barrier(RACERS), os.urandom(LARGE_BYTES)

    def create(number: int) -> bool:
        barrier.wait()
        try:
            store.create("large", bytes([number]) + body)
        except ObjectExistsError:
            return False
        return True

    with ThreadPoolExecutor(RACERS) as threads:
        won = list(threads.map(create, range(RACERS)))
    assert won.count(True) == 1
    assert store.digest("large") == digest(bytes([won.index(True)]) + body)
    with pytest.raises(ObjectExistsError):
        store.create("large", b"small")


def test_what_another_client_creates_and_deletes_is_seen_at_once(place: StorePlace, bucket: str) -> None:
    folder = uuid.uuid4().hex
    ours = in_folder(open_store(bucket, place.options), folder)
    theirs = in_folder(open_store(f"{bucket}/", place.options), folder)
    ours.create("a/1", b"x")
    assert ours.list("") == theirs.list("") == ["a/1"]
    theirs.create("a/2", b"y")
    assert ours.list("") == ["a/1", "a/2"]
    assert ours.list_children("a") == ["1", "2"]
    theirs.delete("a/1")
    assert ours.list_children("a") == ["2"]
    assert not ours.exists("a/1")


def test_a_put_that_did_not_arrive_is_repeated(place: StorePlace, proxy: S3Proxy, through: ObjectStore) -> None:
    proxy.faults.append(Fault(arrives=REQUEST_LOST.arrives, of=PUTS[place.protocol]))
    through.create("object", b"ours")
    assert through.read("object") == b"ours"
    assert proxy.requests[PUTS[place.protocol]] == 2


def test_a_put_whose_answer_was_lost_finds_what_it_stored(
    place: StorePlace, proxy: S3Proxy, through: ObjectStore
) -> None:
    lost = Fault(arrives=ANSWER_LOST.arrives, of=PUTS[place.protocol])
    proxy.faults.append(lost)
    with pytest.raises(ObjectExistsError):
        through.create("object", b"ours")
    assert through.read("object") == b"ours"
    proxy.faults.append(lost)
    assert create_or_find(through, "other", b"ours") == digest(b"ours")


def test_a_server_of_google_that_says_nothing_is_asked_again(gs: StorePlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Azure's library has limits of its own; gcsfs would wait without end."""
    monkeypatch.setattr(cutline.storage.open, "GCS_ANSWER_SECONDS_MAX", 1)
    bucket, silence = gs.bucket("silent"), Event()
    open_store(bucket, gs.options).create("object", b"ours")
    with s3_proxy(gs.endpoint_url) as proxy:
        proxy.faults.append(Fault(arrives=True, of="GetObject", held=silence))
        try:
            assert open_store(bucket, gs.through(proxy.endpoint_url)).read("object") == b"ours"
            assert not silence.is_set()
            assert proxy.requests["GetObject"] == 2
        finally:
            silence.set()


def test_a_refused_deletion_is_reported_and_init_passes(proxy: S3Proxy, through: ObjectStore) -> None:
    through.create("object", b"x")
    proxy.forbidden = frozenset({"DeleteObject"})
    with pytest.raises(DeletionRefusedError, match=r"object can't be deleted: .*403"):
        through.delete("object")
    assert isinstance(probe_store(through), DeletionRefusedError)
    assert through.read("object") == b"x"


def test_a_missing_bucket_is_unreachable(place: StorePlace) -> None:
    store = open_store(f"{place.protocol}://never-made/folder", place.options)
    with pytest.raises(AnswerLostError, match="NotFound"):
        store.create("object", b"x")
    with pytest.raises(
        StoreUnreachableError, match=r"the store's answer to a create was lost \(.*NotFound.*\), so the probe gave up"
    ):
        probe_store(store)
    assert store.list("") == []
