"""The private members of s3fs, aiobotocore and aiohttp that storage/s3_session.py uses still exist.

If one of these tests fails after an upgrade, fix storage/s3_session.py first, then the bounds in pyproject.toml.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import aiohttp
import pytest
from aiobotocore.httpsession import AIOHTTPSession
from botocore.signers import RequestSigner
from s3fs import S3FileSystem

ROOT = Path(__file__).parent.parent.parent
PARAMETERS = {
    (S3FileSystem, "_call_s3"): ["self", "method", "akwarglist", "kwargs"],
    (S3FileSystem, "_cat_file"): ["self", "path", "version_id", "start", "end"],
    (S3FileSystem, "_process_limits"): ["self", "url", "start", "end"],
    (AIOHTTPSession, "_get_session"): ["self", "proxy_url"],
    (AIOHTTPSession, "send"): ["self", "request"],
}


@pytest.mark.parametrize(("kind", "name"), PARAMETERS)
def test_an_overridden_method_still_takes_the_same_parameters(kind: type, name: str) -> None:
    method = getattr(kind, name)
    expected = PARAMETERS[kind, name]
    assert list(inspect.signature(method).parameters)[: len(expected)] == expected
    assert inspect.iscoroutinefunction(method)


@pytest.mark.parametrize(("kind", "name"), [
    (AIOHTTPSession, "_timeout"), (AIOHTTPSession, "_verify"),
    (aiohttp.ClientSession, "_retry_connection"), (RequestSigner, "_credentials"),
    (S3FileSystem, "_s3"),
])  # fmt: skip
def test_an_attribute_still_has_its_name(kind: type, name: str) -> None:
    assert f"self.{name}" in inspect.getsource(kind)


def test_no_other_module_of_storage_uses_private_members_of_libraries() -> None:
    for path in sorted((ROOT / "storage").glob("*.py")):
        # The other one's is Python's own, and used by its tests.
        if path.name in ("s3_session.py", "thread_starts.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                owner = ast.unparse(node.value)
                assert owner in {"self", "cls"}, f"{path.name}, line {node.lineno}: {owner}.{node.attr}"
