"""The shape of a lock: tables of its fields, and the check that every lock passes when it is read.

docs/lock-format.md specifies the fields. A rule of a table is called with a value, its place and
what values there refer to, and raises `Misshapen`. A field whose name ends in "?" may be absent;
"*" stands for fields of other names.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megaindex.arithmetic import INT32_MAX, INT64_MAX, ceil_div
from megaindex.io.atomic import Damaged, parse_object
from megaindex.validation import shown

FORMAT = "megaindex run lock"
VERSION = 3
SOURCE_COLUMNS = ("path", "fingerprint", "idx", "bin_bytes", "sequences", "documents", "tokens",
                  "token_type", "tokenizers", "provenance", "url")  # fmt: skip
HASH_DIGITS = {"xxh3-64": 16, "sha256": 64}
"""Algorithms of the hashes of .idx and .bin, with the hexadecimal digits of one."""
SECTIONS = ("settings", "sources", "tokenizers", "about", "tokens", "files", "subsets")
"""Fields with a digest of their own."""
LEAST_CHUNK = 64 << 20  # bytes of a .bin that one hash covers
MOST_STEPS = 1 << 24  # of a subset; their bounds are an array in memory
_DEEPEST = 8  # values of settings inside each other
_SEQUENCES, _TOKENS = SOURCE_COLUMNS.index("sequences"), SOURCE_COLUMNS.index("tokens")


class Misshapen(ValueError):
    """A value that is not of the shape of a lock."""

    def __init__(self, where: str, expected: str, value: object) -> None:
        super().__init__(f"{where.lstrip('.')} must be {expected}, got {shown(value)}")


@dataclass(frozen=True)
class _Given:
    """Rows, files and bounds that the values at a place may refer to.

    Attributes:
        sources: rows of ``sources``, by the numbers used at the place.
        files: number of rows of ``files``.
    tokenizers: number of rows of ``tokenizers``.
    digits: digits of a hash of an .idx or .bin.
        most: positions that a node of several sources may have.
        depth: values that this one lies in.
    """

    sources: Sequence[Any] = ()
    files: int = 0
    tokenizers: int = 0
    digits: int = 0
    most: int = 0
    depth: int = 0


@dataclass(frozen=True)
class Rule:
    """A rule of a table: a check, and the JSON schema of the values that it allows."""

    check: Callable[[Any, str, _Given], None]
    schema: Mapping[str, Any]

    def __call__(self, value: Any, where: str, given: _Given) -> None:
        """Raise `Misshapen` for a value that breaks the rule."""
        self.check(value, where, given)


def parse_text(text: bytes) -> dict[str, Any]:
    """Return the object of a lock's text.

    Raises:
        Damaged: it is not JSON in UTF-8, begins with a byte order mark, has a key twice, or a
            number that is not an integer.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = sorted(name for name, _ in pairs)
            twice = next(a for a, b in itertools.pairwise(names) if a == b)
            raise Damaged(f"it has the key {shown(twice)} twice in one object")
        return found

    def refused(number: str) -> None:
        raise Damaged(f"its numbers must be integers, got {shown(number)}")

    try:
        whole = text.decode()
    except UnicodeDecodeError as error:
        raise Damaged(f"it is not UTF-8: {error.reason} at byte {error.start}") from None
    return parse_object(whole, object_pairs_hook=once, parse_float=refused, parse_constant=refused)


def check_shape(content: Mapping[str, Any]) -> None:
    """Check all fields of a lock; its digests are not compared.

    Raises:
        Misshapen: a field is missing, unknown, of another type or out of its bounds, or
            contradicts another.
    """
    algorithm, tokenizers = content.get("hash"), content.get("tokenizers")
    top = _Given(
        digits=HASH_DIGITS.get(algorithm, 16) if isinstance(algorithm, str) else 16,
        tokenizers=len(tokenizers) if isinstance(tokenizers, list) else 0,
    )
    _object(_LOCK)(content, "", top)
    given = replace(top, sources=content["sources"]["rows"], files=len(content["files"]))
    about = content["about"]
    if about is not None:
        rows, named = len(given.sources), about["sources"]
        _require(len(named) == rows, "about.sources", f"{rows}, one of each source", named)
    _tokens(content["tokens"], "tokens", given)
    kind = content["settings"].get("kind")
    _one_of(*_SETTINGS)(kind, "settings.kind", given)
    _object({"kind": _one_of(kind), kind: _SETTINGS[kind]})(content["settings"], "settings", given)
    for name, subset in content["subsets"].items():
        _subset(subset, f"subsets.{name}", given)
        for number, skip in enumerate(subset["skip"] or ()):
            if kind == "run" and "source" in skip:
                most = len(subset["sources"]) - 1
                _number_text(most)(skip["source"], f"subsets.{name}.skip[{number}].source", given)


