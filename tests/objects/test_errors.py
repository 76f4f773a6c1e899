"""Stores that cannot be reached, deny, break off or hang: typed errors with the URL, no secrets."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
from support.inputs import for_each
from support.object_server import ACCESS_KEY, SECRET_KEY, Proxy, proxy_before, request

from megaindex.cache.fingerprint import corpus_fingerprint
from megaindex.errors import InvalidArgument, MissingFile, StorageError
from megaindex.format import IndexedDataset
from megaindex.io.paths import ObjectLocation, is_remote, place_of
from megaindex.objects import store as library
from megaindex.objects.store import as_storage_error


@pytest.fixture(autouse=True)
def no_secrets(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """In no log of this process but those of the server, which runs in it too."""
    caplog.set_level(logging.DEBUG)
    yield
    servers = ("moto", "botocore", "werkzeug")
    for record in caplog.get_records("call"):
        if not record.name.startswith(servers):
            assert SECRET_KEY not in record.getMessage()
            assert ACCESS_KEY not in record.getMessage()


def check_error(error: BaseException, *parts: str) -> None:
    """It has these parts, and neither it nor its traceback has a secret."""
    shown = "".join(traceback.format_exception(error)) + repr(error)
    assert SECRET_KEY not in shown
    assert ACCESS_KEY not in shown
    for part in parts:
        assert part in str(error)


@pytest.mark.parametrize("fault", ["503", "500", "429", "reset", "short"])
def test_what_may_pass_is_tried_again(store: Any, proxy: Proxy, fault: str) -> None:
    local, url = store(lengths=[5000] * 20)
    remote = IndexedDataset(url)
    proxy.seen.clear()
    proxy.faults += [fault, fault]
    assert remote[3].tolist() == local[3].tolist()
    assert len(proxy.gets(".bin")) == 3
    if fault == "short":  # gone on with where it ended
        lengths = [_length(seen.range) for seen in proxy.gets(".bin")]
        assert lengths == [20_000, 10_000, 5_000]


def test_a_request_that_hangs_is_made_again(
    store: Any, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_TIMEOUT", "300ms")
    local, url = store()
    remote = IndexedDataset(url)
    proxy.faults += ["slow 6"]
    begun = time.monotonic()
    assert remote[3].tolist() == local[3].tolist()
    assert 0.3 < time.monotonic() - begun < 5


def test_a_body_that_stalls_is_gone_on_with_where_it_stopped(
    store: Any, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the time that a request may take: by default obstore's 30 seconds."""
    monkeypatch.setenv("AWS_TIMEOUT", "300ms")
    local, url = store(lengths=[5000] * 20)
    remote = IndexedDataset(url)
    proxy.faults += ["stall 6"]
    begun = time.monotonic()
    assert remote[3].tolist() == local[3].tolist()
    assert 0.3 < time.monotonic() - begun < 5
    assert len(proxy.gets(".bin")) == 2


@pytest.mark.parametrize(
    "content_range",
    ["", "hello", "bytes 8-127/48000", "bytes 60000-79999/99", "bytes 60000-79999/*"],
)
def test_a_wrong_content_range_is_blamed_on_the_store(
    store: Any, proxy: Proxy, content_range: str
) -> None:
    _, url = store(lengths=[5000] * 20)
    remote = IndexedDataset(url)
    proxy.seen.clear()
    proxy.faults += [f"range {content_range}"]
    with pytest.raises(StorageError) as caught:
        _ = remote[3]
    check_error(caught.value, f"{url}.bin: cannot read 20000 bytes at 60000", "Content-Range",
                "a fault of the store or a proxy")  # fmt: skip
    assert "environment" not in str(caught.value)
    assert len(proxy.gets(".bin")) == 1


@pytest.mark.parametrize("waits_for", ["body", "look", "copy"])
def test_an_interrupt_does_not_wait_for_a_request(
    store: Any, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, waits_for: str
) -> None:
    _, url = store(lengths=[5000] * 20)
    with proxy_before(proxy.upstream) as hanging:  # others need not meet what is left under way
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{hanging.port}")
        remote = IndexedDataset(url) if waits_for == "body" else None
        hanging.seen.clear()
        asked = "HEAD" if waits_for == "look" else "GET"
        if waits_for == "look":
            hanging.latency = 20
        else:
            hanging.faults += ["stall 20"]

        def interrupt() -> None:
            while not any(seen.method == asked for seen in hanging.seen):
                time.sleep(0.01)
            time.sleep(0.05)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

        begun = time.monotonic()
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            _ = remote[3] if remote is not None else IndexedDataset(url)
        assert time.monotonic() - begun < 10


