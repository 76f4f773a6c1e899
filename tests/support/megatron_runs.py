"""Runs of a checkout of Megatron-LM by its own code, on a CPU and without a model.

    PYTHONPATH=CHECKOUT:tests python -m support.megatron_runs < RUNS > RESULTS

A run is a line of JSON: ``args``, the arguments of pretrain_gpt.py, ``ranks``, and ``stop``, the
iteration at which a first launch ends and another resumes. The result has what the run requested,
built and read, and the error that ended it. The checkout's own are: its arguments and their checks,
iterations, requests, builders, samplers, calculator of microbatches, and of its training loop the
statements that change the batch, skip iterations or evaluate. The model is left out.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import inspect
import io
import json
import os
import shlex
import signal
import sys
import tempfile
import types
import typing
import warnings
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

MODEL = shlex.split(
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 4096 "
    "--lr 0.1 --transformer-impl local --no-rope-fusion --no-masked-softmax-fusion "
    "--no-bias-gelu-fusion --no-gradient-accumulation-fusion --no-persist-layer-norm "
    "--no-bias-dropout-fusion --tokenizer-type NullTokenizer --vocab-size 100 --num-workers 0"
)
SPLITS = ("train", "valid", "test")


class Anything:
    """Stand-in for what triton has."""

    def __call__(self, *args: Any, **_: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __getitem__(self, key: Any) -> Any:
        return self


class Triton:
    """Importer of empty modules in the place of triton, which a CPU lacks."""

    def find_spec(self, name: str, *_: Any) -> Any:
        ours = name.partition(".")[0] == "triton"
        return ModuleSpec(name, self, is_package=True) if ours else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> Any:
        module: Any = types.ModuleType(spec.name)
        module.__getattr__ = Anything().__getattr__
        module.__path__, module.__version__ = [], "3.0.0"
        return module

    def exec_module(self, module: Any) -> None:
        """Do nothing."""


def load() -> types.SimpleNamespace:
    """Return the modules of the checkout, with the compiled helpers of the installed release."""
    import torch
    import torch._dynamo
    import torch._inductor.compile_fx
    import torch._inductor.select_algorithm
    import torch.utils._triton as known

    for name in dir(known):  # whose answers are kept
        if name.startswith("has_triton"):
            getattr(known, name)()
    sys.meta_path.append(Triton())  # type: ignore[arg-type]
    typing.override = getattr(typing, "override", lambda function: function)  # type: ignore[attr-defined]
    for folder in sys.path:
        for path in Path(folder or ".").glob("megatron/core/datasets/helpers_cpp*.so"):
            name = "megatron.core.datasets.helpers_cpp"
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec is not None
            assert spec.loader is not None
            sys.modules[spec.name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[spec.name])
    import pretrain_gpt
    from megatron.core import mpu, num_microbatches_calculator
    from megatron.training import arguments, global_vars, training

    store = f"file://{Path(tempfile.mkdtemp(), 'store')}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    return types.SimpleNamespace(
        torch=torch, pretrain=pretrain_gpt, mpu=mpu, calculator=num_microbatches_calculator,
        arguments=arguments, globals=global_vars, training=training,
    )  # fmt: skip


class OnCPU:
    """torch, whose tensors are on the CPU."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    def tensor(self, values: Any, device: Any = None, **others: Any) -> Any:
        return self._torch.tensor(values, **others)


def loop_of(training: Any) -> Any:
    """Return the training loop without the model: what it does before, between and after steps."""
    tree = ast.parse(inspect.getsource(training.train))
    loop = next(
        node for node in ast.walk(tree)
        if isinstance(node, ast.While) and "args.train_iters" in ast.unparse(node.test)
    )  # fmt: skip
    body: list[ast.stmt] = []
    after: list[ast.stmt] = []
    for node in loop.body:
        head = ast.unparse(node).split("\n")[0]
        kept = ("update_num_microbatches(", "num_microbatches = get_num_microbatches()")
        if head.startswith(kept):
            body.append(node)
        elif isinstance(node, ast.If):
            test = ast.unparse(node.test)
            if "iterations_to_skip" in test or "get_num_microbatches() != num_micro" in test:
                body.append(node)
            elif "args.eval_interval" in test and "args.do_valid" in test:
                after.append(ast.If(node.test, ast.parse("evaluate(iteration)").body, []))
    assert len(body) == 5, [ast.unparse(node)[:60] for node in body]
    assert len(after) == 1
    steps = "if iteration == stop:\n    break"
    step = "train_step(iteration)\niteration += 1"
    body = [*ast.parse(steps).body, *body, *ast.parse(step).body, *after]
    module = ast.Module([ast.While(loop.test, body, [])], [])
    return compile(ast.fix_missing_locations(module), "train", "exec")