def _require(is_right: bool, where: str, expected: str, value: object) -> None:
    if not is_right:
        raise Misshapen(where, expected, value)


def _integer(least: int = 0, most: int = INT64_MAX) -> Rule:
    bounds = f"an integer from {least}" + (f" to {most}" if most < INT64_MAX else "")
    return Rule(
        lambda value, where, _: _require(
            type(value) is int and least <= value <= most, where, bounds, value
        ),
        {"type": "integer", "minimum": least, "maximum": most},
    )


def _text(pattern: str = ".*", expected: str = "text") -> Rule:
    form = re.compile(pattern, re.DOTALL)

    def check(value: Any, where: str, _: _Given) -> None:
        is_text = isinstance(value, str) and _WRITABLE.fullmatch(value)
        _require(bool(is_text and form.fullmatch(value)), where, expected, value)

    is_free = {".*": {}, ".+": {"minLength": 1}}
    return Rule(check, {"type": "string", **is_free.get(pattern, {"pattern": f"^({pattern})$"})})


_WRITABLE = re.compile("[^\0\ud800-\udfff]*")  # in UTF-8, as a path


def _hex(digits: int) -> Rule:
    return _text(f"[0-9a-f]{{{digits}}}", f"{digits} hexadecimal digits")


def _number_text(most: int) -> Rule:
    return Rule(
        lambda value, where, _: _require(
            value in map(str, range(most + 1)), where, f"a number from 0 to {most} as text", value
        ),
        {"type": "string"},
    )


def _one_of(*values: Any) -> Rule:
    expected = " or ".join(map(shown, values))
    return Rule(
        lambda value, where, _: _require(
            any(value == each and type(value) is type(each) for each in values),
            where,
            expected,
            value,
        ),
        {"enum": list(values)},
    )


def _either(*rules: Rule, expected: str) -> Rule:
    def check(value: Any, where: str, given: _Given) -> None:
        for each in rules:
            with contextlib.suppress(Misshapen):
                return each(value, where, given)
        raise Misshapen(where, expected, value)

    return Rule(check, {"anyOf": [rule.schema for rule in rules]})


def _or_null(rule: Rule) -> Rule:
    return Rule(
        lambda value, where, given: None if value is None else rule(value, where, given),
        {"anyOf": [{"type": "null"}, rule.schema]},
    )


def _list(rule: Rule, least: int = 0) -> Rule:
    def check(value: Any, where: str, given: _Given) -> None:
        is_list = isinstance(value, list) and len(value) >= least
        _require(is_list, where, f"a list of at least {least} values", value)
        for number, one in enumerate(value):
            rule(one, f"{where}[{number}]", given)

    return Rule(check, {"type": "array", "minItems": least, "items": rule.schema})


def _tuple(*rules: Rule) -> Rule:
    def check(value: Any, where: str, given: _Given) -> None:
        is_tuple = isinstance(value, list) and len(value) == len(rules)
        _require(is_tuple, where, f"a list of {len(rules)} values", value)
        for number, (rule, one) in enumerate(zip(rules, value, strict=True)):
            rule(one, f"{where}[{number}]", given)

    sizes = {"minItems": len(rules), "maxItems": len(rules)}
    return Rule(check, {"type": "array", "prefixItems": [rule.schema for rule in rules], **sizes})


