"""A plan as settings of a framework's own configuration, or as a recipe (``--print-config``).

The framework with these settings alone does the run that was planned. Where the adapter is needed,
its call is a comment, which the planner reads back. A plan without such settings is refused. A
recipe has the same sources, weights and steps, and an order of its own.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megaindex.errors import InvalidArgument
from megaindex.index.frameworks import SPLITS, Split, parse_split
from megaindex.plan.advice import (
    adapter_settings,
    applies_buffer,
    changed_final_epoch,
    lacks_validation,
)
from megaindex.plan.model import SettingsPlan
from megaindex.run.run import Run
from megaindex.run.sizing import own_buffers, own_sources
from megaindex.settings.recipe import Recipe
from megaindex.settings.recipe_file import to_mapping
from megaindex.settings.run_settings import RunSettings
from megaindex.settings.settings import adapter_call
from megaindex.validation import check_choice

_ORDERS = {"neox": ("neox",), "megatron": ("megatron", "megatron-legacy")}
_NAMES = {"neox": "GPT-NeoX", "megatron": "Megatron"}
_ALL_TRAIN = "100,0,0"
_NOT_YAML = re.compile(r"[\x7f-\x9f\u2028\u2029\ufeff]")  # refused, or taken for the end of a line


def export_settings(plan: Any, run: RunSettings | Recipe | Run, framework: str) -> str:
    """Return the plan as NeoX YAML (``neox``), as Megatron flags (``megatron``) or as a recipe.

    Raises:
        InvalidArgument: the run is not one of the framework's, or its settings do not give it.
    """
    check_choice("--print-config", framework, (*_ORDERS, "recipe"))
    if type(run) not in _PRINTED:
        raise InvalidArgument(
            f"--print-config {framework}: the blend of the run changed on the way, which no "
            "settings say; its lock is read by megaindex.lock.open_run"
        )
    text: str = _PRINTED[type(run)](plan, run, framework)
    return text


def _printed_recipe(_: Any, recipe: Recipe, framework: str) -> str:
    """Return a recipe as JSON, which is YAML; refuse frameworks, none of which has its order."""
    if framework == "recipe":
        return _flow(to_mapping(recipe), indent=2)
    name = _NAMES[framework]
    orders = " and ".join(dict.fromkeys(map(recipe.order_of, recipe.sources)))
    stages = len(recipe.stages)
    parts = f"its {stages} stages, nor order {orders}" if stages > 1 else f"order {orders}"
    raise InvalidArgument(
        f"--print-config {framework}: {name} has no settings for {parts} of a recipe, which "
        f"megaindex's own loader trains on; for {name}'s own order, plan its sources by "
        f"--data-path and --order {_ORDERS[framework][0]}, and for the arrays of one source use "
        "`megaindex export`"
    )


def _printed_settings(plan: SettingsPlan, run: RunSettings, framework: str) -> str:
    if framework == "recipe":
        return recipe_yaml(plan, run)
    for reason in _refusals(plan, run, framework):
        raise InvalidArgument(f"--print-config {framework}: {reason}")
    comments = [plan.caution] if plan.caution else []
    if needed := adapter_settings(run):
        comments.append(adapter_call(run.row.order, needed))
    text = neox_yaml(plan, run) if framework == "neox" else megatron_flags(plan, run)
    return "\n".join([*(f"# {line}" for line in comments), text])


_PRINTED: dict[type, Any] = {RunSettings: _printed_settings, Recipe: _printed_recipe}


def _refusals(plan: SettingsPlan, run: RunSettings, framework: str) -> Iterator[str]:
    """Yield each part of the plan that the framework has no setting for, and the remedy."""
    name = _NAMES[framework]
    if run.row.order not in _ORDERS[framework]:
        yield (
            f"{name} does not run order {run.row.order}; plan with --order "
            f"{_ORDERS[framework][0]}, or write a recipe for megaindex's own loader"
        )
    if any(source.tokens is not None for source in run.data.train):
        yield "the settings need files; give --data-path in place of --tokens-per-epoch"
    if run.consumed_samples:
        yield (
            f"{name} counts train_iters from the first sample on; plan the whole run, without "
            "--consumed-samples"
        )
    if run.skip:
        yield (
            f"{name} has no setting for skips; print the run without them, and give them to the "
            "adapter's install(skip=…)"
        )
    if run.tail == "pad" and plan.samples_consumed % plan.global_batch_size:
        yield f"{name} masks no sample of its last batch; use --tail drop or wrap"
    if framework == "neox":
        yield from _refused_by_neox(run)
    else:
        yield from _refused_by_megatron(plan, run)


def _refused_by_neox(run: RunSettings) -> Iterator[str]:
    data = run.data
    if not run.batch.is_constant:
        yield "GPT-NeoX has one batch size; remove --batch-schedule or --rampup-batch-size"
    if run.phases:
        yield "GPT-NeoX has no phases; remove --phase-transition-iterations"
    if run.micro_batch_size is not None and run.gradient_accumulation_steps is None:
        yield (
            "GPT-NeoX accumulates 1 step unless the settings say otherwise; give "
            "--data-parallel-size or --gradient-accumulation-steps, or remove --micro-batch-size"
        )
    if run.evaluation.batch_size not in (None, run.batch.final):
        yield "GPT-NeoX evaluates with the batch of training; remove --eval-global-batch-size"
    if own_sources(run):
        if not (data.valid and data.test):
            yield (
                "GPT-NeoX takes paths for each of train, valid and test, or data_path alone; give "
                "--valid-data-path and --test-data-path too"
            )
        return
    if len(data.train) > 1 or data.train[0].weight is not None or run.target.per_source:
        yield (
            "GPT-NeoX reads train_data_paths, valid_data_paths and test_data_paths as a whole; "
            "divide each corpus with `megaindex split`, and give --train-data-path, "
            "--valid-data-path and --test-data-path"
        )
    if run.variance_buffer != "exact" and not applies_buffer(run):
        yield "GPT-NeoX applies no buffer to data_path; remove --variance-buffer"


def _refused_by_megatron(plan: SettingsPlan, run: RunSettings) -> Iterator[str]:
    buffer, own = run.variance_buffer, own_buffers(run)
    wanted = run.target.value if run.target.kind == "samples" else plan.samples_consumed
    rounded = run.row.order == "megatron-legacy" or run.tail != "drop"
    if _has_schedule(run) and wanted != plan.samples_consumed and rounded:
        yield (
            "Megatron rounds up the last batch of a schedule; give --train-samples "
            f"{plan.samples_consumed}"
        )
    if run.row.order == "megatron-legacy":
        if not run.batch.is_constant or run.phases or run.evaluation.batch_size is not None:
            yield (
                "Megatron-DeepSpeed has no batch schedule, phases or evaluation batch size; "
                "remove them"
            )
        if not applies_buffer(run) or changed_final_epoch(run):
            yield (
                "Megatron-DeepSpeed's buffer and shuffling are its own; remove --variance-buffer, "
                "--separate-final-epoch and --final-epoch-threshold"
            )
        return
    if lacks_validation(run, plan) and plan.rows("test"):
        yield (
            "Megatron-LM stops at its first evaluation without validation data; give "
            "--valid-data-path or a share of --split, or no test data"
        )
    unweighted = [count for count, value in own if value == 1.0]
    if isinstance(buffer, float) and buffer != 1 and own[0][1] == 1.0 and own[0][0] > 1:
        yield (
            "Megatron applies no buffer to paths without weights; give weights, or remove "
            "--variance-buffer"
        )
    if buffer == "exact" and any(count > 1 for count in unweighted):
        yield (
            "Megatron builds paths without weights for one epoch; give weights, or remove "
            "--variance-buffer"
        )


def neox_yaml(plan: SettingsPlan, run: RunSettings) -> str:
    """Return the settings as one NeoX file, in the flow style of NeoX's own files."""
    length = {"train_iters": plan.train_iters}
    if run.target.kind == "loader_epochs":
        length = {"train_epochs": int(run.target.value)}
    settings = {
        **length,
        "seq_length": plan.sequence_length,
        "train_batch_size": plan.global_batch_size,
        "train_micro_batch_size_per_gpu": run.micro_batch_size,
        "gradient_accumulation_steps": run.gradient_accumulation_steps,
        "seed": run.seed,
        "eval_interval": run.evaluation.interval,
        "eval_iters": run.evaluation.iterations,
        "data_impl": "mmap",
        **_neox_data(plan, run),
    }
    given = {key: value for key, value in settings.items() if value is not None}
    lines = [f'  "{key}": {_flow(value)},' for key, value in given.items()]
    return "\n".join(["{", *lines, "}"])


