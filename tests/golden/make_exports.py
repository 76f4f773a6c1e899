"""Writes exports_<framework>.json: the samples that a framework's own reader serves of exports.

    python tests/golden/make_exports.py FRAMEWORK SOURCE VERSION > exports_FRAMEWORK.json

FRAMEWORK is neox, paddlenlp or maxtext; SOURCE as for make_orders.py, for MaxText as for
make_maxtext.py; VERSION is the commit or release. The modules run as they stand, over stand-ins for
what they import besides NumPy. Each case is exported by ``megaindex export``; then the framework's
functions make the datasets as its training does, and every function that builds arrays fails.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from megaindex import IndexedDatasetWriter
from megaindex.cli import main as megaindex

sys.path.insert(0, str(Path(__file__).parent))

PROGRAMS = {
    "neox": "GPT-NeoX, megatron/data/{data_utils,gpt2_dataset,indexed_dataset}.py",
    "paddlenlp": "PaddleNLP, paddlenlp/data/{causal_dataset,indexed_dataset}.py",
    "maxtext": "MaxText, input_pipeline/{_mmap_datasource,_mmap_index_utils}.py",
}
LENGTHS = [(7 * k * k) % 301 for k in range(400)]
SEED = "1234"
SUBSETS = ("train", "valid", "test")
EVALUATIONS = {"eval_interval": 20, "eval_iters": 2}

Words = tuple[str, ...]
CASES: dict[str, list[Words]] = {
    "neox": [
        ("--epochs", "1", "--split", "969,30,1"),
        ("--epochs", "3", "--split", "90,5,5"),
        ("--epochs", "3", "--split", "1,0,0", "--left-over", "carry", "--seed", "0"),
        ("--train-iters", "50", "--split", "80,20,0", "--epochs-mixed", "2"),
        ("--epochs", "2", "--split", "1,0,0", "--order", "window"),
        ("--epochs", "2.3", "--split", "1,0,0", "--order", "megatron"),
        ("--epochs", "1", "--train-data-path", "corpus", "--valid-data-path", "corpus",
         "--test-data-path", "corpus"),
    ],
    "paddlenlp": [
        ("--epochs", "1", "--split", "949,50,1"),
        ("--epochs", "3", "--split", "90,10,0"),
        ("--epochs", "2.2", "--split", "949,50,1", "--order", "paddlenlp"),
        ("--epochs", "2.9", "--split", "949,50,1", "--order", "paddlenlp"),
        ("--epochs", "2.2", "--split", "1,0,0", "--seed", "42"),
        ("--epochs", "2", "--split", "1,0,0", "--order", "window"),
    ],
    "maxtext": [
        ("--epochs", "1"),
        ("--epochs", "3", "--split", "99,1"),
        ("--epochs", "2.2", "--seed", "7"),
        ("--epochs", "2", "--left-over", "carry"),
        ("--epochs", "2", "--order", "window"),
        ("--epochs", "1", "--order", "packed", "--long-documents", "truncate"),
        ("--epochs", "1", "--order", "neox"),
    ],
}  # fmt: skip


def write_corpus() -> None:
    with IndexedDatasetWriter("corpus", dtype="uint16") as writer:
        for k, length in enumerate(LENGTHS):
            writer.add_document((7 * k + np.arange(length)) % 60_000 + 1)


def export_words(framework: str, case: Words, length: int, batch: int) -> list[str]:
    """The command line of a case."""
    path = [] if "--train-data-path" in case else ["--data-path", "corpus"]
    seed = [] if "--seed" in case else ["--seed", SEED]
    shape = ["--seq-length", str(length), "--global-batch-size", str(batch)]
    folder = ["--cache-dir", "cache"] if framework == "maxtext" else []
    evaluation = [f"--{name.replace('_', '-')}={n}" for name, n in EVALUATIONS.items()]
    return ["export", "--to", framework, *path, *case, *seed, *shape, *folder, *evaluation]


def value_of(words: list[str], flag: str) -> str | None:
    return words[words.index(flag) + 1] if flag in words else None


def requests(steps: int, batch: int) -> list[int]:
    """Samples of train, valid and test, by GPT-NeoX's and PaddleNLP's expressions."""
    rounds = steps // EVALUATIONS["eval_interval"] + 1
    return [steps * batch, rounds * EVALUATIONS["eval_iters"] * batch,
            EVALUATIONS["eval_iters"] * batch]  # fmt: skip


def fails(*_: Any, **__: Any) -> Any:
    raise AssertionError("the framework builds arrays")


class LoadedFiles:
    """The .npy files that np.load opens."""

    def __init__(self) -> None:
        self.names: list[str] = []

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        original = np.load

        def load(path: Any, *rest: Any, **more: Any) -> Any:
            self.names.append(os.path.relpath(path))
            return original(path, *rest, **more)

        np.load = load
        try:
            yield
        finally:
            np.load = original


def neox_or_paddlenlp(framework: str, source: Path) -> Callable[..., dict[str, Any]]:
    from make_orders import Framework

    loaded = Framework(framework, source, reads=True)
    data: Any = sys.modules.get("megatron.data.gpt2_dataset", loaded.module)
    data._build_doc_idx = data._build_shuffle_idx = fails

    def datasets(words: list[str], length: int, counts: list[int]) -> dict[str, Any]:
        seed, split = int(value_of(words, "--seed") or SEED), value_of(words, "--split")
        if split is None:
            weighted = loaded.module.get_normalized_weights_and_num_samples
            return {
                subset: loaded.module.build_the_dataset(
                    data_prefix="corpus", name=f"{subset}_0", data_impl="mmap", pack_impl="packed",
                    allow_chopped=True, num_samples=asked[0], num_epochs=None, seq_length=length,
                    seed=seed, skip_warmup=True, build_index_mappings=True, pos_data_prefix=None,
                    neg_data_prefix=None, dataset_impl="gpt2",
                )
                for subset, count in zip(SUBSETS, counts, strict=True)
                for _, asked in [weighted([1.0], count)]
            }  # fmt: skip
        made = loaded.datasets(["corpus"], split, counts, length, seed)
        return dict(zip(SUBSETS, made, strict=True))

    return datasets


def maxtext(source: Path) -> Callable[..., dict[str, Any]]:
    from make_maxtext import modules

    utils, _ = modules(source)
    reader = __import__("importlib").import_module("maxtext.input_pipeline._mmap_datasource")
    utils.build_indices = fails
    reader.grain.MapDataset = SimpleNamespace(source=lambda given: given)

    def datasets(words: list[str], length: int, counts: list[int]) -> dict[str, Any]:
        one = reader.create_mmap_npy_source(
            "cache|corpus", 0, length, False, num_samples=counts[0],
            seed=int(value_of(words, "--seed") or SEED), split=value_of(words, "--split"),
        )  # fmt: skip
        return {"train": one}

    return datasets


def case_of(
    framework: str, case: Words, datasets: Callable[..., dict[str, Any]], number: int
) -> dict[str, Any]:
    length, batch = (24, 64, 130)[number % 3], (4, 6)[number % 2]
    words = export_words(framework, case, length, batch)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert megaindex([*words, "--json"]) == 0
    exported = json.loads(output.getvalue())["datasets"]
    steps = exported[0]["samples_served"] // batch
    counts, files, found = requests(steps, batch), LoadedFiles(), {}
    with contextlib.redirect_stdout(io.StringIO()), files.recorded():
        made = datasets(words, length, counts)
        for subset in [each["subset"] for each in exported]:
            dataset, served = made[subset], counts[SUBSETS.index(subset)]
            texts = np.stack([np.asarray(dataset[i]["text"], np.int64) for i in range(served)])
            found[subset] = {
                "served": served,
                "length": len(dataset),
                "sha256": hashlib.sha256(texts.tobytes()).hexdigest(),
            }
    return {"words": words, "files": sorted(set(files.names)), "subsets": found}


def main() -> None:
    framework, source, version = sys.argv[1], Path(sys.argv[2]).resolve(), sys.argv[3]
    datasets = maxtext(source) if framework == "maxtext" else neox_or_paddlenlp(framework, source)
    cases = []
    for number, case in enumerate(CASES[framework]):
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            write_corpus()
            cases.append(case_of(framework, case, datasets, number))
    made_by = (
        f"{PROGRAMS[framework]}, {version}, numpy {np.__version__}, Python "
        f"{platform.python_version()}: python tests/golden/make_exports.py {framework} SOURCE "
        f"'{version}'"
    )
    body = ",\n ".join(json.dumps(case) for case in cases)
    print(f'{{"made_by": {json.dumps(made_by)},\n"lengths": {json.dumps(LENGTHS)},')
    print(f'"cases": [\n {body}\n]}}')


if __name__ == "__main__":
    main()
