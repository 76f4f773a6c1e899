"""Objects of a store through obstore: clients, metadata, listing, ranged reads, errors.

Requests are made by the threads of a runtime that obstore starts for the whole process. A forked
child inherits the runtime without its threads: a request there would wait for ever. A child thus
gets an obstore of its own: the extension module is loaded once more from a copy, which the dynamic
loader takes for another library, with a runtime yet to be started. That costs 15 MB and 15 ms.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import logging
import os
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from importlib.machinery import ExtensionFileLoader
from typing import Any

import numpy as np
import numpy.typing as npt

from megaindex.errors import InvalidArgument, MegaIndexError, MissingFile, StorageError
from megaindex.io.paths import FileInfo, folder_of, place_of
from megaindex.io.threads import map_interruptibly

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

logger = logging.getLogger(__name__)

_EXTENSION = "obstore._obstore"
# Beyond these, obstore's own: 5xx, 429, timeouts and dropped connections are tried again, and a
# body that ends early is gone on with where it stopped; 403, 404 and 412 are not.
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
_abandoned: list[Any] = []  # of parents: their end would be waited for by a runtime without threads

PIECE = 4 << 20
"""Most bytes of a request: long enough for its latency not to count, short of its time limit."""

MERGE_GAP = 256 << 10
"""Bytes that are read in less time than another request takes."""

_THREADS = 8  # of a read of many pieces
_Bytes = npt.NDArray[np.uint8]


def stat_object(url: str) -> FileInfo | None:
    """Return the size and version of an object; None where it does not exist.

    Raises:
        StorageError: the store cannot be asked, denies it, or gives no strong ETag.
    """
    place = place_of(url)

    def ask(client: Any) -> Any:
        return library().head(client, place.key)

    try:
        with as_storage_error(url, "cannot look at"):
            (meta,) = map_interruptibly(ask, [client_of(place.store, as_set_now=True)], 1)
    except FileNotFoundError:
        return None
    return FileInfo(path=url, nbytes=meta["size"], version=_version(url, meta))


def list_folder(url: str) -> list[str]:
    """Return the URLs of the objects right below ``s3://bucket/folder``, or in a bucket, sorted.

    Raises:
        InvalidArgument: the URL is of an unknown kind.
        StorageError: the store cannot be asked, or denies it.
    """
    place = folder_of(url)

    def ask(client: Any) -> Any:
        return library().list_with_delimiter(client, place.key or None)

    with as_storage_error(url, "cannot list"):
        (found,) = map_interruptibly(ask, [client_of(place.store, as_set_now=True)], 1)
    return sorted(f"{place.store}/{meta['path']}" for meta in found["objects"])


def read(info: FileInfo, offset: int, into: memoryview) -> None:
    """Fill ``into`` with the bytes at ``offset`` of this very object, by one request.

    Raises:
        MissingFile: it is gone.
        StorageError: another object has its name, or the read failed in the end.
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
            raise replaced(url)  # by a store that does not know preconditions
        data = result.bytes()
    if len(data) != len(into) or got != (offset, stop):
        raise StorageError(
            f"{url}: {len(data)} bytes came where {len(into)} at {offset} were asked for; the "
            "store, or a proxy before it, is at fault: try again"
        )
    into[:] = memoryview(data)


def read_each(info: FileInfo, ranges: Sequence[tuple[int, memoryview]]) -> Iterator[None]:
    """`read` each ``(offset, into)``; yields after each."""
    for offset, into in ranges:
        read(info, offset, into)
        yield


def fill(info: FileInfo, offset: int, into: memoryview) -> None:
    """`read` in pieces, several at a time.

    An interrupt ends it at once; requests that are under way may still write to ``into``.
    """
    pieces = [(offset + begin, into[begin : begin + PIECE]) for begin in range(0, len(into), PIECE)]
    map_interruptibly(lambda each: read(info, *each), pieces, _THREADS)


def read_all(info: FileInfo, ranges: Sequence[tuple[int, int]]) -> list[_Bytes]:
    """The bytes of each (offset, nbytes), read-only, in the order asked; neighbours share memory.

    Raises:
        StorageError: as `megaindex.objects.store.read`.
    """
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
    """The tag that changes with any byte of an object. Times do not: they are whole seconds."""
    tag = meta["e_tag"]
    if not tag or not tag.startswith('"'):
        raise StorageError(
            f"{url}: the store gives no strong ETag, so that a replaced object would go unnoticed; "
            "copy the object to a disk, or to a store that does"
        )
    return str(tag)