def _neox_data(plan: SettingsPlan, run: RunSettings) -> dict[str, object]:
    settings: dict[str, object] = {}
    if run.packing is not None:
        settings["pack_impl"] = run.packing.pack_impl
        settings["allow_chopped"] = run.packing.allow_chopped
    if not own_sources(run):
        divided = {"data_path": run.data.train[0].path, "split": run.data.split or _ALL_TRAIN}
        return {**settings, **divided}
    if run.data.documents_alpha is not None:
        settings["weight_by_num_documents"] = True
        settings["weighted_sampler_alpha"] = run.data.documents_alpha
    for split in SPLITS:
        sources = getattr(run.data, split)
        settings[f"{split}_data_paths"] = [source.path for source in sources]
        weighted = _weighted(plan, run, split)
        settings[f"{split}_data_weights"] = [1.0 if w is None else w for w, _ in weighted]
        labels = [source.labels or None for source in sources]
        if any(labels):
            settings[f"{split}_label_data_paths"] = labels
    return settings


def megatron_flags(plan: SettingsPlan, run: RunSettings) -> str:
    """Return the arguments, one a line, each line but the last with a trailing backslash."""
    flags = [_megatron_length(plan, run), f"--seq-length {plan.sequence_length}"]
    if run.micro_batch_size is not None:
        flags.append(f"--micro-batch-size {run.micro_batch_size}")
    if not _has_schedule(run) or run.batch.ramp is not None:
        flags.append(f"--global-batch-size {plan.global_batch_size}")
        if run.batch.ramp is not None:
            flags.append(f"--rampup-batch-size {' '.join(map(str, run.batch.ramp))}")
    else:
        stages = " ".join(
            f"{first * plan.sequence_length}:{b}" for first, b in run.batch.plain_stages
        )
        flags.append(f"--step-batch-size-schedule {shlex.quote(stages)}")
    flags.append(f"--seed {run.seed}")
    flags.append(f"--eval-interval {run.evaluation.interval}")
    flags.append(f"--eval-iters {0 if lacks_validation(run, plan) else run.evaluation.iterations}")
    flags += _evaluation(run)
    if run.phases:
        flags.append(f"--phase-transition-iterations {','.join(map(str, run.phases))}")
    if run.iterations_to_skip:
        flags.append(f"--iterations-to-skip {' '.join(map(str, run.iterations_to_skip))}")
    flags += _megatron_data(plan, run)
    if run.row.order == "megatron-legacy":
        flags.append(f"--train-data-exact-num-epochs {run.row.exact_num_epochs or -1}")
    elif run.surplus is not None:
        flags.append(f"--mid-level-dataset-surplus {run.surplus!r}")
    elif (
        isinstance(run.variance_buffer, float)
        and "variance_buffer" not in adapter_settings(run)
        and not applies_buffer(run)
    ):
        flags.append(f"--mid-level-dataset-surplus {_surplus(run.variance_buffer)}")
    return " \\\n".join(flags)