def _object(fields: Mapping[str, Rule]) -> Rule:
    rules = {name.removesuffix("?"): rule for name, rule in fields.items()}
    others = rules.pop("*", None)
    needed = [name for name in rules if name in fields]

    def check(value: Any, where: str, given: _Given) -> None:
        _require(isinstance(value, dict), where, "an object", value)
        for name in needed:
            _require(name in value, where, f"an object with {name}", [*value])
        for name, one in value.items():
            rule = rules.get(name, others)
            if rule is None:
                raise Misshapen(where, f"an object of {', '.join(rules)}", name)
            rule(one, f"{where}.{name}", given)

    schema = {
        "type": "object",
        "properties": {name: rule.schema for name, rule in rules.items()},
        "required": needed,
        "additionalProperties": False if others is None else others.schema,
    }
    return Rule(check, schema)


def _check_row(value: Any, where: str, given: _Given) -> None:
    _integer(0, len(given.sources) - 1)(value, where, given)


def _check_file(value: Any, where: str, given: _Given) -> None:
    is_row = type(value) is int and 0 <= value < given.files
    _require(is_row, where, f"a row of the {given.files} files", value)


def _check_range(value: Any, where: str, given: _Given) -> None:
    _PAIR(value, where, given)
    _require(value[0] < value[1], where, "a range [begin, end) with begin < end", value)


def _check_value(value: Any, where: str, given: _Given) -> None:
    """Check a value of a recipe, whose reader has rules of its own."""
    _require(given.depth < _DEEPEST, where, f"at most {_DEEPEST} values deep", value)
    inner = replace(given, depth=given.depth + 1)
    if isinstance(value, dict):
        _object({"*": _value} | {f"{name}?": _path for name in PATHS})(value, where, inner)
    elif isinstance(value, list):
        _list(_value)(value, where, inner)
    elif type(value) is int:
        _integer(-INT64_MAX)(value, where, given)
    elif value is not None and not isinstance(value, bool):
        _TEXT(value, where, given)


