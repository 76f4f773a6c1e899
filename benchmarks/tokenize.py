"""Benchmark of tokenizing, time and memory, against the loop of Megatron's preprocess_data.py.

That loop is a multiprocessing pool that encodes a line at a time, with megatron-core's builder.
Both sides have the same tokenizer, number of processes and input.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import sysconfig
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.timing import Comparison, alternate
from megaindex.cli.demo import text_files

WORKERS = len(os.sched_getaffinity(0))
TEXT_BYTES = {"text": 16 << 20, "gigatoken": 64 << 20}
VOCABULARY = 32_000
PART_SIZES = {"gigatoken": "16M"}
SHORT_DOCUMENTS = (500_000, 2_000_000)

_encode: Any = None  # of a process of the pool


def compare(what: str, directory: Path, rounds: int) -> Comparison:
    """Check that both files are equal, then time both sides.

    Args:
        what: "text", source files tokenized with a BPE, where the library dominates; "gigatoken",
            more of them with that encoder on our side; or a number of short documents as bytes,
            where the work around the library dominates.
    """
    text, tokenizer = _input(what, directory)
    name = "byte level" if tokenizer == "bytes" else f"BPE of {VOCABULARY:,}"
    name += ", encoded by gigatoken here" if what == "gigatoken" else ""
    ours, theirs = str(directory / "tokenized"), str(directory / "tokenized-by-megatron")

    def run_ours() -> None:
        _run_ours(ours, text, tokenizer, PART_SIZES.get(what, "2M"), _encoder(what))

    def run_peer() -> None:
        _run_peer(theirs, text, tokenizer)

    run_ours()
    run_peer()
    _check_equal(ours, theirs)
    seconds = alternate(run_ours, run_peer, min(rounds, 3))
    lines = text.read_bytes().count(b"\n")
    return Comparison(
        what=f"tokenizing {os.path.getsize(text) / 1e6:,.0f} MB of JSONL, {lines:,} documents, "
        f"{name}, {WORKERS} processes",
        ours=seconds[0],
        peer=seconds[1],
        items=lines,
        unit="document",
        output_bytes=sum(os.path.getsize(ours + suffix) for suffix in (".bin", ".idx")),
    )


def figures(directory: Path) -> list[str]:
    """Print peak memory and processor time of each side with all its processes."""
    lines = []
    for what in (*TEXT_BYTES, *map(str, SHORT_DOCUMENTS)):
        reason = missing(what)
        if reason is not None:
            lines.append(reason)
            continue
        said = []
        for side, where in (("ours", "here"), ("peer", "there")):
            command = [sys.executable, "-m", "benchmarks.tokenize", side, what, str(directory)]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            peak, seconds = map(float, output.split()[-2:])
            said.append(f"{peak / 1e6:,.0f} MB at most and {seconds:.1f} s of processors {where}")
        lines.append(
            f"tokenizing {what}{' short documents' * (what not in TEXT_BYTES)}: {', '.join(said)}"
        )
    return lines


def missing(what: str) -> str | None:
    """Return a reason not to compare."""
    if what == "gigatoken" and find_spec("gigatoken") is None:
        return "tokenize with gigatoken is left out: pip install 'megaindex[gigatoken]'"
    return None


def _encoder(what: str) -> list[str]:
    return ["--encoder", "gigatoken"] if what == "gigatoken" else []


def _run_ours(output: str, text: Path, tokenizer: str, part_size: str, encoder: list[str]) -> None:
    """Run the command, including its start; the peer's pool forks this process."""
    command = [
        sys.executable, "-m", "megaindex", "tokenize", output, str(text), "--tokenizer", tokenizer,
        "--eod", "0", "--part-size", part_size, "--workers", str(WORKERS), "--overwrite",
        *encoder,
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)


