"""Ids of `--encoder gigatoken` against those of tokenizers, and what is refused."""

from __future__ import annotations

import json
import random
import re
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.inputs import for_each
from support.tokenizing import TEXTS, pair, run, train_bpe, write_jsonl

from megaindex.cli import main
from megaindex.errors import InvalidArgument
from megaindex.format import tokenizers as module
from megaindex.format.tokenizers import Gigatoken, HuggingFace, find_tokenizer

pytest.importorskip("gigatoken")
from tokenizers import processors

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT_4 = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+|"
    r" ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s+"
)
BYTE_LEVEL = {
    "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True
}  # fmt: skip
NFC = {"type": "NFC"}
Settings = dict[str, Any]


def split(pattern: str, **changes: Any) -> Settings:
    first = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    last = BYTE_LEVEL | {"use_regex": False}
    return {
        "type": "Sequence", "pretokenizers": [first | {"invert": False} | changes, last]
    }  # fmt: skip


def added(content: str, number: int, **changes: Any) -> Settings:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"id": number, "content": content} | flags | changes


def model(**changes: Any) -> Callable[[Settings], None]:
    return lambda settings: settings["model"].update(changes)


def top(**changes: Any) -> Callable[[Settings], None]:
    return lambda settings: settings.update(changes)


def more(*tokens: Settings, **changes: Any) -> Callable[[Settings], None]:
    def change(settings: Settings) -> None:
        settings["added_tokens"] += tokens
        settings.update(changes)

    return change


ACCEPTED = {
    "GPT-2": model(),
    "prefix space": top(pre_tokenizer=BYTE_LEVEL | {"add_prefix_space": True}),
    "Llama 3": top(pre_tokenizer=split(LLAMA_3)),
    "ignore_merges": model(ignore_merges=True),
    "NFC": top(normalizer=NFC),
    "NFC in a sequence": top(normalizer={"type": "Sequence", "normalizers": [NFC]}),
    "added": more(
        added("<|eot|>", 500, special=True, lstrip=True), added("<|eo", 501, rstrip=True)
    ),
    "added and NFC": more(added("é", 500, normalized=True), added("[X]", 501), normalizer=NFC),
}

REFUSED = {
    "other ids for": top(pre_tokenizer=split(GPT_4)),
    "model has dropout": model(dropout=0.5),
    "must be ByteLevel, or one isolating Split and a plain ByteLevel, got ByteLevel": top(
        pre_tokenizer=BYTE_LEVEL | {"use_regex": False}
    ),
    "got Split, ByteLevel": top(pre_tokenizer=split(LLAMA_3, behavior="Removed")),
    "got Digits, ByteLevel": top(
        pre_tokenizer={
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, BYTE_LEVEL],
        }
    ),
    "got None": top(pre_tokenizer=None),
    "normalizer must be NFC, got Lowercase": top(normalizer={"type": "Lowercase"}),
    "token 'the' is a single_word": more(added("the", 500, single_word=True)),
    "token '<R>' strips white space": more(added("<R>", 500, rstrip=True), added(" y", 501)),
    "token '<L>' strips white space": more(
        added("<L>", 500, lstrip=True), added("y ", 501, normalized=True)
    ),
    "begins with white space, and it has add_prefix_space": more(
        added(" y", 500), pre_tokenizer=BYTE_LEVEL | {"add_prefix_space": True}
    ),
    "is not in NFC": more(added("e\u0301", 500), normalizer=NFC),
    r"tokens 'b\|c' and 'a\|b' overlap": more(
        added("a|b", 500, normalized=True), added("b|c", 501)
    ),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_bpe(tmp_path_factory.mktemp("trained"), vocabulary=500, template=True)


def write(
    folder: Path, trained: Path, change: Callable[[Settings], None] = lambda _settings: None
) -> module.TokenizerFile:
    """A variant of the trained tokenizer."""
    settings = json.loads(trained.read_bytes())
    change(settings)
    (folder / "tokenizer.json").write_text(json.dumps(settings))
    return find_tokenizer(folder, add_special_tokens=True, encoder="gigatoken")


def random_texts(count: int) -> list[str]:
    """Texts of assigned and unassigned characters, composed and not, around words."""
    draw = random.Random(20)
    words = [word for text in TEXTS for word in text.split(" ")]
    words += [
        "e\u0301",
        "<|eot|>",
        "<|eo",
        "[X]",
        "<eos>",
        "don't",
        "it'S",
        " \n",
        "\r\n",
        "\u3000",
    ]
    bounds = (0x80, 0x100, 0x370, 0x3000, 0x11000, 0x20000, 0x110000)

    def piece() -> str:
        if draw.random() < 0.6:
            return draw.choice(words)
        found = chr(draw.randrange(draw.choice(bounds)))
        return "" if unicodedata.category(found) == "Cs" else found

    return [
        "".join(piece() + " " * (draw.random() < 0.4) for _ in range(draw.randrange(30)))
        for _ in range(count)
    ]


