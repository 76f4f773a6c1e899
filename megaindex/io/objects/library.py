"""obstore as this process may use it, and one client for each bucket.

Requests are made by the threads of a runtime that obstore starts for the whole process. A forked
child inherits the runtime without its threads: a request there would wait for ever. A child thus
gets an obstore of its own: the extension module is loaded once more from a copy, which the dynamic
loader takes for another library, with a runtime yet to be started. That costs 15 MB and 15 ms.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from importlib.machinery import ExtensionFileLoader
from typing import Any

from megaindex.errors import InvalidArgument, StorageError

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


class _Process:
    """What belongs to one process."""

    def __init__(self, *, inherited: bool) -> None:
        self.lock = threading.RLock()
        self.inherited = inherited
        """Whether the obstore that is loaded is the parent's."""
        self.clients: dict[str, tuple[_Settings, Any]] = {}


_this = _Process(inherited=False)
_abandoned: list[Any] = []  # of parents: their end would be waited for by a runtime without threads


def library() -> Any:
    """The module obstore.

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
        InvalidArgument: an endpoint is no URL.
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


def _settings(store: str) -> _Settings:
    family = _FAMILIES[store.partition(":")[0]]
    return {name: value for name, value in os.environ.items() if name.startswith(family)}


def _check_endpoints(settings: _Settings) -> None:
    """The library panics at an endpoint without a scheme."""
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
