"""The numbers of repeated S3 requests, on a clock of the test's own."""

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


def refused(status: int, code: str = "", **headers: str) -> ClientError:
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
SERVER = [refused(500, "InternalError"), refused(502), refused(503), refused(503, "ServiceUnavailable"), refused(504)]
NOT_NOW = [
    refused(503, "SlowDown"),
    refused(429),
    refused(429, "TooManyRequests"),
    refused(400, "RequestTimeout"),
    refused(409, "ConditionalRequestConflict"),
    refused(400, "BadDigest"),
]
DEFINITE = [
    refused(403, "AccessDenied"),
    refused(403, "InvalidAccessKeyId"),
    refused(403, "SignatureDoesNotMatch"),
    refused(403),
    refused(400, "ExpiredToken"),
    refused(400, "InvalidArgument"),
    refused(301, "PermanentRedirect"),
    NoCredentialsError(),
    SSLError(endpoint_url=URL, error="SECRET"),
]


@pytest.mark.parametrize("error", [*BROKEN, *NOT_MADE, *SERVER, *NOT_NOW], ids=repr)
def test_what_may_pass_is_repeated(error: Exception) -> None:
    assert is_passing(error)


@pytest.mark.parametrize(
    "error",
    [
        *DEFINITE,
        refused(404, "NoSuchKey"),
        refused(404, "NoSuchBucket"),
        refused(412),
        refused(501),
        refused(507),
        ValueError(),
    ],
    ids=repr,
)
def test_what_will_be_the_same_again_is_not_repeated(error: Exception) -> None:
    assert not is_passing(error)


def test_only_a_definite_answer_says_what_became_of_a_put() -> None:
    for error in (*BROKEN, *SERVER, refused(507), ValueError()):
        assert failure_of(error) is S3Failure.UNKNOWN
    for error in NOT_NOW:
        assert failure_of(error) is S3Failure.NOT_NOW
    for error in NOT_MADE:
        assert failure_of(error) is S3Failure.NOT_SENT
    for error in DEFINITE:
        assert failure_of(error) is S3Failure.REFUSED
    assert failure_of(refused(412)) is S3Failure.TAKEN
    assert failure_of(refused(404, "NoSuchUpload")) is S3Failure.MISSING
    assert failure_of(refused(501)) is S3Failure.NOT_IMPLEMENTED


def test_an_answer_behind_an_error_of_s3fs_is_seen() -> None:
    wrapped = OSError(5, "SECRET")
    wrapped.__cause__ = refused(503, "SlowDown")
    assert is_passing(wrapped)
    assert is_too_fast(wrapped)
    assert failure_of(wrapped) is S3Failure.NOT_NOW


def test_no_text_of_server_or_library_is_shown() -> None:
    for error in (*BROKEN, *NOT_MADE, *SERVER, *NOT_NOW, *DEFINITE, ValueError("SECRET")):
        assert "SECRET" not in reason_of(error)


def test_pauses_double_up_to_a_limit_and_are_drawn_whole_at_random() -> None:
    retries = Retries()
    for error, first, most in ((refused(500), 0.2, 5.0), (refused(503, "SlowDown"), 1.0, 20.0)):
        for attempt in (1, 2, 3, 7):
            limit = min(first * 2 ** (attempt - 1), most)
            pauses = [retries.pause_after(attempt, error) for _ in range(DRAWS)]
            assert all(0 <= pause <= limit for pause in pauses)
            # Of 300 draws from the whole some are in its lowest and in its highest tenth: not so once in 10^13 times.
            assert min(pauses) < limit / 10
            assert max(pauses) > limit * 9 / 10


def test_the_time_that_the_store_names_is_waited_at_least() -> None:
    assert retry_after_seconds(refused(503, "SlowDown")) == 0
    assert retry_after_seconds(refused(503, "SlowDown", retry_after="7")) == 7
    assert retry_after_seconds(refused(503, "SlowDown", retry_after="soon")) == 0
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    assert 28 <= retry_after_seconds(refused(503, "SlowDown", retry_after=later)) <= 30
    assert Retries().pause_after(1, refused(429, retry_after="7")) >= 7


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[], float]:
    """Time goes by only where somebody sleeps."""
    seconds = [0.0]

    async def sleep(pause: float) -> None:
        seconds[0] += pause

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: seconds[0])
    return lambda: seconds[0]


def attempts(tries: Tries, error: Exception, seconds_each: float = 0) -> int:
    async def run() -> None:
        await asyncio.sleep(seconds_each)
        while await tries.again(error):
            await asyncio.sleep(seconds_each)

    drive(run())
    return tries.attempt


def drive(coroutine: object) -> None:
    """Run a coroutine that waits for nothing but the test's own clock; an event loop has one of its own."""
    with pytest.raises(StopIteration):
        coroutine.send(None)  # type: ignore[attr-defined]


def test_attempts_are_bounded_in_number(clock: Callable[[], float]) -> None:
    assert attempts(Tries(Retries(), Pace(), began=0.0), refused(500)) == 6
    assert clock() <= 0.2 + 0.4 + 0.8 + 1.6 + 3.2
    assert attempts(Tries(Retries(attempts_max=2), Pace()), refused(500)) == 2
    assert attempts(Tries(Retries(), Pace()), refused(403, "AccessDenied")) == 1


def test_attempts_are_bounded_in_time(clock: Callable[[], float]) -> None:
    # Each takes half a minute: the third would begin after more than one.
    assert attempts(Tries(Retries(), Pace(), began=0.0), refused(500), seconds_each=31) == 2
    assert clock() < 63


def test_what_its_bytes_take_is_not_counted_against_a_request(clock: Callable[[], float]) -> None:
    size_bytes = 10 * 60 * BYTES_PER_SECOND_MIN
    assert attempts(Tries(Retries(), Pace(), size_bytes, began=clock()), refused(500), seconds_each=200) == 4


def test_a_store_that_wants_too_long_a_pause_is_given_up_at_once(clock: Callable[[], float]) -> None:
    assert attempts(Tries(Retries(), Pace(), began=0.0), refused(503, "SlowDown", retry_after="3600")) == 1
    assert clock() == 0


def test_a_store_that_is_asked_too_much_is_asked_less_by_all(clock: Callable[[], float]) -> None:
    pace = Pace()
    drive(pace.turn())
    assert clock() == 0
    tries = Tries(Retries(), pace, began=0.0)
    again = tries.again(refused(503, "SlowDown", retry_after="7"))
    drive(again)
    waited = clock()
    assert waited >= 7
    pace.slow_down(5)
    drive(pace.turn())
    assert waited + 5 <= clock() <= waited + 10
    free = clock()
    drive(pace.turn())
    assert clock() == free


def test_a_user_may_choose_the_number_as_botocore_has_it() -> None:
    assert retries_of({}) == Retries()
    assert retries_of({"retries": {"total_max_attempts": 2}}).attempts_max == 2
    assert retries_of({"retries": {"total_max_attempts": 0}}).attempts_max == 1
    assert retries_of({"retries": {"mode": "standard"}}) == Retries()
