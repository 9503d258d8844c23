"""What the watch of nodes takes for an answer."""

from __future__ import annotations

import asyncio

import psycopg
import pytest

from cutline.fleet.config import Node
from cutline.nodes.watch import _Probe


@pytest.mark.parametrize(
    ("error", "is_answered"),
    [
        (RuntimeError("can't start new thread"), True),
        (psycopg.OperationalError("FATAL:  the database system is starting up"), True),
        (psycopg.OperationalError("connection failed: too many open files"), True),
        (psycopg.OperationalError("connection timeout expired"), False),
    ],
)
def test_limits_of_this_process_and_refusals_are_no_silence(
    monkeypatch: pytest.MonkeyPatch, error: Exception, *, is_answered: bool
) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(psycopg.AsyncConnection, "connect", fail)
    passed = asyncio.run(_Probe(Node("s1", "host=db7"), "cutline").poll())
    assert (passed is None) == is_answered
