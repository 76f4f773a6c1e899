"""Settings as flags and framework files give them.

Each reader fills the `Settings` it finds and leaves the rest None; `merged` lays flags over files.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib import resources
from typing import Any

from megaindex.configs.batch_schedule import parse_count
from megaindex.configs.run import Source, TargetKind
from megaindex.errors import InvalidArgument
from megaindex.index.order_settings import NeoxDocumentsOrder
from megaindex.validation import check_between, check_weights, make_plain, read_number


def parse_blend(
    words: Sequence[str], weights: Sequence[str] | None, flag: str
) -> tuple[Source, ...]:
    """``P``, ``P P …`` or ``w P w P …`` as sources, read as Megatron reads them.

    An even number of words with a number in every odd place is a weighted blend; ``weights`` gives
    the weights apart.
    """
    pairs = list(zip(words[::2], words[1::2], strict=False))
    numbers = [n for weight, _ in pairs if isinstance(n := read_number(weight), float)]
    inline = bool(pairs) and len(words) % 2 == 0 and len(numbers) == len(pairs)
    if numbers and not inline:
        raise InvalidArgument(
            f"{flag}: {' '.join(words)!r} mixes weights and bare paths; write a weight before "
            "every path, or none"
        )
    if inline and weights is not None:
        raise InvalidArgument(f"{flag} has weights already; remove --weights")
    if inline:
        return tuple(
            Source(path=path.strip(), weight=number)
            for number, (_, path) in zip(numbers, pairs, strict=True)
        )
    parsed = _weights(weights, len(words))
    return tuple(Source(path=p.strip(), weight=w) for p, w in zip(words, parsed, strict=True))


def parse_tokens(words: Sequence[str], weights: Sequence[str] | None) -> tuple[Source, ...]:
    """``T``, ``T T …`` as sources without files."""
    parsed = _weights(weights, len(words))
    return tuple(
        Source(tokens=_tokens(word), weight=weight)
        for word, weight in zip(words, parsed, strict=True)
    )


def _tokens(word: str) -> int:
    return check_between("--tokens-per-epoch", parse_count(word, "--tokens-per-epoch"), 1)


def _weights(weights: Sequence[str] | None, count: int) -> Sequence[float | None]:
    if weights is None:
        return [None] * count
    return check_weights("--weights", list(map(read_number, weights)), count)


TARGETS: dict[str, TargetKind] = {
    "epochs": "epochs",
    "train_iters": "iterations",
    "train_epochs": "loader_epochs",
    "train_samples": "samples",
    "train_tokens": "tokens",
}
# Fields that answer one question: a flag for one of them replaces all that a file says on it.
_GROUPS = (
    tuple(TARGETS),
    (
        "data_path",
        "tokens_per_epoch",
        "train_data_path",
        "valid_data_path",
        "test_data_path",
        "companions",
        "documents_alpha",
    ),
    ("data_parallel_size", "world_size"),
    ("batch_schedule", "rampup_batch_size"),
    ("variance_buffer", "mid_level_dataset_surplus"),
)

ORDER_FIELDS = {
    "separate_final_epoch": "separate_final_epoch",
    "final_epoch_threshold": "final_epoch_threshold",
    "exact_num_epochs": "train_data_exact_num_epochs",
    "epochs_mixed": "epochs_mixed",
    "left_over": "left_over",
}
"""Fields that set an order, by the names that its class has for them."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings under the names of the planner's flags; None where nothing was said."""

    order: str | None = None
    data_path: tuple[str, ...] | None = None
    """Paths, or weights and paths in turn."""
    train_data_path: tuple[str, ...] | None = None
    valid_data_path: tuple[str, ...] | None = None
    test_data_path: tuple[str, ...] | None = None
    tokens_per_epoch: tuple[str, ...] | None = None
    companions: Mapping[str, tuple[tuple[str, ...], ...]] | None = None
    """GPT-NeoX: labels, rejected text and its labels beside each path of a split, or empty."""
    documents_alpha: float | None = None
    """GPT-NeoX's weight_by_num_documents, with its alpha: see `Data`."""
    packing: NeoxDocumentsOrder | None = None
    """GPT-NeoX's pack_impl other than packed."""
    weights: tuple[str, ...] | None = None
    split: str | None = None
    seq_length: int | None = None
    micro_batch_size: int | None = None
    data_parallel_size: int | None = None
    gradient_accumulation_steps: int | None = None
    global_batch_size: int | None = None
    world_size: int | None = None
    tensor_model_parallel_size: int | None = None
    pipeline_model_parallel_size: int | None = None
    context_parallel_size: int | None = None
    batch_schedule: str | None = None
    rampup_batch_size: tuple[int, ...] | None = None
    epochs: str | None = None
    train_iters: int | None = None
    train_epochs: int | None = None
    """GPT-NeoX's, which are not --epochs: see `Target`."""
    train_samples: str | None = None
    train_tokens: str | None = None
    variance_buffer: str | None = None
    mid_level_dataset_surplus: str | None = None
    """Megatron's surplus of weighted blends: its variance_buffer is 1 and this."""
    tail: str | None = None
    seed: int | None = None
    eval_interval: int | None = None
    eval_iters: int | None = None
    eval_global_batch_size: int | None = None
    eval_micro_batch_size: int | None = None
    start_eval_at_iter: int | None = None
    skip_train: bool | None = None
    full_validation: bool | None = None
    multiple_validation_sets: bool | None = None
    dataloader_type: str | None = None
    framework_version: str | None = None
    """Release of Megatron-LM whose rules hold; None: the default one, or one that knows all."""
    consumed_samples: str | None = None
    separate_final_epoch: str | None = None
    final_epoch_threshold: float | None = None
    train_data_exact_num_epochs: int | None = None
    epochs_mixed: int | None = None
    left_over: str | None = None
    phase_transition_iterations: tuple[int, ...] | None = None
    coverage: str | None = None
    blend_counts: str | None = None
    notes: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    """Settings of the framework that concern its data and change nothing in the plan."""

    def __post_init__(self) -> None:
        make_plain(self, optional=_INTEGERS, called=flag_of)


