"""Classify failed S3 requests by the server's answer, or by the lack of one.

All other S3 modules use this one, so that a failure means the same thing in a put, a read, a listing and a deletion.
Text from the server or a library is never shown, because it may quote credentials. Source: Amazon S3 API Reference,
"Error responses".
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from datetime import datetime
from email.utils import parsedate_to_datetime
from enum import Enum, auto

from aiohttp import ClientConnectorError
from aiohttp import ClientError as BrokenBodyError
from botocore.exceptions import (  # type: ignore[import-untyped]
    ClientError,
    ConnectTimeoutError,
    CredentialRetrievalError,
    EndpointConnectionError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
    ProxyConnectionError,
    ReadTimeoutError,
    SSLError,
    SSOError,
    TokenRetrievalError,
)
from botocore.parsers import ResponseParserError  # type: ignore[import-untyped]

from cutline.storage.clock import machine_now, utc_now
from cutline.storage.store import Fault, hint_of_status

NO_CONNECTION = (ConnectTimeoutError, ProxyConnectionError)
NO_CREDENTIALS = (
    NoCredentialsError,
    PartialCredentialsError,
    CredentialRetrievalError,
    TokenRetrievalError,
    SSOError,
)
NOTHING_SENT = (SSLError, ParamValidationError, *NO_CREDENTIALS)
ENDED_EARLY = (IncompleteReadError, BrokenBodyError)
NO_ANSWER = (
    *NO_CONNECTION,
    EndpointConnectionError,
    HTTPClientError,
    *ENDED_EARLY,
    ResponseParserError,
    TimeoutError,
)

SECONDS_PER_MINUTE = 60
STATUS_BAD_REQUEST = 400
STATUS_FORBIDDEN = 403
STATUS_MISSING = 404
STATUS_CONFLICT = 409
STATUS_TAKEN = 412
STATUS_BEYOND_END = 416
STATUS_TOO_MANY = 429
STATUS_SERVER = 500
STATUS_NOT_IMPLEMENTED = 501
STATUS_UNAVAILABLE = 503
PASSING_STATUSES = {STATUS_TOO_MANY, STATUS_SERVER, 502, STATUS_UNAVAILABLE, 504}

# Temporary refusals: the request was not carried out, and the same request may succeed later.
TOO_FAST = {
    "SlowDown",
    "TooManyRequests",
    "TooManyRequestsException",
    "Throttling",
    "ThrottlingException",
    "RequestLimitExceeded",
    "BandwidthLimitExceeded",
}
DAMAGED_ON_THE_WAY = {"BadDigest", "IncompleteBody", "XAmzContentSHA256Mismatch"}
NOT_NOW = {"ConditionalRequestConflict", "OperationAborted", "RequestTimeout", *TOO_FAST, *DAMAGED_ON_THE_WAY}
WRONG_CLOCK = "RequestTimeTooSkewed"
EXPIRED = {"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"}
# The codes for credentials that were never valid, and also for revoked credentials.
UNKNOWN_CREDENTIALS = {"InvalidAccessKeyId", "InvalidToken", "InvalidClientTokenId", "UnrecognizedClientException"}
# Failures that an operator can act on, in words; for all others, S3's code is shown, so that it can be looked up.
MEANINGS = {
    "NoSuchBucket": "the bucket does not exist",
    "NoSuchUpload": "another client ended the upload in parts",
}
CREDENTIALS = "the credentials in [store_options] of fleet.toml, or those that the AWS tools read"
REGION_HINT = "name the bucket's region in [store_options] of fleet.toml: client_kwargs = { region_name = … }"
# Hints by error code, for refusals whose status is not specific enough.
CODE_HINTS = {
    "NoSuchBucket": "create the bucket, or correct store in fleet.toml",
    "AccessDenied": "use credentials that allow this: docs/storage.md, Policies",
    "InvalidAccessKeyId": f"the store does not recognize the access key: check {CREDENTIALS}",
    "SignatureDoesNotMatch": f"the secret does not belong to the access key: check {CREDENTIALS}",
    "PermanentRedirect": REGION_HINT,
    "AuthorizationHeaderMalformed": REGION_HINT,
}
# botocore's names for the sources of credentials, in words. Any name that is missing here belongs to a credential
# service.
SOURCES = {
    "explicit": "key, secret and token in [store_options] of fleet.toml, or the variables named there",
    "env": "the environment's AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN",
    "shared-credentials-file": "the AWS credentials file",
    "config-file": "the AWS config file",
    "custom-process": "the credential_process of the AWS profile",
    "sso": "the AWS profile's single sign-on (aws sso login)",
    "login": "the AWS profile's login (aws login)",
    "assume-role": "the role of the AWS profile",
    "assume-role-with-web-identity": "the web identity token's file",
}


class CredentialsExpired(Exception):  # noqa: N818  # a situation within the package; the store raises its error
    """The store no longer accepts the credentials, and their `source` did not provide new ones."""

    def __init__(self, source: str) -> None:
        super().__init__(source)
        self.source = source


class UntrustedServerError(SSLError):  # type: ignore[misc]  # botocore has no types
    """No TLS connection to the server could be made: OpenSSL's reason, and the authorities that this process trusts."""

    def __init__(self, error: SSLError, authorities: str) -> None:
        super().__init__(endpoint_url=error.kwargs["endpoint_url"], error=type(error).__name__)
        # aiohttp's own errors are instances of OpenSSL's classes, too, but give no reason.
        causes = [cause for cause in _causes(error) if isinstance(cause, ssl.SSLError)]
        said = (getattr(cause, "verify_message", "") or getattr(cause, "reason", "") for cause in causes)
        self.is_certificate = any(isinstance(cause, ssl.SSLCertVerificationError) for cause in causes)
        self.why = next(filter(None, said), "unknown reason")
        self.authorities = authorities or "those included in botocore"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and its causes; aiohttp keeps OpenSSL's error in an attribute."""
    while error is not None:
        yield error
        if isinstance(inner := getattr(error, "certificate_error", None), BaseException):
            yield inner
        if isinstance(inner := getattr(error, "os_error", None), BaseException):
            yield inner
        error = error.__cause__ or error.__context__


