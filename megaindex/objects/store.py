"""Objects of a store through obstore: clients, metadata, listing, ranged reads, errors.

obstore makes requests in threads of a runtime of the process. A forked child inherits it without
threads, so that a request would never return. It therefore loads the extension module again from a
copy, which the dynamic loader treats as another library with its own runtime; this takes 15 MB and
15 ms.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import logging
import os
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from importlib.machinery import ExtensionFileLoader
from typing import Any

import numpy as np
import numpy.typing as npt

from megaindex._lazy import library_needed
from megaindex.errors import InvalidArgument, MegaIndexError, MissingFile, StorageError
from megaindex.io.paths import FileInfo, folder_of, place_of
from megaindex.io.threads import map_interruptibly

_STATUS = re.compile(r"status code: (\d{3}(?: [A-Z][A-Za-z]*)*)")
_RETRIED = re.compile(r"after (\d+) retries")
_METADATA_SERVERS = ("169.254.169.254", "metadata.google.internal", "169.254.170.2")
_HTTP = "set AWS_ALLOW_HTTP=true (AZURE_…, GOOGLE_…) for a store without TLS, or write https://"
_ACCESS = (
    "check the credentials in the environment, their permission to read the bucket, and that the "
    "key exists: without permission to list, some stores deny access to missing keys"
)
_CREDENTIALS = "check the path of the credentials file in the environment"
# pattern of obstore's message, our reason and remedy; the first match is used
_KNOWN = (
    ("|".join(map(re.escape, _METADATA_SERVERS)), "no credentials were found", _ACCESS),
    ("BadScheme", "plain http is not allowed by default", _HTTP),
    (
        "incorrectly configured region|status code: 30[0-9]",
        "the store redirects the request, as for a bucket of another region",
        "set AWS_REGION to the bucket's region and check the endpoint",
    ),
    (
        "non-partial response when range requested",
        "the store or a proxy ignores Range and sends the whole object",
        "bypass the proxy, or copy the object to a disk or to another store",
    ),
    (
        "UnexpectedRange|NoContentRange|ParseContentRange|InvalidRangeRequest",
        "Content-Range of the response is missing or differs from the request, a fault of the "
        "store or a proxy",
        "bypass the proxy, or copy the object to a disk or to another store",
    ),
    (
        "token file|service account file|(?i:credentials?) file|OpenCredentials|TokenFile",
        "a credentials file is missing or cannot be read",
        _CREDENTIALS,
    ),
    (
        "Account must be specified",
        "the storage account is not set",
        "set AZURE_STORAGE_ACCOUNT_NAME",
    ),
)
_CONNECTION = re.compile(r"kind: (Connect|Request|Timeout|Interrupted)\b")

logger = logging.getLogger("megaindex")

_EXTENSION = "obstore._obstore"
# obstore retries 5xx, 429, timeouts and dropped connections, and resumes incomplete bodies; it does
# not retry 403, 404 and 412.
_RETRIES = {
    "max_retries": 4,
    "retry_timeout": timedelta(seconds=60),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=10)},
}
_Settings = dict[str, str]
_FAMILIES = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}
_ENDPOINTS = (
    "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT",
    "AZURE_ENDPOINT", "GOOGLE_BASE_URL",
)  # fmt: skip
_abandoned: list[Any] = []  # of the parent; kept alive because dropping them would wait for threads

PIECE = 4 << 20
"""Bytes per request: enough to hide latency, few enough for its time limit."""

MERGE_GAP = 256 << 10
"""Gap between ranges that is read rather than skipped by another request."""

_THREADS = 8  # parallel requests of one read
_COPIED = 1 << 20  # bytes copied at once
_Bytes = npt.NDArray[np.uint8]


def stat_object(url: str) -> FileInfo | None:
    """Return the size and version of an object, or None if it does not exist.

    Raises:
        StorageError: the request failed or was denied, or the store has no strong ETags.
    """
    place = place_of(url)
    try:
        with as_storage_error(url, "cannot read metadata"):
            meta = _ask(place.store, lambda client: library().head(client, place.key))
    except FileNotFoundError:
        return None
    return FileInfo(path=url, nbytes=meta["size"], version=_version(url, meta))


def list_folder(url: str) -> list[str]:
    """Return the sorted URLs of the objects directly below ``s3://bucket/folder`` or a bucket.

    Raises:
        InvalidArgument: the scheme of the URL is unknown.
        StorageError: the request failed or was denied.
    """
    place = folder_of(url)
    key = place.key or None
    with as_storage_error(url, "cannot list"):
        found = _ask(place.store, lambda client: library().list_with_delimiter(client, key))
    return sorted(f"{place.store}/{meta['path']}" for meta in found["objects"])


def _ask(store: str, request: Callable[[Any], Any]) -> Any:
    """Return the answer of a store; Ctrl-C interrupts the wait."""
    (answer,) = map_interruptibly(request, [client_of(store, as_set_now=True)], 1)
    return answer


def read(info: FileInfo, offset: int, into: memoryview) -> None:
    """Fill ``into`` with the bytes at ``offset`` of an object by one request.

    Raises:
        MissingFile: the object does not exist.
        StorageError: the object was replaced, or the request failed after retries.
    """
    if not len(into):
        return
    url, stop = info.path, offset + len(into)
    place = place_of(url)
    options: dict[str, Any] = {"range": (offset, stop), "if_match": info.version}
    with as_storage_error(url, f"cannot read {len(into)} bytes at {offset}"):
        result = library().get(client_of(place.store), place.key, options=options)
        meta, got = result.meta, result.range
        if (meta["size"], _version(url, meta)) != (info.nbytes, info.version):
            raise replaced(url)  # the store ignores preconditions
        data = result.bytes()
    if len(data) != len(into) or got != (offset, stop):
        raise StorageError(
            f"{url}: the response must have {len(into)} bytes at {offset}, got {len(data)}; "
            "the store or a proxy is at fault: try again"
        )
    into[:] = memoryview(data)


def read_each(info: FileInfo, ranges: Sequence[tuple[int, memoryview]]) -> Iterator[None]:
    """`read` each ``(offset, into)`` and yield after each."""
    for offset, into in ranges:
        read(info, offset, into)
        yield


def fill(info: FileInfo, offset: int, into: memoryview) -> None:
    """`read` in parallel pieces; after an interrupt, requests may still write to ``into``."""
    pieces = [(offset + begin, into[begin : begin + PIECE]) for begin in range(0, len(into), PIECE)]
    map_interruptibly(lambda each: read(info, *each), pieces, _THREADS)


def read_all(info: FileInfo, ranges: Sequence[tuple[int, int]]) -> list[_Bytes]:
    """Return the read-only bytes of each (offset, nbytes); near ranges share memory."""
    parts: list[_Bytes] = [np.empty(0, np.uint8)] * len(ranges)
    for begin, stop, members in _together(ranges):
        block = np.empty(stop - begin, np.uint8)
        fill(info, begin, block.data)
        block.flags.writeable = False
        for number in members:
            offset, nbytes = ranges[number]
            parts[number] = block[offset - begin : offset - begin + nbytes]
    return parts


def _version(url: str, meta: Any) -> str:
    """Return the ETag; modification times have a resolution of a second, which is not enough."""
    tag = meta["e_tag"]
    if not tag or not tag.startswith('"'):
        raise StorageError(
            f"{url}: the store must give a strong ETag, to notice replaced objects, got {tag!r}; "
            "copy the object to a disk or to another store"
        )
    return str(tag)


def _together(ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, list[int]]]:
    """Yield (begin, stop, numbers of the ranges inside) of each read of merged ranges."""
    begin = stop = 0
    members: list[int] = []
    for number in sorted(range(len(ranges)), key=ranges.__getitem__):
        offset, nbytes = ranges[number]
        if members and offset > stop + MERGE_GAP:
            yield begin, stop, members
            members = []
        if not members:
            begin = stop = offset
        stop = max(stop, offset + nbytes)
        members.append(number)
    if members:
        yield begin, stop, members


def library() -> Any:
    """Return the module obstore.

    Raises:
        InvalidArgument: it is not installed.
        StorageError: it cannot be loaded again in a forked process.
    """
    with _this.lock:
        if _this.inherited:
            try:
                _load_afresh()
            except (OSError, ImportError) as error:
                raise StorageError(
                    f"obstore cannot be loaded again in a forked process: {error}; start workers "
                    "with the method spawn or forkserver"
                ) from error
            _this.inherited = False
        missing = "corpora in object stores need obstore; pip install 'megaindex[objects]'"
        with library_needed(missing):
            import obstore
            import obstore.store
    return obstore


def client_of(store: str, *, as_set_now: bool = False) -> Any:
    """Return the client of ``s3://bucket``, with settings and credentials found by obstore:
    environment variables, web identity, container or instance credentials.

    Args:
        as_set_now: create a new client if the variables changed; comparing takes 50 us.

    Raises:
        InvalidArgument: an endpoint is not a URL.
    """
    obstore = library()
    with _this.lock:
        settings, client = _this.clients.get(store, ({}, None))
        if client is None or (as_set_now and settings != _settings(store)):
            settings = _settings(store)
            _check_endpoints(settings)
            # no client options: with any, obstore ignores those in the environment
            client = obstore.store.from_url(f"{store}/", retry_config=_RETRIES)
            _this.clients[store] = settings, client
            logger.debug("created a client for %s", store)
    return client


class _ProcessState:
    """State of a process."""

    def __init__(self, *, inherited: bool) -> None:
        self.lock = threading.RLock()
        self.inherited = inherited
        """True if the loaded obstore is that of the parent process."""
        self.clients: dict[str, tuple[_Settings, Any]] = {}


_this = _ProcessState(inherited=False)


def _settings(store: str) -> _Settings:
    family = _FAMILIES[store.partition(":")[0]]
    return {name: value for name, value in os.environ.items() if name.startswith(family)}


def _check_endpoints(settings: _Settings) -> None:
    """Raise InvalidArgument for an endpoint without a scheme, which makes obstore panic."""
    for name in _ENDPOINTS:
        value = settings.get(name)
        if value is not None and not value.lower().startswith(("http://", "https://")):
            raise InvalidArgument(f"{name} must begin with https:// or http://; add the scheme")


def _load_afresh() -> None:
    """Replace the inherited obstore by one with its own runtime."""
    names = [name for name in sys.modules if name.partition(".")[0] == "obstore"]
    inherited = {name: sys.modules.pop(name) for name in names}
    _abandoned.append(inherited)
    original = inherited[_EXTENSION].__file__
    with _copied(str(original)) as path:
        loader = ExtensionFileLoader(_EXTENSION, path)
        spec = importlib.util.spec_from_file_location(_EXTENSION, path, loader=loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    module.__file__ = original  # for children of this process
    sys.modules[_EXTENSION] = module


@contextlib.contextmanager
def _copied(original: str) -> Iterator[str]:
    """Yield the path of a copy, unique because the loader compares paths of libraries.

    The copy is in memory, or a temporary file where the system has no anonymous files (macOS).
    """
    copy: Any
    if hasattr(os, "memfd_create"):
        copy = os.fdopen(os.memfd_create("obstore"), "wb")
        path = f"/proc/{os.getpid()}/fd/{copy.fileno()}"
    else:
        copy = tempfile.NamedTemporaryFile(prefix="obstore-", suffix=".so")  # noqa: SIM115
        path = copy.name
    with copy, open(original, "rb") as file:
        shutil.copyfileobj(file, copy, _COPIED)
        copy.flush()
        yield path


def _after_fork() -> None:
    global _this  # noqa: PLW0603
    _abandoned.append(_this)
    _this = _ProcessState(inherited=_this.inherited or "obstore" in sys.modules)


os.register_at_fork(after_in_child=_after_fork)


@contextlib.contextmanager
def as_storage_error(url: str, action: str) -> Iterator[None]:
    """Convert errors of obstore to StorageError with the URL and the action."""
    try:
        yield
    except MegaIndexError:
        raise
    except FileNotFoundError:
        raise missing(url) from None
    except BaseException as error:
        panic = type(error).__name__ == "PanicException"  # not a subclass of Exception
        kinds = library().exceptions
        if not panic and not isinstance(error, (kinds.BaseError, OSError, ValueError)):
            raise
        raise _typed(error, kinds, url, action) from None


def missing(url: str) -> MissingFile:
    """Return the error of an object that does not exist."""
    error = MissingFile(f"{url}: does not exist; check the bucket, the key and the endpoint")
    error.errno = errno.ENOENT
    return error


def replaced(url: str, detail: str = "the store has another version") -> StorageError:
    """Return the error of an object that was replaced."""
    return StorageError(
        f"{url}: changed since it was opened: {detail}; restore the object or start again with it"
    )


def _typed(error: BaseException, kinds: Any, url: str, action: str) -> Exception:
    if isinstance(error, kinds.PreconditionError):
        return replaced(url)
    denials = (kinds.PermissionDeniedError, kinds.UnauthenticatedError)
    if isinstance(error, denials) or _status(error)[:3] in ("401", "403"):
        denied = StorageError(f"{url}: {action}: access denied ({_status(error)}); {_ACCESS}")
        denied.errno = errno.EACCES
        return denied
    if isinstance(error, (kinds.InvalidPathError, kinds.UnknownConfigurationKeyError)):
        return InvalidArgument(f"{url}: {action}: the key is not valid in this store; check it")
    retried = _RETRIED.search(str(error))
    tries = f" after {int(retried[1]) + 1} attempts" if retried else ""
    reason, remedy = _reason(str(error))
    failed = StorageError(f"{url}: {action}: {reason}{tries}; {remedy}")
    failed.errno = errno.EIO
    return failed


def _reason(text: str) -> tuple[str, str]:
    """Return reason and remedy of an obstore message."""
    for phrase, reason, remedy in _KNOWN:
        if re.search(phrase, text):
            return reason, remedy
    status = _STATUS.search(text)
    if status:
        return f"the store responded with {status[1]}", "check region and endpoint"
    if "Config" in text:
        return "the settings of the store are not valid", "check its environment variables"
    if _CONNECTION.search(text):
        return (
            "the store cannot be reached, or the connection broke",
            "check the network, the endpoint and its variables, then try again",
        )
    return "the request failed", "check the store's environment variables, then try again"


def _status(error: BaseException) -> str:
    found = _STATUS.search(str(error))
    return found[1] if found else "no status"