_COUNT, _SIZE, _TEXT = _integer(), _integer(1), _text()
_ANY = Rule(lambda *_: None, {})
_row = Rule(_check_row, _COUNT.schema)
"""A row of ``sources``."""
_file = Rule(_check_file, _COUNT.schema)
"""A row of ``files``."""
_PAIR = _tuple(_COUNT, _COUNT)
_range = Rule(_check_range, _PAIR.schema)
"""[begin, end)."""
_value = Rule(_check_value, {})
_path = Rule(lambda value, *more: (_row if type(value) is int else _value)(value, *more), {})
"""A row in place of a path; sources in a mix may have such a name too."""
_FLAG, _LENGTH, _SEED = _one_of(True, False), _integer(1, INT32_MAX - 1), _integer(0, 2**32 - 1)
PATHS = ("path", "labels", "loss_mask")
_NUMBER = _either(
    _COUNT,
    _text(r"-?\d{1,400}(\.\d{1,400})?(e[+-]?\d{1,4})?|\d{1,400}/\d{1,400}|exact"),
    expected="a number, or one as text",
)
_LONG = _one_of("split", "truncate", "skip")
_SKIPS = _list(
    _object({"steps?": _TEXT, "move?": _FLAG, "documents?": _file, "source?": _TEXT,
             "from_step?": _COUNT, "remove?": _FLAG})
)  # fmt: skip
_SUBSET_SHARE = _either(
    _COUNT, _text(r"\d{1,400}/\d{1,400}|0x[0-9a-f]{16}"), expected="a share or a threshold"
)
_RUN_SOURCE = _object(
    {**{f"{name}?": _row for name in PATHS}, "path": _row, "weight?": _NUMBER,
     "shuffle_name?": _TEXT, "subset?": _SUBSET_SHARE, "held_out?": _SUBSET_SHARE,
     "subset_seed?": _SEED}
)  # fmt: skip
_RUN = {
    "order": _object(
        {"name": _TEXT, "python_sum?": _one_of("plain", "compensated"), "*": _value}
    ),
    "sequence_length": _LENGTH,
    "variance_buffer": _or_null(_NUMBER),
    "surplus": _or_null(_NUMBER),
    "tail": _one_of("drop", "pad", "wrap"),
    "seed": _SEED,
    "data_parallel_size": _or_null(_SIZE),
    "micro_batch_size": _or_null(_SIZE),
    "gradient_accumulation_steps": _or_null(_SIZE),
    "consumed_samples": _COUNT,
    "phases": _list(_COUNT),
    "dataloader": _one_of("single"),
    "iterations_to_skip?": _list(_SIZE),
    "data": _object({
        "split": _or_null(_TEXT), "documents_alpha": _or_null(_NUMBER), "apart": _FLAG,
        "train": _list(_RUN_SOURCE, 1), "valid?": _list(_RUN_SOURCE), "test?": _list(_RUN_SOURCE),
    }),
    "batch": _object({
        "stages": _list(_tuple(_COUNT, _SIZE), 1), "ramp": _or_null(_tuple(_COUNT, _COUNT, _COUNT)),
        "stepped": _FLAG,
    }),
    "target": _object({"kind": _TEXT, "value": _NUMBER, "per_source": _list(_NUMBER)}),
    "evaluation": _object({
        "interval": _SIZE, "iterations": _COUNT, "batch_size": _or_null(_SIZE),
        "micro_batch_size": _or_null(_SIZE), "start": _COUNT, "alone": _FLAG, "full": _FLAG,
        "multiple": _FLAG,
    }),
    "version": _or_null(_TEXT),
    "exact?": _FLAG,
    "skip?": _SKIPS,
    "amend?": _object({
        "num_samples": _SIZE, "consumed_samples": _or_null(_COUNT),
        "began": _list(_object({"path": _row, "weight": _or_null(_NUMBER)}), 1),
        "changes": _list(_object({"consumed_samples": _COUNT, "blend": _list(
            _object({"path": _row, "weight": _NUMBER}), 1)})),
    }),
}  # fmt: skip
_RECIPE_SOURCE = _object({"path": _row, "*": _value})
_COLUMNS = _object({
    "sources": _or_null(_list(_COUNT)),
    "proportions?": _either(_object({"shares_of_stage": _COUNT}), _list(_NUMBER),
                            expected="proportions"),
})  # fmt: skip
_MIX = _either(_COLUMNS, _object({"*": _value}), expected="a mix")
_RECIPE = {
    "sources": _object({"*": _RECIPE_SOURCE}),
    "stages": _object({"*": _object({"mix": _MIX, "*": _value})}),
    "evaluation?": _object({"source": _RECIPE_SOURCE, "*": _value}),
    "past?": _object({"read?": _object({"*": _object({"documents?": _file, "*": _value})}),
                      "*": _value}),
    "mix_changes?": _object({"file": _file, "sources": _list(_TEXT)}),
    "skip?": _SKIPS,
    "*": _value,
}  # fmt: skip
_SETTINGS = {"run": _object(_RUN), "recipe": _object(_RECIPE)}
ADDRESS = r"[a-z][a-z0-9+.-]*://\S{1,2000}"
_ADDRESS = _text(ADDRESS, "an address such as https://example.org/data")
_ABOUT = _object({"title?": _TEXT, "licence?": _TEXT, "version?": _TEXT, "address?": _ADDRESS})
_tokenizer = Rule(
    lambda value, where, given: _integer(0, given.tokenizers - 1)(value, where, given),
    _COUNT.schema,
)
"""A row of ``tokenizers``."""
_hashes = Rule(
    lambda value, where, given: _hex(given.digits)(value, where, given),
    _text("|".join(f"[0-9a-f]{{{digits}}}" for digits in HASH_DIGITS.values())).schema,
)
"""A hash by the algorithm of the lock."""
_SOURCE = _tuple(
    _text(".+"), _hex(32), _hashes, *4 * [_COUNT], _text(r"[a-z]+\d+", "a token type"),
    _list(_tokenizer), _or_null(_hex(64)), _or_null(_ADDRESS),
)  # fmt: skip
_TOKENIZER = {"name": _text(".+"), "fingerprint": _TEXT, "special_tokens": _FLAG,
              "eod": _or_null(_COUNT)}  # fmt: skip
