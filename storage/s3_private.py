"""The private members of libraries that the S3 store depends on, all of them.

Everything else in storage/ uses what s3fs, aiobotocore, botocore and aiohttp document. pyproject.toml bounds their
versions, and tests/unit/test_storage_s3_private.py fails if a member named here changes, or if another module uses one.

The package obstore can't take their place: its version 0.12 has no conditional upload in parts, no deletion by version
and no profiles. It reports a put that it repeated as another program's, fails a listing in which another program's name
has an empty segment, and hangs in a forked process.
"""

from __future__ import annotations

from typing import Any

from aiobotocore.httpsession import AIOHTTPSession  # type: ignore[import-untyped]


class OneSendSession(AIOHTTPSession):  # type: ignore[misc]  # aiobotocore has no types
    """An HTTP session that sends a request once; botocore takes the class by its option `http_session_cls`.

    `AIOHTTPSession._get_session` makes aiohttp's session, and is the only place where that can be reached.
    `ClientSession._retry_connection` is what makes aiohttp repeat a PUT whose connection broke, silently, and there is
    no public switch for it. If the repeated put then finds nobody to connect to, the failure reads as if nothing had
    been sent, although the first one may have stored the object.
    """

    async def _get_session(self, proxy_url: str | None) -> Any:
        session = await super()._get_session(proxy_url)
        session._retry_connection = False
        return session
