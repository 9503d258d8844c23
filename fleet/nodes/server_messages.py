"""What a server says about an error, as messages quote it: a function of a table's owner may say any amount."""

from __future__ import annotations

import psycopg

MESSAGE_SHOWN_MAX = 1000


def shorten_message(error: psycopg.Error) -> str:
    """The server's message on one line, cut off after MESSAGE_SHOWN_MAX characters."""
    text = error.diag.message_primary
    # Without a message of the server, libpq's own. An empty one says nothing either, and libpq adds the whole context.
    text = str(error) if text is None else text or f"an error without a message ({error.diag.sqlstate})"
    is_cut = len(text) > MESSAGE_SHOWN_MAX
    return " ".join(text[:MESSAGE_SHOWN_MAX].split()) + "…" * is_cut