def _together(ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, list[int]]]:
    """(begin, stop, numbers of the ranges in it) of each stretch to read."""
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
        StorageError: this is a forked process that cannot have its own.
    """
    with _this.lock:
        if _this.inherited:
            try:
                _load_afresh()
            except (OSError, ImportError) as error:
                raise StorageError(
                    f"obstore cannot be loaded anew in a forked process: {error}; start workers "
                    "with the method spawn or forkserver"
                ) from error
            _this.inherited = False
        try:
            import obstore
            import obstore.store
        except ImportError:
            raise InvalidArgument(
                "corpora in object stores need obstore; pip install 'megaindex[objects]'"
            ) from None
    return obstore


def client_of(store: str, *, as_set_now: bool = False) -> Any:
    """The client of ``s3://bucket``; obstore finds settings and credentials where it looks for
    them: environment variables, web identity, container or instance credentials.

    Args:
        as_set_now: make another if the variables changed. Comparing them takes 50 us, too long
            for each request.

    Raises:
        InvalidArgument: an endpoint is not a URL.
        obstore's errors, where the settings contradict.
    """
    obstore = library()
    with _this.lock:
        settings, client = _this.clients.get(store, ({}, None))
        if client is None or (as_set_now and settings != _settings(store)):
            settings = _settings(store)
            _check_endpoints(settings)
            # given options of the HTTP client, obstore would not look for them in the environment
            client = obstore.store.from_url(f"{store}/", retry_config=_RETRIES)
            _this.clients[store] = settings, client
            logger.debug("made a client for %s", store)
    return client


class _Process:
    """State of one process."""

    def __init__(self, *, inherited: bool) -> None:
        self.lock = threading.RLock()
        self.inherited = inherited
        """Whether the obstore that is loaded is the parent's."""
        self.clients: dict[str, tuple[_Settings, Any]] = {}


_this = _Process(inherited=False)


def _settings(store: str) -> _Settings:
    family = _FAMILIES[store.partition(":")[0]]
    return {name: value for name, value in os.environ.items() if name.startswith(family)}


def _check_endpoints(settings: _Settings) -> None:
    """Refuse an endpoint without a scheme, at which the library panics."""
    for name in _ENDPOINTS:
        value = settings.get(name)
        if value is not None and not value.lower().startswith(("http://", "https://")):
            raise InvalidArgument(f"{name}: must begin with https:// or http://; write it in full")


def _load_afresh() -> None:
    """Put an obstore with a runtime of its own in the place of the inherited one."""
    inherited = {name: sys.modules.pop(name) for name in _names()}
    _abandoned.append(inherited)
    original = inherited[_EXTENSION].__file__
    with _copied(str(original)) as path:
        loader = ExtensionFileLoader(_EXTENSION, path)
        spec = importlib.util.spec_from_file_location(_EXTENSION, path, loader=loader)
        assert spec is not None, "a loader was given"
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    module.__file__ = original  # of a child of this process, too
    sys.modules[_EXTENSION] = module


def _names() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "obstore"]


@contextlib.contextmanager
def _copied(original: str) -> Iterator[str]:
    """A path of a copy in memory. The loader knows libraries by their paths too, so it is one that
    no other process had."""
    copy = os.memfd_create("obstore")
    try:
        with open(original, "rb") as file:
            left = os.fstat(file.fileno()).st_size
            while left > 0:
                left -= os.sendfile(copy, file.fileno(), None, left)
        yield f"/proc/{os.getpid()}/fd/{copy}"
    finally:
        os.close(copy)


def _after_fork() -> None:
    global _this  # noqa: PLW0603
    _abandoned.append(_this)
    _this = _Process(inherited=_this.inherited or "obstore" in sys.modules)


os.register_at_fork(after_in_child=_after_fork)


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
    """Return the error of an object that does not exist."""
    error = MissingFile(f"{url}: does not exist; check the bucket, the key and the endpoint")
    error.errno = errno.ENOENT
    return error


def replaced(url: str, detail: str = "the store has another version now") -> StorageError:
    """Return the error of an object that is not the one that was looked at."""
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
    """Return the reason and the remedy."""
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
