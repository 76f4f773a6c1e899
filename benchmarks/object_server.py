"""Object store on the loopback device: HEAD and ranged GET of a folder's files, with a delay.

``python -m benchmarks.object_server FOLDER SECONDS`` prints its port. It is minimal, so that the
clients dominate the measurement; the tests use a complete S3 server.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def served(folder: Path, latency: float) -> Iterator[int]:
    """Run a server in a process of its own and yield its port."""
    command = [sys.executable, "-m", "benchmarks.object_server", str(folder), str(latency)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.terminate()


async def _answer(
    folder: str, latency: float, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    try:
        while request := await reader.readuntil(b"\r\n\r\n"):
            await asyncio.sleep(latency)
            lines = request.decode().split("\r\n")
            method, path, _ = lines[0].split(" ")
            headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
            writer.write(_response(folder + path.partition("?")[0], method, headers))
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


def _response(path: str, method: str, headers: dict[str, str]) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
    try:
        status = os.fstat(descriptor)
        begin, stop = 0, status.st_size
        code = "200 OK"
        where = ""
        if "range" in headers:
            first, last = headers["range"].removeprefix("bytes=").split("-")
            begin, stop = int(first), min(int(last) + 1, stop)
            code = "206 Partial Content"
            where = f"Content-Range: bytes {begin}-{stop - 1}/{status.st_size}\r\n"
        head = (
            f'HTTP/1.1 {code}\r\nContent-Length: {stop - begin}\r\nETag: "{status.st_mtime_ns}"\r\n'
            f"Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\nAccept-Ranges: bytes\r\n{where}\r\n"
        )
        body = b"" if method == "HEAD" else os.pread(descriptor, stop - begin, begin)
        return head.encode() + body
    finally:
        os.close(descriptor)


async def _serve(folder: str, latency: float) -> None:
    server = await asyncio.start_server(
        lambda reader, writer: _answer(folder, latency, reader, writer), "127.0.0.1", 0
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], float(sys.argv[2])))
