"""The private members of libraries that storage/s3_private.py names still exist, and no other module uses any.

If one of these tests fails after an upgrade, fix storage/s3_private.py first, then the bounds in pyproject.toml.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import aiohttp
from aiobotocore.httpsession import AIOHTTPSession

import cutline.storage.s3_private

FOLDER = Path(__file__).parent.parent.parent / "storage"
# process_limits uses Python's own.
PRIVATE = {"s3_private.py", "process_limits.py"}


def test_the_session_of_aiohttp_is_made_where_it_was() -> None:
    assert list(inspect.signature(AIOHTTPSession._get_session).parameters) == ["self", "proxy_url"]
    assert inspect.iscoroutinefunction(AIOHTTPSession._get_session)
    assert "await self._get_session(proxy_url)" in inspect.getsource(AIOHTTPSession.send)


def test_aiohttp_repeats_a_request_only_where_it_may_retry_the_connection() -> None:
    assert "self._retry_connection" in inspect.getsource(aiohttp.ClientSession.__init__)
    assert "self._retry_connection and method in IDEMPOTENT_METHODS" in inspect.getsource(aiohttp.ClientSession)


def test_every_private_member_is_named_in_the_docstring_of_its_class() -> None:
    text = cutline.storage.s3_private.OneSendSession.__doc__ or ""
    for name, owner in private_members(FOLDER / "s3_private.py"):
        assert name in text, f"{owner}.{name}"


def test_no_other_module_of_storage_uses_private_members_of_libraries() -> None:
    for path in sorted(FOLDER.rglob("*.py")):
        used = [] if path.name in PRIVATE else private_members(path)
        assert not used, f"{path.name}: {used}"


def private_members(path: Path) -> list[tuple[str, str]]:
    """The private members of others that a module uses, with the expressions that they belong to."""
    attributes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
    return [
        (node.attr, ast.unparse(node.value))
        for node in attributes
        if node.attr.startswith("_")
        and not node.attr.startswith("__")
        and ast.unparse(node.value) not in {"self", "cls"}
    ]
