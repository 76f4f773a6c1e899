"""The plan as settings to paste back into a framework's own configuration."""

from __future__ import annotations

import shlex

from megaindex.errors import InvalidArgument
from megaindex.index.dialect import SPLITS, Split
from megaindex.plan.model import Plan, Row
from megaindex.recipe.run import Run


def paste(plan: Plan, run: Run, framework: str) -> str:
    """A NeoX YAML snippet (``neox``) or Megatron flags (``megatron``).

    Raises:
        InvalidArgument: no such framework.
    """
    if framework == "neox":
        return neox_yaml(plan, run)
    if framework == "megatron":
        return megatron_flags(plan, run)
    raise InvalidArgument(f"--print-config must be neox or megatron, got {framework!r}")


def neox_yaml(plan: Plan, run: Run) -> str:
    """Settings of one NeoX file, in flow style as its own files are."""
    settings: dict[str, object] = {
        "train_iters": plan.train_iters,
        "seq_length": plan.sequence_length,
    }
    if run.micro_batch_size is not None and run.gradient_accumulation_steps is not None:
        settings["train_micro_batch_size_per_gpu"] = run.micro_batch_size
        settings["gradient_accumulation_steps"] = run.gradient_accumulation_steps
    else:
        settings["train_batch_size"] = plan.global_batch_size
    settings["seed"] = run.seed
    if plan.evaluation is not None:
        settings["eval_interval"] = run.evaluation.interval
        settings["eval_iters"] = run.evaluation.iterations
    settings.update(_neox_data(plan, run))
    lines = [f'  "{key}": {_json(value)},' for key, value in settings.items()]
    return "\n".join(["{", *lines, "}"])


def _neox_data(plan: Plan, run: Run) -> dict[str, object]:
    train = _rows(plan, "train")
    if not all(row.path for row in train):
        return {}
    if len(train) == 1 and train[0].weight is None and not (run.data.valid or run.data.test):
        return {"data_path": train[0].path, **({"split": run.data.split} if run.data.split else {})}
    settings: dict[str, object] = {}
    for split in SPLITS:
        if rows := _rows(plan, split):
            settings[f"{split}_data_paths"] = [row.path for row in rows]
            settings[f"{split}_data_weights"] = [
                1.0 if row.weight is None else row.weight for row in rows
            ]
    return settings


def megatron_flags(plan: Plan, run: Run) -> str:
    """Arguments, one a line, each line but the last ending in a backslash."""
    flags = [
        f"--train-iters {plan.train_iters}",
        f"--seq-length {plan.sequence_length}",
    ]
    if run.micro_batch_size is not None:
        flags.append(f"--micro-batch-size {run.micro_batch_size}")
    if run.batch.is_constant:
        flags.append(f"--global-batch-size {plan.global_batch_size}")
    elif run.batch.ramp is not None:
        flags += [
            f"--global-batch-size {plan.global_batch_size}",
            f"--rampup-batch-size {' '.join(map(str, run.batch.ramp))}",
        ]
        samples = run.target.value if run.target.kind == "samples" else plan.samples_consumed
        flags[0] = f"--train-samples {samples}"
    else:
        # A step schedule is built whole for samples alone, not for iterations.
        samples = run.target.value if run.target.kind == "samples" else plan.samples_consumed
        flags[0] = f"--train-samples {samples}"
        stages = " ".join(f"{first * plan.sequence_length}:{b}" for first, b in run.batch.stages)
        flags.append(f"--step-batch-size-schedule {shlex.quote(stages)}")
    flags.append(f"--seed {run.seed}")
    if plan.evaluation is not None:
        flags.append(f"--eval-interval {run.evaluation.interval}")
        flags.append(f"--eval-iters {run.evaluation.iterations}")
        flags += _evaluation(run)
    flags += _megatron_data(plan, run)
    surplus = run.surplus
    if surplus is None and isinstance(plan.variance_buffer, float) and plan.variance_buffer > 1:
        surplus = float(f"{plan.variance_buffer - 1:.6g}")
    if surplus is not None:
        flags.append(f"--mid-level-dataset-surplus {surplus!r}")
    return " \\\n".join(flags)


def _evaluation(run: Run) -> list[str]:
    """Flags of evaluation that are not as Megatron has them unasked."""
    evaluation = run.evaluation
    flags = []
    if evaluation.batch_size is not None:
        flags.append(f"--eval-global-batch-size {evaluation.batch_size}")
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


def _megatron_data(plan: Plan, run: Run) -> list[str]:
    own = bool(run.data.valid or run.data.test)
    flags = []
    for split in SPLITS if own else SPLITS[:1]:
        rows = _rows(plan, split)
        if rows and all(row.path for row in rows):
            words = [word for row in rows for word in _weighted(row)]
            flag = f"--{split}-data-path" if own else "--data-path"
            flags.append(f"{flag} {shlex.join(words)}")
    if flags and not own:
        flags.append(f"--split {run.data.split or '100,0,0'}")
    return flags


def _weighted(row: Row) -> list[str]:
    return [row.path] if row.weight is None else [f"{row.weight:.17g}", row.path]


def _rows(plan: Plan, split: Split) -> list[Row]:
    return [row for row in plan.datasets if row.split == split]


def _json(value: object) -> str:
    import json

    return json.dumps(value)