@pytest.mark.parametrize("fault", ["503", "reset"])
def test_and_given_up_in_the_end(store: Any, proxy: Proxy, fault: str) -> None:
    _, url = store()
    remote = IndexedDataset(url)
    proxy.seen.clear()
    proxy.faults += [fault] * 50
    with pytest.raises(StorageError) as caught:
        _ = remote[3]
    check_error(caught.value, f"{url}.bin: cannot read ", "after 5 attempts")
    assert len(proxy.gets(".bin")) == 5


@pytest.mark.parametrize("wrong", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_a_server_that_checks_signatures_denies_others(
    s3: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    monkeypatch.setenv(wrong, "another-secret")
    request(proxy.upstream, "POST", "/moto-api/reset-auth", b"0")
    try:
        with pytest.raises(StorageError) as caught:
            IndexedDataset(f"s3://{s3}/corpus")
    finally:
        request(proxy.upstream, "POST", "/moto-api/reset-auth", b"inf")
    check_error(caught.value, f"s3://{s3}/corpus.bin: cannot read metadata: access denied (403 ")
    assert "another-secret" not in str(caught.value)
    assert sorted(seen.path[-4:] for seen in proxy.seen) == [".bin", ".idx"]


@pytest.mark.parametrize(
    ("fault", "text"),
    [("403", "access denied (403 Forbidden)"), ("401", "access denied (401 Unauthorized)"),
     ("412", "changed since it was opened"), ("404", "does not exist"),
     ("301", "set AWS_REGION to the bucket's region"),
     ("416", "416 Range Not Satisfiable")],
)  # fmt: skip
def test_what_will_not_pass_is_said_at_once(
    store: Any, proxy: Proxy, fault: str, text: str
) -> None:
    _, url = store()
    remote = IndexedDataset(url)
    proxy.seen.clear()
    proxy.faults += [fault]
    with pytest.raises(StorageError) as caught:
        _ = remote[3]
    check_error(caught.value, f"{url}.bin: ", text)
    assert isinstance(caught.value, MissingFile) == (fault == "404")
    assert len(proxy.gets(".bin")) == 1


def test_an_index_that_breaks_off_leaves_no_copy(store: Any, proxy: Proxy, tmp_path: Any) -> None:
    _, url = store()
    proxy.faults += ["503"] * 50
    with pytest.raises(StorageError) as caught:
        IndexedDataset(url)
    check_error(caught.value, f"{url}.idx: cannot read ")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]
    proxy.faults.clear()
    IndexedDataset(url)


def test_a_cache_that_cannot_be_made_is_named(
    store: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    _, url = store()
    (tmp_path / "file").touch()
    monkeypatch.setenv("MEGAINDEX_OBJECT_CACHE", str(tmp_path / "file"))
    with pytest.raises(StorageError, match="file: cannot write the cache of MEGAINDEX_OBJ"):
        IndexedDataset(url)


def test_an_unreachable_store_is_an_error_in_seconds(
    s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:  # bound and not listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        begun = time.monotonic()
        with pytest.raises(StorageError) as caught:
            IndexedDataset(f"s3://{s3}/corpus")
    assert time.monotonic() - begun < 8
    check_error(
        caught.value, f"s3://{s3}/corpus.bin: cannot read metadata: the store cannot be reached"
    )


@pytest.mark.parametrize("endpoint", ["nonsense", f"{ACCESS_KEY}:9000", ""])
def test_an_endpoint_without_a_scheme_is_refused(
    s3: str, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(InvalidArgument) as caught:
        IndexedDataset(f"s3://{s3}/corpus")
    check_error(caught.value, "AWS_ENDPOINT_URL must begin with https:// or http://")


def test_a_panic_of_the_library_is_an_error_of_the_store() -> None:
    class PanicException(BaseException):
        pass

    with pytest.raises(StorageError) as caught, as_storage_error("s3://b/c", "cannot read"):
        raise PanicException(SECRET_KEY)
    check_error(caught.value, "s3://b/c: cannot read: the request failed; check")
    with pytest.raises(KeyboardInterrupt), as_storage_error("s3://b/c", "cannot read"):
        raise KeyboardInterrupt


def test_corrected_settings_count_when_a_corpus_is_opened(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    local, url = store()
    monkeypatch.setenv("AWS_ALLOW_HTTP", "false")
    with pytest.raises(StorageError) as caught:
        IndexedDataset(url)
    check_error(
        caught.value, f"{url}.bin: cannot read metadata: plain http", "set AWS_ALLOW_HTTP=true"
    )
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    assert IndexedDataset(url)[3].tolist() == local[3].tolist()
    assert len(library._this.clients) == 1


def test_a_server_that_ignores_ranges_is_named(store: Any, proxy: Proxy) -> None:
    _, url = store()
    remote = IndexedDataset(url)
    proxy.drops_ranges = True
    with pytest.raises(StorageError) as caught:
        _ = remote[3]
    check_error(caught.value, f"{url}.bin: cannot read ", "ignores Range")


def test_a_missing_file_of_credentials_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", f"/nowhere/{SECRET_KEY}.json")
    with pytest.raises(StorageError) as caught:
        IndexedDataset("gs://bucket/corpus")
    check_error(caught.value, "a credentials file is missing", "path of the credentials file")


def test_wrong_settings_are_an_error(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_TIMEOUT", f"{SECRET_KEY}")
    with pytest.raises(StorageError) as caught:
        IndexedDataset(f"s3://{s3}/corpus")
    check_error(caught.value, "cannot read metadata: the settings of the store are not valid")


def test_credentials_are_in_nothing_that_is_kept(
    store: Any, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    import pickle

    _, url = store()
    remote = IndexedDataset(url)
    assert {r.filename for r in caplog.records} >= {"store.py", "files.py"}
    kept = [repr(remote), repr(remote.identity), corpus_fingerprint(remote)]
    kept += [p.read_text() for p in (tmp_path / "cache").glob("*.json")]
    kept += [pickle.dumps(remote).decode("latin-1")]
    for text in kept:
        assert SECRET_KEY not in text
        assert ACCESS_KEY not in text


@for_each(
    ("url", "message"),
    [
        (f"s3://AKIA:{SECRET_KEY}@bucket/corpus", "credentials"),
        (f"s3://{SECRET_KEY.replace('/', '')}@bucket/corpus", "credentials"),
        (f"s3:/AKIA:{SECRET_KEY}@bucket/corpus", "two slashes"),
        (f"s3://AKIA:{SECRET_KEY}", "credentials"),
        (f"s3://bucket/corpus?X-Amz-Signature={SECRET_KEY}", "a query"),
        (f"az://container/corpus?sig={SECRET_KEY}", "a query"),
        ("s3:/bucket/corpus", "two slashes"),
        ("http://somewhere/corpus", "must be one of s3://, gs://, az://, got http://"),
        ("s3a://bucket/corpus", "write the same location as s3://bucket/key"),
        ("gcs://bucket/corpus", "write the same location as gs://bucket/key"),
        ("abfs://container/corpus", "write the same location as az://container/key"),
        ("s3://bucket", "must name a bucket and a key"),
        ("s3:///corpus", "must name a bucket and a key"),
        ("file://host/corpus", "must not name a host"),
        (f"file://AKIA:{SECRET_KEY}@host/corpus", "must not name a host"),
        ("s3://bucket//corpus", "an empty part"),
        ("s3://bucket/a//corpus", "copy the object to another key"),
        ("s3://bucket/a/../corpus", "an empty part"),
        ("s3://bucket/./corpus", "an empty part"),
        ("s3://bucket/a\nb", "a control character"),
    ],
)
def test_urls_that_are_refused(url: str, message: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        IndexedDataset(url)
    check_error(caught.value, message)
    for part in (SECRET_KEY.replace("/", ""), *SECRET_KEY.split("/")):
        assert part not in str(caught.value)


def test_urls_and_their_places() -> None:
    assert place_of("s3://bucket/a/b c%20#d") == ObjectLocation("s3://bucket", "a/b c%20#d")
    assert place_of("GS://bucket/a") == ObjectLocation("gs://bucket", "a")
    assert place_of("s3://bucket/.../..a/.b") == ObjectLocation("s3://bucket", ".../..a/.b")
    assert place_of("s3://bucket/a\u3000b/ü").key == "a\u3000b/ü"
    for path in ("/data/s3/corpus", "data", "s3/corpus", "c:/data", "./s3://x", "", "file:///s3"):
        assert not is_remote(path)


@pytest.mark.parametrize(
    ("url", "environment"),
    [
        ("gs://bucket/corpus", {"GOOGLE_SKIP_SIGNATURE": "true"}),
        ("az://container/corpus", {"AZURE_STORAGE_ACCOUNT_NAME": "account"}),
    ],
)
def test_other_stores_have_clients_too(
    monkeypatch: pytest.MonkeyPatch, url: str, environment: dict[str, str]
) -> None:
    """Made, not used: there is no such server here."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    library._this.clients.clear()
    client = library.client_of(place_of(url).store)
    assert type(client).__name__ == {"gs": "GCSStore", "az": "AzureStore"}[url[:2]]
    library._this.clients.clear()


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(InvalidArgument, match=r"pip install 'megaindex\[objects\]'"):
        IndexedDataset("s3://bucket/corpus")


def _length(header: str | None) -> int:
    assert header is not None
    begin, stop = header.removeprefix("bytes=").split("-")
    return int(stop) - int(begin) + 1


def test_this_process_has_no_proxy_of_the_machine(s3: str) -> None:
    assert s3
    assert {name.lower() for name in os.environ if "proxy" in name.lower()} == {"no_proxy"}