class S3Failure(Enum):
    """The way in which a request failed. If it is UNKNOWN, the request may have been carried out."""

    TAKEN = auto()
    MISSING = auto()
    NOT_SENT = auto()
    NOT_NOW = auto()
    REFUSED = auto()
    NOT_IMPLEMENTED = auto()
    UNKNOWN = auto()


def failure_of(error: BaseException) -> S3Failure:
    """Classify a failed request; UNKNOWN unless it was certainly not carried out."""
    code, status = code_and_status(error)
    if status == STATUS_TAKEN:
        return S3Failure.TAKEN
    if status == STATUS_MISSING:
        return S3Failure.MISSING
    if status == STATUS_NOT_IMPLEMENTED:
        return S3Failure.NOT_IMPLEMENTED
    # A proxy that asks for fewer requests may already have passed this request on to the store.
    if is_too_fast(error):
        return S3Failure.UNKNOWN
    if code in NOT_NOW or status == STATUS_CONFLICT:
        return S3Failure.NOT_NOW
    if is_not_connected(error):
        return S3Failure.NOT_SENT
    if 300 <= status < STATUS_SERVER or isinstance(error, (CredentialsExpired, *NOTHING_SENT)):
        return S3Failure.REFUSED
    return S3Failure.UNKNOWN


def is_passing(error: BaseException) -> bool:
    """Whether the same request may succeed later.

    Errors that come from neither the network nor the server are bugs, which don't pass.
    """
    code, status = code_and_status(error)
    if status:
        return code in NOT_NOW or code == WRONG_CLOCK or status == STATUS_CONFLICT or status in PASSING_STATUSES
    return isinstance(error, NO_ANSWER)


def is_not_connected(error: BaseException) -> bool:
    """Whether the request was not sent, because there was no connection.

    aiobotocore raises the same error whether a connection was never made or was reset, although only the former means
    that nothing was stored; the underlying error tells the two apart.
    """
    if isinstance(error, EndpointConnectionError):
        return isinstance(error.kwargs.get("error"), (ClientConnectorError, socket.gaierror))
    return isinstance(error, NO_CONNECTION)


def is_answer(error: BaseException) -> bool:
    """Whether a server answered."""
    return code_and_status(error)[1] != 0


def is_hardly_passing(error: BaseException) -> bool:
    """Whether a failure that may pass is more likely due to a wrong setting if the store has never answered."""
    return not is_answer(error) or is_wrong_clock(error)


def is_wrong_clock(error: BaseException) -> bool:
    """Whether the store refused the request because of the time at which it was signed."""
    return code_and_status(error)[0] == WRONG_CLOCK


def is_too_fast(error: BaseException) -> bool:
    """Whether the store asks for fewer requests."""
    code, status = code_and_status(error)
    return code in TOO_FAST or status in (STATUS_TOO_MANY, STATUS_UNAVAILABLE)


def is_wordless(error: BaseException) -> bool:
    """Whether a refusal has a status but no error code, as for a HEAD, whose answer has no body."""
    code, status = code_and_status(error)
    return status in (STATUS_BAD_REQUEST, STATUS_FORBIDDEN) and code in ("", str(status))


def code_and_status(error: BaseException) -> tuple[str, int]:
    """Return S3's error code and HTTP status, or ("", 0) if the server did not answer."""
    if not isinstance(error, ClientError):
        return "", 0
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return str(error.response.get("Error", {}).get("Code", "")), int(status)


def retry_after_seconds(error: BaseException) -> float:
    """Return the delay in the Retry-After header in seconds; 0 if there is none. Source: RFC 9110, section 10.2.3."""
    text = _header(error, "retry-after")
    return float(text) if text.isdecimal() else max(_seconds_ahead(text, utc_now()), 0.0)


