"""Writes maxtext.json: the indices and blends that MaxText's grain_file_type mmap_npy builds.

    python tests/golden/make_maxtext.py SOURCE COMMIT > tests/golden/maxtext.json

SOURCE is a checkout of MaxText at COMMIT, the branch of its pull request 4625. Its modules
_mmap_index_utils.py, _mmap_datasource.py and _megatron_blending.py run as they stand; grain and the
package around them are replaced by stand-ins.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import platform
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import numpy as np

from megaindex import IndexedDatasetWriter

LENGTHS = {
    "web": [(7 * k * k) % 301 + 1 for k in range(300)],
    "code": [(11 * k) % 97 + 1 for k in range(90)],
    "chat": [40, 3, 77, 5],
}
CASES = 12


def modules(source: Path) -> tuple[Any, Any]:
    for name in ("grain", "grain.python", "tqdm"):
        sys.modules[name] = MagicMock()
    sys.modules["grain"].python = sys.modules["grain.python"]  # type: ignore[attr-defined]
    sys.modules["tqdm"].tqdm = lambda items, **_: items  # type: ignore[attr-defined]
    sys.modules["grain.python"].RandomAccessDataSource = object  # type: ignore[attr-defined]
    for name, folder in (("maxtext", "src/maxtext"),
                         ("maxtext.input_pipeline", "src/maxtext/input_pipeline")):  # fmt: skip
        package = ModuleType(name)
        package.__path__ = [str(source / folder)]
        sys.modules[name] = package
    load = importlib.import_module
    return (
        load("maxtext.input_pipeline._mmap_index_utils"),
        load("maxtext.input_pipeline._megatron_blending"),
    )


def case(utils: Any, blending: Any, rng: np.random.Generator, number: int) -> dict[str, Any]:
    names = list(rng.permutation(list(LENGTHS))[: 1 + number % 3])
    weights = [round(float(weight), 3) for weight in rng.uniform(0.01, 1, len(names))]
    length, seed = int(rng.choice([16, 64, 130])), int(rng.integers(0, 2**31))
    steps, devices = int(rng.integers(1, 60)), int(rng.integers(1, 5))
    split = None if "chat" in names else [None, "99,1", "0.8,0.2"][number // 3 % 3]
    size, blend = steps * devices * 2, None
    wanted = [size]
    if len(names) > 1:
        once = utils._normalize_weights(weights)
        wanted = utils.compute_blend_buffers(size, once, 0.5)
        source, sample = np.zeros(size, np.int16), np.zeros(size, np.int64)
        twice = np.array(utils._normalize_weights(once))
        blending.build_blending_indices(source, sample, twice, len(names), size)
        blend = [source.tolist(), sample.tolist()]
    built = [
        utils.build_indices([name], length, num_samples=count, seed=seed, split=split)[:3]
        for name, count in zip(names, wanted, strict=True)
    ]
    files = ";".join(f"cache|{name},{w!r}" for name, w in zip(names, weights, strict=True))
    words = [
        f"max_target_length={length}",
        f"data_shuffle_seed={seed}",
        f"steps={steps}",
        f"grain_train_files={files if blend else 'cache|' + names[0]}",
        *([f"mmap_npy_split={split}"] if split else []),
    ]
    return {
        "words": words,
        "devices": devices,
        "documents": [array[0][:64].tolist() for array in built],
        "shuffle": [array[2][:64].tolist() for array in built],
        "samples": [len(array[2]) for array in built],
        "blend": blend,
    }


def main() -> None:
    source, commit = Path(sys.argv[1]).resolve(), sys.argv[2]
    logging.disable(logging.CRITICAL)
    utils, blending = modules(source)
    rng = np.random.default_rng(4625)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for name, lengths in LENGTHS.items():
            with IndexedDatasetWriter(name, dtype="uint16") as writer:
                for each in lengths:
                    writer.add_document(np.arange(each))
        cases = [case(utils, blending, rng, number) for number in range(CASES)]
    made_by = (
        f"MaxText {commit} (pull request 4625), numpy {np.__version__}, Python "
        f"{platform.python_version()}: python tests/golden/make_maxtext.py SOURCE {commit}"
    )
    print(json.dumps({"made_by": made_by, "lengths": LENGTHS, "cases": cases}))


if __name__ == "__main__":
    main()
