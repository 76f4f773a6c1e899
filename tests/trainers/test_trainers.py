"""One lock under every trainer: the same receipts, whatever the number of ranks.

The packages are those of requirements/trainers.txt, which `make trainers` installs.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.locked_runs import assert_receipt

import megaindex
from megaindex.errors import InvalidArgument, MissingFile
from megaindex.loader import SampleOptions
from megaindex.lock import make_lock, open_run, read_lock
from megaindex.recipe import read_recipe

pytestmark = [
    pytest.mark.slow,  # `make trainers` runs them all
    pytest.mark.filterwarnings("ignore"),  # of the trainers
]
HERE = Path(__file__).parent
TRAINERS = {
    "pytorch": "torch",
    "stateful_dataloader": "torchdata.stateful_dataloader",
    "accelerate": "accelerate",
    "huggingface": "transformers",
    "lightning": "lightning",
    "torchtitan": "torchtitan",
    "automodel": "nemo_automodel",
}
NEEDS = TRAINERS | {
    "torchft": "torchft",
    "bridge": "megatron.bridge",
    "megatron": "megatron.bridge",
}
CHECKPOINTS = {
    "pytorch": "7.pt",
    "stateful_dataloader": "7.pt",
    "accelerate": "7",
    "huggingface": "checkpoint-7",
    "lightning": "step=7.ckpt",
    "automodel": "epoch_0_step_6",
}

MICRO = {2: {"micro": 2, "accumulate": 6}, 4: {"micro": 3, "accumulate": 2}}  # by ranks


def need(name: str) -> None:
    try:
        found = importlib.util.find_spec(NEEDS[name])
    except ModuleNotFoundError:  # of the package around it
        found = None
    if found is None:
        pytest.skip(f"{NEEDS[name]} is not installed; make trainers installs it")


@pytest.fixture(scope="module")
def lock(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The lock of 20 steps of 24 samples: of two sources, mixed, more than an epoch of one."""
    folder = tmp_path_factory.mktemp("locked")
    rng = np.random.default_rng(0)
    for name, count in (("web", 300), ("code", 60)):
        with megaindex.IndexedDatasetWriter(str(folder / name), "uint16") as writer:
            for length in rng.integers(20, 200, count):
                writer.add_document(rng.integers(1, 250, length))
    recipe = folder / "run.yaml"
    recipe.write_text(
        "sequence_length: 64\n"
        "batch: {micro_batch_size: 2, data_parallel_size: 2, global_batch_size: 24}\n"
        "sources: {web: web, code: code}\n"
        "stages:\n  main: {steps: 20, mix: {web: 0.7, code: 0.3}}\n"
    )
    path = str(folder / "run.lock")
    make_lock(read_recipe(recipe)).write(path)
    return path


@pytest.fixture(scope="module")
def keys(lock: str) -> str:
    """A file with the row and the tokens of each sample."""
    options = SampleOptions(keys=True)
    batches = [*open_run(lock, data_parallel_size=1, micro_batch_size=24, options=options)]
    names = ("sample", "source", "exposure", "key", "tokens")
    rows = [
        row
        for batch in batches
        for row in zip(*(batch[name].tolist() for name in names), strict=True)
    ]
    assert {row[2] for row in rows} == {0, 1}
    path = Path(lock).with_name("rows.json")
    path.write_text(json.dumps({row[0]: row for row in rows}))
    return str(path)