_INTEGERS = tuple(field.name for field in fields(Settings) if field.type == "int | None")


def merged(base: Settings, over: Settings) -> Settings:
    """``over`` where it says something, else ``base``; alternatives are replaced together."""
    changes: dict[str, Any] = {name: getattr(over, name) for name in replaced_by(over)}
    changes["notes"] = base.notes + over.notes
    changes["ignored"] = base.ignored + over.ignored
    return replace(base, **changes)


def replaced_by(over: Settings) -> set[str]:
    """Names of the settings that ``over`` decides, alternatives of one question together."""
    said = {f.name for f in fields(Settings) if getattr(over, f.name) not in (None, ())}
    # A schedule and a global batch exclude each other, while a ramp needs one.
    for one, other in (
        ("batch_schedule", "global_batch_size"),
        ("global_batch_size", "batch_schedule"),
    ):
        if one in said and getattr(over, other) is None:
            said |= {other}
            break
    return said.union(*(group for group in _GROUPS if said.intersection(group)))


def flag_of(name: str) -> str:
    """Return the name that users know a field by: the planner's flag, or GPT-NeoX's key."""
    return name if name == "train_epochs" else "--" + name.replace("_", "-")


@cache
def argument_names(framework: str) -> frozenset[str]:
    """Return the names of all arguments that a framework has."""
    file = resources.files("megaindex.configs").joinpath(f"{framework}_arguments.txt")
    lines = file.read_text("utf-8").splitlines()
    return frozenset(line for line in lines if not line.startswith("#"))


ADAPTERS = {"neox": "megaindex.adapters.neox", "megatron": "megaindex.adapters.megatron"}
"""Modules of the adapters by the order of their framework."""
_LINE = re.compile(r"^\s*#\s*megaindex\.adapters\.(\w+)\.install\((.*)\)\s*$", re.MULTILINE)
_PLANNED = ("variance_buffer", "separate_final_epoch", "final_epoch_threshold")


def adapter_call(order: str, settings: Mapping[str, Any]) -> str:
    """Return a call such as ``megaindex.adapters.neox.install(variance_buffer="exact")``."""
    given = ", ".join(f"{name}={json.dumps(value)}" for name, value in settings.items())
    return f"{ADAPTERS[order]}.install({given})"


def settings_in_comments(text: str, order: str, where: str) -> dict[str, Any]:
    """Return the settings of the adapter calls in the comments of a configuration.

    Raises:
        InvalidArgument: a call of another framework's adapter, or with settings that no plan takes.
    """
    found: dict[str, Any] = {}
    for framework, arguments in _LINE.findall(text):
        said = _keywords(arguments)
        if said is None or framework != order or set(said) - set(_PLANNED):
            raise InvalidArgument(
                f"{where}: the comment megaindex.adapters.{framework}.install({arguments}) is not "
                f"planned; of the {order} adapter {', '.join(_PLANNED)} are: remove it"
            )
        found |= said
    if "variance_buffer" in found:
        found["variance_buffer"] = str(found["variance_buffer"])
    return found


def _keywords(arguments: str) -> dict[str, Any] | None:
    try:
        call = ast.parse(f"_({arguments})", mode="eval").body
        assert isinstance(call, ast.Call)
        names = [keyword.arg or "" for keyword in call.keywords]
        values = [ast.literal_eval(keyword.value) for keyword in call.keywords]
    except (SyntaxError, ValueError, AssertionError):
        return None
    return None if call.args else dict(zip(names, values, strict=True))
