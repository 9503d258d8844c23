"""Which S3 requests are repeated, how often, and after which pauses, on a simulated clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import aiohttp
import pytest
from botocore.exceptions import (
    ClientError,
    ConnectionClosedError,
    ConnectTimeoutError,
    EndpointConnectionError,
    IncompleteReadError,
    NoCredentialsError,
    ReadTimeoutError,
    SSLError,
)

from storage.s3_failures import S3Failure, failure_of, is_passing, is_too_fast, reason_of, retry_after_seconds
from storage.s3_retries import BYTES_PER_SECOND_MIN, Pace, Retries, Tries, retries_of

URL = "http://127.0.0.1:9"
DRAWS = 300


def client_error(status: int, code: str = "", **headers: str) -> ClientError:
    metadata = {
        "HTTPStatusCode": status,
        "HTTPHeaders": {name.replace("_", "-"): text for name, text in headers.items()},
    }
    return ClientError({"Error": {"Code": code, "Message": "SECRET"}, "ResponseMetadata": metadata}, "PutObject")


BROKEN = [
    ConnectionClosedError(endpoint_url=URL),
    ReadTimeoutError(endpoint_url=URL),
    IncompleteReadError(actual_bytes=1, expected_bytes=2),
    aiohttp.ClientPayloadError("SECRET"),
]
NOT_MADE = [ConnectTimeoutError(endpoint_url=URL), EndpointConnectionError(endpoint_url=URL)]
SERVER = [
    client_error(500, "InternalError"),
    client_error(502),
    client_error(503),
    client_error(503, "ServiceUnavailable"),
    client_error(504),
]
NOT_NOW = [
    client_error(503, "SlowDown"),
    client_error(429),
    client_error(429, "TooManyRequests"),
    client_error(400, "RequestTimeout"),
    client_error(409, "ConditionalRequestConflict"),
    client_error(400, "BadDigest"),
]
DEFINITE = [
    client_error(403, "AccessDenied"),
    client_error(403, "InvalidAccessKeyId"),
    client_error(403, "SignatureDoesNotMatch"),
    client_error(403),
    client_error(400, "ExpiredToken"),
    client_error(400, "InvalidArgument"),
    client_error(301, "PermanentRedirect"),
    NoCredentialsError(),
    SSLError(endpoint_url=URL, error="SECRET"),
]


@pytest.mark.parametrize("error", [*BROKEN, *NOT_MADE, *SERVER, *NOT_NOW], ids=repr)
def test_a_temporary_failure_is_repeated(error: Exception) -> None:
    assert is_passing(error)


@pytest.mark.parametrize(
    "error",
    [
        *DEFINITE,
        client_error(404, "NoSuchKey"),
        client_error(404, "NoSuchBucket"),
        client_error(412),
        client_error(501),
        client_error(507),
        ValueError(),
    ],
    ids=repr,
)
def test_a_permanent_failure_is_not_repeated(error: Exception) -> None:
    assert not is_passing(error)


def test_only_a_definite_answer_says_whether_a_put_was_stored() -> None:
    for error in (*BROKEN, *SERVER, client_error(507), ValueError()):
        assert failure_of(error) is S3Failure.UNKNOWN
    for error in NOT_NOW:
        assert failure_of(error) is S3Failure.NOT_NOW
    for error in NOT_MADE:
        assert failure_of(error) is S3Failure.NOT_SENT
    for error in DEFINITE:
        assert failure_of(error) is S3Failure.REFUSED
    assert failure_of(client_error(412)) is S3Failure.TAKEN
    assert failure_of(client_error(404, "NoSuchUpload")) is S3Failure.MISSING
    assert failure_of(client_error(501)) is S3Failure.NOT_IMPLEMENTED


def test_the_servers_answer_behind_an_error_of_s3fs_is_found() -> None:
    wrapped = OSError(5, "SECRET")
    wrapped.__cause__ = client_error(503, "SlowDown")
    assert is_passing(wrapped)
    assert is_too_fast(wrapped)
    assert failure_of(wrapped) is S3Failure.NOT_NOW


def test_no_text_of_server_or_library_is_shown() -> None:
    for error in (*BROKEN, *NOT_MADE, *SERVER, *NOT_NOW, *DEFINITE, ValueError("SECRET")):
        assert "SECRET" not in reason_of(error)


def test_pauses_are_drawn_from_a_whole_range_that_doubles_up_to_a_limit() -> None:
    retries = Retries()
    for error, first, most in ((client_error(500), 0.2, 5.0), (client_error(503, "SlowDown"), 1.0, 20.0)):
        for attempt in (1, 2, 3, 7):
            limit = min(first * 2 ** (attempt - 1), most)
            pauses = [retries.pause_after(attempt, error) for _ in range(DRAWS)]
            assert all(0 <= pause <= limit for pause in pauses)
            # Of 300 draws from the whole range, some are in its lowest and highest tenth, all but once in 10^13 times.
            assert min(pauses) < limit / 10
            assert max(pauses) > limit * 9 / 10


def test_a_pause_is_at_least_as_long_as_the_store_demands() -> None:
    assert retry_after_seconds(client_error(503, "SlowDown")) == 0
    assert retry_after_seconds(client_error(503, "SlowDown", retry_after="7")) == 7
    assert retry_after_seconds(client_error(503, "SlowDown", retry_after="soon")) == 0
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    assert 28 <= retry_after_seconds(client_error(503, "SlowDown", retry_after=later)) <= 30
    assert Retries().pause_after(1, client_error(429, retry_after="7")) >= 7


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[], float]:
    """A clock that advances only while somebody sleeps."""
    seconds = [0.0]

    async def sleep(pause: float) -> None:
        seconds[0] += pause

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: seconds[0])
    return lambda: seconds[0]


def count_attempts(tries: Tries, error: Exception, seconds_each: float = 0) -> int:
    async def run() -> None:
        await asyncio.sleep(seconds_each)
        while await tries.again(error):
            await asyncio.sleep(seconds_each)

    drive(run())
    return tries.attempt


def drive(coroutine: object) -> None:
    """Run a coroutine that waits only for the simulated clock; an event loop would have a clock of its own."""
    with pytest.raises(StopIteration):
        coroutine.send(None)  # type: ignore[attr-defined]


def test_attempts_are_bounded_in_number(clock: Callable[[], float]) -> None:
    assert count_attempts(Tries(Retries(), Pace(), began=0.0), client_error(500)) == 6
    assert clock() <= 0.2 + 0.4 + 0.8 + 1.6 + 3.2
    assert count_attempts(Tries(Retries(attempts_max=2), Pace()), client_error(500)) == 2
    assert count_attempts(Tries(Retries(), Pace()), client_error(403, "AccessDenied")) == 1


def test_attempts_are_bounded_in_time(clock: Callable[[], float]) -> None:
    # Each attempt takes half a minute: the third would begin after more than a minute.
    assert count_attempts(Tries(Retries(), Pace(), began=0.0), client_error(500), seconds_each=31) == 2
    assert clock() < 63


def test_the_time_that_its_bytes_take_does_not_count_against_a_request(clock: Callable[[], float]) -> None:
    size_bytes = 10 * 60 * BYTES_PER_SECOND_MIN
    assert count_attempts(Tries(Retries(), Pace(), size_bytes, began=clock()), client_error(500), seconds_each=200) == 4


def test_a_store_that_demands_too_long_a_pause_is_given_up_at_once(clock: Callable[[], float]) -> None:
    assert count_attempts(Tries(Retries(), Pace(), began=0.0), client_error(503, "SlowDown", retry_after="3600")) == 1
    assert clock() == 0


def test_all_requests_slow_down_for_a_store_that_asks_for_it(clock: Callable[[], float]) -> None:
    pace = Pace()
    drive(pace.turn())
    assert clock() == 0
    tries = Tries(Retries(), pace, began=0.0)
    again = tries.again(client_error(503, "SlowDown", retry_after="7"))
    drive(again)
    waited = clock()
    assert waited >= 7
    pace.slow_down(5)
    drive(pace.turn())
    assert waited + 5 <= clock() <= waited + 10
    free = clock()
    drive(pace.turn())
    assert clock() == free


def test_a_user_may_set_the_number_of_attempts_as_in_botocore() -> None:
    assert retries_of({}) == Retries()
    assert retries_of({"retries": {"total_max_attempts": 2}}).attempts_max == 2
    assert retries_of({"retries": {"total_max_attempts": 0}}).attempts_max == 1
    assert retries_of({"retries": {"mode": "standard"}}) == Retries()
