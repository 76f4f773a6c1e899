"""Writes samplers.json: the micro batches that the frameworks' own samplers deal.

    python tests/golden/make_samplers.py MEGATRON VERSION NEOX VERSION > tests/golden/samplers.json

MEGATRON is `megatron/training/datasets/data_samplers.py` of Megatron-LM, NEOX
`megatron/data/samplers.py` of GPT-NeoX, each with the commit it is of. They run as they stand, with
PyTorch; what they import of their own packages is replaced by stand-ins. The training samplers of
Megatron core 0.16.1 are the same text.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import platform
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch

STAND_INS = (
    "megatron", "megatron.core", "megatron.core.datasets", "megatron.core.datasets.utils",
    "megatron.training", "megatron.training.dist_signal_handler",
)  # fmt: skip

# samples, micro batch, ranks, consumed samples
SINGLE = [(40, 2, 3, 0), (41, 1, 1, 7), (97, 4, 2, 24), (50, 3, 4, 36), (12, 5, 2, 0)]
CYCLIC = [
    (24, 2, 3, 0), (29, 2, 3, 0), (29, 2, 3, 12), (30, 5, 2, 40), (41, 4, 2, 80), (64, 3, 1, 9),
    (5, 1, 2, 0), (22, 2, 4, 16), (103, 1, 8, 96), (200, 2, 4, 176),
]  # fmt: skip
ROUNDS = 40


def module_of(path: str) -> ModuleType:
    sys.modules.update(dict.fromkeys(STAND_INS, MagicMock()))
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def single_cases(megatron: Any) -> Iterator[dict[str, Any]]:
    for (samples, micro, ranks, consumed), drop_last in itertools.product(SINGLE, (True, False)):
        yield {
            "num_samples": samples,
            "micro_batch_size": micro,
            "consumed_samples": consumed,
            "drop_last": drop_last,
            "ranks": [
                list(
                    megatron.MegatronPretrainingSampler(
                        samples, consumed, micro, rank, ranks, drop_last
                    )
                )
                for rank in range(ranks)
            ],
        }


def forever(batches: Iterable[list[int]]) -> Iterator[list[int]]:
    """What Megatron's cyclic_iter makes of a DataLoader."""
    while True:
        yield from batches


def cyclic_cases(megatron: Any) -> Iterator[dict[str, Any]]:
    """As one run, and as what a run resumed at each round reads there."""
    for (samples, micro, ranks, consumed), sharding in itertools.product(CYCLIC, (True, False)):

        def sampler(
            rank: int, start: int, case: Any = (samples, micro, ranks, sharding)
        ) -> Iterator[list[int]]:
            total, micro, size, sharding = case
            return forever(
                megatron.MegatronPretrainingRandomSampler(
                    None, total, start, micro, rank, size, sharding
                )
            )

        yield {
            "num_samples": samples,
            "micro_batch_size": micro,
            "consumed_samples": consumed,
            "data_sharding": sharding,
            "unbroken": [
                list(itertools.islice(sampler(rank, consumed), ROUNDS)) for rank in range(ranks)
            ],
            "resumed": [
                [next(sampler(rank, consumed + k * micro * ranks)) for k in range(ROUNDS)]
                for rank in range(ranks)
            ],
        }


def neox_cases(neox: Any) -> Iterator[dict[str, Any]]:
    for samples, micro, ranks, consumed in SINGLE:
        dealt = []
        for rank in range(ranks):
            sampler = neox.DistributedBatchSampler(
                sampler=torch.utils.data.SequentialSampler(range(samples)),
                batch_size=micro * ranks,
                drop_last=True,
                rank=rank,
                world_size=ranks,
            )
            sampler.start_iter = consumed // (micro * ranks)
            dealt.append(list(sampler))
        yield {
            "num_samples": samples,
            "micro_batch_size": micro,
            "start_iter": consumed // (micro * ranks),
            "ranks": dealt,
        }


def evaluation_cases(megatron: Any) -> Iterator[dict[str, Any]]:
    for samples, ranks in [(12, 4), (13, 4), (3, 4), (9, 1)]:
        dealt = [megatron.MegatronFullValidationSampler(samples, k, ranks) for k in range(ranks)]
        yield {
            "num_samples": samples,
            "lengths": [len(sampler) for sampler in dealt],
            "ranks": [list(sampler) for sampler in dealt],
        }


def main() -> None:
    megatron_path, megatron_version, neox_path, neox_version = sys.argv[1:]
    megatron, neox = module_of(megatron_path), module_of(neox_path)
    content = {
        "programs": {
            "Megatron-LM, megatron/training/datasets/data_samplers.py": megatron_version,
            "GPT-NeoX, megatron/data/samplers.py": neox_version,
        },
        "python": platform.python_version(),
        "torch": torch.__version__,
        "command": "python tests/golden/make_samplers.py MEGATRON "
        f"{megatron_version} NEOX {neox_version}",
        "single": list(single_cases(megatron)),
        "cyclic": list(cyclic_cases(megatron)),
        "neox": list(neox_cases(neox)),
        "full_validation": list(evaluation_cases(megatron)),
    }
    json.dump(content, sys.stdout, separators=(",", ":"))
    print()


if __name__ == "__main__":
    main()
