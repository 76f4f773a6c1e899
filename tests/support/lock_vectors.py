"""The vectors of docs/lock-format.md: values of its functions, and small locks with their spans.

``PYTHONPATH=.:tests python -m support.lock_vectors`` writes them to docs/lock-format/.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from support.folders import inside

from megaindex import (
    AmendedBlend,
    EpochOrder,
    IndexedDataset,
    IndexedDatasetWriter,
    PackedOrder,
)
from megaindex.builders.described import build_described
from megaindex.cache.fingerprint import canonical_json
from megaindex.index.mixing import PerStream, Random, Stratified
from megaindex.index.orders.keyed import key_of
from megaindex.index.receipts import Receipt, fingerprint_keys
from megaindex.index.spans import Spans
from megaindex.kernels import active
from megaindex.kernels.reference import bijection, packing
from megaindex.lock import Lock, make_lock
from megaindex.lock.lengths import write_lengths
from megaindex.lock.publication import public_lock, with_about
from megaindex.lock.shape import lock_schema
from megaindex.run.identity import canonical_forms
from megaindex.settings.mix_changes import MixChanges
from megaindex.settings.recipe_file import recipe_of

FOLDER = Path(__file__).parents[2] / "docs" / "lock-format"
FILES = ("web.idx", "code.idx", "tiny.idx", "mix.npy", "bad.ids", "public.lengths")
"""Files that the locks name, beside the `.bin` files, which are not kept."""

_LENGTHS = {"web": [4000], "code": [4000], "tiny": [5, 0, 9, 4, 17, 2, 8, 8, 3, 12]}
_UNIT = 2**31
_ROWS = [[4, _UNIT // 4, _UNIT // 4, _UNIT // 2], [9, 0, _UNIT // 8, _UNIT // 8 * 7]]
_SAMPLES, _DOCUMENTS = "megaindex/1234/0/samples/web", "megaindex/1234/0/documents/web"
_ONE = {"data_path": "tiny", "sequence_length": 8, "seed": 1, "global_batch_size": 1}
_MIX = {"web": 4, "code": 2}
_HELD = {"held_out": "1/5", "subset_seed": 3, "shuffle_name": "tiny"}
_TINY = {"mix": {"tiny": 1}, "batch": {"global_batch_size": 1}}


_ABOUT = """
title: Example data
version: "1.0"
sources: {tiny: {licence: CC0-1.0, address: "https://example.org", url: "https://example.org/tiny"}}
"""


def _recipe(sources: Mapping[str, Any], stages: Mapping[str, Any], **words: Any) -> dict[str, Any]:
    batch = {"global_batch_size": 4}
    return {"sequence_length": 8, "seed": 1, "batch": batch, "sources": sources,
            "stages": stages, **words}  # fmt: skip


LOCKS: Mapping[str, dict[str, Any]] = {
    "arrays": {**_ONE, "epochs": 2, "order": "megatron"},
    "epoch": {**_ONE, "epochs": 2, "order": "epoch"},
    "carry": {**_ONE, "epochs": 4, "order": EpochOrder(left_over="carry", epochs_mixed=2)},
    "window": {**_ONE, "epochs": 2, "order": "window"},
    "packed": {**_ONE, "epochs": 2, "order": "packed"},
    "aligned": {**_ONE, "epochs": 2, "order": PackedOrder(align=2)},
    "least-seen": {
        **_ONE, "train_iters": 12, "order": "megatron",
        "amend": AmendedBlend(data_path=["tiny"], num_samples=20, consumed_samples=10),
    },
    "blend": {
        "data_path": [1, "web", 2, "code"], "sequence_length": 8, "train_iters": 20,
        "global_batch_size": 4, "eval_iters": 0, "tokens": True,
    },
    "public": {
        "data_path": [1, "web", 2, "tiny"], "sequence_length": 8, "train_iters": 20,
        "global_batch_size": 4, "eval_iters": 0, "sha256": True,
    },
    "stages": _recipe(
        {"web": "web", "code": {"path": "code", "order": "window"}},
        {"a": {"steps": 6, "mix": _MIX}, "b": {"steps": 4, "mix": _MIX}},
    ),
    "lengths": _recipe(
        {"tiny": {"path": "tiny", "shuffle_name": "tiny", "block_tokens": 15}},
        {"a": {**_TINY, "steps": 4}, "b": {**_TINY, "steps": 1, "sequence_length": 8},
         "c": {**_TINY, "steps": 2}},
        sequence_length=4, batch={"global_batch_size": 1},
    ),
    "mixed": _recipe(
        {"web": "web", "code": {"path": "code", "order": "packed"}, "tiny": "tiny"},
        {"a": {"steps": 9, "mix": {"web": 2, "code": 1}, "batching": "random"},
         "b": {"steps": 6, "mix": {"web": 2, "tiny": 1}, "batching": "per_stream"},
         "c": {"samples": 30, "mix": {"web": 3, "code": 1, "tiny": 1}}},
        tail="pad", skip=[{"steps": "2 7-8"}, {"steps": "12", "move": True},
                          {"documents": "bad.ids", "source": "tiny", "from_step": 10},
                          {"source": "code", "from_step": 3, "remove": True},
                          {"documents": "bad.ids", "source": "tiny", "from_step": 12,
                           "remove": True}],
        mix_changes={"file": "mix.npy", "sources": ["web", "code", "tiny"]},
    ),
    "past": _recipe(
        {"web": "web", "tiny": "tiny"}, {"a": {"steps": 8, "mix": {"web": 1, "tiny": 1}}},
        past={"steps": 50, "read": {"web": {"tokens": 900}, "tiny": {"documents": "bad.ids"}}},
    ),
    "subset": _recipe(
        {name: {"path": "tiny", "order": order, "subset": "1/2", **_HELD}
         for name, order in (("a", "epoch"), ("b", "packed"), ("c", "window"), ("d", "blocks"))},
        {"all": {"steps": 5, "mix": {"a": 1, "b": 1, "c": 1, "d": 1}}},
        evaluation={"source": {"path": "tiny", **_HELD}},
    ),
    "bins": _recipe(
        {"tiny": {"path": "tiny", "kind": "finetuning", "packed": True, "long_documents": "split"},
         "web": "web"},
        {"a": {"steps": 3, "mix": {"tiny": 1}}, "b": {"steps": 2, "mix": {"tiny": 1, "web": 1}}},
    ),
}  # fmt: skip
"""Settings of the run of each lock: those of `make_lock`, or a recipe."""


def write_inputs(folder: Path) -> None:
    """Write the pairs and files of all locks."""
    for name, lengths in _LENGTHS.items():
        with IndexedDatasetWriter(str(folder / name), dtype="uint16") as writer:
            for length in lengths:
                writer.add_document(np.arange(length))
    np.save(folder / "mix.npy", np.array([[4 * a, *rest] for a, *rest in _ROWS]))
    (folder / "bad.ids").write_text("2 4\n7\n")


def make_locks(folder: Path) -> dict[str, Lock]:
    """Write the lock of each run in a folder with its inputs."""
    with inside(folder):
        return {name: _locked(name) for name in LOCKS}


def _locked(name: str) -> Lock:
    settings = LOCKS[name]
    if "stages" in settings:
        lock = make_lock(recipe_of(settings, "run.yaml", Path()))
    else:
        lock = make_lock(**settings)
    if name == "public":
        Path("about.yaml").write_text(_ABOUT)
        lock = with_about(lock, "about.yaml")
        write_lengths(lock, "public.lengths", overwrite=True)
        lock = public_lock(lock)
    return lock.write(f"{name}.lock", overwrite=True)


def expected(lock: Lock) -> dict[str, Any]:
    """Return what follows from a lock: canonical forms, identities, and the spans of positions.

    A span is one of `span_texts`.
    """
    files = [file.sha256 for file in lock.files]
    pairs = [source.fingerprint for source in lock.sources]
    subsets = {name: lock.subset(name) for name in lock.content["subsets"]}
    return {
        "canonical_form": canonical_json(canonical_forms(subsets, pairs, files)),
        "identity": lock.identity,
        "content_identity": lock.content_identity,
        "spans": {name: _spans_of(lock, name) for name in subsets},
    }


def _spans_of(lock: Lock, name: str) -> dict[str, list[str]]:
    subset = lock.subset(name)
    pairs = [IndexedDataset(lock.sources[row].path) for row in subset["sources"]]
    index = build_described(subset["index"], pairs, files=[file.path for file in lock.files])
    holes = subset["index"].get("left_out", [])
    return {
        str(p): [] if any(a <= p < b for a, b in holes) else span_texts(index.locate([p]))
        for p in range(subset["steps"][0][0], subset["samples"])
    }


def span_texts(spans: Spans) -> list[str]:
    """Return each span as a text ``source:document:offset:length``, with the padding before it, if
    there is any, and ``:masked`` or ``:removed``, if it is."""
    padding = [0] * len(spans) if spans.padding is None else spans.padding.tolist()
    kinds = np.zeros(len(spans), int)
    for marks in (spans.masked, spans.removed):
        kinds += 0 if marks is None else marks
    rows = zip(*(column.tolist() for column in spans), strict=True)
    return [
        ":".join(map(str, row)) + (f":{gap}" if gap else "") + ("", ":masked", ":removed")[kind]
        for row, gap, kind in zip(rows, padding, kinds, strict=True)
    ]


def vectors() -> dict[str, list[dict[str, Any]]]:
    """Return arguments and values of the functions that the page defines."""
    return {
        "canonical JSON": [_canonical()],
        "key": [_key(text) for text in (_SAMPLES, *map(_text, (100, 200, 1000)))],
        "perm": [_perm(n) for n in (1, 2, 10, 4095, 4096, 5000, 10**6, 10**12)],
        "shuffle": [_shuffle(seed, 10) for seed in (0, 1234, 2**32 - 1)],
        "rank_perm": [_rank(*pair) for pair in ((7, 1), (7, 2), (7, 10), (8, 10), (7, 5000))],
        "pack": [_pack(*rest) for rest in ((0, 1, True), (2, 1, True), (0, 2, False))],
        "draws": list(_draws()),
        "balance": [_balance(*rest) for rest in (
            ([5, 1, 9, 7], 1, 4), ([5, 1, 9, 7, 4, 4], 2, 8), ([5, 1, 9], 1, 4))],
        "receipt": list(_receipts()),
    }  # fmt: skip


def _canonical() -> dict[str, Any]:
    value = {
        "b": ['"', "\\", "/", "\b\t\n\f\r", "\0\x1f\x7f"],
        "\U0001f600": None, "\uff5e": True, "a": -1,
    }  # fmt: skip
    text = canonical_json(value)
    return {"value": value, "text": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def _text(length: int) -> str:
    """Return a text of so many bytes, since XXH3 has another formula for each of these lengths."""
    return "megaindex/".ljust(length, "a")


def _key(text: str) -> dict[str, Any]:
    words = [f"{bijection.key_word(key_of(text), i):016x}" for i in (0, 1)]
    return {"text": text, "hash": xxhash.xxh3_128_hexdigest(text.encode()), "words": words}


def _perm(n: int) -> dict[str, Any]:
    first = np.arange(min(n, 5))
    values = active().bijection_apply(key_of(_SAMPLES), n, first).tolist()
    return {"key": _SAMPLES, "n": n, "values": values}


def _shuffle(seed: int, n: int) -> dict[str, Any]:
    state, both = active().seed_state(seed), np.empty((2, n), np.int32)
    for values in both:
        active().shuffled_range(state, 0, values, 1)
    return {"seed": seed, "n": n, "first": both[0].tolist(), "second": both[1].tolist()}


def _rank(length: int, n: int) -> dict[str, Any]:
    key = key_of(_DOCUMENTS)
    values = [packing.permuted_rank(key, length, n, r) for r in range(min(n, 10))]
    return {"key": _DOCUMENTS, "length": length, "n": n, "values": values}


def _pack(most: int, least: int, stacked: bool) -> dict[str, Any]:
    lengths, capacity = [8, 5, 5, 4, 3, 3, 3, 2, 2, 2, 2, 1], 8
    counts = np.bincount(lengths, minlength=capacity + 1)
    layers, runs = (each.tolist() for each in active().pack_pieces(counts, most, least, stacked))
    bins = [_pieces(layers, layer, first + i)
            for (layer, first, number), (_, _, end) in pairwise(runs)
            for i in range(end - number)]  # fmt: skip
    return {"lengths": lengths, "capacity": capacity, "most": most, "least": least,
            "stacked": stacked, "layers": layers, "bins": bins}  # fmt: skip


def _pieces(layers: list[list[int]], layer: int, i: int) -> list[list[int]]:
    """Return (length, rank) of the pieces of bin ``i`` of a layer."""
    below, before, length, each, rank, _ = layers[layer]
    lower = _pieces(layers, below, before + i) if below >= 0 else []
    return lower + [[length, rank + i * each + r] for r in range(each)]


def _draws() -> Iterable[dict[str, Any]]:
    for shares in ([2, 1, 1], [5, 3], [7, 11, 2]):
        yield _drawn({"rule": "stratified", "shares": shares}, Stratified(shares=tuple(shares)))
    yield _drawn({"rule": "per_stream", "shares": [2, 1], "batch": 3},
                 PerStream(shares=(2, 1), batch_sizes=(3, 3)))  # fmt: skip
    random = Random(shares=(2, 1), seed=1234, name="main/0", period=12)
    yield _drawn({"rule": "random", "shares": [2, 1], "seed": 1234, "name": "main/0", "period": 12},
                 random)  # fmt: skip
    for weights in ([0.5, 0.25, 0.25], [0.1, 0.2, 0.7]):
        streams, counts = np.empty(16, np.int16), np.zeros(len(weights), np.int64)
        active().blend_greedy(np.array(weights), 0, 16, counts, streams, None)
        yield {"draws": {"rule": "greedy", "weights": [w.hex() for w in weights]},
               "streams": streams.tolist()}  # fmt: skip
    streams, sizes = np.empty(12, np.int16), np.array([2, 3, 7])
    active().blend_exhaustive(sizes, 0, 12, np.zeros(3, np.int64), streams, None)
    yield {"draws": {"rule": "exhaustive", "weights": sizes.tolist()}, "streams": streams.tolist()}
    changes = MixChanges.from_array("abc", np.array(_ROWS), "rows")
    firsts = (
        ({"rule": "stratified", "shares": [2, 1]}, Stratified(shares=(2, 1)), 1),
        ({"rule": "per_stream", "shares": [2, 1], "batch": 3},
         PerStream(shares=(2, 1), batch_sizes=(3, 3)), 3),
    )  # fmt: skip
    for first, rule, batch in firsts:
        draws = changes.draws(0, 2, 0, np.arange(3), rule, batch)
        given = {"rule": "changed", "file": "file", "changes": [0, 2], "position": 0,
                 "columns": [0, 1, 2], "first": first}  # fmt: skip
        given.update({"batch": batch} if batch > 1 else {})
        yield {**_drawn(given, draws), "rows": _ROWS}


def _drawn(given: dict[str, Any], draws: Any) -> dict[str, Any]:
    found = draws.lookup(np.arange(24))
    return {"draws": given, "streams": found.stream.tolist(), "ordinals": found.ordinal.tolist()}


def _balance(work: list[int], micro: int, rows: int) -> dict[str, Any]:
    out = np.empty(rows, np.int64)
    active().balance_rows(np.array(work, np.int64), 0, 0, 2, micro, out)
    return {"work": work, "D": 2, "M": micro, "batches": out.reshape(-1, 2, micro).tolist()}


def _receipts() -> Iterable[dict[str, Any]]:
    fingerprints = ["00112233445566778899aabbccddeeff", "f" * 32]
    keys = fingerprint_keys(fingerprints)
    one, two = [[0, 7, 0, 9]], [[1, 3, 5, 4], [0, 8, 0, 5]]
    for positions, rows in (([0], [one]), ([5], [one]), ([6], [two]), ([5, 6], [one, two])):
        columns = np.array([span for row in rows for span in row], np.int64).reshape(-1, 4).T
        splits = np.cumsum([0, *map(len, rows)])
        spans = Spans(columns[0].astype(np.int32), *(c.copy() for c in columns[1:]), splits)
        receipt = str(Receipt.of(np.array(positions), spans, keys))
        yield {"fingerprints": fingerprints, "positions": positions, "spans": rows,
               "receipt": receipt}  # fmt: skip


def text_of(value: Mapping[str, Any]) -> str:
    """Return JSON with a line for each entry of the lists and objects that it holds."""
    parts = []
    for name, entries in value.items():
        if not isinstance(entries, (dict, list)):
            parts.append(f'  "{name}": {json.dumps(entries)}')
            continue
        items = entries.items() if isinstance(entries, dict) else enumerate(entries)
        lines = [(f'"{key}": ' if isinstance(entries, dict) else "") + json.dumps(each)
                 for key, each in items]  # fmt: skip
        ends = "{}" if isinstance(entries, dict) else "[]"
        inner = ",\n".join(f"    {line}" for line in lines)
        parts.append(f'  "{name}": {ends[0]}\n{inner}\n  {ends[1]}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        write_inputs(Path(folder))
        locks = make_locks(Path(folder))
        with inside(Path(folder)):
            found = {f"{name}.lock": expected(lock) for name, lock in locks.items()}
        for name in (*FILES, *found):
            (FOLDER / name).write_bytes((Path(folder) / name).read_bytes())
    (FOLDER / "vectors.json").write_text(text_of(vectors()))
    (FOLDER / "expected.json").write_text(text_of(found))
    (FOLDER / "lock.schema.json").write_text(text_of(lock_schema()))


if __name__ == "__main__":
    sys.exit(main())
