"""Credentials that expire meanwhile are renewed if there are newer ones; otherwise the error says what to do."""

from __future__ import annotations

import json
import os
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import pytest
from msgspec.structs import replace

from cutline.storage.open import open_store
from cutline.storage.s3 import S3Store
from cutline.storage.store import AnswerLostError, CredentialsExpiredError, ObjectStore, StoreUnreachableError
from tests.s3.kinds import PROXIED_KINDS, S3Place
from tests.s3.proxy import ANSWER_LOST, Fault, S3Proxy, s3_proxy
from tests.s3.server import in_folder

OLD_KEY = "old-access-key"
# A credential_process: it gives old credentials the first time, then the server's. Both claim to last for years.
CREDENTIAL_PROCESS = """
import json, pathlib, sys
counted = pathlib.Path(sys.argv[1])
counted.write_text(counted.read_text() + "x" if counted.exists() else "x")
old = {"AccessKeyId": "old-access-key", "SecretAccessKey": "old-secret", "SessionToken": "old-token"}
chosen = old if len(counted.read_text()) == 1 or len(sys.argv) == 2 else json.loads(sys.argv[2])
print(json.dumps({"Version": 1, "Expiration": "2099-01-01T00:00:00Z"} | chosen))
"""
ASKS: list[Callable[[ObjectStore], object]] = [
    lambda store: store.create("another", b"x"),
    lambda store: store.read("object"),
    lambda store: store.size("object"),  # a refused HEAD has no body
    lambda store: store.list(""),
    lambda store: store.delete("object"),
    lambda store: store.unfinished(),
    lambda store: store.create_in_parts("another", b"x"),  # type: ignore[attr-defined]
]


class Profile(Protocol):
    """Writes an AWS profile whose credential_process gives newer credentials or not; returns its store_options."""

    def __call__(self, *, renewed: bool) -> dict[str, object]: ...


@pytest.fixture(scope="module", params=PROXIED_KINDS)
def server(request: pytest.FixtureRequest) -> S3Place:
    place: S3Place = request.getfixturevalue(request.param)
    if not place.endpoint_url or "key" not in place.options:
        pytest.skip("AWS answers only under its own host names, so no proxy can stand in front of it")
    return place


@pytest.fixture(scope="module")
def proxy(server: S3Place) -> Iterator[S3Proxy]:
    with s3_proxy(server.endpoint_url) as running:
        yield running


@pytest.fixture(scope="module")
def url(server: S3Place) -> str:
    return server.bucket("credentials")


@pytest.fixture
def store(server: S3Place, proxy: S3Proxy, url: str) -> ObjectStore:
    """A store with one object and with the credentials in its options, as on the first day."""
    proxy.reset()
    opened = open_store(url, server.options | {"endpoint_url": proxy.endpoint_url})
    opened.client.has_worked = False  # type: ignore[attr-defined]
    inside = in_folder(opened, uuid.uuid4().hex)
    inside.create("object", b"body")
    return inside


@pytest.fixture
def profile(server: S3Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Profile:
    def options(*, renewed: bool) -> dict[str, object]:
        name = f"test-{uuid.uuid4().hex}"  # the same options would be the same store
        program, config = tmp_path / "giver.py", tmp_path / "config"
        program.write_text(CREDENTIAL_PROCESS)
        good = {"AccessKeyId": server.options["key"], "SecretAccessKey": server.options["secret"]}
        words = f"{sys.executable} {program} {tmp_path / 'counted'}"
        if renewed:
            words += " " + json.dumps(json.dumps(good, separators=(",", ":")))
        config.write_text(f"[profile {name}]\nregion = us-east-1\ncredential_process = {words}\n")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
        return {"profile": name}

    return options


@pytest.mark.parametrize("ask", ASKS)
def test_expired_credentials_of_the_options_are_reported_with_a_remedy(
    server: S3Place, proxy: S3Proxy, store: ObjectStore, ask: Callable[[ObjectStore], object]
) -> None:
    proxy.expired.add(str(server.options["key"]))
    asked = proxy.requests.total()
    with pytest.raises(CredentialsExpiredError, match="credentials have expired") as raised:
        ask(store)
    assert raised.value.exit_code == 6
    assert raised.value.slug == "credentials-expired"
    assert "[store_options]" in raised.value.hint
    assert "renew" in raised.value.hint
    assert str(server.options["secret"]) not in f"{raised.value.message} {raised.value.hint} {raised.value.details}"
    # A HEAD, botocore's request for the bucket's region, and a GET, whose refusal has a body.
    assert proxy.requests.total() - asked <= 3
    proxy.expired.clear()
    assert store.list("") == ["object"]


@pytest.mark.parametrize("ask", ASKS[:3])
def test_renewable_credentials_are_renewed_and_the_request_is_repeated(
    proxy: S3Proxy, store: ObjectStore, profile: Profile, tmp_path: Path, ask: Callable[[ObjectStore], object]
) -> None:
    proxy.expired.add(OLD_KEY)
    renewing = open_store(store.url, profile(renewed=True) | {"endpoint_url": proxy.endpoint_url})
    assert isinstance(store, S3Store)
    assert isinstance(renewing, S3Store)
    renewing = replace(renewing, root=store.root)
    ask(renewing)
    assert len((tmp_path / "counted").read_text()) == 2
    assert renewing.list("") == store.list("")


def test_a_credential_process_without_newer_credentials_is_named(
    proxy: S3Proxy, url: str, profile: Profile, tmp_path: Path
) -> None:
    proxy.reset()
    proxy.expired.add(OLD_KEY)
    options = profile(renewed=False) | {"endpoint_url": proxy.endpoint_url}
    with pytest.raises(CredentialsExpiredError) as raised:
        open_store(url, options).list("")
    assert "credential_process" in raised.value.hint
    assert "old-secret" not in f"{raised.value.message} {raised.value.hint}"
    assert len((tmp_path / "counted").read_text()) == 2


@pytest.mark.parametrize(
    "fault",
    [
        Fault(arrives=False, status=403, code="InvalidAccessKeyId"),
        Fault(arrives=False, status=400, code="InvalidToken"),
        Fault(arrives=False, status=403, code="ExpiredTokenException"),
        Fault(arrives=False, status=400, code="RequestExpired"),
    ],
)
def test_revoked_credentials_count_as_expired(proxy: S3Proxy, store: ObjectStore, fault: Fault) -> None:
    proxy.faults.append(fault)
    with pytest.raises(CredentialsExpiredError):
        store.create("another", b"x")
    assert store.list("") == ["object"]


def test_credentials_that_never_worked_have_not_expired(proxy: S3Proxy, store: ObjectStore) -> None:
    store.client.has_worked = False  # type: ignore[attr-defined]
    proxy.faults.append(Fault(arrives=False, status=403, code="InvalidAccessKeyId"))
    with pytest.raises(StoreUnreachableError, match="InvalidAccessKeyId") as raised:
        store.create("another", b"x")
    assert raised.value.slug == "store-unreachable"


def test_the_result_is_indeterminate_if_credentials_expire_after_a_lost_answer(
    proxy: S3Proxy, store: ObjectStore
) -> None:
    proxy.faults += [ANSWER_LOST, Fault(arrives=False, status=400, code="ExpiredToken")]
    with pytest.raises(AnswerLostError, match="expired"):
        store.create("another", b"ours")
    assert store.read("another") == b"ours"
