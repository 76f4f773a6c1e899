"""An S3 server for the session, a proxy before it, and a corpus in a bucket of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.corpora import write_corpus
from support.object_server import Proxy, proxy_before, request, s3_server, set_environment, upload

from megaindex.objects import store as library

_buckets = (f"bucket-{number}" for number in itertools.count())


@pytest.fixture(scope="session")
def s3_port() -> Iterator[int]:
    with s3_server() as port:
        yield port


@pytest.fixture(scope="session")
def session_proxy(s3_port: int) -> Iterator[Proxy]:
    with proxy_before(s3_port) as proxy:
        yield proxy


@pytest.fixture
def proxy(session_proxy: Proxy) -> Proxy:
    session_proxy.reset()
    return session_proxy


@pytest.fixture
def s3(proxy: Proxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """A new bucket, which this process reaches through the proxy."""
    set_environment(proxy.port, monkeypatch, tmp_path / "cache")
    bucket = next(_buckets)
    request(proxy.upstream, "PUT", f"/{bucket}")
    library._this.clients.clear()  # they keep the environment in which they were made
    yield bucket
    library._this.clients.clear()


Stored = Callable[..., tuple[Any, str]]


@pytest.fixture
def store(s3: str, proxy: Proxy, tmp_path: Path) -> Stored:
    """Writes a corpus and uploads it: (the local dataset, the URL of the other)."""

    def write(name: str = "corpus", lengths: Any = None, **how: Any) -> tuple[Any, str]:
        if lengths is None:
            lengths = np.random.default_rng(5).integers(0, 60, 200)
        local = write_corpus(tmp_path / name, lengths, **how)
        url = upload(proxy.upstream, s3, f"data/{name}", tmp_path / name)
        return local, url

    return write