def assert_equal(file: module.TokenizerFile, *batches: list[str]) -> None:
    ours, theirs = Gigatoken(file), HuggingFace(file)
    for texts in batches:
        tokens, lengths = ours.encode(texts)
        expected, expected_lengths = theirs.encode(texts)
        np.testing.assert_array_equal(lengths, expected_lengths)
        np.testing.assert_array_equal(tokens, expected)


@pytest.mark.slow
@for_each("name", ACCEPTED)
def test_the_ids_are_those_of_tokenizers(tmp_path: Path, trained: Path, name: str) -> None:
    file = write(tmp_path, trained, ACCEPTED[name])
    assert_equal(file, random_texts(100), [])


@for_each("reason", REFUSED)
def test_a_tokenizer_with_other_ids_is_refused(tmp_path: Path, trained: Path, reason: str) -> None:
    file = write(tmp_path, trained, REFUSED[reason])
    with pytest.raises(InvalidArgument, match=rf"as tokenizers does: .*{reason}.*omit --encoder$"):
        Gigatoken(file)


@for_each("template", ["$A <eos>", "<bos> $A <eos> <eos>"])
def test_special_tokens_lie_around_each_text(tmp_path: Path, trained: Path, template: str) -> None:
    ids = {
        token["content"]: token["id"] for token in json.loads(trained.read_bytes())["added_tokens"]
    }
    around = processors.TemplateProcessing(single=template, special_tokens=list(ids.items()))

    def change(settings: Settings) -> None:
        settings["post_processor"] = json.loads(around.__getstate__())

    assert_equal(write(tmp_path, trained, change), ["a b", "", "don't stop"], [""], [])


def test_ids_without_special_tokens_are_those_of_tokenizers(tmp_path: Path, trained: Path) -> None:
    file = write(tmp_path, trained, ACCEPTED["NFC"])
    plain = module.find_tokenizer(file.path, encoder="gigatoken", add_special_tokens=False)
    assert_equal(plain, random_texts(300), [chr(code) for code in (0x80, sys.maxunicode)])


def test_a_tokenizer_that_it_cannot_load_is_refused(
    tmp_path: Path, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path, trained, ACCEPTED["NFC"])
    import gigatoken

    def fail(_: object) -> None:
        raise ValueError("no such rule\nat line 3")

    monkeypatch.setattr(gigatoken.Tokenizer, "from_json", fail)
    with pytest.raises(InvalidArgument, match=r"no such rule\b.*omit --encoder$") as caught:
        Gigatoken(file)
    assert "line 3" not in str(caught.value)


def test_texts_that_only_one_library_knows_are_encoded_by_tokenizers(
    tmp_path: Path, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = Gigatoken(write(tmp_path, trained, ACCEPTED["NFC"]))
    fast: list[str] = []
    encode = loaded._encode_fast
    monkeypatch.setattr(
        loaded, "_encode_fast", lambda texts: (fast.extend(texts), encode(texts))[1]
    )
    unassigned = next(c for c in map(chr, range(0x378, 0x3000)) if unicodedata.category(c) == "Cn")
    loaded.encode(["plain", "é", f"a{unassigned}", "e\u0301", "日本"])
    assert fast == ["plain", "é", "日本"]


def test_its_cache_is_bounded(
    tmp_path: Path, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Gigatoken, "_CACHED_TEXT", 40_000)
    loaded = Gigatoken(write(tmp_path, trained))
    first, seen = loaded._fast, []
    for begin in range(0, 20_000, 100):
        texts = [f"unique{number}" for number in range(begin, begin + 100)]
        tokens, _ = loaded.encode(texts)
        np.testing.assert_array_equal(tokens, HuggingFace.encode(loaded, texts)[0])
        seen += [loaded._fast] if loaded._fast is not (seen[-1] if seen else first) else []
    assert len(seen) == 5  # of 208,890 bytes, those of the sample included


def test_texts_of_every_kind_are_compared() -> None:
    text = "".join(module._sample(["<one>"]))
    assert "<one>" in text
    for kind in ("[\x01-\x08]", "[\u0530-\u08ff]", "[\u3400-\u4dff]", "[0-9]{6}", "[A-Za-z]{4}"):
        assert re.search(kind, text), kind


@pytest.mark.slow
@pytest.mark.parametrize("template", [False, True])
def test_a_run_writes_the_same_bytes(tmp_path: Path, trained: Path, template: bool) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [*TEXTS, *random_texts(200)])
    options: Settings = {"tokenizer": trained, "eod": "<eos>", "add_special_tokens": template}
    run(tmp_path / "one", [source], **options)
    workers = 1 + template
    run(
        tmp_path / "two", [source], **options, encoder="gigatoken", part_bytes=3000, workers=workers
    )  # fmt: skip
    assert pair(tmp_path / "one") == pair(tmp_path / "two")
    assert (tmp_path / "one.provenance").read_bytes() == (tmp_path / "two.provenance").read_bytes()