def _has_schedule(run: RunSettings) -> bool:
    """Return True for a schedule, also of one size: Megatron-LM then requests other samples."""
    return not run.batch.is_constant or (run.batch.stepped and run.row.order == "megatron")


def _megatron_length(plan: SettingsPlan, run: RunSettings) -> str:
    """Return --train-samples for a target of samples, schedules and phases, else --train-iters."""
    target = run.target
    if target.kind == "samples" and (run.tail == "drop" or target.value >= plan.samples_consumed):
        return f"--train-samples {int(target.value)}"
    planned_as_iterations = target.kind == "iterations" and run.unit is not None
    if run.phases or (_has_schedule(run) and not planned_as_iterations):
        return f"--train-samples {plan.samples_consumed}"
    return f"--train-iters {plan.train_iters}"


def _surplus(buffer: float) -> str:
    """Return the shortest decimal that gives ``buffer`` when Megatron adds 1."""
    digits = (f"{buffer - 1:.{count}g}" for count in range(1, 18))
    return next((text for text in digits if 1 + float(text) == buffer), repr(buffer - 1))


def _evaluation(run: RunSettings) -> list[str]:
    """Return the flags of evaluation that differ from Megatron's defaults."""
    evaluation = run.evaluation
    size = evaluation.batch_size
    if size is None and run.batch.stepped and run.unit is None:
        size = run.nominal_batch
    flags = [] if size is None else [f"--eval-global-batch-size {size}"]
    if evaluation.micro_batch_size not in (None, run.micro_batch_size):
        flags.append(f"--eval-micro-batch-size {evaluation.micro_batch_size}")
    if evaluation.start:
        flags.append(f"--start-eval-at-iter {evaluation.start}")
    switches = {
        "--skip-train": evaluation.alone,
        "--full-validation": evaluation.full,
        "--multiple-validation-sets": evaluation.multiple,
    }
    flags += [flag for flag, given in switches.items() if given]
    return flags + (["--dataloader-type cyclic"] if run.dataloader == "cyclic" else [])


