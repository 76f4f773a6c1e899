"""Settings as given by flags and framework files.

A reader sets the fields that it finds and leaves the others None; `merged` combines two sources.
"""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib import resources
from typing import Any

from megaindex.errors import InvalidArgument
from megaindex.index.order_settings import NeoxDocumentsOrder, Order
from megaindex.index.skips import Skip, given_skips
from megaindex.settings.run_settings import TargetKind
from megaindex.validation import (
    check_flag,
    check_integer,
    check_text,
    make_plain,
)

TARGETS: dict[str, TargetKind] = {
    "epochs": "epochs",
    "train_iters": "iterations",
    "train_epochs": "loader_epochs",
    "train_samples": "samples",
    "train_tokens": "tokens",
}
# Alternative fields: a flag for one of them replaces a file's settings of the whole group.
_GROUPS = (
    tuple(TARGETS),
    (
        "data_path",
        "tokens_per_epoch",
        "length_histogram",
        "train_data_path",
        "valid_data_path",
        "test_data_path",
        "labels",
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
    "max_documents": "max_documents",
    "long_documents": "long_documents",
    "align": "align",
    "python_sum": "python_sum",
}
"""Fields of `Settings` by the names of the order classes' fields."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a run, named like the planner's flags; None for those not given.

    Numbers with suffixes, paths and lists are text, as on the command line; `resolve` parses them.

    Attributes:
        order: name of the order.
        data_path: paths, or weights and paths alternating; likewise for the paths of one split.
        train_data_path: paths of the training data, likewise.
        valid_data_path: paths of the validation data, likewise.
        test_data_path: paths of the test data, likewise.
        tokens_per_epoch: tokens of each source, in place of paths.
        length_histogram: files with the lengths of the documents of each source, in place of paths.
        labels: GPT-NeoX: labels for each path of a split, or empty.
        documents_alpha: GPT-NeoX's weighted_sampler_alpha, with weight_by_num_documents.
        packing: GPT-NeoX's pack_impl other than packed.
        weights: weight of each source.
        shuffle_names: name by which orders epoch, window and packed shuffle each source of
            training; empty: its fingerprint.
        document_subset: share of the tokens of each source of training that makes an epoch, such as
            ``1/16``, or its threshold; in orders epoch, window and packed.
        held_out: share of the tokens that training leaves out, or its threshold.
        subset_seed: part of the key by which both are chosen.
        split: shares of train, valid and test, such as ``969,30,1``.
        seq_length: tokens of a sample.
        micro_batch_size: samples of a micro batch of one rank.
        data_parallel_size: number of data-parallel ranks.
        gradient_accumulation_steps: micro batches of one rank in an iteration.
        global_batch_size: samples of an iteration.
        world_size: number of processes.
        tensor_model_parallel_size: processes that share each layer.
        pipeline_model_parallel_size: processes that share the layers.
        context_parallel_size: processes that share each sequence.
        batch_schedule: batch sizes by tokens consumed, such as ``0:768 250B:1536``.
        rampup_batch_size: start, increment and samples of Megatron's ramp-up.
        epochs: length of the run in epochs, such as ``1.5``; separated by commas: of each source.
        train_iters: length of the run in iterations.
        train_epochs: GPT-NeoX's setting, which differs from `epochs`: see `Target.kind`.
        train_samples: length of the run in samples.
        train_tokens: length of the run in tokens, such as ``300B``.
        variance_buffer: factor of the samples requested of each source of a blend, or ``exact``.
        mid_level_dataset_surplus: Megatron's surplus of weighted blends, 1 less than its
            variance_buffer.
        tail: policy for a partial last batch: drop, pad or wrap.
        seed: seed of the shuffles.
        eval_interval: iterations between two evaluations.
        eval_iters: batches of an evaluation.
        eval_global_batch_size: global batch size of evaluations.
        eval_micro_batch_size: micro batch size of evaluations.
        start_eval_at_iter: first iteration that evaluates.
        skip_train: evaluate once, without training.
        full_validation: read all of each validation dataset.
        multiple_validation_sets: evaluate each validation source separately.
        dataloader_type: ``single`` or ``cyclic``, of Megatron-LM.
        framework_version: release of Megatron-LM whose rules hold; None: 0.16.1, or main for
            newer settings.
        consumed_samples: samples of a run served so far.
        separate_final_epoch: treatment of the last epoch: auto, always or never.
        final_epoch_threshold: share of an epoch below which ``auto`` separates the last one.
        train_data_exact_num_epochs: epochs of the index.
        epochs_mixed: order epoch: epochs shuffled together.
        left_over: order epoch: drop or carry.
        max_documents: order packed: most documents of a sample.
        long_documents: order packed: treatment of documents longer than a sample.
        align: order packed: multiple of tokens at which documents begin in a sample.
        python_sum: orders of GPT-NeoX and its kin: Python's sum of weights and splits, plain or
            compensated.
        phase_transition_iterations: iterations at which Megatron-LM rebuilds its datasets.
        skip: steps that are not trained on, and documents whose loss is masked.
        iterations_to_skip: iterations, from 1, that Megatron-LM reads without training on them.
        coverage: method of the plan's coverage: auto, exact, expected or none.
        blend_counts: counting of a blend's draws: auto, exact or bounds.
        exact: GPT-NeoX's train_epochs under the adapter's exact mode.
        notes: warnings for the plan.
        ignored: settings of the framework's data that do not change the plan.
        of_framework: True if `train_iters` counts from the first iteration of the run, as in a
            framework's file; by flags alone it counts from `consumed_samples`.

    Raises:
        InvalidArgument: an integer field is not an integer.
    """

    order: str | None = None
    data_path: tuple[str, ...] | None = None
    train_data_path: tuple[str, ...] | None = None
    valid_data_path: tuple[str, ...] | None = None
    test_data_path: tuple[str, ...] | None = None
    tokens_per_epoch: tuple[str, ...] | None = None
    length_histogram: tuple[str, ...] | None = None
    labels: Mapping[str, tuple[str, ...]] | None = None
    documents_alpha: float | None = None
    packing: NeoxDocumentsOrder | None = None
    weights: tuple[str, ...] | None = None
    shuffle_names: tuple[str, ...] | None = None
    document_subset: str | None = None
    held_out: str | None = None
    subset_seed: int | None = None
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
    train_samples: str | None = None
    train_tokens: str | None = None
    variance_buffer: str | None = None
    mid_level_dataset_surplus: str | None = None
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
    consumed_samples: str | None = None
    separate_final_epoch: str | None = None
    final_epoch_threshold: float | None = None
    train_data_exact_num_epochs: int | None = None
    epochs_mixed: int | None = None
    left_over: str | None = None
    max_documents: int | None = None
    long_documents: str | None = None
    align: int | None = None
    python_sum: str | None = None
    phase_transition_iterations: tuple[int, ...] | None = None
    skip: tuple[Skip, ...] | None = None
    iterations_to_skip: tuple[int, ...] | None = None
    coverage: str | None = None
    blend_counts: str | None = None
    exact: bool | None = None
    notes: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    of_framework: bool | None = None

    def __post_init__(self) -> None:
        make_plain(self, optional=_INTEGERS, called=flag_of)


_INTEGERS = tuple(field.name for field in fields(Settings) if field.type == "int | None")
_OF_FILES = ("labels", "documents_alpha", "packing", "train_epochs", "exact", "notes", "ignored",
             "of_framework")  # fmt: skip
NAMES = tuple(field.name for field in fields(Settings) if field.name not in _OF_FILES)
"""Settings that flags and arguments of `make_plan` give, by name."""


def settings_by_name(given: Mapping[str, Any]) -> Settings:
    """Return the settings among the given values; None is not given, other names are left out."""
    values = {name: given[name] for name in NAMES if given.get(name) is not None}
    order = values.get("order")
    if isinstance(order, NeoxDocumentsOrder):
        values |= {"order": order.name, "packing": order}
    elif isinstance(order, Order):
        settings = {ORDER_FIELDS[name]: value for name, value in order.changed_settings.items()}
        if again := sorted(settings.keys() & values):
            raise InvalidArgument(f"{flag_of(again[0])} is a setting of the order too; give one")
        values |= {"order": order.name, **settings}
    types = {field.name: str(field.type) for field in fields(Settings)}
    return Settings(**{name: _as_flag(name, types[name], values[name]) for name in values})


def _as_flag(name: str, kind: str, value: Any) -> Any:
    """Return a Python value in the form in which the command has it."""
    several = isinstance(value, Iterable) and not isinstance(value, (str, bytes))
    if kind == "str | None":
        return ",".join(map(str, value)) if several else str(value)
    if kind == "tuple[str, ...] | None":
        words = value if several else [value]
        if name == "shuffle_names":  # text as it is: None and 3 are no names
            return tuple(check_text(flag_of(name), word) for word in words)
        return tuple(os.fspath(w) if isinstance(w, os.PathLike) else str(w) for w in words)
    if kind == "tuple[int, ...] | None":
        return tuple(check_integer(flag_of(name), v) for v in (value if several else [value]))
    if name == "skip":
        return given_skips(value)
    return check_flag(flag_of(name), value) if kind == "bool | None" else value


def merged(base: Settings, over: Settings) -> Settings:
    """Return ``base`` with the settings of ``over``, which replace their alternatives too."""
    changes: dict[str, Any] = {name: getattr(over, name) for name in replaced_by(over)}
    changes["notes"] = base.notes + over.notes
    changes["ignored"] = base.ignored + over.ignored
    return replace(base, **changes)


def replaced_by(over: Settings) -> set[str]:
    """Return the names of the settings given in ``over``, and of their alternatives."""
    given = {f.name for f in fields(Settings) if getattr(over, f.name) not in (None, ())}
    # a schedule and a global batch exclude each other, while a ramp needs one
    exclusive = {"batch_schedule", "global_batch_size"}
    if given & exclusive:
        given |= exclusive
    return given.union(*(group for group in _GROUPS if given.intersection(group)))


def flag_of(name: str) -> str:
    """Return the user's name of a field: the planner's flag, or GPT-NeoX's key."""
    return name if name == "train_epochs" else "--" + name.replace("_", "-")


@cache
def argument_names(framework: str) -> frozenset[str]:
    """Return the names of all arguments of a framework (neox or megatron)."""
    file = resources.files("megaindex.settings").joinpath(f"{framework}_arguments.txt")
    lines = file.read_text("utf-8").splitlines()
    return frozenset(line for line in lines if not line.startswith("#"))


ADAPTERS = {"neox": "megaindex.adapters.neox", "megatron": "megaindex.adapters.megatron"}
"""Modules of the adapters by the order of their framework."""
_LINE = re.compile(r"^\s*#\s*megaindex\.adapters\.(\w+)\.install\((.*)\)\s*$", re.MULTILINE)
_PLANNED = ("exact", "variance_buffer", "separate_final_epoch", "final_epoch_threshold")


def adapter_call(order: str, settings: Mapping[str, Any]) -> str:
    """Return a call such as ``megaindex.adapters.neox.install(variance_buffer="exact")``."""
    given = ", ".join(
        f"{name}={value if isinstance(value, bool) else json.dumps(value)}"
        for name, value in settings.items()
    )
    return f"{ADAPTERS[order]}.install({given})"


def settings_in_comments(text: str, order: str, where: str) -> dict[str, Any]:
    """Return the settings of the adapter calls in the comments of a configuration."""
    found: dict[str, Any] = {}
    for framework, arguments in _LINE.findall(text):
        given = _keywords(arguments)
        if given is None or framework != order or set(given) - set(_PLANNED):
            raise InvalidArgument(
                f"{where}: the comment megaindex.adapters.{framework}.install({arguments}) is not "
                f"planned; planned are {', '.join(_PLANNED)} of the {order} adapter: remove it"
            )
        found |= given
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
