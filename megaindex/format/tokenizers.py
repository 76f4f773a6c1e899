"""Tokenizers: byte level, Hugging Face tokenizers (also encoded by gigatoken) and SentencePiece.

| file | library | call | equal to Megatron's |
|---|---|---|---|
| tokenizer.json | tokenizers | `encode_batch(texts)` | AutoTokenizer's `(text).input_ids` |
| *.model | sentencepiece | `encode(texts)` | `encode_as_ids(text)` |
| bytes | built in | `text.encode()` | `list(text.encode("utf-8"))` |

Without `add_special_tokens` the first equals --tokenizer-hf-no-include-special-tokens.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import re
import sys
import unicodedata
from array import array
from collections.abc import Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from megaindex.errors import FormatError, InvalidArgument, MissingFile, StorageError
from megaindex.io.atomic import read_named, read_object
from megaindex.io.paths import check_local
from megaindex.validation import check_choice

BYTES = "bytes"
GIGATOKEN = "gigatoken"
ENCODERS = (GIGATOKEN,)
"""Libraries that encode a tokenizer.json in place of tokenizers."""
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(?<!\.json)(?<!\.model)")
_GIGATOKEN_VERSION = "0.10."
_UNICODE_16_SINCE = (0, 21, 2)  # version of tokenizers
_UNSEEN, _COMMON, _UNCOMMON = range(3)  # characters, by whether both libraries know them
_SAMPLED_TEXTS, _SAMPLED_TOKENS = 400, 400
_WORDS = (
    *("the", "Hello", "WORLD", "don't", "it'S", "we'LL", "\u2019s", "over", "naïve", "STRASSE"),
    *("import", "日本語", "Привет"),
    *("e\u0301", "A\u030a", "\u017f", "İ", "ǅ", "한국", "\u1112\u1161"),
    *("  ", "\n", "\r\n", "\t", " \n ", "\n\n", "\u00a0", "\u2003", "\u2028", "\x85", "\x1c"),
    *("...", "==", "//", "/\n", "<|", "|>", "(a)", "x_y", "1.5", "3rd", "a1b", "🎉", "👩\u200d🔬"),
)
_SHOWN = 60  # most characters of a text in a message
END_OF_DOCUMENT = 256
"""End token of the byte-level tokenizer."""

Ids = tuple[npt.NDArray[Any], npt.NDArray[np.int64]]
"""Ids of all texts, one after the other, and the number of ids of each text."""


@dataclass(frozen=True, kw_only=True)
class TokenizerFile:
    """A tokenizer identified by its content; small and picklable."""

    path: str
    """Path of the file; "bytes" for the built-in one."""
    library: str
    """"tokenizers", "sentencepiece" or "bytes"."""
    fingerprint: str
    """Library, its version, and XXH3-128 of the file."""
    add_special_tokens: bool
    encoder: str | None = None
    """Name and version of the library that encodes in place of `library`, with equal ids."""

    def __str__(self) -> str:
        return self.path


class Tokenizer(Protocol):
    """A loaded tokenizer: single-threaded, stateless between texts."""

    vocab_size: int
    """Size by which Megatron chooses the token type."""
    largest_id: int

    @property
    def own_eod(self) -> int | None:
        """The end token that the tokenizer defines."""

    @property
    def special_tokens(self) -> dict[str, int]:
        """Ids of the special tokens by their texts."""

    def id_of(self, token: str, /) -> int | None:
        """Return the id of a token by its text; None if it is unknown."""

    def encode(self, texts: Sequence[str]) -> Ids:
        """Return the ids of texts; errors of the library are passed on."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, those of special tokens included where they have one."""


def find_tokenizer(
    path: str | os.PathLike[str], *, add_special_tokens: bool, encoder: str | None = None
) -> TokenizerFile:
    """Return the tokenizer at `path`: a file, a folder that holds one, or "bytes".

    Args:
        path: as given by the user.
        add_special_tokens: add the special tokens of the template of a tokenizer.json.
        encoder: one of `ENCODERS`; by default the tokenizer's own library encodes.

    Raises:
        InvalidArgument: its library or that of `encoder` is not installed or not supported, a
            folder holds no tokenizer, or `encoder` is given for another kind of tokenizer.
        MissingFile: the file or folder does not exist.
        StorageError: the file cannot be read.
    """
    path = os.fspath(path)
    check_local(path, "download the tokenizer first")
    if path == BYTES:
        library, fingerprint = BYTES, "bytes 1"
    else:
        _refuse_hub_name(path)
        path = os.path.abspath(_in_folder(path))
        content = read_named(path, "tokenizer", longest=1 << 30)
        library = "tokenizers" if content.lstrip()[:1] == b"{" else "sentencepiece"
        digest = xxhash.xxh3_128_hexdigest(content)
        fingerprint = f"{library} {_version(library, path)} {digest}"
    return TokenizerFile(
        path=path,
        library=library,
        fingerprint=fingerprint,
        add_special_tokens=add_special_tokens,
        encoder=None if encoder is None else _encoder(encoder, path, library),
    )


