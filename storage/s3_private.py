"""Every private member of a library that the S3 store depends on.

Everything else in storage/ uses what s3fs, aiobotocore, botocore and aiohttp document. pyproject.toml bounds their
versions, and tests/unit/test_storage_s3_private.py fails if a member named here changes, or if another module uses one.

obstore can't replace these libraries: version 0.12 lacks conditional multipart uploads, deletion of versions, and
profiles. It mistakes the object of its own repeated put for another program's, can't list names with an empty segment,
and hangs in a forked process.
"""

from __future__ import annotations

from typing import Any

from aiobotocore.httpsession import AIOHTTPSession  # type: ignore[import-untyped]


class OneSendSession(AIOHTTPSession):  # type: ignore[misc]  # aiobotocore has no types
    """An HTTP session that sends a request once; botocore's `http_session_cls` option takes this class.

    `AIOHTTPSession._get_session` creates aiohttp's session, and is the only place where it can be reached.
    `ClientSession._retry_connection` makes aiohttp silently repeat a PUT whose connection broke; no public option turns
    this off. If the repeated put can't connect, the failure looks as if nothing had been sent, although the first put
    may have stored the object.
    """

    async def _get_session(self, proxy_url: str | None) -> Any:
        session = await super()._get_session(proxy_url)
        session._retry_connection = False
        return session
