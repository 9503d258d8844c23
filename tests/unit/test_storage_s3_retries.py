"""Which S3 requests are repeated, for how long, how often, and what is told of them, on a simulated clock."""

from __future__ import annotations

import asyncio
import math
import re
import socket
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from types import SimpleNamespace
from typing import Any

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

from cutline.storage import waits
from cutline.storage.s3_create import Creation
from cutline.storage.s3_failures import (
    CredentialsExpired,
    S3Failure,
    failure_of,
    fault_of,
    is_passing,
    reason_of,
    retry_after_seconds,
)
from cutline.storage.s3_retries import (
    BYTES_PER_SECOND_MIN,
    RATE_GAIN,
    RATE_MAX,
    RATE_MIN,
    Pace,
    Retries,
    Tries,
    retries_of,
)
from cutline.storage.waits import HURRY_SECONDS, hurry, listening, stop_hurrying, tell, urgent_requests

URL = "http://127.0.0.1:9"
HOST: Any = SimpleNamespace(host="127.0.0.1", port=9, ssl=None)
DRAWS = 300


def client_error(status: int, code: str = "", **headers: str) -> ClientError:
    metadata = {
        "HTTPStatusCode": status,
        "HTTPHeaders": {name.replace("_", "-"): text for name, text in headers.items()},
    }
    return ClientError({"Error": {"Code": code, "Message": "SECRET"}, "ResponseMetadata": metadata}, "PutObject")