@functools.lru_cache(maxsize=1)
def load(file: TokenizerFile) -> Tokenizer:
    """Load a tokenizer; the last one loaded is cached.

    Raises:
        FormatError: the file is not a tokenizer.
        InvalidArgument: the encoder does not give the ids of the tokenizer's own library.
        StorageError: the file changed since the run began.
    """

    if file.library == BYTES:
        return Bytes()
    encoder = None if file.encoder is None else GIGATOKEN
    now = find_tokenizer(file.path, add_special_tokens=file.add_special_tokens, encoder=encoder)
    if now != file:
        raise StorageError(
            f"{file.path}: changed since the run began ({now.fingerprint}, was "
            f"{file.fingerprint}); restore it, or start again"
        )
    if file.library == "sentencepiece":
        return SentencePiece(file)
    return HuggingFace(file) if encoder is None else Gigatoken(file)


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep the libraries from starting threads of their own, since tasks run in parallel."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class Bytes:
    """Byte-level tokenizer: ids 0 to 255 are bytes of the UTF-8 text, 256 ends a document."""

    vocab_size = END_OF_DOCUMENT + 1
    largest_id = END_OF_DOCUMENT
    own_eod = END_OF_DOCUMENT

    @property
    def special_tokens(self) -> dict[str, int]:
        return {}

    def id_of(self, _token: str) -> int | None:
        return None  # bytes have no names

    def encode(self, texts: Sequence[str]) -> Ids:
        encoded = [text.encode() for text in texts]
        return np.frombuffer(b"".join(encoded), np.uint8), _lengths(encoded)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < END_OF_DOCUMENT).decode(errors="replace")


class HuggingFace:
    """A tokenizer.json, as in transformers' fast tokenizers, without truncation and padding."""

    def __init__(self, file: TokenizerFile) -> None:
        from tokenizers import Tokenizer

        with _readable(file, "the tokenizers library"):
            loaded = Tokenizer.from_file(file.path)
            loaded.no_truncation()  # a tokenizer.json may turn both on
            loaded.no_padding()
            vocabulary = loaded.get_vocab(with_added_tokens=True)
        self._loaded = loaded
        self._special = file.add_special_tokens
        # tokenizers 0.20 added encode_batch_fast, which computes no offsets
        self._encode = getattr(loaded, "encode_batch_fast", loaded.encode_batch)
        self.vocab_size: int = loaded.get_vocab_size(with_added_tokens=True)
        self.largest_id: int = max(vocabulary.values(), default=-1)
        self._path = file.path

    @property
    def own_eod(self) -> int | None:
        token = _configured_eos(self._path)
        return None if token is None else self.id_of(token)

    @property
    def special_tokens(self) -> dict[str, int]:
        added = self._loaded.get_added_tokens_decoder().items()
        return {token.content: number for number, token in added if token.special}

    def id_of(self, token: str) -> int | None:
        found: int | None = self._loaded.token_to_id(token)
        return found

    def encode(self, texts: Sequence[str]) -> Ids:
        encodings = self._encode(list(texts), add_special_tokens=self._special)
        return _flat([encoding.ids for encoding in encodings])

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._loaded.decode(list(ids), skip_special_tokens=False)
        return text