def start(name: str, ranks: int, *, fails: bool = False, **settings: Any) -> list[Any]:
    """Run a trainer in ``ranks`` processes, and return their results, or, if all must fail, the
    ends of their logs."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "PYTHONPATH": os.pathsep.join(map(str, (HERE.parents[1], HERE.parent))),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
    }
    given = {"lock": "", "until": -1, "resume": "", "own": False, "keys": "", "mix": 0, **settings}
    command = [sys.executable, str(HERE / "trainer_process.py"), name, str(ranks)]
    folder = Path(given["folder"])
    folder.mkdir(exist_ok=True)
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(
            [*command, json.dumps(given)], env=environment, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
    try:
        failed = process.wait(500)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    files = [folder / "log.txt", *sorted(folder.glob(f"log-{ranks}-*.txt"))]
    logs = [file.read_text()[-3000:] for file in files]
    assert failed == (ranks if fails else 0), "\n".join(logs)
    if fails:
        return logs[1:]
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"result-{ranks}-*.json"))]


def test_the_lock_serves_each_token_once_an_epoch(lock: str) -> None:
    """Of web, not all; of code, all but those that fill no sample, and then some once more."""
    spans = open_run(lock, data_parallel_size=1).index.locate(np.arange(480))
    times = np.zeros((2, 300, 200), int)
    for begin, end in itertools.pairwise(spans.row_splits):
        for number in range(begin, end):
            first = spans.offset[number]
            inputs = spans.length[number] - (number == end - 1)  # the last token is a label alone
            times[spans.source[number], spans.document[number], first : first + inputs] += 1
    web, code = times
    lengths = megaindex.IndexedDataset(str(Path(lock).parent / "code")).sequence_lengths
    assert web.max() == 1
    assert code.max() == 2
    assert 0 <= lengths.sum() - np.count_nonzero(code) <= 64


@pytest.mark.parametrize("name", TRAINERS)
def test_the_receipts_are_those_of_the_lock(
    name: str, lock: str, keys: str, tmp_path: Path
) -> None:
    """Two ranks train for seven steps, and four go on with other micro batches.

    Under Automodel it is four, then two: it has random states of the ranks that were, and none for
    more. Each finds the rows of the micro batch that it trains on, and no model gets their fields.
    """
    need(name)
    folder = str(tmp_path / "run")
    train = {"lock": lock, "folder": folder, "keys": keys}
    first, then = (4, 2) if name == "automodel" else (2, 4)
    start(name, first, **MICRO[first], until=7, **train)
    resume = "7" if name == "torchtitan" else f"{folder}/{CHECKPOINTS[name]}"
    (state,) = start(name, then, **MICRO[then], until=20, resume=resume, **train)
    assert_receipt(state, read_lock(lock), 480)


@pytest.mark.parametrize("name", sorted(TRAINERS.keys() - {"stateful_dataloader"}))
def test_the_mix_changes_under_every_trainer(name: str, lock: str, tmp_path: Path) -> None:
    """From step 4 on, set in the first two; the run continues on other ranks with the change."""
    need(name)
    folder = str(tmp_path / "run")
    train = {"lock": lock, "folder": folder, "mix": 4}
    first, then = (4, 2) if name == "automodel" else (2, 4)
    start(name, first, **MICRO[first], until=7, **train)
    resume = "7" if name == "torchtitan" else f"{folder}/{CHECKPOINTS[name]}"
    (state,) = start(name, then, **MICRO[then], until=20, resume=resume, **train)
    run = open_run(lock, data_parallel_size=1, micro_batch_size=24)
    assert run.set_mix({"web": 1, "code": 1}, at=4) == 4
    for _ in run:
        pass
    expected = run.state_dict()["receipt"]
    assert state["receipt"]["receipt"] == expected["receipt"]
    assert state["receipt"]["samples"] == expected["samples"] == 480
    locked = open_run(lock, data_parallel_size=1, micro_batch_size=24)
    for _ in locked:
        pass
    assert locked.state_dict()["receipt"]["receipt"] != expected["receipt"]


def test_torchft_repeats_the_samples_of_a_step_that_a_group_leaves(
    lock: str, tmp_path: Path
) -> None:
    """Two groups, then one, then two: each step that is committed has the samples of the lock."""
    need("torchft")
    paths = os.pathsep.join(map(str, (HERE.parents[1], HERE.parent)))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "torchft_groups.py"), lock, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=500,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [
        json.loads(line)
        for path in sorted(tmp_path.glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    groups = [size for _, rank, size, _ in sorted(rows) if rank == 0]
    assert groups[:7] == [2] * 7
    assert groups[7] == 1
    assert groups[-1] == 2
    run = open_run(lock, data_parallel_size=1, micro_batch_size=24)
    for step, batch in enumerate(run):
        parts = sorted((rank, tokens) for at, rank, _, tokens in rows if at == step)
        assert [row for _, tokens in parts for row in tokens] == batch["tokens"].tolist()
    assert step == len(groups) - 1 == 19


def test_the_batch_size_of_torchtitan_must_be_that_of_the_lock(lock: str, tmp_path: Path) -> None:
    """Checkpoints after 168 micro batches would lie between steps of the lock, which have 12."""
    need("torchtitan")
    run = {"lock": lock, "folder": str(tmp_path / "run"), "until": 1}
    (log,) = start("torchtitan", 1, fails=True, micro=2, accumulate=24, **run)
    assert "run.lock: has steps of 24 samples, and the trainer 48, 24 of 2; set its global" in log


def test_settings_of_huggingface_that_contradict_the_lock(lock: str, tmp_path: Path) -> None:
    need("huggingface")
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from megaindex.adapters.huggingface import attach

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=1, **sizes))

    def trainer(data: Any = None, **settings: Any) -> Any:
        given = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 6, **settings}
        arguments = TrainingArguments(
            str(tmp_path), report_to="none", use_cpu=True, disable_tqdm=True, **given
        )
        return Trainer(model=model, args=arguments, train_dataset=data)

    with pytest.raises(InvalidArgument, match="has a train_dataset"):
        attach(trainer([1]), lock)
    for settings, message in (
        ({}, r"has 20 steps, .* num_train_epochs=3; set num_train_epochs=1"),
        ({"max_steps": 21}, "max_steps=21"),
        ({"gradient_accumulation_steps": 3}, "steps of 24 samples, and the trainer 12, 3 of 4"),
        ({"num_train_epochs": 1, "ignore_data_skip": True}, "ignore_data_skip must be False"),
    ):
        made = trainer(**settings)
        attach(made, lock)
        with pytest.raises(InvalidArgument, match=message):
            made.train()
    with pytest.raises(InvalidArgument, match="has a loader already"):
        attach(made, lock)
    made = trainer(max_steps=2, save_strategy="steps", save_steps=1)
    attach(made, lock)
    made.train()
    (tmp_path / "checkpoint-1" / "megaindex.json").unlink()
    with pytest.raises(MissingFile, match=r"checkpoint-1/megaindex\.json: does not exist"):
        made.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


@pytest.mark.parametrize("micro", [1, 4])
def test_huggingface_reports_its_speed_in_samples(micro: int, lock: str, tmp_path: Path) -> None:
    need("huggingface")
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from megaindex.adapters.huggingface import attach

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    arguments = TrainingArguments(
        str(tmp_path), report_to="none", use_cpu=True, disable_tqdm=True, num_train_epochs=1,
        per_device_train_batch_size=micro, gradient_accumulation_steps=24 // micro,
    )  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=1, **sizes))
    trainer = Trainer(model=model, args=arguments)
    attach(trainer, lock)
    metrics = trainer.train().metrics
    seconds = metrics["train_runtime"]  # rounded to 4 digits, as the speed is to 3
    assert metrics["train_samples_per_second"] == pytest.approx(480 / seconds, rel=1e-3, abs=1e-3)


def test_settings_of_lightning_that_contradict_the_lock(lock: str) -> None:
    need("lightning")
    import lightning
    from lightning.pytorch.demos.boring_classes import BoringModel

    from megaindex.adapters.lightning import LockedDataModule

    for settings, message in (
        ({"max_epochs": 3}, "max_steps=-1, max_epochs=3; set max_epochs=1"),
        ({"max_steps": 21}, "max_steps=21"),
        ({"max_epochs": 1, "max_steps": 21}, "max_steps=21"),
        ({"max_epochs": 1, "accumulate_grad_batches": 2}, "and the trainer 8, 2 of 4"),
    ):
        given = {"accumulate_grad_batches": 6, "logger": False, "accelerator": "cpu", **settings}
        trainer = lightning.Trainer(enable_checkpointing=False, **given)
        with pytest.raises(InvalidArgument, match=message):
            trainer.fit(BoringModel(), datamodule=LockedDataModule(lock, micro_batch_size=4))


def test_settings_of_automodel_that_contradict_the_lock(lock: str) -> None:
    need("automodel")
    from nemo_automodel.components.config.loader import ConfigNode
    from nemo_automodel.recipes._typed_config import RecipeConfig

    from megaindex.adapters.automodel import attach

    def recipe(dataset: Any = None, **settings: Any) -> Any:
        steps = {"global_batch_size": 24, "local_batch_size": 2, **settings}
        config = {"step_scheduler": steps, **({} if dataset is None else {"dataset": dataset})}
        return SimpleNamespace(cfg=RecipeConfig(ConfigNode(config)))

    with pytest.raises(InvalidArgument, match="has a dataset of its own"):
        attach(recipe({"_target_": "builtins.list"}), lock)
    made = recipe({"tokenizer": None}, max_steps=20)
    attach(made, lock)
    with pytest.raises(InvalidArgument, match="lock is attached already"):
        attach(made, lock)
    with pytest.raises(InvalidArgument, match="with pipelines"):
        made.cfg.dataloader.build(dp_rank=0, dp_world_size=1, pp_enabled=True)
    packed = SimpleNamespace(
        cfg=RecipeConfig(ConfigNode({"packed_sequence": {"packed_sequence_size": 64}}))
    )
    with pytest.raises(InvalidArgument, match="leave packed_sequence.packed_sequence_size out"):
        attach(packed, lock)
    for settings, message in (
        ({"num_epochs": 3}, r"num_epochs=3; set step_scheduler\.num_epochs=1"),
        ({"max_steps": 21}, "max_steps=21"),
        ({"max_steps": 20, "global_batch_size": 12}, "and the trainer 12, 3 of 4"),
        ({"max_steps": 20, "global_batch_size": 28}, "and the trainer 28"),
    ):
        made = recipe(local_batch_size=4, **settings)
        attach(made, lock)
        with pytest.raises(InvalidArgument, match=message):
            made.cfg.dataloader.build(dp_rank=0, dp_world_size=1)


def test_accelerate_does_not_divide_batches_again() -> None:
    need("accelerate")
    from accelerate.data_loader import prepare_data_loader
    from torch.utils.data import DataLoader

    from megaindex.loader import MicroBatchSampler

    sampler = MicroBatchSampler(
        num_samples=64, micro_batch_size=4, data_parallel_rank=0, data_parallel_size=2
    )
    loader = DataLoader(list(range(64)), batch_sampler=sampler)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="divided between the ranks"):
        prepare_data_loader(loader, num_processes=2, process_index=0, put_on_device=False)


def test_bridge_reads_the_samples_of_a_lock(tmp_path: Path) -> None:
    """Two ranks read seven steps, and four go on; each compares every sample with the lock's."""
    need("bridge")
    lock = tmp_path / "run.lock"
    make_lock(
        data_path=blend_words(tmp_path), order="megatron", sequence_length=64, seed=1234,
        split="100,0,0", train_iters=20, eval_iters=0, global_batch_size=24, micro_batch_size=2,
        data_parallel_size=2,
    ).write(str(lock))  # fmt: skip
    run = {"lock": str(lock), "folder": str(tmp_path / "run")}
    assert start("bridge", 2, **MICRO[2], until=7, **run) == [168]
    resume = f"{run['folder']}/7.pt"
    assert start("bridge", 4, **MICRO[4], until=20, resume=resume, **run) == [480]


