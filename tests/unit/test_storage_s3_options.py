"""What Cutline makes of [store_options], and what it warns of; nothing here is contacted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

import cutline.cli.main
from cutline.storage.location import AUTHORITY_VARIABLES, ENDPOINT_VARIABLES, warnings_of, with_environment
from cutline.storage.s3_client import to_s3fs
from cutline.storage.s3_create import check_encryption, is_same_key
from cutline.storage.store import EncryptionIgnoredError

PLAIN, UNVERIFIED = "without TLS", "not verified"
KEY = "arn:aws:kms:us-east-1:1:key/1234"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*ENDPOINT_VARIABLES, *AUTHORITY_VARIABLES):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("options", "warning"),
    [
        ({}, None),
        ({"endpoint_url": "https://s3.example"}, None),
        ({"endpoint_url": "http://127.0.0.1:9000"}, None),
        ({"endpoint_url": "http://[::1]:9000"}, None),
        ({"endpoint_url": "http://localhost:9000"}, None),
        ({"endpoint_url": "http://s3.example"}, PLAIN),
        ({"endpoint_url": "HTTP://user:word@s3.example:90"}, PLAIN),
        ({"endpoint_url": "http://127.0.0.1.example"}, PLAIN),
        ({"endpoint_url": "http://10.0.0.1"}, PLAIN),
        ({"client_kwargs": {"endpoint_url": "http://s3.example"}}, PLAIN),
        ({"endpoint_url": "http://[::1"}, None),
        ({"use_ssl": False}, PLAIN),
        ({"client_kwargs": {"verify": False}}, UNVERIFIED),
    ],
    ids=str,
)
def test_a_store_that_others_on_the_network_can_read_is_warned_of(
    options: Mapping[str, object], warning: str | None
) -> None:
    warnings = warnings_of("s3://bucket/folder", options)
    assert [warning in text for text in warnings if warning] == ([True] if warning else [])
    assert len(warnings) == (1 if warning else 0)
    assert "word" not in "".join(warnings)
    assert warnings_of("file:///folder", options) == []


def test_the_endpoint_and_the_authorities_of_the_environment_go_to_executors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://general")
    monkeypatch.setenv("AWS_CA_BUNDLE", "/ca.pem")
    found = {"key": "k", "endpoint_url": "https://general", "ca_file": "/ca.pem"}
    assert with_environment("s3://b", {"key": "k"}) == found
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://for-s3")
    assert with_environment("s3://b", {"key": "k"}) == found | {"endpoint_url": "https://for-s3"}
    assert with_environment("gs://b", {"key": "k"}) == {"key": "k"}
    given = {"endpoint_url": "https://given", "client_kwargs": {"verify": "/given.pem"}}
    assert with_environment("s3://b", given) == given


def test_encryption_and_authorities_are_passed_in_s3fs_own_options(tmp_path: Path) -> None:
    options = {"ca_file": "/ca.pem", "server_side_encryption": "aws:kms", "kms_key_id": KEY, "endpoint_url": "http://h"}
    assert to_s3fs(options) == {
        "endpoint_url": "http://h",
        "client_kwargs": {"verify": "/ca.pem"},
        "s3_additional_kwargs": {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": KEY},
    }


def test_a_server_must_name_the_way_and_the_key_unless_an_alias_was_asked_for() -> None:
    asked = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": KEY}
    check_encryption("s3://b", "a", asked, asked)
    for told in ({}, {"ServerSideEncryption": "AES256"}, asked | {"SSEKMSKeyId": "arn:aws:kms:us-east-1:1:key/other"}):
        with pytest.raises(EncryptionIgnoredError):
            check_encryption("s3://b", "a", asked, told)
    assert is_same_key("1234", KEY)
    assert is_same_key("alias/mine", KEY)
    assert is_same_key("arn:aws:kms:us-east-1:1:alias/mine", KEY)
    assert not is_same_key("234", KEY)


def test_the_warning_is_shown_once_per_command_and_in_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cutline.cli.commands.list.list_store", lambda fleet: Empty())
    file = tmp_path / "fleet.toml"
    options = '[store_options]\nendpoint_url = "http://192.0.2.1"\n[[node]]\nid = "a"\ndsn = "user=u"\n'
    file.write_text(f'name = "f"\nstore = "s3://bucket"\n{options}')
    assert cutline.cli.main.run(["--fleet", str(file), "--json", "list"]) == 0
    shown = capsys.readouterr()
    assert shown.err.count('"note": "the store is accessed without TLS (http://192.0.2.1)') == 1
    assert [PLAIN in text for text in json.loads(shown.out)["warnings"]] == [True, False]


class Answers:
    """What `list` asks the nodes: nothing."""

    unanswered: Mapping[str, str] = {}
    promoted: Mapping[str, str] = {}
    old = ()


class Empty:
    """An empty store's listing, with a warning of its own."""

    entries, open_operations, copies, warnings, answers = (), (), (), ["its own"], Answers()
    age_problem = ""