class Gigatoken(HuggingFace):
    """A tokenizer.json whose texts gigatoken encodes, as far as its ids equal those of tokenizers.

    Settings of a tokenizer.json that gigatoken ignores are refused, and both libraries are compared
    on a sample before the first text. Texts with characters that only one of them may know (of a
    version of Unicode later than Python's), or, for a tokenizer with NFC, texts that are not in
    NFC, are encoded by tokenizers.

    gigatoken caches all words that it has met, up to 11 bytes for each byte of text, hence it is
    loaded anew after `_CACHED_TEXT` bytes.
    """

    _CACHED_TEXT = 1 << 25

    def __init__(self, file: TokenizerFile) -> None:
        super().__init__(file)
        self._json: str = self._loaded.to_str()
        settings = json.loads(self._json)
        reason = _not_in_gigatoken(settings)
        if reason is not None:
            raise self._refusal(reason)
        self._composed = settings["normalizer"] is not None  # NFC, the only one accepted
        self._state = np.zeros(sys.maxunicode + 1, np.uint8)
        self._fast = self._load_fast()
        self._text_left = self._CACHED_TEXT
        self._around = self._template()
        self._check(_sample([token["content"] for token in settings["added_tokens"]]))

    def encode(self, texts: Sequence[str]) -> Ids:
        fast = [text.isascii() or self._is_common(text) for text in texts]
        if all(fast):
            return self._encode_fast(texts)
        ids: list[npt.NDArray[Any]] = [np.empty(0, np.int32)] * len(texts)
        for chosen, encode in ((True, self._encode_fast), (False, super().encode)):
            where = [i for i, one in enumerate(fast) if one is chosen]
            tokens, lengths = encode([texts[i] for i in where])
            for i, own in zip(where, np.split(tokens, np.cumsum(lengths)), strict=False):
                ids[i] = own
        return np.concatenate(ids), _lengths(ids)

    def _is_common(self, text: str) -> bool:
        """Return True if both libraries know all characters, and normalize none."""
        codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        state = self._state[codes]
        if not state.all():
            for code in np.unique(codes[state == _UNSEEN]):
                assigned = unicodedata.category(chr(code)) != "Cn"
                self._state[code] = _COMMON if assigned else _UNCOMMON
            state = self._state[codes]
        common = bool(state.max(initial=_COMMON) == _COMMON)
        return common and (not self._composed or unicodedata.is_normalized("NFC", text))

    def _encode_fast(self, texts: Sequence[str]) -> Ids:
        self._text_left -= sum([len(text) if text.isascii() else 3 * len(text) for text in texts])
        if self._text_left < 0:
            self._fast = None  # frees its memory before the next one is loaded
            self._fast = self._load_fast()
            self._text_left = self._CACHED_TEXT
        layout = self._fast.encode_batch(list(texts), parallel=False).layout
        offsets = np.asarray(layout.offsets.data)
        tokens = np.asarray(layout.content.data)[offsets[0] : offsets[-1]].view(np.int32)
        own = np.diff(offsets).astype(np.int64)
        before, after = self._around
        if not before and not after:
            return tokens, own
        lengths = own + len(before) + len(after)
        ends = np.cumsum(lengths)
        ranges = ((ends - lengths, before), (ends - len(after), after))
        places = [(first + at, token) for first, added in ranges for at, token in enumerate(added)]
        return insert_tokens(tokens, places), lengths

    def _load_fast(self) -> Any:
        import gigatoken

        try:
            return gigatoken.Tokenizer.from_json(self._json)
        except Exception as error:
            raise self._refusal(str(error).partition("\n")[0]) from error

    def _template(self) -> tuple[list[int], list[int]]:
        """Return the special tokens before and after each text."""
        if not self._special:
            return [], []
        encoding = self._loaded.encode("a", add_special_tokens=True)
        is_own = [not added for added in encoding.special_tokens_mask]
        first, stop = is_own.index(True), len(is_own) - is_own[::-1].index(True)
        return encoding.ids[:first], encoding.ids[stop:]

    def _check(self, texts: Sequence[str]) -> None:
        expected, lengths = super().encode(texts)
        found, found_lengths = self.encode(texts)
        if np.array_equal(lengths, found_lengths) and np.array_equal(expected, found):
            return
        ends = np.cumsum(lengths)[:-1]
        both = zip(texts, np.split(expected, ends), strict=True)
        text = next(text for text, ids in both if not np.array_equal(self.encode([text])[0], ids))
        raise self._refusal(f"it gives other ids for {text[:_SHOWN]!r}")

    def _refusal(self, reason: str) -> InvalidArgument:
        return InvalidArgument(
            f"{self._path}: gigatoken does not encode as tokenizers does: {reason}; omit --encoder"
        )