def _megatron_data(plan: SettingsPlan, run: RunSettings) -> list[str]:
    flags = []
    for split in SPLITS if own_sources(run) else SPLITS[:1]:
        if weighted := _weighted(plan, run, split):
            bare = run.row.order != "megatron-legacy" or len(weighted) == 1
            pairs = (
                [path] if w is None and bare else [repr(1.0 if w is None else float(w)), path]
                for w, path in weighted
            )
            words = [word for pair in pairs for word in pair]
            flag = f"--{split}-data-path" if own_sources(run) else "--data-path"
            flags.append(f"{flag} {shlex.join(words)}")
    if not own_sources(run):
        flags.append(f"--split {run.data.split or _ALL_TRAIN}")
    return flags


def _weighted(plan: SettingsPlan, run: RunSettings, split: Split) -> list[tuple[float | None, str]]:
    """Return weight and path of every source; epochs for each source set the weights."""
    sources = getattr(run.data, split)
    weights = [None if source.weight is None else float(source.weight) for source in sources]
    if split == "train" and run.target.per_source:
        rows = [row for row in plan.rows("train") if row.phase in (None, 1)]
        weights = [row.weight for row in rows]
    return [(weight, source.path) for weight, source in zip(weights, sources, strict=True)]


def recipe_yaml(plan: SettingsPlan, run: RunSettings) -> str:
    """Return a recipe of the sources, weights and steps of a run, with a stage for each phase.

    Its order is megaindex's own, so that no stage repeats the samples of an earlier one.
    """
    for reason in _refused_by_recipe(plan, run):
        raise InvalidArgument(f"--print-config recipe: {reason}")
    sources = run.data.train
    paths = [source.path or f"source_{k}" for k, source in enumerate(sources)]
    short = [Path(path).name for path in paths]
    names = short if len({*short}) == len({*paths}) else paths
    mix = dict.fromkeys(names, 0.0)  # a corpus that is given twice is one source
    for name, (weight, _) in zip(names, _weighted(plan, run, "train"), strict=True):
        mix[name] += 1.0 if weight is None else weight
    mix = {name: weight for name, weight in mix.items() if weight}
    phases = [(f"phase_{k}", phase.begin, phase.end) for k, phase in enumerate(plan.phases, 1)]
    batch = {
        "micro_batch_size": run.micro_batch_size,
        "data_parallel_size": run.data_parallel_size,
        "global_batch_size": run.batch.final,
    }
    named = {
        name: {"path": source.path} if source.path else {"tokens": source.tokens}
        for name, source in zip(names, sources, strict=True)
        if name in mix
    }
    others = run.data.valid or run.data.test
    lines = [
        *(["# without validation and test data; add evaluation for those"] if others else []),
        f"sequence_length: {run.sequence_length}",
        f"batch: {_flow({key: value for key, value in batch.items() if value is not None})}",
        "sources:",
        *(f"  {_flow(name)}: {_flow(each)}" for name, each in named.items()),
        "stages:",
        *(
            f"  {name}: {_flow({'steps': end - begin, 'mix': mix})}"
            for name, begin, end in phases or [("all", 0, plan.train_iters)]
        ),
        f"seed: {run.seed}",
    ]
    return "\n".join(lines)


def _flow(value: Any, indent: int | None = None) -> str:
    """Return a value in YAML's flow style, which JSON is, but for pairs of escapes such as those
    that Python writes in place of an emoji."""
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    return _NOT_YAML.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _refused_by_recipe(plan: SettingsPlan, run: RunSettings) -> Iterator[str]:
    """Yield each part of the plan that a recipe has no setting for, and the remedy."""
    data = run.data
    if not run.row.is_framework:
        yield (
            f"the plan is of order {run.row.order}, not of a framework; plan it by flags, or with "
            "--order megatron, whose recipe has the same sources and weights"
        )
    if run.consumed_samples or plan.train_iters == 0:
        yield "a recipe counts steps from its first one on; plan the whole run"
    if not run.batch.is_constant:
        yield "stages have one batch size here; give --global-batch-size, and add the schedule"
    if data.split is not None and any(parse_split(data.split, run.row.order, "--split")[1:]):
        yield (
            "a recipe trains on all documents of its sources; divide each corpus with `megaindex "
            "split`, and give --train-data-path"
        )
    if len(data.train) > 1 and data.train[0].weight is None and not run.target.per_source:
        yield "sources of a mix have weights; give them before each path"
    if len(data.train) > 1 and run.exact:
        yield "each epoch reads its sources whole; write a recipe with their samples as weights"
    if run.packing is not None or any(source.labels for source in data.train):
        yield "labels and pack_impl are settings of finetuning sources; write a recipe"
    if run.skips(plan.train_iters):
        yield "skipped steps are those of an order; add skip to the recipe"
