from __future__ import annotations

import pytest

from tests.s3.kinds import parse_named_s3


@pytest.mark.parametrize(
    ("url", "options", "store_url", "endpoint"),
    [
        ("s3://bucket", "{}", "s3://bucket", ""),
        ("s3://bucket/a/folder/", '{"endpoint_url": "http://given"}', "s3://bucket/a/folder", "http://given"),
        ("http://127.0.0.1:9000/bucket/folder", '{"key": "k"}', "s3://bucket/folder", "http://127.0.0.1:9000"),
        ("https://minio.example/bucket", "{}", "s3://bucket", "https://minio.example"),
    ],
)
def test_a_server_is_named_by_one_url(
    url: str, options: str, store_url: str, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(variable, raising=False)
    server = parse_named_s3(url, options)
    assert (server.url, server.endpoint_url) == (store_url, endpoint)
    assert server.bucket("test") == f"{store_url}/{server.folder}/test"
    assert server.folder != parse_named_s3(url, options).folder
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://from.environment")
    assert server.endpoint_url == (endpoint or "http://from.environment")


@pytest.mark.parametrize(
    ("url", "options"), [("bucket", "{}"), ("http://host", "{}"), ("s3://b", "[]"), ("s3://", "{}")]
)
def test_invalid_urls_and_options_are_refused(url: str, options: str) -> None:
    with pytest.raises(ValueError, match="SNAPSHOT_TEST_S3"):
        parse_named_s3(url, options)
