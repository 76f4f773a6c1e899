"""Releases of Megatron-LM and its training programs."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, Literal

from megaindex.errors import InvalidArgument

DEFAULT_VERSION = "0.16.1"
NEWEST = "main"
_MAIN = (0, 19)
"""Release of megatron-core whose settings Megatron-LM main of August 2026 has."""


@dataclass(frozen=True, kw_only=True)
class Version:
    """Rules of a release of Megatron-LM."""

    since: tuple[int, int]
    """First release with these rules."""
    name: str = ""
    ramps: bool
    """True if ``--rampup-batch-size`` changes the batch, False if it is accepted and ignored."""
    eval_interval: int | None
    """Default of ``--eval-interval``; None: without the flag the run stops with a TypeError."""
    empty_loaders: bool
    """True if a blend without samples, such as that of ``--eval-iters 0``, is accepted; else the
    run stops with an AssertionError."""
    full_validation: Literal["samples", "ranks"]
    """Iterations of an evaluation with ``--full-validation``: one for each sample, or one for each
    sample of the rank with the most samples."""
    needs_validation: bool = True
    """True if a run with ``--eval-iters`` and without validation data stops as it evaluates."""
    first_skipped: Literal[0, 1] = 0
    """Number of the first iteration in ``--iterations-to-skip``."""

    @property
    def framework(self) -> str:
        """Framework and version, as printed."""
        release = f"{NEWEST}, 2026-08" if self.name == NEWEST else f"megatron-core {self.name}"
        return f"Megatron-LM ({release})"


_FIRST = Version(
    since=(0, 12), ramps=True, eval_interval=1000, empty_loaders=False, needs_validation=False,
    full_validation="samples",
)  # fmt: skip
_SETS = replace(_FIRST, since=(0, 14), needs_validation=True)
_RULES = (
    _FIRST,
    _SETS,
    replace(_SETS, since=(0, 16), eval_interval=None),
    replace(_SETS, since=(0, 17), eval_interval=None, first_skipped=1),
    Version(
        since=(0, 18), ramps=False, eval_interval=None, empty_loaders=False,
        full_validation="ranks", first_skipped=1,
    ),
)  # fmt: skip
_MAIN_RULES = replace(_RULES[-1], since=_MAIN, empty_loaders=True)

# First release with a setting; other settings are older than all releases above.
_SINCE = {
    "full_validation": (0, 14),
    "multiple_validation_sets": (0, 14),
    "phase_transition_iterations": (0, 16),
    "start_eval_at_iter": (0, 18),
    "eval_global_batch_size": (0, 18),
    "eval_micro_batch_size": (0, 18),
    "batch_schedule": (0, 18),
}
_FLAGS = {"batch_schedule": "--step-batch-size-schedule"}


def find_version(name: str) -> Version:
    """Return the rules of a release, such as ``0.16.1`` or ``main``."""
    match = re.fullmatch(r"(\d{1,3})\.(\d{1,3})(\.\w{1,8})?", name)
    number = _MAIN if name == NEWEST else (int(match[1]), int(match[2])) if match else (0, 0)
    if not _RULES[0].since <= number <= _MAIN:
        raise InvalidArgument(
            f"--framework-version: {name!r} is not a release of megatron-core from "
            f"{_text(_RULES[0].since)} to {_text(_MAIN)}, nor {NEWEST}; give one such as "
            f"{DEFAULT_VERSION} or {NEWEST}"
        )
    rules = [row for row in _RULES if row.since <= number][-1] if name != NEWEST else _MAIN_RULES
    return replace(rules, name=name)


def version_of(settings: Any) -> Version:
    """Return the release of the settings, else the default one, or main if that lacks a setting."""
    newer = {name: since for name, since in _SINCE.items() if getattr(settings, name) is not None}
    named = settings.framework_version
    version = find_version(named or DEFAULT_VERSION)
    number = _MAIN if version.name == NEWEST else _number(version.name)
    missing = {name: since for name, since in newer.items() if since > number}
    if not missing:
        return version
    if named is None:
        return find_version(NEWEST)
    name, since = next(iter(missing.items()))
    raise InvalidArgument(
        f"{_FLAGS.get(name, '--' + name.replace('_', '-'))} came with megatron-core "
        f"{_text(since)}, and --framework-version {named} lacks it; remove one of them"
    )


def _number(name: str) -> tuple[int, int]:
    major, minor = name.split(".")[:2]
    return int(major), int(minor)


def _text(number: tuple[int, int]) -> str:
    return ".".join(map(str, number))


# Ends of programs' paths by the reason for not planning them; empty: they build GPT datasets.
_REASONS = {
    "": ("pretrain_gpt.py", "pretrain_hybrid.py", "pretrain_mamba.py"),
    "its samples are not the GPT samples of --seq-length tokens; plan a GPT run": (
        "pretrain_bert.py", "pretrain_t5.py", "pretrain_ict.py", "pretrain_retro.py",
    ),
    "its own loader serves images and conversations": (
        "pretrain_vlm.py", "multimodal/train.py", "mimo/train.py", "mimo/pretrain_mimo",
    ),
    "reinforcement learning builds no datasets": ("train_rl.py",),
    "it does not read .bin/.idx pairs as pretrain_gpt.py does": (
        "modelopt/finetune.py", "modelopt/offline_feature_extract.py",
    ),
    "it mixes two corpora by a rule of its own": ("detxoify_lm/finetune_gpt.py",),
    "it evaluates prompts": ("msdp/main.py",),
    "it does not train": (
        "convert_model.py", "modelopt/generate.py", "modelopt/mmlu.py", "modelopt/prune.py",
        "modelopt/quantize.py", "modelopt/validate.py", "modelopt/export.py",
        "detxoify_lm/generate_samples_gpt.py", "tools/run_text_generation_server.py",
        "tools/run_hybrid_text_generation_server.py", "tools/run_inference_performance_test.py",
        "multimodal/run_text_generation.py", "inference/launch_inference_server",
        "inference/offline_inference", "tools/checkpoint/checkpoint_inspector.py",
    ),
}  # fmt: skip
PROGRAMS = {end.removesuffix(".py"): why for why, ends in _REASONS.items() for end in ends}
"""Ends of the paths of programs, and of modules with / for each dot: why each is not planned."""

_DATA = ("data_path", "tokens_per_epoch")
_PARALLEL = ("data_parallel_size", "world_size")

# Argument: the reason for not planning it, and the planner's settings that replace it.
REFUSED: dict[str, tuple[str, tuple[str, ...]]] = {
    "--mock-data": (
        "the samples are generated; pass --data-path, or --tokens-per-epoch, to plan the same run "
        "on data",
        _DATA,
    ),
    "--sft": ("supervised finetuning packs whole conversations of a JSON file", ()),
    "--finetune-hf-dataset": ("the data set is tokenized in the run", ()),
    "--perform-rl-step": ("reinforcement learning builds no datasets", ()),
    "--yaml-cfg": ("the arguments are in a file; give them as arguments", ()),
    "--batch-size": ("Megatron-LM refuses it; give --micro-batch-size", ("micro_batch_size",)),
    "--model-parallel-size": (
        "Megatron-LM refuses it; give --tensor-model-parallel-size",
        ("tensor_model_parallel_size",),
    ),
    "--data-efficiency-curriculum-learning": (
        "DeepSpeed's loader serves other samples; leave it out to plan the datasets",
        (),
    ),
    **dict.fromkeys(
        (
            "--train-desc-path",
            "--train-doc-idx-path",
            "--train-sample-idx-path",
            "--train-shuffle-idx-path",
        ),
        ("these arrays take the place of those built; leave them out to plan the datasets", ()),
    ),
    "--decrease-batch-size-if-needed": (
        "it lowers the global batch to whole micro batches of all ranks; pass --global-batch-size",
        ("global_batch_size",),
    ),
    "--tensor-parallel-num-weight-shards": (
        "it takes ranks from data parallelism; pass --data-parallel-size",
        _PARALLEL,
    ),
}

# Arguments that concern data and change neither the samples built nor those read.
IGNORED = frozenset((
    "--allow-ambiguous-pad-tokens", "--data-cache-path", "--dataloader-defer-npy-index-mmap",
    "--dataloader-fast-cache-load", "--dataloader-inter-document-masking", "--decoder-seq-length",
    "--eod-mask-loss", "--exit-duration-in-mins", "--exit-interval", "--fim-data",
    "--fim-eod-token", "--fim-fragment-rate", "--fim-middle-token", "--fim-no-prefix",
    "--fim-pad-token", "--fim-prefix-token", "--fim-rate", "--fim-split-sample", "--fim-spm-rate",
    "--fim-suffix-token",
    "--hybrid-context-parallel",
    "--no-create-attention-mask-in-dataloader", "--no-data-sharding", "--no-mmap-bin-files",
    "--num-dataset-builder-threads", "--num-workers", "--object-storage-cache-path",
    "--per-dataset-sequences-path", "--repeated-dataloader", "--reset-attention-mask",
    "--reset-position-ids", "--sample-rate", "--use-checkpoint-args", "--validation-set-names",
))  # fmt: skip

NOTES = {
    "--repeated-dataloader": "begins the samples anew where they end, which the plan does not show",
    "--fim-data": "rearranges the tokens within samples: the plan counts tokens before that",
    "--exit-interval": "may end the run before the plan does",
    "--use-checkpoint-args": "takes arguments from a checkpoint, which the plan does not read",
}