# aiobotocore raises this too if a connection was reset that had been made.
RESET = EndpointConnectionError(endpoint_url=URL, error=aiohttp.ClientOSError(104, "SECRET"))
BROKEN = [
    RESET,
    ConnectionClosedError(endpoint_url=URL),
    ReadTimeoutError(endpoint_url=URL),
    IncompleteReadError(actual_bytes=1, expected_bytes=2),
    aiohttp.ClientPayloadError("SECRET"),
]
NOT_MADE = [
    ConnectTimeoutError(endpoint_url=URL),
    EndpointConnectionError(endpoint_url=URL, error=socket.gaierror("SECRET")),
    EndpointConnectionError(endpoint_url=URL, error=aiohttp.ClientConnectorDNSError(HOST, OSError("SECRET"))),
]
SERVER = [
    client_error(500, "InternalError"),
    client_error(502),
    client_error(503),
    client_error(503, "ServiceUnavailable"),
    client_error(504),
]
TOO_FAST = [
    client_error(503, "SlowDown"),
    client_error(503, "SlowDownWrite"),
    client_error(429),
    client_error(429, "TooManyRequests"),
]
WRONG_CLOCK = client_error(403, "RequestTimeTooSkewed")
NOT_NOW = [
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


@pytest.mark.parametrize("error", [*BROKEN, *NOT_MADE, *SERVER, *TOO_FAST, *NOT_NOW, WRONG_CLOCK], ids=repr)
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
    for error in (*BROKEN, *SERVER, *TOO_FAST, client_error(507), ValueError()):
        assert failure_of(error) is S3Failure.UNKNOWN
    for error in NOT_NOW:
        assert failure_of(error) is S3Failure.NOT_NOW
    for error in NOT_MADE:
        assert failure_of(error) is S3Failure.NOT_SENT
    for error in (*DEFINITE, WRONG_CLOCK):
        assert failure_of(error) is S3Failure.REFUSED
    assert failure_of(client_error(412)) is S3Failure.TAKEN
    assert failure_of(client_error(404, "NoSuchUpload")) is S3Failure.MISSING
    assert failure_of(client_error(501)) is S3Failure.NOT_IMPLEMENTED


def test_a_connection_that_was_reset_is_not_one_that_was_never_made() -> None:
    assert [reason_of(error) for error in NOT_MADE] == ["it did not answer in time", "can't connect", "can't connect"]
    assert reason_of(RESET) == "the connection broke: ClientOSError"


def test_no_text_of_server_or_library_is_shown() -> None:
    for error in (*BROKEN, *NOT_MADE, *SERVER, *TOO_FAST, *NOT_NOW, *DEFINITE, ValueError("SECRET")):
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


def test_a_request_is_repeated_for_minutes(clock: Callable[[], float]) -> None:
    for error, most in ((client_error(500), 5.0), (client_error(503, "SlowDown"), 20.0)):
        began, tries = clock(), Tries(Retries(), Pace())
        attempts = count_attempts(tries, error)
        assert 600 <= clock() - began < 601
        # Pauses are half of the longest on average.
        assert 600 / most < attempts < 600 / most * 3


def test_the_user_says_for_how_long(clock: Callable[[], float]) -> None:
    count_attempts(Tries(Retries(seconds_max=30.0), Pace()), client_error(503, "SlowDown"))
    assert 30 <= clock() < 31
    assert count_attempts(Tries(Retries(seconds_max=0.0), Pace()), client_error(500)) == 1


def test_attempts_are_bounded_in_number_if_the_user_says_so(clock: Callable[[], float]) -> None:
    assert count_attempts(Tries(Retries(attempts_max=2), Pace()), client_error(500)) == 2
    assert count_attempts(Tries(Retries(), Pace()), client_error(403, "AccessDenied")) == 1
    assert clock() < 1


@pytest.mark.parametrize("error", [*NOT_MADE, ReadTimeoutError(endpoint_url=URL), WRONG_CLOCK], ids=repr)
def test_what_is_likely_a_mistake_is_not_waited_for_before_the_store_has_answered(
    error: Exception, clock: Callable[[], float]
) -> None:
    count_attempts(Tries(Retries(), Pace()), error)
    assert 10 <= clock() < 11
    pace = Pace()
    pace.worked()
    count_attempts(Tries(Retries(), pace), error)
    assert clock() > 600
    pace, began = Pace(), clock()
    drive(Tries(Retries(), pace).again(client_error(503)))
    count_attempts(Tries(Retries(), pace), error)
    assert clock() - began > 590


def test_the_time_that_its_bytes_take_does_not_count_against_a_request(clock: Callable[[], float]) -> None:
    size_bytes = 10 * 60 * BYTES_PER_SECOND_MIN
    assert count_attempts(Tries(Retries(), Pace(), size_bytes), client_error(500), seconds_each=200) == 7
    assert 1400 < clock() < 1425


def test_a_store_that_demands_too_long_a_pause_is_given_up_at_once(clock: Callable[[], float]) -> None:
    pace = Pace()
    assert count_attempts(Tries(Retries(), pace), client_error(503, "SlowDown", retry_after="3600")) == 1
    assert clock() == 0
    # Nothing that is asked of it afterwards waits for that.
    drive(pace.turn())
    assert clock() == 0


def test_requests_that_wait_for_their_turn_are_told(clock: Callable[[], float]) -> None:
    pace, told = Pace(store="s3://b"), []
    pace.slow_down(30)
    with listening(told.append):
        drive(pace.turn())
    assert clock() >= 30
    assert told == ["s3://b has asked for fewer requests: slowing down"]


def test_an_outage_that_was_waited_for_is_not_waited_for_again(clock: Callable[[], float]) -> None:
    pace = Pace()
    count_attempts(Tries(Retries(), pace), client_error(500))
    given_up = clock()
    # Cleaning up, and reading back.
    assert count_attempts(Tries(Retries(), pace), client_error(500)) == 1
    assert clock() == given_up
    pace.worked()
    assert count_attempts(Tries(Retries(), pace), client_error(500)) > 100
    # Hours later it is another one.
    drive(asyncio.sleep(7200))
    assert count_attempts(Tries(Retries(), pace), client_error(500)) > 100


def test_a_command_that_was_stopped_waits_for_seconds_only(clock: Callable[[], float]) -> None:
    began, tries = clock(), Tries(Retries(), Pace())
    waiting = tries.again(client_error(503, "SlowDown", retry_after="60"))
    hurry()
    try:
        drive(waiting)
        assert clock() - began <= HURRY_SECONDS + 1
        # All that is asked after it, too.
        count_attempts(Tries(Retries(), Pace()), client_error(500))
        assert clock() - began <= HURRY_SECONDS + 1
    finally:
        stop_hurrying()
    assert count_attempts(Tries(Retries(), Pace()), client_error(500)) > 100


def test_all_requests_slow_down_for_a_store_that_asks_for_it(clock: Callable[[], float]) -> None:
    pace = Pace()
    for _ in range(40):
        drive(pace.turn())
    assert clock() == 0
    # Those that were under way are all refused: one refusal, not forty.
    for _ in range(40):
        pace.slow_down(3)
    assert pace.rate == 20
    drive(pace.turn())
    assert clock() == 3
    for _ in range(20):
        drive(pace.turn())
    assert clock() == pytest.approx(4)
    for _ in range(20):
        drive(asyncio.sleep(2))
        pace.slow_down(0)
    assert pace.rate == RATE_MIN


def test_requests_become_more_again_as_they_work(clock: Callable[[], float]) -> None:
    pace = Pace()
    drive(pace.turn())
    pace.slow_down(0)
    assert pace.rate == RATE_MIN
    rates = []
    while pace.rate < math.inf:
        drive(pace.turn())
        pace.worked()
        rates.append((clock(), pace.rate))
    # RATE_GAIN more per second in each second: after 20 seconds some 40, and no limit after some 100.
    assert next(rate for at, rate in rates if at >= 20) == pytest.approx(RATE_MIN + 20 * RATE_GAIN, rel=0.15)
    assert clock() == pytest.approx((RATE_MAX - RATE_MIN) / RATE_GAIN, rel=0.15)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    monkeypatch.setattr(waits, "_told", {})
    texts: list[str] = []
    with listening(texts.append):
        yield texts


def test_the_operator_is_told_after_two_seconds_and_once_a_minute(clock: Callable[[], float], told: list[str]) -> None:
    pace = Pace("store s3://b/f")
    tries = Tries(Retries(pause_seconds_max=1.0), pace)
    while clock() < 2:
        assert told == []
        drive(tries.again(client_error(500, "InternalError")))
    text = "store s3://b/f: the server answered 500 InternalError; the request will be retried for up to 10 min"
    # It may wait while the second second ends.
    drive(tries.again(client_error(500, "InternalError")))
    assert told == [text]
    while clock() < 58:
        drive(tries.again(client_error(500, "InternalError")))
    assert told == [text]
    while clock() < 70:
        drive(tries.again(client_error(500, "InternalError")))
    assert told == [text, text]
    tries.worked()
    assert re.fullmatch("store s3://b/f answers again, after 7[01] s", told[2])
    Tries(Retries(), pace).worked()
    assert len(told) == 3


def test_a_request_that_works_soon_is_not_told(clock: Callable[[], float], told: list[str]) -> None:
    tries = Tries(Retries(pause_seconds_max=0.5), Pace())
    drive(tries.again(client_error(500)))
    tries.worked()
    assert clock() < 1
    assert told == []


def test_a_create_that_finds_its_own_object_says_that_the_store_answers_again(
    clock: Callable[[], float], told: list[str]
) -> None:
    """Its put has arrived, but the answer was lost."""
    pace = Pace("store s3://b/f")

    async def put() -> None:
        raise client_error(412) if clock() >= 4 else client_error(500)

    drive(Creation(client_of(pace), "s3://b/f", "k", {}, put_id="mine").decide(put, 0))
    assert ["will be retried" in told[0], *("answers again, after" in text for text in told[1:])] == [True, True]
    # The next outage will be reported, too.
    assert pace.told_at is None


def client_of(pace: Pace) -> Any:
    """A client whose store has the object of this put."""

    async def request(_name: str, **_: object) -> dict[str, object]:
        return {"Metadata": {"cutline-put": "mine"}}

    return SimpleNamespace(tries=lambda size: Tries(Retries(pause_seconds_max=1.0), pace, size), request=request)


def test_a_new_listener_hears_what_another_has_heard(clock: Callable[[], float], told: list[str]) -> None:
    tell("the store is away")
    tell("the store is away")
    heard: list[str] = []
    with listening(heard.append):
        tell("the store is away")
        tell("the store is away")
    assert (told, heard) == (["the store is away"], ["the store is away"])


def test_each_failure_has_the_hint_that_fits_it() -> None:
    def hint(error: Exception) -> str:
        return fault_of(error).unreachable("s3://b").hint

    for error in (*TOO_FAST, client_error(503), client_error(503, "ServiceUnavailable")):
        assert "fewer requests" in hint(error)
        assert "fewer requests" in reason_of(error)
    for error in (client_error(500, "InternalError"), client_error(502), client_error(504)):
        assert "the store's log" in hint(error)
    for error in (*NOT_MADE, ReadTimeoutError(endpoint_url=URL), ConnectionClosedError(endpoint_url=URL)):
        assert "check the network" in hint(error)
    for error in (IncompleteReadError(actual_bytes=1, expected_bytes=2), aiohttp.ClientPayloadError()):
        assert "cuts the store's answers short" in hint(error)
    assert "correct this machine's clock" in hint(WRONG_CLOCK)
    passing = (*TOO_FAST, *SERVER, *BROKEN, *NOT_MADE, *NOT_NOW, WRONG_CLOCK, client_error(404, "NoSuchBucket"))
    assert not [error for error in passing if "credentials" in hint(error)]
    for code in ("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "AnotherRefusal", ""):
        assert "credentials" in hint(client_error(403, code))
    assert "credentials" in hint(client_error(401))
    assert "credentials" in hint(CredentialsExpired("env"))


@pytest.mark.parametrize(("minutes", "text"), [(20, "20 min behind"), (-90, "90 min ahead of")])
def test_a_refused_clock_is_told_with_the_difference(minutes: int, text: str) -> None:
    then = format_datetime(datetime.now(UTC) + timedelta(minutes=minutes), usegmt=True)
    assert reason_of(client_error(403, "RequestTimeTooSkewed", date=then)) == (
        f"the clocks of this machine and the store differ too much: this machine's clock is {text} the store's"
    )


def test_a_user_may_set_the_number_of_attempts_as_in_botocore() -> None:
    assert retries_of({}) == Retries()
    assert retries_of({"retries": {"total_max_attempts": 2}}).attempts_max == 2
    assert retries_of({"retries": {"total_max_attempts": 0}}).attempts_max == 1
    assert retries_of({"retries": {"mode": "standard"}}) == Retries()
    assert retries_of({}, 90.0) == Retries(seconds_max=90.0)


def test_a_sign_of_life_passes_requests_that_wait_for_their_turn(clock: Callable[[], float]) -> None:
    pace = Pace()
    pace.slow_down(30)
    with urgent_requests():
        drive(pace.turn())
    assert clock() == 0
    drive(pace.turn())
    assert clock() >= 30