def blend_words(folder: Path) -> list[str]:
    """Write two corpora, and return the words of a blend of both."""
    words = []
    for weight, name in ((0.7, "web"), (0.3, "code")):
        rng = np.random.default_rng(len(name))
        with megaindex.IndexedDatasetWriter(str(folder / name), "uint16") as writer:
            for length in rng.integers(20, 200, 200):
                writer.add_document(rng.integers(1, 250, length))
        words += [str(weight), str(folder / name)]
    return words


def test_lightning_does_not_divide_batches_again() -> None:
    need("lightning")
    from lightning.pytorch.utilities.data import _update_dataloader
    from torch.utils.data import DataLoader, DistributedSampler

    from megaindex.loader import MicroBatchSampler

    data: Any = list(range(64))
    sampler = MicroBatchSampler(
        num_samples=64, micro_batch_size=4, data_parallel_rank=0, data_parallel_size=2
    )
    loader = DataLoader(data, batch_sampler=sampler)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="divided between the ranks"):
        _update_dataloader(loader, DistributedSampler(data, 2, 0))


def test_all_ranks_fail_where_one_does_not_see_the_lock(lock: str, tmp_path: Path) -> None:
    logs = start("elsewhere", 2, fails=True, lock=lock, folder=str(tmp_path / "run"))
    first, last = (log.strip().splitlines()[-1] for log in logs)
    assert re.search(r"StorageError: process 1 on .*failed.*MissingFile.*same file system", first)
    assert re.search(r"MissingFile: .*run\.lock\.gone does not exist", last)