def _encoder(name: str, path: str, library: str) -> str:
    """Return name and version of an encoder, which must be one whose ids were compared."""
    check_choice("--encoder", name, ENCODERS)
    if library != "tokenizers":
        raise InvalidArgument(
            f"{path}: --encoder {name} encodes a tokenizer.json only; omit --encoder"
        )
    found = _version(GIGATOKEN, path)
    if not found.startswith(_GIGATOKEN_VERSION):
        raise InvalidArgument(
            f"--encoder {name} needs gigatoken {_GIGATOKEN_VERSION}*, got {found}; pip install "
            "'megaindex[gigatoken]'"
        )
    if _numbers(_version(library, path)) < _UNICODE_16_SINCE:
        raise InvalidArgument(
            f"--encoder {name} needs tokenizers 0.21.2 or later, which knows Unicode 16; pip "
            "install 'megaindex[gigatoken]'"
        )
    if _numbers(unicodedata.unidata_version) >= (17,):
        raise InvalidArgument(
            f"--encoder {name} needs a Python with Unicode 16 or earlier, got "
            f"{unicodedata.unidata_version}; omit --encoder"
        )
    return f"{name} {found}"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def _not_in_gigatoken(settings: dict[str, Any]) -> str | None:
    """Return a setting of a tokenizer.json that gigatoken would ignore or does otherwise."""
    model = settings["model"]
    for name in ("dropout", "byte_fallback", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            return f"its model has {name}"
    steps = settings["pre_tokenizer"] or {}
    steps = steps.get("pretokenizers", [steps])
    kinds = [step.get("type") for step in steps]
    if kinds == ["Split", "ByteLevel"]:
        split, last = steps
        wrong = split["behavior"] != "Isolated" or split["invert"]
        wrong = wrong or last["use_regex"] or last["add_prefix_space"]
    else:
        wrong = kinds != ["ByteLevel"] or not steps[0]["use_regex"]
    if wrong:
        return (
            "its pre-tokenizer must be ByteLevel, or one isolating Split and a plain ByteLevel, "
            f"got {', '.join(map(str, kinds))}"
        )
    normalizer = settings["normalizer"] or {"normalizers": []}
    forms = {step["type"] for step in normalizer.get("normalizers", [normalizer])}
    if forms - {"NFC"}:
        return f"its normalizer must be NFC, got {', '.join(sorted(forms))}"
    return _token_not_in_gigatoken(
        settings["added_tokens"], composed=bool(forms), spaced=steps[0].get("add_prefix_space")
    )


def _token_not_in_gigatoken(
    added: Sequence[dict[str, Any]], *, composed: bool, spaced: bool
) -> str | None:
    """Return an added token that gigatoken would find elsewhere.

    The normalizer is NFC if ``composed``; a space is put before each text if ``spaced``.
    """
    begins = any(token["content"][:1].isspace() for token in added)
    ends = any(token["content"][-1:].isspace() for token in added)
    if spaced and begins:
        return "one of its tokens begins with white space, and it has add_prefix_space"
    for token in added:
        if token["single_word"]:
            return f"its token {token['content']!r} is a single_word"
        if (token["rstrip"] and begins) or (token["lstrip"] and ends):
            return f"its token {token['content']!r} strips white space that is part of a token"
        if composed and not unicodedata.is_normalized("NFC", token["content"]):
            return f"its token {token['content']!r} is not in NFC"
    first = [token["content"] for token in added if not token["normalized"]]
    then = [token["content"] for token in added if token["normalized"]]
    for one, other in itertools.product(first, then):  # searched for one after the other
        if _overlap(one, other) or _overlap(other, one):
            return f"its tokens {one!r} and {other!r} overlap"
    return None


def _overlap(one: str, other: str) -> bool:
    """Return True if a text can hold both, the second from within the first."""
    return other in one or any(one.endswith(other[:size]) for size in range(1, len(other)))


def _sample(added: Sequence[str]) -> list[str]:
    """Return texts of words, characters of all kinds, white space and added tokens."""
    draw = random.Random(0)

    def character(first: int, stop: int) -> str:
        while unicodedata.category(found := chr(draw.randrange(first, stop))) in ("Cn", "Cs"):
            pass
        return found

    def piece() -> str:
        kind = draw.randrange(8)
        if kind < 3:
            return draw.choice(_WORDS)
        if kind == 3:
            return character(0, 0x80) * draw.randrange(1, 4)
        if kind == 4:
            return "".join(character(0x80, 0x3000) for _ in range(draw.randrange(1, 4)))
        if kind == 5:
            return character(0x3000, 0x20000)
        if kind == 6:
            return str(draw.randrange(10 ** draw.randrange(1, 9)))
        return draw.choice(added or _WORDS)

    texts = ["", *added[:_SAMPLED_TOKENS]]
    for _ in range(_SAMPLED_TEXTS):
        spaced = (piece() + " " * (draw.random() < 0.3) for _ in range(draw.randrange(40)))
        texts.append("".join(spaced))
    return texts


class SentencePiece:
    """A SentencePiece model, without begin and end tokens."""

    def __init__(self, file: TokenizerFile) -> None:
        import sentencepiece

        with _readable(file, "SentencePiece"):
            loaded = sentencepiece.SentencePieceProcessor(model_file=file.path)
        self._loaded = loaded
        self.vocab_size: int = loaded.get_piece_size()
        self.largest_id: int = self.vocab_size - 1

    @property
    def own_eod(self) -> int | None:
        found: int = self._loaded.eos_id()
        return found if found >= 0 else None

    @property
    def special_tokens(self) -> dict[str, int]:
        loaded, ids = self._loaded, range(self.vocab_size)
        return {loaded.id_to_piece(i): i for i in ids if loaded.is_control(i)}

    def id_of(self, token: str) -> int | None:
        found: int = self._loaded.piece_to_id(token)  # id of <unk> for an unknown token
        return found if self._loaded.id_to_piece(found) == token else None

    def encode(self, texts: Sequence[str]) -> Ids:
        return _flat(self._loaded.encode(list(texts), out_type=int, num_threads=1))

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._loaded.decode(list(ids))
        return text


def insert_tokens(
    tokens: npt.NDArray[Any], inserted: Sequence[tuple[npt.NDArray[np.int64], int]]
) -> npt.NDArray[np.int32]:
    """Return tokens with others ``inserted``: places in the result, and the id at all of them."""
    ids = np.empty(tokens.size + sum(places.size for places, _ in inserted), np.int32)
    is_own = np.ones(ids.size, np.bool_)
    for places, token in inserted:
        ids[places] = token
        is_own[places] = False
    ids[is_own] = tokens
    return ids


def _flat(ids: Sequence[Sequence[int]]) -> Ids:
    tokens = array("i", itertools.chain.from_iterable(ids))
    return np.frombuffer(tokens, np.int32), _lengths(ids)


def _lengths(texts: Sequence[Sized]) -> npt.NDArray[np.int64]:
    return np.fromiter(map(len, texts), np.int64, len(texts))


@contextmanager
def _readable(file: TokenizerFile, library: str) -> Iterator[None]:
    """Raise FormatError for an error of the library, of any type: a panic in Rust is not an
    Exception."""
    try:
        yield
    except (MemoryError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise FormatError(
            f"{file.path}: cannot be read by {library}: {error}; pass a tokenizer.json, a "
            f"SentencePiece .model, or bytes"
        ) from error


def _configured_eos(path: str) -> str | None:
    """Return the end token of the tokenizer_config.json beside a tokenizer.json."""
    beside = os.path.join(os.path.dirname(path), "tokenizer_config.json")
    try:
        config = read_object(beside)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise FormatError(
            f"{beside}: must be a JSON object, but {error}; correct it, or move it away and pass "
            "--eod"
        ) from error
    for name in ("eos_token", "sep_token"):  # in the order of Megatron
        token = config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            return token
    return None


def _refuse_hub_name(path: str) -> None:
    """Raise MissingFile for a path that does not exist and may be a name on Hugging Face's hub."""
    if _HUB_NAME.fullmatch(path) and not os.path.lexists(path):
        folder = path.rpartition("/")[2]
        raise MissingFile(
            f"{path}: no such file or folder, and tokenizers are not downloaded; if it is a name "
            f"on the Hugging Face hub, get its tokenizer.json or tokenizer.model by: hf download "
            f"{path} --include 'tokenizer*' --local-dir {folder}; then pass --tokenizer {folder}"
        )


def _in_folder(path: str) -> str:
    if not os.path.isdir(path):
        return path
    for name in ("tokenizer.json", "tokenizer.model"):
        if os.path.isfile(found := os.path.join(path, name)):
            return found
    raise InvalidArgument(
        f"{path}: the folder holds neither tokenizer.json nor tokenizer.model; name the file itself"
    )


def _version(library: str, path: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(library)
    except PackageNotFoundError:
        raise InvalidArgument(
            f"{path}: needs the library {library}; pip install 'megaindex[{library}]'"
        ) from None