def _header(error: BaseException, name: str) -> str:
    metadata = error.response.get("ResponseMetadata", {}) if isinstance(error, ClientError) else {}
    return str(metadata.get("HTTPHeaders", {}).get(name, ""))


def _seconds_ahead(text: str, now: datetime) -> float:
    """Return how many seconds the time in a header is ahead of `now`; 0 if it is not a time."""
    try:
        when = parsedate_to_datetime(text)
    except ValueError:
        return 0.0
    return (when - now).total_seconds() if when.tzinfo else 0.0


def length_text(seconds: float) -> str:
    """Format a duration in whole units: `45 s`, `10 min`."""
    return f"{seconds:.0f} s" if seconds < 2 * SECONDS_PER_MINUTE else f"{seconds / SECONDS_PER_MINUTE:.0f} min"


def fault_of(error: BaseException) -> Fault:
    """Return the Fault for a failed request, with a hint if the cause is known."""
    code, status = code_and_status(error)
    hint = hint_of_status(status)
    if isinstance(error, CredentialsExpired):
        source = SOURCES.get(error.source, f"the service {error.source}" if error.source else "an unknown source")
        hint = f"renew the credentials, which come from {source}; then repeat the command"
    elif isinstance(error, NO_CREDENTIALS):
        hint = "set key and secret in [store_options], or use a profile, the environment or a role, as AWS tools do;"
        hint += " on a cluster, do this for the user that runs Spark's executors, too"
    elif isinstance(error, UntrustedServerError):
        hint = "set ca_file in [store_options] of fleet.toml to a file with the CA that issued the store's certificate"
        hint = hint if error.is_certificate else "check endpoint_url in [store_options]: the port must accept HTTPS"
    elif code == WRONG_CLOCK:
        hint = (
            "correct this machine's clock, or the store's: S3 rejects requests whose time is more than 15 minutes off"
        )
    elif code in CODE_HINTS:
        hint = CODE_HINTS[code]
    elif is_too_fast(error):
        hint = f"{hint_of_status(STATUS_UNAVAILABLE)}; retry_for in [store_options] sets how long requests are retried"
    elif isinstance(error, ENDED_EARLY):
        hint = "check proxies and load balancers: something cuts the store's answers short. Then repeat the command"
    elif isinstance(error, NO_ANSWER):
        hint = "check the network, and endpoint_url in [store_options]; repeat the command once the store answers"
    return Fault(
        reason_of(error),
        is_missing=status == STATUS_MISSING and code != "NoSuchBucket",
        is_beyond_end=status == STATUS_BEYOND_END,
        is_forbidden=code == "AccessDenied",
        is_expired=isinstance(error, CredentialsExpired),
        hint=hint,
    )


def reason_of(error: BaseException) -> str:
    """Describe why a request failed, without any text from the server or a library."""
    code, status = code_and_status(error)
    if code in MEANINGS:
        return MEANINGS[code]
    if code == WRONG_CLOCK:
        # Requests are signed with this machine's time.
        ahead = _seconds_ahead(_header(error, "date"), machine_now())
        side = "behind" if ahead > 0 else "ahead of"
        by = f": this machine's clock is {length_text(abs(ahead))} {side} the store's" if ahead else ""
        return f"the clocks of this machine and the store differ too much{by}"
    if status:
        why = ", which asks for fewer requests" if is_too_fast(error) else ""
        return f"the server answered {status} {'' if code == str(status) else code}".rstrip() + why
    if isinstance(error, CredentialsExpired):
        return "the credentials have expired or were revoked"
    if isinstance(error, NO_CREDENTIALS):
        return f"no credentials were found ({type(error).__name__})"
    if isinstance(error, UntrustedServerError):
        if error.is_certificate:
            return f"certificate verification failed: {error.why} (authorities: {error.authorities})"
        return f"no TLS connection: {error.why}"
    if isinstance(error, EndpointConnectionError):
        broken = error.kwargs.get("error")
        return "can't connect" if is_not_connected(error) else f"the connection broke: {type(broken).__name__}"
    if isinstance(error, ENDED_EARLY):
        return "its answer was cut short"
    if isinstance(error, (ReadTimeoutError, ConnectTimeoutError, TimeoutError)):
        return "it did not answer in time"
    if isinstance(error, NO_ANSWER):
        return f"the connection broke: {type(error).__name__}"
    return type(error).__name__


def remove_text(error: Exception) -> Exception:
    """Return the same error without the server's text, so that not even a traceback shows it."""
    if type(error) is ResponseParserError:
        return ResponseParserError("an answer that is not from S3")
    if not isinstance(error, ClientError):
        return error
    code, status = code_and_status(error)
    reason = {"Code": code, "Message": f"{status} {code}"}
    response = {"Error": reason, "ResponseMetadata": error.response.get("ResponseMetadata", {})}
    without: Exception = ClientError(response, error.operation_name)
    return without
