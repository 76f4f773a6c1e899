"""obstore's errors as ours. Their texts hold addresses, headers and replies of the server, any of
which may carry a secret, so that only known parts of them are repeated."""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Iterator
from typing import Any

from megaindex.errors import InvalidArgument, MegaIndexError, MissingFile, StorageError
from megaindex.io.objects.library import library

_STATUS = re.compile(r"status code: (\d{3}(?: [A-Z][A-Za-z]*)*)")
_RETRIED = re.compile(r"after (\d+) retries")
_METADATA_SERVERS = ("169.254.169.254", "metadata.google.internal", "169.254.170.2")
_HTTP = "set AWS_ALLOW_HTTP=true (AZURE_…, GOOGLE_…) for a store without TLS, or write https://"
_ACCESS = (
    "check the credentials in the environment, their right to read the bucket, and that the key "
    "exists: without the right to list, some stores deny what is missing"
)
_CREDENTIALS = "check the file that the credentials' variables name"
# what is in obstore's texts, what we say, and what helps; the first that is found counts
_KNOWN = tuple(
    (re.compile(phrase), reason, remedy)
    for phrase, reason, remedy in (
        ("|".join(map(re.escape, _METADATA_SERVERS)), "no credentials were found", _ACCESS),
        ("BadScheme", "plain http is not allowed by default", _HTTP),
        (
            "incorrectly configured region|status code: 30[0-9]",
            "the store sends elsewhere, as for a bucket of another region",
            "set AWS_REGION to the bucket's region and check the endpoint",
        ),
        (
            "non-partial response when range requested",
            "the store, or a proxy before it, ignores Range and sends the whole object",
            "read around the proxy, or copy the object to a disk or to another store",
        ),
        (
            "UnexpectedRange|NoContentRange|ParseContentRange|InvalidRangeRequest",
            "the answer's Content-Range is missing, or is of other bytes than were asked for",
            "the store, or a proxy or cache before it, is at fault: read around it, or copy the "
            "object to a disk or to another store",
        ),
        (
            "token file|service account file|(?i:credentials?) file|OpenCredentials|TokenFile",
            "a file of credentials is missing or cannot be read",
            _CREDENTIALS,
        ),
        (
            "Account must be specified",
            "no storage account is named",
            "set AZURE_STORAGE_ACCOUNT_NAME",
        ),
    )
)
_CONNECTION = re.compile(r"kind: (Connect|Request|Timeout|Interrupted)\b")


@contextlib.contextmanager
def as_storage_error(url: str, action: str) -> Iterator[None]:
    """Raise what obstore raises inside as a StorageError: `action` failed for `url`."""
    try:
        yield
    except MegaIndexError:
        raise
    except FileNotFoundError:
        raise missing(url) from None
    except BaseException as error:
        panic = type(error).__name__ == "PanicException"  # of Rust, and no Exception
        kinds = library().exceptions
        if not panic and not isinstance(error, (kinds.BaseError, OSError, ValueError)):
            raise
        raise _typed(error, kinds, url, action) from None


def missing(url: str) -> MissingFile:
    """There is no such object."""
    error = MissingFile(f"{url}: does not exist; check the bucket, the key and the endpoint")
    error.errno = errno.ENOENT
    return error


def replaced(url: str, detail: str = "the store has another version now") -> StorageError:
    """The object is not the one that was looked at."""
    return StorageError(
        f"{url}: changed since it was looked at: {detail}; restore the object or start anew with it"
    )


def _typed(error: BaseException, kinds: Any, url: str, action: str) -> Exception:
    if isinstance(error, kinds.PreconditionError):
        return replaced(url)
    denials = (kinds.PermissionDeniedError, kinds.UnauthenticatedError)
    if isinstance(error, denials) or _status(error)[:3] in ("401", "403"):  # of a listing
        denied = StorageError(f"{url}: {action}: access denied ({_status(error)}); {_ACCESS}")
        denied.errno = errno.EACCES
        return denied
    if isinstance(error, (kinds.InvalidPathError, kinds.UnknownConfigurationKeyError)):
        return InvalidArgument(f"{url}: {action}: not a key that the store can have; check it")
    retried = _RETRIED.search(str(error))
    tries = f" after {int(retried[1]) + 1} attempts" if retried else ""
    reason, remedy = _reason(str(error))
    failed = StorageError(f"{url}: {action}: {reason}{tries}; {remedy}")
    failed.errno = errno.EIO
    return failed


def _reason(text: str) -> tuple[str, str]:
    """Why it failed, and what helps."""
    for phrase, reason, remedy in _KNOWN:
        if phrase.search(text):
            return reason, remedy
    status = _STATUS.search(text)
    if status:
        return f"the store answered {status[1]}", "check region and endpoint"
    if "Config" in text:
        return "the store's settings are refused", "check its environment variables"
    if _CONNECTION.search(text):
        return (
            "the store cannot be reached, or the connection broke",
            "check the network, the endpoint and its variables, then try again",
        )
    return "the request failed", "check the store's environment variables, then try again"


def _status(error: BaseException) -> str:
    found = _STATUS.search(str(error))
    return found[1] if found else "no status"