_LOCK = {
    "format": _one_of(FORMAT),
    "version": _one_of(VERSION),
    "written_by": _TEXT,
    "settings": _object({"*": _ANY}),
    "root": _TEXT,
    "hash": _one_of(*HASH_DIGITS),
    "sources": _object({
        "columns": _tuple(*(_one_of(name) for name in SOURCE_COLUMNS)),
        "rows": _list(_SOURCE, 1),
    }),
    "tokenizers": _list(_object(_TOKENIZER)),
    "about": _or_null(_object({"run": _ABOUT, "sources": _list(_or_null(_ABOUT))})),
    "dialect": _one_of("megatron", "neox", "paddlenlp"),
    "tokens": _or_null(_object({
        "chunk_bytes": _or_null(_COUNT), "hashes": _list(_text("[0-9a-f]*"))})),
    "files": _list(_object({"path": _text(".+"), "bytes": _COUNT, "sha256": _hex(64)})),
    "subsets": _object(dict.fromkeys(("train", "valid?", "test?"), _ANY)),
    "digests": _object({name: _hex(64) for name in SECTIONS}),
    "digest": _hex(64),
}  # fmt: skip
_SUBSET = {
    "samples": _SIZE,
    "sources": _list(_row, 1),
    "index": _object({"order": _TEXT, "*": _ANY}),
    "steps": _list(_tuple(_COUNT, _COUNT, _SIZE), 1),
    "past_steps": _COUNT,
    "masked_rows": _integer(0, INT32_MAX),
    "shapes": _list(_tuple(_COUNT, _or_null(_SIZE), _or_null(_SIZE)), 1),
    "targets": _list(_or_null(_tuple(_one_of("labels", "loss_mask"), _row)), 1),
    "rounds": _SIZE,
    "every": _or_null(_SIZE),
    "skip": _or_null(_SKIPS),
    "note": _object(
        {
            "order": _TEXT,
            "names": _list(_or_null(_TEXT), 1),
            "settings": _list(_tuple(_TEXT, _either(_TEXT, _SEED, expected="text or an integer"))),
        }
    ),
    "receipts": _object({"block_steps": _SIZE, "blocks": _list(_hex(32), 1), "total": _hex(32)}),
}
_SAMPLES = {"order": _TEXT, "documents": _range, "sequence_length": _LENGTH,
            "extra": _integer(0, 1), "seed": _SEED, "samples": _SIZE, "epochs": _SIZE}  # fmt: skip
_TABLE = {"order": _TEXT, "common": _object({"*": _ANY}), "columns": _list(_TEXT),
          "rows": _list(_list(_ANY), 1)}  # fmt: skip
_WORD = _text(r"0x[0-9a-f]{16}")
_KEYED = {
    **_SAMPLES,
    "name": _TEXT,
    "members?": _object({"seed": _SEED, "name": _TEXT, "first": _WORD, "last": _WORD}),
}
_NODES: dict[str, dict[str, Rule]] = {
    "arrays": {**_SAMPLES, "final_epoch_apart": _FLAG, "least_seen?": _COUNT},
    "epoch": {**_KEYED, "epochs_mixed": _SIZE,
              "left_over": _one_of("drop", "carry"), "without?": _file},
    "blocks": {**_KEYED, "block_tokens": _SIZE},
    "window": {**_KEYED},
    "packed": {**_KEYED, "max_documents": _COUNT, "long_documents": _LONG,
               "align?": _integer(2, 2**24)},
    "bins": {**_KEYED, "capacity": _integer(2, INT32_MAX), "packed": _FLAG,
             "long_documents": _LONG},
    "blend": {**_TABLE, "rule": _one_of("greedy", "divisor", "exhaustive"),
              "weights": _list(_ANY),
              "samples": _SIZE, "uncounted?": _SIZE},
    "stages": {**_TABLE, "stages": _list(_object({"rule": _TEXT, "*": _ANY}), 1),
               "first_position?": _SIZE},
    "sequence": {"order": _TEXT, "parts": _list(_object({
        "ranges": _list(_tuple(_COUNT, _COUNT, _SIZE), 1), "index": _ANY}), 1)},
    "skipped": {"order": _TEXT, "end": _SIZE, "left_out": _list(_range), "moved": _list(_range),
                "masks": _list(_object({"source": _row, "from": _COUNT, "file": _or_null(_file),
                                        "remove?": _one_of(True)})),
                "index": _ANY},
}  # fmt: skip
_OF_ONE = tuple(name for name, fields in _NODES.items() if "sequence_length" in fields)
_IN_PARTS = ("blend", "stages", *_OF_ONE)
_STAGE = {"rule": _TEXT, "samples": _SIZE, "sources?": _list(_row, 1), "begins": _list(_COUNT)}
_RULES: dict[str, dict[str, Rule]] = {
    "stratified": {"shares": _list(_SIZE)},
    "per_stream": {"shares": _list(_SIZE),
                   "batch": _either(_SIZE, _list(_SIZE), expected="one batch, or a list of them")},
    "random": {"shares": _list(_SIZE), "seed": _SEED, "name": _TEXT, "period": _SIZE},
    "changed": {"file": _file, "changes": _range, "position": _COUNT,
                "columns": _list(_integer(-1)), "batch?": _SIZE, "first?": _ANY},
}  # fmt: skip


