"""Small tokenizers, and what Megatron's preprocess_data.py writes with them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megaindex.corpus import Tokenized, tokenize
from megaindex.engine import open_engine

TEXTS = [
    "The first document, plain and simple.",
    "Zweites Dokument: Größe, Straße, naïve façade — “quotes” and … dots.",
    "日本語のテキスト。もう一つの文。",
    "",
    "emoji 🎉🎊 and\ttabs\nand lines\r\nof both kinds",
    "a" * 3000 + " " + "b" * 50,
    "numbers 0123456789 and <eos> inside the text",
]


def train_bpe(folder: Path, vocabulary: int = 400, template: bool = False) -> Path:
    """A byte-level BPE as a tokenizer.json, with <bos> and <eos>."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(TEXTS * 3, trainer)
    if template:
        made.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", made.token_to_id("<bos>"))]
        )
        made.enable_truncation(4)  # which Megatron undoes
        made.enable_padding(length=64)
    folder.mkdir(exist_ok=True)
    path = folder / "tokenizer.json"
    made.save(str(path))
    return path


def train_sentencepiece(folder: Path, **options: int) -> Path:
    import sentencepiece

    folder.mkdir(exist_ok=True)
    lines = [line for text in TEXTS for line in text.splitlines() if 0 < len(line) < 1000]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines * 5),
        model_prefix=str(folder / "small"),
        vocab_size=400,
        hard_vocab_limit=False,
        byte_fallback=True,
        model_type="bpe",
        minloglevel=9,
        **options,
    )
    return folder / "small.model"


def encoder_of(tokenizer: str | Path, special: bool = True) -> Callable[[str], list[int]]:
    """The call for one text that Megatron's tokenizer makes."""
    if str(tokenizer) == "bytes":
        return lambda text: list(text.encode())
    if str(tokenizer).endswith(".model"):
        import sentencepiece

        model = sentencepiece.SentencePieceProcessor()
        model.Load(str(tokenizer))
        found: Callable[[str], list[int]] = model.encode_as_ids
        return found
    from tokenizers import Tokenizer

    loaded = Tokenizer.from_file(str(tokenizer))
    loaded.no_truncation()
    loaded.no_padding()
    return lambda text: loaded.encode(text, add_special_tokens=special).ids


def write_as_megatron(
    megatron: Any,
    prefix: Path,
    values: Iterable[str | list[str]],
    encode: Callable[[str], list[int]],
    *,
    eod: int | None = None,
    dtype: type = np.uint16,
) -> None:
    """The loop of preprocess_data.py around megatron-core's own builder."""
    builder = megatron.IndexedDatasetBuilder(f"{prefix}.bin", dtype)
    for value in values:
        ids: list[int] = []
        lengths: list[int] = []
        for sentence in value if isinstance(value, list) else [value]:
            if found := encode(sentence):
                ids.extend(found)
                lengths.append(len(found))
        if ids and eod is not None:
            ids.append(eod)
            lengths[-1] += 1
        builder.add_document(np.array(ids, np.int64), lengths)
    builder.finalize(f"{prefix}.idx")


def write_jsonl(path: Path, values: Iterable[Any], key: str = "text") -> Path:
    """One object a line; packed where the name says so."""
    data = "".join(json.dumps({"id": i, key: v}) + "\n" for i, v in enumerate(values)).encode()
    path.write_bytes(packed(data, path.suffix))
    return path


def packed(data: bytes, suffix: str) -> bytes:
    if suffix == ".gz":
        half = len(data) // 2
        return gzip.compress(data[:half]) + gzip.compress(data[half:])  # two members
    if suffix == ".zst":
        import zstandard

        half = len(data) // 2
        one = zstandard.ZstdCompressor()
        return one.compress(data[:half]) + one.compress(data[half:])  # two frames
    return data


def run(
    output: Path, inputs: Sequence[Path | str], *, workers: int = 1, **options: Any
) -> Tokenized:
    """`tokenize` in this process, or in others."""
    with open_engine(workers=workers) as engine:
        return tokenize(output, inputs, engine=engine, **{"tokenizer": "bytes", **options})


class InThisProcess:
    """An engine without workers."""

    workers = 1

    def run(self, function: Callable[[Any], Any], tasks: Any) -> Iterator[tuple[int, Any]]:
        for number, task in enumerate(tasks):
            yield number, function(task)


def pair(prefix: Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}
