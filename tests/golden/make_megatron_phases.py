"""Writes megatron_phases.json: launches of runs with --phase-transition-iterations.

    python tests/golden/make_megatron_phases.py SOURCE COMMIT > tests/golden/megatron_phases.json

SOURCE is a checkout of Megatron-LM at COMMIT. Its functions that count the samples of a phase and
build the loaders, and its sampler, run as they stand. A launch ends at a transition, as
Megatron-LM's does, or earlier, and the next one resumes.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

FUNCTIONS = (
    "get_train_valid_test_num_samples",
    "build_train_valid_test_datasets",
    "build_train_valid_test_data_loaders",
)


def defined(source: str, wanted: tuple[str, ...], names: dict[str, Any]) -> dict[str, Any]:
    """Return the functions or classes of a module, in which ``names`` stand for what it imports."""
    chosen = [node for node in ast.parse(source).body if getattr(node, "name", "") in wanted]
    assert len(chosen) == len(wanted)
    exec(compile(ast.Module(chosen, []), "source", "exec"), names)
    return names


def launch(source: str, sampler: Any, args: SimpleNamespace) -> tuple[int, list[int]]:
    """Return the training samples requested, and those of a launch from ``args.iteration`` on."""
    found: dict[str, Any] = {}

    def provider(sizes: tuple[int, int, int]) -> tuple[str, str, str]:
        found["requested"] = sizes[0]
        return "train", "valid", "test"

    def loader(dataset: str, consumed: int) -> Any:
        if dataset != "train":
            return None
        size = args.global_batch_size
        found["batches"] = sampler(found["requested"], consumed, size, 0, 1)
        return found["batches"]

    torch = SimpleNamespace(
        tensor=lambda values, **_: np.array(values),
        long=None,
        distributed=SimpleNamespace(broadcast=lambda *_: None),
    )
    names: dict[str, Any] = {
        "get_args": lambda: args,
        "print_rank_0": lambda *_: None,
        "mpu": SimpleNamespace(get_tensor_model_parallel_rank=lambda: 0),
        "build_pretraining_data_loader": loader,
        "torch": torch,
    }
    defined(source, FUNCTIONS, names)["build_train_valid_test_data_loaders"](provider)
    ends = [end for end in args.phase_transition_iterations if end > args.iteration]
    steps = min([*ends, args.train_iters]) - args.iteration
    if args.steps is not None:
        steps = min(steps, args.steps)
    batches = [batch for batch, _ in zip(found["batches"], range(steps), strict=False)]
    assert len(batches) == steps
    return found["requested"], [sample for batch in batches for sample in batch]


def runs_of(source: str, sampler: Any) -> list[dict[str, Any]]:
    rng = np.random.default_rng(24)
    runs = []
    for _ in range(40):
        size, steps = int(rng.integers(1, 6)), int(rng.integers(5, 60))
        samples = size * steps + int(rng.integers(size))
        count = int(rng.integers(1, 4))
        phases = sorted({int(each) for each in rng.integers(1, steps + 4, count)})
        launches, iteration = [], 0
        while iteration < steps:
            stop = int(rng.integers(1, 40)) if rng.integers(2) else None
            args = SimpleNamespace(
                train_samples=samples, train_iters=samples // size, global_batch_size=size,
                phase_transition_iterations=phases, iteration=iteration, steps=stop,
                consumed_train_samples=iteration * size, consumed_valid_samples=0,
                eval_iters=0, eval_interval=1000, start_eval_at_iter=None, skip_train=False,
                full_validation=False, multiple_validation_sets=False, perform_rl_step=False,
            )  # fmt: skip
            requested, served = launch(source, sampler, args)
            assert served == list(range(served[0], served[0] + len(served)))
            launches.append([iteration, requested, served[0], len(served)])
            iteration += len(served) // size
        runs.append({"train_samples": samples, "global_batch_size": size, "phases": phases,
                     "launches": launches})  # fmt: skip
    return runs


def main(checkout: str, commit: str) -> None:
    root = Path(checkout, "megatron", "training")
    name = "MegatronPretrainingSampler"
    samplers = defined((root / "datasets" / "data_samplers.py").read_text(), (name,), {})
    found = {
        "megatron_lm": commit,
        "launch": "iteration, training samples requested, first sample read, samples read",
        "runs": runs_of((root / "training.py").read_text(), samplers[name]),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