def _tokens(tokens: Any, where: str, given: _Given) -> None:
    is_whole = given.digits == HASH_DIGITS["sha256"]
    if tokens is None:
        _require(not is_whole, where, "hashes of every .bin, as hash is sha256", tokens)
        return
    chunk, hashes = tokens["chunk_bytes"], tokens["hashes"]
    sizes = [row[SOURCE_COLUMNS.index("bin_bytes")] for row in given.sources]
    if is_whole:
        _require(chunk is None, f"{where}.chunk_bytes", "null, as hash is sha256", chunk)
        counts = [1] * len(sizes)
    else:
        is_size = chunk is not None and chunk >= LEAST_CHUNK and not chunk & (chunk - 1)
        _require(is_size, f"{where}.chunk_bytes", f"a power of two from {LEAST_CHUNK}", chunk)
        counts = [ceil_div(size, chunk) for size in sizes]
    expected = f"{given.digits} digits for each chunk"
    is_long = list(map(len, hashes)) == [given.digits * count for count in counts]
    _require(is_long, f"{where}.hashes", expected, hashes)


def _subset(subset: Any, where: str, given: _Given) -> None:
    _object(_SUBSET)(subset, where, given)
    steps, samples, receipts = subset["steps"], subset["samples"], subset["receipts"]
    first, _, past = steps[0] if steps[0][1] == 0 else (0, 0, 0)
    at = first
    for row, (begin, size, number) in enumerate(steps):
        is_next = begin == at and (size > 0 or row == 0)
        _require(is_next, f"{where}.steps[{row}]", f"steps from position {at} on", steps[row])
        at += size * number
    _require(at == samples > first, f"{where}.samples", f"{at}, the end of its steps", samples)
    total = sum(number for _, _, number in steps)
    _integer(1, MOST_STEPS)(total, f"the number of {where}.steps", given)
    _integer(0, total)(subset["past_steps"], f"{where}.past_steps", given)
    _integer(1, total - past)(receipts["block_steps"], f"{where}.receipts.block_steps", given)
    blocks = ceil_div(total - past, receipts["block_steps"])
    expected = f"{blocks} receipts, of {receipts['block_steps']} steps each"
    _require(len(receipts["blocks"]) == blocks, f"{where}.receipts.blocks", expected,
             len(receipts["blocks"]))  # fmt: skip
    many = len(subset["sources"])
    for place, values in (("note.names", subset["note"]["names"]), ("targets", subset["targets"])):
        _require(len(values) == many, f"{where}.{place}", f"{many}, one of each source", values)
    firsts = [shape[0] for shape in subset["shapes"]]
    in_order = firsts[0] == 0 and firsts == sorted({*firsts}) and firsts[-1] < samples
    _require(in_order, f"{where}.shapes", f"in order from position 0 to {samples - 1}", firsts)
    skips, index = subset["skip"], subset["index"]
    masks = [each for each in skips or () if "steps" not in each]
    is_same = (skips is not None) == (index["order"] == "skipped")
    removes = [each.get("remove", False) for each in masks]
    is_same = is_same and [each.get("remove", False) for each in index.get("masks", ())] == removes
    _require(is_same, f"{where}.skip", "the skips of its index", skips)
    rows = [given.sources[row] for row in subset["sources"]]
    inside = replace(given, sources=rows, most=samples)
    begin, end = _node(index, f"{where}.index", inside)
    _require(begin == first, f"{where}.index", f"of first position {first}", begin)
    _require(samples <= end, f"{where}.samples", f"at most {end}, as its index has", samples)


