"""Operation ids: they sort by time and are never reused (docs/architecture.md, invariant 2)."""

from __future__ import annotations

import re
import secrets
from datetime import UTC, datetime

RANDOM_BYTES = 5
OPERATION_ID = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{10}")


def new_operation_id(now: datetime) -> str:
    """Return an id like `20261120T074343Z-3f9a01bc77`: the UTC second of `now`, then 40 random bits.

    Ids from different seconds sort by time. The random part contains a letter, so that a name that ends with a date
    can't be mistaken for one that ends with an id. Raises ValueError if `now` has no time zone: Python would read it as
    local time, which would break the order.
    """
    if now.tzinfo is None:
        raise ValueError("an operation id needs a time with a time zone")
    random = secrets.token_hex(RANDOM_BYTES)
    while random.isdigit():
        random = secrets.token_hex(RANDOM_BYTES)
    return f"{now.astimezone(UTC):%Y%m%dT%H%M%SZ}-{random}"


def time_of_id(operation: str) -> datetime | None:
    """Return the second at which an operation began, from its id; None if it is not an id."""
    if not OPERATION_ID.fullmatch(operation):
        return None
    try:
        return datetime.strptime(operation.partition("-")[0], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    except ValueError:
        return None
