"""Writes neox_runs.json: what runs of GPT-NeoX read, for the planner's tests.

    python tests/golden/make_neox_runs.py SOURCE VERSION > tests/golden/neox_runs.json

SOURCE is a checkout of GPT-NeoX, VERSION its commit. Configuration files are read by its NeoXArgs,
and its data_utils, samplers and datasets build and serve what its training and evaluation loops ask
for; tokens are counted as they come. The model, `mpu`, DeepSpeed and torch's distributed and CUDA
calls are replaced by stand-ins for one process without a GPU, its compiled helpers by
megaindex.helpers. `printed` are what `megaindex plan --print-config neox` prints, run with the
adapter where a comment of theirs calls it.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import itertools
import json
import logging
import math
import os
import platform
import random
import signal
import sys
import tempfile
import typing
from collections import Counter, defaultdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch
import yaml
from make_neox_packing import load_neox

import megaindex.adapters.neox
import megaindex.helpers
from megaindex.cli.plan import main as plan_main

SPLITS = ("train", "valid", "test")
MODEL = {
    "num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "max_position_embeddings": 64,
    "num_workers": 0, "precision": "fp16", "data_impl": "mmap",
}  # fmt: skip
MODEL_ALONE = {name: value for name, value in MODEL.items() if name != "data_impl"}
SECONDS = 6  # after which a loop is taken to be endless


def functions(source: Path, file: str, names: list[str], namespace: dict[str, Any]) -> Any:
    """Functions executed from their source, whose module needs more than they do."""
    tree = ast.parse((source / file).read_text())
    chosen = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name in names]
    assert len(chosen) == len(names), file
    exec(compile(ast.Module(body=chosen, type_ignores=[]), file, "exec"), namespace)
    return SimpleNamespace(**{name: namespace[name] for name in names})


def stand_in(name: str, **values: Any) -> None:
    sys.modules[name] = ModuleType(name)
    vars(sys.modules[name]).update(values)


class Neox:
    """Arguments, data loaders and loops of a checkout."""

    def __init__(self, source: Path) -> None:
        import packaging.version

        sys.modules["megatron.data.helpers"] = megaindex.helpers
        stand_in("deepspeed", checkpointing=MagicMock())
        stand_in("deepspeed.launcher")
        stand_in("deepspeed.launcher.runner", DLTS_HOSTFILE="/job/hostfile")
        stand_in("pkg_resources", packaging=packaging)
        self.data = load_neox(source)
        sys.modules["megatron.data"].helpers = megaindex.helpers
        torch.distributed.barrier = lambda *_, **__: None
        self.mpu = sys.modules["megatron.mpu"]
        utils = {**vars(typing), "os": os, "logging": logging}
        utils |= {name: importlib.import_module(name) for name in ("re", "collections")}
        names = ["obtain_resource_pool", "expand_attention_types"]
        read = functions(source, "megatron/utils.py", names, utils)
        stand_in("megatron.utils", **vars(read))
        stand_in("megatron.logging", Tee=MagicMock())
        stand_in("megatron.tokenizer", build_tokenizer=MagicMock())
        self.args = importlib.import_module("megatron.neox_arguments").NeoXArgs
        self.loops: dict[str, Any] = {
            "torch": torch, "math": math, "defaultdict": defaultdict, "deepspeed": MagicMock(),
            "print_rank_0": lambda *_: None, "reduce_losses": lambda _: torch.tensor([0.0]),
            "mpu": self.mpu, "sys": sys, "OverflowMonitor": MagicMock(), "forward_step": None,
            "get_noise_scale_logger": MagicMock(), "training_log": lambda **_: False,
        }  # fmt: skip
        names = ["update_iterations", "evaluate", "train"]
        functions(source, "megatron/training.py", names, self.loops)

    def run(self, files: list[str], ranks: int, resumed: int = 0) -> dict[str, Any]:
        """Every micro batch of all ranks, one rank after the other, in two runs if resumed."""
        served = {split: Counter() for split in SPLITS}
        rows = dict.fromkeys(SPLITS, 0)
        for rank, begin in itertools.product(range(ranks), sorted({0, resumed})):
            self.mpu.get_data_parallel_world_size.return_value = ranks
            self.mpu.get_data_parallel_rank.return_value = rank
            args = self.args.from_ymls(files)
            args.iteration = begin
            loaders = self.data.build_train_valid_test_data_loaders(args)
            self.loops["update_iterations"](args, loaders)
            iterators = self.data.shift_and_wrap_data_loaders(args, loaders)
            if begin < resumed:  # the first run ends there
                args.train_iters, args.do_test = resumed, False
            last = begin == resumed
            self._loops(args, dict(zip(SPLITS, iterators, strict=True)), served, rows, last)
        return {
            "train_iters": args.train_iters,
            "splits": {
                split: {
                    "rows": rows[split],
                    "counted": 0 if loader is None else len(loader) * ranks * args.batch_size,
                    "built": [] if loader is None else built_by(loader.dataset),
                    "served": served[split],
                }
                for split, loader in loaders.items()
            },
        }

    def _loops(self, args: Any, iterators: Any, served: Any, rows: Any, last: bool) -> None:
        def take(split: str) -> Any:
            batch = next(iterators[split])
            text = batch["text"].numpy()[:, :-1]
            served[split].update(text.ravel().tolist())
            rows[split] += len(text)
            return torch.tensor(0.0), {}

        def train_step(**_: Any) -> Any:
            for _ in range(args.gradient_accumulation_steps):
                take("train")
            return {}, 0

        def evaluate(split: str) -> None:
            forward = lambda **_: take(split)  # noqa: E731
            self.loops["evaluate"](args, forward, iterators[split], MagicMock())

        self.loops["train_step"] = train_step
        self.loops["evaluate_and_print_results"] = lambda **_: evaluate("valid")
        if args.do_train and args.train_iters > 0:
            optimizer = SimpleNamespace(param_groups=[], cur_scale=1)
            self.loops["train"](
                neox_args=args, timers=MagicMock(), model=MagicMock(), reference_model=None,
                optimizer=optimizer, lr_scheduler=None, train_data_iterator=iterators["train"],
                valid_data_iterator=iterators["valid"],
            )  # fmt: skip
        if args.do_valid and last:
            evaluate("valid")
        if args.do_test:
            evaluate("test")


def built_by(dataset: Any) -> list[int]:
    return [int(d.shuffle_idx.shape[0]) for d in getattr(dataset, "datasets", [dataset])]


class Case:
    """Corpora of one configuration, whose tokens are all different."""

    def __init__(self, rng: random.Random, builder: Any, folder: Path) -> None:
        self.rng, self.builder, self.folder = rng, builder, folder
        self.corpora: dict[str, list[int]] = {}
        self.prompts: dict[str, list[int]] = {}
        self.first: dict[str, int] = {}
        self._next = 1

    def corpus(self, name: str, length: int, documents: int | None = None) -> str:
        count = documents or self.rng.choice([4, 8, 20])
        sizes = [self.rng.randint(1, 3 * length) for _ in range(count)]
        self.corpora[name], self.first[name] = sizes, self._next
        self._next += sum(sizes)
        starts = np.cumsum([self.first[name], *sizes])
        self._write(name, [np.arange(a, b) for a, b in itertools.pairwise(starts)])
        return f"@{name}"

    def labels(self, name: str) -> str:
        sizes = self.corpora[name]
        self.prompts[name] = [self.rng.randint(0, n) * (self.rng.random() < 0.5) for n in sizes]
        rows = zip(sizes, self.prompts[name], strict=True)
        self._write(f"{name}_label", [[-100] * p + [1] * (n - p) for n, p in rows])
        return f"@{name}_label"

    def _write(self, name: str, rows: list[Any]) -> None:
        builder = self.builder(str(self.folder / f"{name}.bin"), np.int32)
        for row in rows:
            builder.add_item(np.asarray(row, np.int32))
            builder.end_document()
        builder.finalize(str(self.folder / f"{name}.idx"))

    def shares(self, name: str, bounds: tuple[int, int], served: Counter[int]) -> list[int]:
        """Tokens of the documents by times served."""
        starts = np.cumsum([self.first[name], *self.corpora[name]])
        tokens = range(int(starts[bounds[0]]), int(starts[bounds[1]]))
        times = Counter(served.get(token, 0) for token in tokens)
        return [times.get(k, 0) for k in range(max(times, default=0) + 1)]


KINDS = ("split", "blend", "split epochs", "blend epochs", "documents", "labels", "overflow")


def settings(case: Case, kind: str) -> dict[str, Any]:
    rng = case.rng
    length = rng.choice([4, 8, 16])
    keys: dict[str, Any] = {
        "seq_length": length, "seed": rng.randint(0, 10**6),
        "global_num_gpus": rng.choice([1, 1, 2]),
        "train_micro_batch_size_per_gpu": rng.randint(1, 3),
        "gradient_accumulation_steps": rng.randint(1, 2), "eval_iters": rng.randint(1, 3),
        "eval_interval": rng.randint(1, 12),
    }  # fmt: skip
    keys |= {"train_epochs": rng.randint(1, 3)} if "epochs" in kind else {
        "train_iters": rng.randint(1, 20)
    }  # fmt: skip
    if kind.startswith("split"):
        split = rng.choice(["60,20,20", "8/1/1", "90,10", "70,0,30"])
        return {**keys, "data_path": case.corpus("c", length, 30), "split": split}
    if kind == "documents":
        keys |= {"weight_by_num_documents": True, "weighted_sampler_alpha": rng.choice([0.3, 1.0])}
    if kind in ("labels", "overflow"):
        keys["pack_impl"] = "unpacked" if kind == "labels" else "pack_until_overflow"
        keys["allow_chopped"] = kind == "overflow" or rng.random() < 0.5
    for split in SPLITS:
        names = [f"{split}{k}" for k in range(rng.randint(1, 2 + (split == "train")))]
        keys[f"{split}_data_paths"] = [case.corpus(name, length) for name in names]
        if kind == "labels":
            keys[f"{split}_label_data_paths"] = [case.labels(name) for name in names]
        if "epochs" not in kind and rng.random() < 0.7:
            keys[f"{split}_data_weights"] = [round(rng.uniform(0.2, 3), 2) for _ in names]
    return keys


def placed(value: Any, folder: Path) -> Any:
    return json.loads(json.dumps(value).replace('"@', f'"{folder}/'))


def run_case(neox: Neox, number: int) -> dict[str, Any]:
    kind, rng = KINDS[number % len(KINDS)], random.Random(number)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        builder = importlib.import_module("megatron.data.indexed_dataset")
        case = Case(rng, builder.MMapIndexedDatasetBuilder, folder)
        keys = settings(case, kind)
        file = folder / "c.yml"
        file.write_text(yaml.dump({**MODEL, **placed(keys, folder)}))
        answer = {"kind": kind, "corpora": case.corpora, "prompts": case.prompts, "keys": keys}
        signal.alarm(SECONDS)
        try:
            run = neox.run([str(file)], keys["global_num_gpus"])
        except Exception as error:
            return {**answer, "error": type(error).__name__}
        finally:
            signal.alarm(0)
        count_shares(neox, case, keys, run)
        return {**answer, **run}


def count_shares(neox: Neox, case: Case, keys: dict[str, Any], run: dict[str, Any]) -> None:
    """Replace the tokens served by the shares of each source."""
    for index, split in enumerate(SPLITS):
        found = run["splits"][split]
        paths = keys.get(f"{split}_data_paths", [keys.get("data_path")])
        shares = []
        for path in paths if found["built"] else []:
            name = os.path.basename(path).lstrip("@")
            count = len(case.corpora[name])
            bounds = (0, count)
            if "split" in keys:
                ends = neox.data.get_train_valid_test_split_(keys["split"], count)
                bounds = (ends[index], ends[index + 1])
            shares.append(case.shares(name, bounds, found["served"]))
        found["served"] = shares


def printed_case(neox: Neox, number: int) -> dict[str, Any]:
    """What the planner prints for random flags, run as it stands."""
    rng = random.Random(f"printed {number}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        builder = importlib.import_module("megatron.data.indexed_dataset")
        case = Case(rng, builder.MMapIndexedDatasetBuilder, folder)
        ranks, flags = rng.choice([1, 2]), flags_of(case, rng)
        flags += ["--data-parallel-size", str(ranks)]
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            status = plan_main([*placed(flags, folder), "--print-config", "neox"])
        assert status == 0, flags
        text = out.getvalue()
        (folder / "printed.yml").write_text(text)
        (folder / "model.yml").write_text(yaml.dump({**MODEL_ALONE, "global_num_gpus": ranks}))
        calls = [line[2:] for line in text.splitlines() if line.startswith("# megaindex.")]
        for call in calls:
            eval(call, {"megaindex": megaindex})
        files = [str(folder / "model.yml"), str(folder / "printed.yml")]
        run = neox.run(files, ranks)
        if calls:
            megaindex.adapters.neox.uninstall()
        count_shares(neox, case, yaml.safe_load(text), run)
        return {
            "corpora": case.corpora,
            "flags": flags,
            "text": text.replace(f"{folder}/", "@"),
            **run,
        }


def flags_of(case: Case, rng: random.Random) -> list[str]:
    length = rng.choice([4, 8, 16])
    flags = [
        *("--order", "neox", "--seq-length", str(length), "--seed", str(rng.randint(0, 9999))),
        *("--eval-interval", str(rng.randint(2, 12)), "--eval-iters", "1"),
        *("--micro-batch-size", str(rng.randint(1, 3))),
        *("--gradient-accumulation-steps", str(rng.randint(1, 2))),
        *("--epochs", rng.choice(["1", "1", "1.5", "2"])),
    ]
    if rng.random() < 0.4:
        split = rng.choice([["--split", "60,20,20"], ["--split", "8/1/1"], []])
        buffer = rng.choice([[], ["--variance-buffer", "exact"]])
        return [*flags, "--data-path", case.corpus("c", length, 40), *split, *buffer]
    for split, most in (("train", 3), ("valid", 2), ("test", 1)):
        words = []
        for k in range(rng.randint(1, most)):
            weight = str(round(rng.uniform(0.2, 3), 2))
            words += [weight, case.corpus(f"{split}{k}", length, 20)]
        flags += [f"--{split}-data-path", *words]
    return [*flags, *rng.choice([[], ["--variance-buffer", "exact"], ["--variance-buffer", "1.2"]])]


def endless(*_: Any) -> None:
    raise TimeoutError


def main() -> None:
    source, version, *count = sys.argv[1:]
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the framework prints to standard output
    signal.signal(signal.SIGALRM, endless)
    with contextlib.redirect_stdout(io.StringIO()):
        neox = Neox(Path(source).resolve())
        runs = [run_case(neox, number) for number in range(int(count[0]) if count else 56)]
        printed = [printed_case(neox, number) for number in range(20)]
    content = {
        "program": "GPT-NeoX, its NeoXArgs, megatron/data and the loops of megatron/training.py",
        "version": version,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "command": f"python tests/golden/make_neox_runs.py SOURCE {version}",
        "runs": runs,
        "printed": printed,
    }
    json.dump(content, answer, separators=(",", ":"))
    answer.write("\n")
    answer.close()


if __name__ == "__main__":
    main()