def _node(
    node: Any, where: str, given: _Given, orders: Sequence[str] = tuple(_NODES)
) -> tuple[int, int]:
    """Check a node; return the first of its positions that serves a sample, and their end."""
    _object({"order": _one_of(*orders), "*": _ANY})(node, where, given)
    order = node["order"]
    _object(_NODES[order])(node, where, given)
    if order == "skipped":
        return _skipped(node, where, given)
    if order == "sequence":
        return _sequence(node, where, given, [name for name in orders if name in _IN_PARTS])
    if order in ("blend", "stages"):
        return _several(node, where, given)
    _require(len(given.sources) == 1, where, f"of {len(given.sources)} sources", order)
    (source,), epochs = given.sources, node["epochs"]
    _integer(1, source[_SEQUENCES])(node["documents"][1], f"{where}.documents[1]", given)
    tokens = epochs * source[_TOKENS]
    most = tokens if order in ("packed", "bins") else ceil_div(tokens, node["sequence_length"])
    _integer(1, min(most, INT64_MAX))(node["samples"], f"{where}.samples", given)
    _integer(0, node["samples"])(node.get("least_seen", 0), f"{where}.least_seen", given)
    return 0, node["samples"]


def _skipped(node: Any, where: str, given: _Given) -> tuple[int, int]:
    end, left_out, moved = node["end"], node["left_out"], node["moved"]
    edges = [*itertools.chain.from_iterable(left_out), end]
    _require(edges == sorted(edges), f"{where}.left_out", f"ranges in order up to {end}", left_out)
    is_part = moved == [each for each in left_out if each in moved]
    _require(is_part, f"{where}.moved", "ranges of left_out", moved)
    inside = replace(given, most=end)
    first, last = _node(node["index"], f"{where}.index", inside, ("sequence", *_IN_PARTS))
    _require(end <= last, f"{where}.end", f"at most {last}, as the index has", end)
    return first, end + sum(b - a for a, b in moved)


def _sequence(node: Any, where: str, given: _Given, orders: Sequence[str]) -> tuple[int, int]:
    begin = total = widest = 0
    for number, part in enumerate(node["parts"]):
        place = f"{where}.parts[{number}]"
        rows = part["index"].get("rows") if isinstance(part["index"], dict) else None
        many = len(rows) if isinstance(rows, list) else 1
        widest = max(widest, many)
        inside = replace(given, sources=given.sources[:many])
        first, end = _node(part["index"], f"{place}.index", inside, orders)
        _require(first == 0 or number == 0, place, "of first position 0", first)
        begin += first
        is_whole = part["index"]["order"] != "stages" or part["ranges"] == [[0, end, 1]]
        _require(is_whole, f"{place}.ranges", f"{[[0, end, 1]]}, all of its stages", part["ranges"])
        size = 0
        for a, b, times in part["ranges"]:
            _require(a <= b <= end, f"{place}.ranges", f"ranges up to {end}", [a, b, times])
            size += (b - a) * times
        most = given.most - total
        _require(size <= most, f"{place}.ranges", f"of at most {most} samples", part["ranges"])
        total += size
    _require(widest == len(given.sources), f"{where}.parts", "one part of all sources", widest)
    return begin, total