def test_parts_of_the_other_encoder_are_not_mixed(tmp_path: Path, trained: Path) -> None:
    lines = [json.dumps({"text": text}) for text in TEXTS] + ["damaged"]
    source = tmp_path / "a.jsonl"
    source.write_text("\n".join(lines))
    out = [str(tmp_path / "out"), str(source), "--tokenizer", str(trained), "--part-size", "600"]
    assert main(["tokenize", *out, "--workers", "1"]) == 2
    assert list((tmp_path / "out.parts").glob("*.bin"))
    with pytest.raises(InvalidArgument, match=r"encoder is gigatoken 0\.10\.\d+, was tokenizers"):
        run(
            tmp_path / "out", [source], tokenizer=trained, part_bytes=600, encoder="gigatoken",
            on_bad_line="skip",
        )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokenizer", "bytes"], "bytes: --encoder gigatoken encodes a tokenizer.json only"),
        (["--tokenizer", "T"], "--encoder gigatoken needs gigatoken 0.10"),
    ],
)
def test_what_the_command_refuses(
    tmp_path: Path, trained: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], options: list[str], message: str,
) -> None:  # fmt: skip
    version = module._version
    monkeypatch.setattr(
        module,
        "_version",
        lambda name, path: "0.11.0" if name == "gigatoken" else version(name, path),
    )
    source = write_jsonl(tmp_path / "a.jsonl", ["text"])
    options = [str(trained) if one == "T" else one for one in options]
    status = main(
        ["tokenize", str(tmp_path / "out"), str(source), "--encoder", "gigatoken", *options]
    )
    assert status == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("count", [5, pytest.param(200, marks=pytest.mark.slow)])
def test_random_added_tokens_are_refused_or_equal(
    tmp_path: Path, trained: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """By the rules alone, since texts in which tokens meet are rare where they are many."""
    monkeypatch.setattr(Gigatoken, "_check", lambda *_: None)
    parts = ["a", "b", "|", "<", ">", " ", "\n", "é", "e\u0301", "E", "'s", "1"]
    flags = ("lstrip", "rstrip", "normalized", "special")
    pre_tokenizers = (BYTE_LEVEL, BYTE_LEVEL | {"add_prefix_space": True}, split(LLAMA_3))
    draw, compared = random.Random(count), 0
    while compared < count:
        contents = {"".join(draw.choices(parts, k=draw.randrange(1, 4))) for _ in range(4)}
        tokens = [
            added(content, 500 + k, **{flag: draw.random() < 0.3 for flag in flags})
            for k, content in enumerate(sorted(contents))
        ]
        change = more(
            *tokens, pre_tokenizer=draw.choice(pre_tokenizers), normalizer=draw.choice([None, NFC])
        )
        file = write(tmp_path, trained, change)
        try:
            Gigatoken(file)
        except InvalidArgument:
            continue
        fragments = [*sorted(contents), *parts, "  ", "\t", "the"]
        texts = ["".join(draw.choices(fragments, k=draw.randrange(10))) for _ in range(150)]
        assert_equal(file, texts)
        compared += 1


@pytest.mark.slow
@pytest.mark.parametrize("pre_tokenizer", ["GPT-2", "Llama 3"])
def test_characters_are_of_the_same_classes(
    tmp_path: Path, trained: Path, pre_tokenizer: str
) -> None:
    """Of assigned characters below U+20000, with a vocabulary that joins them to their neighbours.

    Neighbours are joined only within a word of the pre-tokenizer, so the ids show how it is split.
    """
    of_byte = {b: chr(b) for b in (*range(33, 127), *range(161, 173), *range(174, 256))}
    rest = [byte for byte in range(256) if byte not in of_byte]
    of_byte |= {byte: chr(256 + i) for i, byte in enumerate(rest)}
    neighbours = "aA1! \n'/"
    merges = [
        order
        for one in neighbours
        for byte in range(0x80, 0x100)
        for order in ([of_byte[ord(one)], of_byte[byte]], [of_byte[byte], of_byte[ord(one)]])
    ]
    words = [*sorted(of_byte.values()), *map("".join, merges)]

    def change(settings: Settings) -> None:
        ACCEPTED[pre_tokenizer](settings)
        settings |= {"added_tokens": [], "post_processor": None}
        vocabulary = {word: number for number, word in enumerate(words)}
        settings["model"] |= {"vocab": vocabulary, "merges": merges}

    file = write(tmp_path, trained, change)
    every = [
        c
        for c in map(chr, (*range(0x80, 0x20000), *range(0xE0000, 0xE1000)))
        if unicodedata.category(c) not in ("Cn", "Co", "Cs") and not "\uac80" < c < "\ud700"
    ]
    fast, slow = Gigatoken(file), HuggingFace(file)
    for begin in range(0, len(every), 512):
        some = every[begin : begin + 512]
        texts = [text for c in some for one in neighbours for text in (one + c, c + one, c + c)]
        np.testing.assert_array_equal(fast.encode(texts)[0], slow.encode(texts)[0])