def test_automodel_builds_the_samples_of_a_lock_without_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Automodel's own datasets, with the helpers of megaindex."""
    need("automodel")
    import megaindex.adapters.automodel as adapter

    adapter.install()
    code = importlib.import_module("nemo_automodel.components.datasets.llm.megatron_dataset")
    from torch import distributed
    from torch.utils import cpp_extension

    monkeypatch.setattr(cpp_extension, "load_inline", None)
    words = blend_words(tmp_path)
    tokenizer = SimpleNamespace(eos_token_id=0, name_or_path="bytes", pad_token_id=None)
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        built = code.MegatronPretraining(
            paths=words, seq_length=64, tokenizer=tokenizer, micro_batch_size=2,
            global_batch_size=24, seed=1234, split="100,0,0", trainer_max_steps=20,
            splits_to_build="train", num_val_samples=0, num_test_samples=0,
            index_mapping_dir=str(tmp_path / "cache"),
        )  # fmt: skip
        built.build()
    finally:
        distributed.destroy_process_group()
        adapter.uninstall()
    samples = built.get_dataset("train")
    lock = make_lock(
        data_path=words, order="megatron", sequence_length=64, seed=1234, split="100,0,0",
        train_iters=20, eval_iters=0, micro_batch_size=24, data_parallel_size=1,
    )  # fmt: skip
    position = 0
    for batch in open_run(lock):
        for tokens, labels in zip(batch["tokens"], batch["labels"], strict=True):
            sample = samples[position]
            assert tokens.equal(sample["input_ids"])
            assert labels.equal(sample["labels"])
            position += 1
    assert position == 480