def _several(node: Any, where: str, given: _Given) -> tuple[int, int]:
    """Check a node of a table of sources."""
    common, columns, rows = (node[name] for name in ("common", "columns", "rows"))
    is_table = len({*columns}) == len(columns) and not {*columns} & {*common}
    _require(is_table, f"{where}.columns", "names that are no others", columns)
    _require(
        len(rows) == len(given.sources), f"{where}.rows", f"{len(given.sources)} rows", len(rows)
    )
    orders: Sequence[str] = ("sequence", *_OF_ONE)
    if "uncounted" in node:
        _one_of("greedy")(node["rule"], f"{where}.rule", given)
        orders = ("arrays",)
    for number, (row, source) in enumerate(zip(rows, given.sources, strict=True)):
        place = f"{where}.rows[{number}]"
        _require(len(row) == len(columns), place, f"of {len(columns)} values", row)
        own = {name: value for name, value in zip(columns, row, strict=True) if value is not None}
        _node({**common, **own}, place, replace(given, sources=[source], most=INT64_MAX), orders)
    if node["order"] == "blend":
        weight = _DOUBLE if node["rule"] == "greedy" else _SIZE
        _tuple(*len(rows) * [weight])(node["weights"], f"{where}.weights", given)
        most = sum(node["weights"]) if node["rule"] == "exhaustive" else given.most
        _integer(1, min(most, given.most))(node["samples"], f"{where}.samples", given)
        return 0, node["samples"]
    first = end = node.get("first_position", 0)
    for number, stage in enumerate(node["stages"]):
        _stage(stage, f"{where}.stages[{number}]", replace(given, sources=rows), {**_STAGE})
        end += stage["samples"]
    _require(end <= given.most, f"{where}.stages", f"of at most {given.most} samples", end)
    return first, end


_DOUBLE = _text(r"0x[01]\.[0-9a-f]{1,13}p[+-]\d{1,4}", "a double such as 0x1.8p-1")


def _stage(stage: Any, where: str, given: _Given, fields: dict[str, Rule]) -> None:
    """Check a stage, or the rule that a changed mix begins with."""
    kinds = _RULES if fields else {name: _RULES[name] for name in _RULES if name != "changed"}
    _object({"rule": _one_of(*kinds), "*": _ANY})(stage, where, given)
    _object({**fields, "rule": _TEXT, **kinds[stage["rule"]]})(stage, where, given)
    streams = len(stage.get("sources", given.sources))
    for name in ("shares", "columns", "begins", "batch"):
        value = stage.get(name)
        if isinstance(value, list):
            count = streams if fields else min(len(value), streams)
            _require(len(value) == count, f"{where}.{name}", f"of {streams} streams", value)
    if stage["rule"] == "changed" and "first" in stage:
        _stage(stage["first"], f"{where}.first", replace(given, sources=[None] * streams), {})


def lock_schema() -> dict[str, Any]:
    """Return the tables as a JSON schema (2020-12); rules between fields are not in it."""

    def tagged(field: str, tables: Mapping[str, Mapping[str, Rule]], **more: Rule) -> Any:
        objects = {tag: {**more, **fields, field: _one_of(tag)} for tag, fields in tables.items()}
        return {"anyOf": [_object(fields).schema for fields in objects.values()]}

    node, draws, stage = ({"$ref": f"#/$defs/{name}"} for name in ("node", "draws", "stage"))
    nodes = {name: dict(fields) for name, fields in _NODES.items()}
    nodes["skipped"]["index"] = Rule(_ANY.check, node)
    nodes["stages"]["stages"] = _list(Rule(_ANY.check, stage), 1)
    ranges = _list(_tuple(_COUNT, _COUNT, _SIZE), 1)
    nodes["sequence"]["parts"] = _list(_object({"ranges": ranges, "index": Rule(_ANY.check, node)}))
    rules = {name: dict(fields) for name, fields in _RULES.items()}
    rules["changed"]["first?"] = Rule(_ANY.check, draws)
    plain = {name: fields for name, fields in rules.items() if name != "changed"}
    subset = Rule(_ANY.check, _object({**_SUBSET, "index": Rule(_ANY.check, node)}).schema)
    settings = [_object({"kind": _one_of(kind), kind: rule}) for kind, rule in _SETTINGS.items()]
    fields = {
        **_LOCK,
        "settings": _either(*settings, expected="settings"),
        "subsets": _object({"train": subset, "valid?": subset, "test?": subset}),
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": FORMAT,
        **_object(fields).schema,
        "$defs": {
            "node": tagged("order", nodes),
            "stage": tagged("rule", rules, **_STAGE),
            "draws": tagged("rule", plain),
        },
    }
