"""S3 on the loopback device for tests: a server that speaks the protocol, and a proxy before it
that can be told to misbehave."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ACCESS_KEY = "AKIAMEGAINDEXTESTKEY"
SECRET_KEY = "s3cr3t/of+the/megaindex+tests/never0shown"
_OTHERS = ("AWS_", "AZURE_", "GOOGLE_", "MEGAINDEX_OBJECT")


def settings(port: int) -> dict[str, str]:
    """Environment of a process that reads from the server at ``port``."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "NO_PROXY": "127.0.0.1",
    }


def set_environment(port: int, environment: Any, cache: Path) -> None:
    """Nothing but these settings, through a pytest.MonkeyPatch."""
    for name in list(os.environ):
        if name.startswith(_OTHERS) or "proxy" in name.lower():
            environment.delenv(name)
    for name, value in {**settings(port), "MEGAINDEX_OBJECT_CACHE": str(cache)}.items():
        environment.setenv(name, value)


@contextlib.contextmanager
def s3_server() -> Iterator[int]:
    """moto's server; yields its port."""
    import logging

    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        yield server.get_host_and_port()[1]
    finally:
        server.stop()


def request(port: int, method: str, path: str, body: bytes = b"") -> http.client.HTTPResponse:
    """One request, whose signature moto does not check. AssertionError unless it succeeds."""
    scope = f"{ACCESS_KEY}/20260101/us-east-1/s3/aws4_request"
    signed = f"AWS4-HMAC-SHA256 Credential={scope}, SignedHeaders=host, Signature=0"
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request(method, path, body, {"Authorization": signed})
        response = connection.getresponse()
        assert response.status < 300, (response.status, response.read())
        response.read()
        return response
    finally:
        connection.close()


def upload(port: int, bucket: str, key: str, prefix: Path) -> str:
    """Put both files of a pair into a bucket; returns the URL of its prefix."""
    for suffix in (".bin", ".idx"):
        content = Path(f"{prefix}{suffix}").read_bytes()
        request(port, "PUT", f"/{bucket}/{key}{suffix}", content)
    return f"s3://{bucket}/{key}"


class _SlowToPickle:
    """Keeps who sends it to another process busy in PyTorch, for a second."""

    def __reduce__(self) -> tuple[Any, ...]:
        import torch

        until = time.monotonic() + 1
        while time.monotonic() < until:
            torch.ones(1 << 20).sort()  # without Python's lock
        return _SlowToPickle, ()


def slow_to_send(samples: Any) -> tuple[_SlowToPickle, Any]:
    """A ``collate_fn``."""
    return _SlowToPickle(), list(samples)


@dataclass
class Seen:
    method: str
    path: str
    range: str | None
    begun: float
    if_match: str | None = None
    ended: float = 0.0


@dataclass
class Proxy:
    """Passes requests on, one misbehaviour for each GET as long as there are ``faults``.

    A fault is a status ("503"), "reset", "short" (the body ends early), "slow 0.5" (seconds),
    "stall 0.5" (in the middle of the body), or "range …", the Content-Range of the answer.
    """

    upstream: int
    faults: list[str] = field(default_factory=list)
    latency: float = 0.0
    """Seconds before each request is passed on."""
    seen: list[Seen] = field(default_factory=list)
    drops_conditions: bool = False
    """Leave If-Match out, as a store that does not know it."""
    drops_ranges: bool = False
    """Leave Range out, as some caches do."""
    etag: str | None = None
    """In the place of the ETag that the store gave; empty: none."""
    port: int = 0

    def gets(self, suffix: str = "") -> list[Seen]:
        return [s for s in self.seen if s.method == "GET" and s.path.endswith(suffix)]

    def in_flight(self) -> int:
        """Most requests that were under way at a time."""
        times = [(s.begun, 1) for s in self.seen] + [(s.ended, -1) for s in self.seen]
        most = now = 0
        for _, change in sorted(times):
            now += change
            most = max(most, now)
        return most

    def reset(self) -> None:
        self.faults.clear()
        self.seen.clear()
        self.latency = 0.0
        self.drops_conditions = self.drops_ranges = False
        self.etag = None


@contextlib.contextmanager
def proxy_before(upstream: int) -> Iterator[Proxy]:
    proxy = Proxy(upstream)
    server = _Server(("127.0.0.1", 0), _Handler)
    server.proxy = proxy
    proxy.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 256
    proxy: Proxy

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that gave up is no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _pass_on(self) -> None:
        proxy = self.server.proxy
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        asked = self.headers.get("range"), time.monotonic(), self.headers.get("if-match")
        seen = Seen(self.command, self.path, *asked)
        proxy.seen.append(seen)
        try:
            fault = proxy.faults.pop(0) if self.command == "GET" and proxy.faults else ""
            time.sleep(float(fault.split()[1]) if fault.startswith("slow") else proxy.latency)
            self._answer(proxy, body, fault)
        finally:
            seen.ended = time.monotonic()

    def _answer(self, proxy: Proxy, body: bytes, fault: str) -> None:
        if fault == "reset":
            self._reset()
        elif fault.isdigit():
            secret = f"<Error><AWSAccessKeyId>{ACCESS_KEY}</AWSAccessKeyId></Error>".encode()
            self.send_response(int(fault))
            self.send_header("content-length", str(len(secret)))
            self.end_headers()
            self.wfile.write(secret)
        else:
            status, headers, data = self._ask(proxy, body)
            if fault.startswith("range"):
                headers = [(k, v) for k, v in headers if k.lower() != "content-range"]
                headers += [("content-range", text)] if (text := fault[6:]) else []
            self.send_response(status)
            for name, value in headers:
                self.send_header(name, value)
            self.end_headers()
            if self.command == "HEAD":
                return
            breaks_off = fault == "short" or fault.startswith("stall")
            self.wfile.write(data[: len(data) // 2] if breaks_off else data)
            if fault.startswith("stall"):
                self.wfile.flush()
                time.sleep(float(fault.split()[1]))
            self.close_connection = self.close_connection or breaks_off

    def _ask(self, proxy: Proxy, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        headers = dict(self.headers)
        dropped = {"if-match": proxy.drops_conditions, "range": proxy.drops_ranges}
        headers = {k: v for k, v in headers.items() if not dropped.get(k.lower())}
        connection = http.client.HTTPConnection("127.0.0.1", proxy.upstream, timeout=20)
        try:
            connection.request(self.command, self.path, body, headers)
            response = connection.getresponse()
            data = response.read()
            hop = ("connection", "transfer-encoding", "date", "server", "content-length")
            kept = [(k, v) for k, v in response.getheaders() if k.lower() not in hop]
            if proxy.etag is not None:
                kept = [(k, v) for k, v in kept if k.lower() != "etag"]
                kept += [("ETag", proxy.etag)] if proxy.etag else []
            length = response.getheader("content-length") or str(len(data))
            return response.status, [*kept, ("content-length", length)], data
        finally:
            connection.close()

    def _reset(self) -> None:
        linger = struct.pack("ii", 1, 0)  # closing then sends RST
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.connection.close()
        self.close_connection = True

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass_on
