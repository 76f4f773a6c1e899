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
_ACCESS = (
    "check the credentials in the environment, their right to read the bucket, and that the key "
    "exists: without the right to list, some stores deny what is missing"
)


@contextlib.contextmanager
def as_storage_error(url: str, action: str) -> Iterator[None]:
    """Raise what obstore raises inside as a StorageError: `action` failed for `url`."""
    try:
        yield
    except MegaIndexError:
        raise
    except FileNotFoundError:
        raise missing(url) from None
    except Exception as error:
        kinds = library().exceptions
        if not isinstance(error, (kinds.BaseError, OSError, ValueError)):
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


def _typed(error: Exception, kinds: Any, url: str, action: str) -> Exception:
    if isinstance(error, kinds.PreconditionError):
        return replaced(url)
    if isinstance(error, (kinds.PermissionDeniedError, kinds.UnauthenticatedError)):
        denied = StorageError(f"{url}: {action}: access denied ({_status(error)}); {_ACCESS}")
        denied.errno = errno.EACCES
        return denied
    if isinstance(error, (kinds.InvalidPathError, kinds.UnknownConfigurationKeyError)):
        return InvalidArgument(f"{url}: {action}: not a key that the store can have; check it")
    text = str(error)
    retried = _RETRIED.search(text)
    tries = f" after {int(retried[1]) + 1} attempts" if retried else ""
    if any(server in text for server in _METADATA_SERVERS):
        reason, remedy = "no credentials were found", _ACCESS
    elif _STATUS.search(text):
        reason, remedy = f"the store answered {_status(error)}", "check region and endpoint"
    elif "Config" in text:
        reason, remedy = "the store's settings are refused", "check its environment variables"
    else:
        reason = "the store cannot be reached, or the connection broke"
        remedy = "check the network, the endpoint and its variables, then try again"
    failed = StorageError(f"{url}: {action}: {reason}{tries}; {remedy}")
    failed.errno = errno.EIO
    return failed


def _status(error: Exception) -> str:
    found = _STATUS.search(str(error))
    return found[1] if found else "no status"
