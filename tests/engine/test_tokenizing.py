"""Text tokenized by many: the pair of one process, on every engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tokenizing import TEXTS, names, pair, run, train_bpe, write_jsonl

from megaindex.corpus import tokenize
from megaindex.engine import Engine
from megaindex.errors import FormatError


@pytest.mark.slow
def test_the_pair_is_that_of_one_process(engine: Engine, tmp_path: Path) -> None:
    bpe = train_bpe(tmp_path / "bpe")
    inputs = [
        write_jsonl(tmp_path / f"{i}.jsonl{s}", TEXTS * 40) for i, s in enumerate(["", ".gz"])
    ]
    options = {"tokenizer": bpe, "eod": "<eos>"}
    run(tmp_path / "one", inputs, **options)
    made = tokenize(tmp_path / "many", inputs, part_bytes=9999, engine=engine, **options)
    assert made.parts > 10
    assert pair(tmp_path / "many") == pair(tmp_path / "one")
    assert "many.parts" not in names(tmp_path)


def test_a_bad_line_is_named_from_wherever_it_was_met(engine: Engine, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [*TEXTS * 40, 7])
    line = 40 * len(TEXTS) + 1
    with pytest.raises(FormatError, match=rf"a\.jsonl: line {line}: key 'text' must hold a string"):
        tokenize(tmp_path / "o", [source], tokenizer="bytes", part_bytes=9999, engine=engine)
    assert not (tmp_path / "o.bin").exists()