def _run_peer(output: str, text: Path, tokenizer: str) -> None:
    """Run the loop of tools/preprocess_data.py, then sync as megaindex does."""
    from benchmarks import peer

    builder = peer.IndexedDatasetBuilder(output + ".bin", np.uint16)
    with (
        open(text, encoding="utf-8") as lines,
        multiprocessing.get_context("fork").Pool(WORKERS, _load, (tokenizer,)) as pool,
    ):
        for ids in pool.imap(_encode_line, lines, 32):
            builder.add_document(np.array(ids), [len(ids)] if ids else [])
    builder.finalize(output + ".idx")
    for suffix in (".bin", ".idx"):
        with open(output + suffix, "rb") as file:
            os.fsync(file.fileno())


def _load(tokenizer: str) -> None:
    global _encode  # noqa: PLW0603
    if tokenizer == "bytes":
        _encode = lambda text: list(text.encode())  # noqa: E731
        return
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import Tokenizer

    loaded = Tokenizer.from_file(tokenizer)
    _encode = lambda text: loaded.encode(text).ids  # noqa: E731


def _encode_line(line: str) -> list[int]:
    ids: list[int] = _encode(json.loads(line)["text"])
    if ids:
        ids.append(0)
    return ids


def _check_equal(ours: str, theirs: str) -> None:
    for suffix in (".bin", ".idx"):
        if subprocess.run(["cmp", ours + suffix, theirs + suffix], check=False).returncode:
            raise SystemExit(f"tokenize: {suffix} differs from megatron-core's")


def _input(what: str, directory: Path) -> tuple[Path, str]:
    """Write the text and its tokenizer."""
    if what in TEXT_BYTES:
        return _text(directory, what), str(_tokenizer(directory))
    return _short(directory, int(what)), "bytes"


def _text(directory: Path, what: str) -> Path:
    """Return source files of Python and its packages, in documents of some thousand bytes."""
    path = directory / f"{what}.jsonl"
    if path.exists():
        return path
    roots = [sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")]
    written = 0
    with open(path, "w", encoding="utf-8") as out:
        for source in text_files(roots[: 1 if what == "text" else 2], (".py", ".txt")):
            text = source.read_text(encoding="utf-8", errors="replace")
            for begin in range(0, len(text), 4000):
                written += out.write(json.dumps({"text": text[begin : begin + 4000]}) + "\n")
            if written >= TEXT_BYTES[what]:
                break
    return path


def _short(directory: Path, count: int) -> Path:
    path = directory / f"short-{count}.jsonl"
    if not path.exists():
        with open(path, "w") as out:
            out.writelines(f'{{"text": "document number {i}"}}\n' for i in range(count))
    return path


def _tokenizer(directory: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    path = directory / "tokenizer.json"
    if not path.exists():
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=["<eos>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        with open(_text(directory, "text"), encoding="utf-8") as lines:
            made.train_from_iterator((json.loads(line)["text"] for line in lines), trainer)
        made.save(str(path))
    return path


class _PeakOfAll:
    """Peak of the anonymous memory of this process and its descendants, in bytes above its start.

    Pages shared by processes count once."""

    def __enter__(self) -> _PeakOfAll:
        self.bytes = 0
        self._start = _anonymous(os.getpid())
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.05):
            self.bytes = max(self.bytes, _anonymous(os.getpid()) - self._start)


def _anonymous(pid: int) -> int:
    """Return the anonymous memory of a process, 0 if it has ended."""
    try:
        status = Path(f"/proc/{pid}/smaps_rollup").read_text()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0
    own = next(
        (int(s.split()[1]) << 10 for s in status.splitlines() if s.startswith("Pss_Anon")), 0
    )
    return own + sum(_anonymous(int(child)) for child in children)


def _measure(side: str, what: str, directory: Path) -> None:
    """Print bytes and seconds."""
    text, tokenizer = _input(what, directory)
    output = str(directory / f"measured-{side}-{what}")
    if side == "peer":
        from benchmarks import peer

        assert peer.IndexedDatasetBuilder  # imported before the measurement
    start = sum(os.times()[:4])
    with _PeakOfAll() as peak:
        if side == "ours":
            _run_ours(output, text, tokenizer, PART_SIZES.get(what, "4M"), _encoder(what))
        else:
            _run_peer(output, text, tokenizer)
    print(peak.bytes, sum(os.times()[:4]) - start)


if __name__ == "__main__":
    _measure(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