class Launch:
    """A run of the checkout, from its first iteration or from where another launch ended."""

    def __init__(self, real: Any, run: dict[str, Any], before: Launch | None = None) -> None:
        self.real, self.ranks, self.before = real, run["ranks"], before
        self.result: dict[str, Any] = {"skipped": [], "evaluated": []}
        self.iterators: dict[str, list[Any]] = {}
        sys.argv = ["pretrain_gpt.py", *MODEL, *run["args"]]
        os.environ["WORLD_SIZE"], os.environ["RANK"] = str(self.ranks), "0"
        self.args = real.arguments.parse_args()
        real.arguments.validate_args(self.args, {})
        real.globals.set_global_variables(self.args, build_tokenizer=False)
        self.args.iteration = self.args.consumed_train_samples = 0
        self.args.consumed_valid_samples = self.args.skipped_train_samples = 0
        if before is not None:
            for name in ("iteration", "consumed_train_samples", "consumed_valid_samples"):
                setattr(self.args, name, getattr(before.args, name))
            real.calculator.update_num_microbatches(self.args.consumed_train_samples, False)

    def run(self, stop: int | None) -> None:
        training, args = self.real.training, self.args
        training.update_train_iters(args)
        self.result["train_iters"] = args.train_iters
        self.result["requested"] = training.get_train_valid_test_num_samples()
        self._build()
        if not args.skip_train and args.do_train:
            self._train(stop)
            if stop is not None and args.iteration == stop:
                return
        if args.do_valid:
            self._evaluate(args.iteration)
        if args.do_test:
            self._read("test", args.eval_iters)

    def _build(self) -> None:
        """Build the datasets once, and the loaders of every rank."""
        from support.megatron_dataset import Tokenizer

        real, built = self.real, []
        for name in ("build_tokenizer", "get_tokenizer"):
            setattr(real.pretrain, name, lambda *_, **__: Tokenizer())
        real.pretrain.is_dataset_built_on_rank = lambda *_, **__: True
        real.training.torch = OnCPU(real.torch)
        real.mpu.get_tensor_model_parallel_rank = lambda *_: 0
        real.mpu.get_data_parallel_group = lambda *_, **__: None
        real.mpu.get_data_parallel_world_size = lambda *_, **__: self.ranks

        def provide(sizes: Any, vp_stage: Any = None) -> Any:
            if not built:
                built.append(real.pretrain.train_valid_test_datasets_provider(sizes))
                self.result["datasets"] = {
                    split: rows_of(made) for split, made in zip(SPLITS, built[0], strict=True)
                }
            return built[0]

        provide.is_distributed = True  # type: ignore[attr-defined]
        for rank in range(self.ranks):
            real.mpu.get_data_parallel_rank = lambda *_, rank=rank, **__: rank
            loaders = real.training.build_train_valid_test_data_loaders(provide)
            for split, each in zip(SPLITS, loaders, strict=True):
                loader = each[0] if isinstance(each, list) and len(each) == 1 else each
                cyclic = self.args.dataloader_type == "cyclic" or (
                    split == "valid" and self.args.full_validation and not self._before_018()
                )
                if loader is not None and not isinstance(loader, list):
                    batches = loader.batch_sampler
                    self.iterators.setdefault(split, []).append(endless(batches, cyclic))
        self.datasets = dict(zip(SPLITS, built[0], strict=True))

    def _before_018(self) -> bool:
        return not hasattr(self.args, "eval_micro_batch_size")

    def _next(self, split: str, *, skipped: bool = False) -> None:
        ids = [next(iterator) for iterator in self.iterators[split]]
        dataset = self.datasets[split]
        drawn = self.result.setdefault("drawn", {}).setdefault(split, {})
        for each in (one for batch in ids for one in batch if not skipped):
            source = int(dataset.dataset_index[each]) if hasattr(dataset, "dataset_index") else 0
            drawn[source] = drawn.get(source, 0) + 1

    def _read(self, split: str, iterations: int) -> None:
        args = self.args
        size = getattr(args, "eval_global_batch_size", args.global_batch_size)
        micro = getattr(args, "eval_micro_batch_size", args.micro_batch_size)
        for _ in range(iterations * (size // (micro * self.ranks))):
            self._next(split)

    def _evaluate(self, iteration: int) -> None:
        self.result["evaluated"].append(iteration)
        self._read("valid", self.args.eval_iters)
        size = getattr(self.args, "eval_global_batch_size", self.args.global_batch_size)
        self.args.consumed_valid_samples += self.args.eval_iters * size

    def _train(self, stop: int | None) -> None:
        args, calculator = self.args, self.real.calculator

        def read(*, skipped: bool) -> None:
            for _ in range(calculator.get_num_microbatches()):
                self._next("train", skipped=skipped)

        def step(iteration: int) -> None:
            read(skipped=False)
            size = self.ranks * args.micro_batch_size * calculator.get_num_microbatches()
            args.consumed_train_samples += size
            args.iteration = iteration + 1

        def skip(_: Any) -> None:
            self.result["skipped"].append(names["iteration"])
            read(skipped=True)
            args.iteration = names["iteration"] + 1

        names: dict[str, Any] = {
            **vars(self.real.training), "args": args, "iteration": args.iteration,
            "start_iteration": args.iteration, "train_data_iterator": None, "stop": stop,
            "num_microbatches": calculator.get_num_microbatches(),
            "dummy_train_step": skip, "train_step": step, "evaluate": self._evaluate,
            "_dp_world_size": lambda: self.ranks, "mpu": self.real.mpu, "model": None,
        }  # fmt: skip
        try:
            exec(loop_of(self.real.training), names)
        finally:
            self.result["made"] = args.iteration


def endless(batches: Any, cyclic: bool) -> Any:
    """Yield the batches of a sampler, of a cyclic one without end."""
    yield from batches
    while cyclic:
        yield from batches


def rows_of(dataset: Any) -> list[dict[str, int]]:
    """Return samples and epochs of each source of a dataset; of none, of a split without data."""
    if dataset is None:
        return []
    sources = [each for top in (dataset if isinstance(dataset, list) else [dataset])
               for each in getattr(top, "datasets", [top])]  # fmt: skip
    return [
        {"built": len(each.shuffle_index),
         "epochs": len(each.document_index) // max(1, len(each.indices))}
        for each in sources
    ]  # fmt: skip


def result_of(real: Any, run: dict[str, Any]) -> dict[str, Any]:
    """Return what a run did, and the error that ended it."""
    launch, stops = None, [*([run["stop"]] if run.get("stop") else []), None]
    found: dict[str, Any] = {}
    # Megatron counts epochs of a part without tokens for ever; 10 s of processor time
    signal.setitimer(signal.ITIMER_PROF, 10)
    try:
        for stop in stops:
            real.globals.destroy_global_vars()
            real.globals.unset_num_microbatches_calculator()
            launch = Launch(real, run, launch)
            if stop is None and launch.before is not None:
                found["consumed"] = launch.args.consumed_train_samples
                found["first_launch"] = launch.before.result
            launch.run(stop)
    except (Exception, SystemExit) as error:
        found["error"] = f"{type(error).__name__}: {error}"[:300]
        found["where"] = "run" if launch is not None and "datasets" in launch.result else "setup"
    signal.setitimer(signal.ITIMER_PROF, 0)
    return {**found, **({} if launch is None else launch.result)}


def out_of_time(*_: Any) -> None:
    raise TimeoutError("the run does not end")


def main() -> None:
    """Read runs, and write their results."""
    signal.signal(signal.SIGPROF, out_of_time)
    warnings.simplefilter("ignore")
    quiet = io.StringIO()
    with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
        real = load()
    for line in sys.stdin:
        with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
            found = result_of(real, json.loads(line))
        print(json.dumps(found), flush=True)
        quiet.truncate(0)


if __name__ == "__main__":
    main()
