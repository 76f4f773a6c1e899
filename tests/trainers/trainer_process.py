"""The processes of a tiny run under a real trainer, on CPU, with gloo.

``trainer_process.py NAME RANKS SETTINGS`` trains on the samples of a lock and writes the state of
all ranks to a file. It imports the trainer, and forks into one process for each rank. With
``own``, the trainer reads numbered samples with its own loader instead, and each rank writes the
numbers that it trained on.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed

OWN_SAMPLES = 487  # not a multiple of the 24 samples of a step
VOCABULARY = 256
RANK, SIZE = 0, 1  # of the process that was forked
IMPORTED = {  # before the processes are forked
    "pytorch": "megaindex.adapters.run_loader",
    "elsewhere": "megaindex.adapters.run_loader",
    "stateful_dataloader": "torchdata.stateful_dataloader",
    "accelerate": "accelerate",
    "huggingface": "megaindex.adapters.huggingface",
    "lightning": "megaindex.adapters.lightning",
    "torchtitan": "trainers.torchtitan_on_cpu",
    "automodel": "trainers.automodel_on_cpu",
    "bridge": "trainers.bridge_on_cpu",
}


class Settings(SimpleNamespace):
    """What all processes of one start have in common."""

    lock: str
    folder: str
    """Of checkpoints and results."""
    micro: int
    accumulate: int
    until: int
    """Step after which the run stops; a checkpoint is written at every 7th."""
    resume: str
    """Checkpoint from which the run continues; empty: none."""
    own: bool
    keys: str
    """File with the row of each sample's tokens, which the trainer has to find; empty: none."""
    mix: int
    """Step from which a run draws with `MIX`, unless it continues; 0: none."""


MIX = {"web": 1, "code": 1}
ROWS = ("sample", "source", "exposure", "key")


SERVED: list[int] = []
"""Samples of the rows that this process trained on, if there is a file of them."""


def check_rows(settings: Settings, tokens: torch.Tensor, rows: Any) -> None:
    """Compare the rows of a micro batch, which ``rows()`` returns, with those of the lock."""
    if not settings.keys or settings.own:
        return
    known = json.loads(Path(settings.keys).read_text())
    found = rows()
    assert sorted(found) == ["exposure", "key", "sample", "source"]
    columns = [found[name].tolist() for name in ("sample", "source", "exposure", "key")]
    for row, own in zip(zip(*columns, strict=True), tokens.tolist(), strict=True):
        assert known[str(row[0])] == [*row, own]
    SERVED.extend(columns[0])


def change_mix(run: Any, settings: Settings) -> None:
    if settings.mix and not settings.resume:
        assert run.set_mix(MIX, at=settings.mix) == settings.mix


def state_of(run: Any, settings: Settings) -> Any:
    """Return the joined state, after counting the steps that were measured."""
    steps = settings.until if settings.until > 0 else 20
    first = int(settings.resume != "") and 7
    if settings.keys:
        check_served(settings, steps - first)
    assert run.wait.steps in (steps - first, steps - first - 1 + (settings.until < 20)), run.wait
    return run.state_dict()


def check_served(settings: Settings, steps: int) -> None:
    rows = steps * settings.micro * settings.accumulate
    assert len(SERVED) == len({*SERVED}) == rows, (len(SERVED), rows)


class Numbered(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Samples that hold their own number."""

    def __len__(self) -> int:
        return OWN_SAMPLES

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        tokens = torch.tensor([number % 256, number // 256, 0, 0])
        return {"input_ids": tokens, "labels": tokens}


def numbers_of(batch: dict[str, torch.Tensor]) -> list[int]:
    return [row[0].item() + 256 * row[1].item() for row in batch["input_ids"]]


def loss_of(weight: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    tokens = batch["input_ids"] if "input_ids" in batch else batch["tokens"]
    return torch.nn.functional.cross_entropy(weight[tokens].mT, batch["labels"])


def is_last_of_step(number: int, settings: Settings) -> bool:
    return number % settings.accumulate == 0


def train_pytorch(settings: Settings) -> Any:
    """A loop of one's own; each rank computes its gradient, which is summed."""
    from megaindex.adapters import RunLoader

    distributed.init_process_group("gloo")
    loader = RunLoader(
        settings.lock,
        micro_batch_size=settings.micro,
        micro_batches_per_step=settings.accumulate,
        keys=bool(settings.keys),
    )
    if settings.resume:
        loader.load_state_dict(torch.load(settings.resume))
    change_mix(loader, settings)
    weight = torch.zeros(VOCABULARY, VOCABULARY, requires_grad=True)
    for batch in loader:
        check_rows(settings, batch["tokens"], loader.rows)
        assert ("key" in batch) == bool(settings.keys)
        loss_of(weight, batch).backward()
        if not is_last_of_step(loader.returned, settings):
            continue
        distributed.all_reduce(weight.grad)
        weight.data -= weight.grad
        step = loader.returned // settings.accumulate
        if step % 7 == 0:
            state = loader.state_dict()
            if RANK == 0:
                torch.save(state, f"{settings.folder}/{step}.pt")
        if step == settings.until:
            break
    return state_of(loader, settings)


def train_elsewhere(settings: Settings) -> None:
    """Open a lock that the last rank does not see."""
    from megaindex.adapters import RunLoader

    distributed.init_process_group("gloo")
    RunLoader(settings.lock + ".gone" * (RANK == SIZE - 1))


def train_stateful_dataloader(settings: Settings) -> Any:
    """torchdata's loader with worker processes; its state is that of rank 0 for all."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    from megaindex.loader import SampleOptions, collate, join_states, receipted
    from megaindex.lock import open_run

    distributed.init_process_group("gloo")
    run = open_run(
        settings.lock,
        data_parallel_rank=RANK,
        data_parallel_size=SIZE,
        micro_batch_size=settings.micro,
        options=SampleOptions(keys=bool(settings.keys)),
    )
    loader = StatefulDataLoader(
        run.dataset(receipts=True), batch_sampler=run.sampler, collate_fn=collate, num_workers=2
    )
    if settings.resume:
        state = torch.load(settings.resume)
        loader.load_state_dict(state["loader"])
        run.recorder.load_state_dict(state["receipts"])
    done = len(run) - len(run.sampler)
    for number, batch in enumerate(receipted(loader, run.recorder, run.sampler), 1 + done):
        rows = {name: batch.pop(name) for name in ROWS if name in batch}
        check_rows(settings, batch["tokens"], lambda: rows)  # noqa: B023
        step = number // settings.accumulate
        if is_last_of_step(number, settings) and step % 7 == 0:
            receipts = [None] * SIZE
            distributed.all_gather_object(receipts, run.recorder.state_dict())
            state = {"loader": loader.state_dict(), "receipts": join_states(receipts)}
            if RANK == 0:
                torch.save(state, f"{settings.folder}/{step}.pt")
        if number == settings.until * settings.accumulate:
            break
    if settings.keys:
        check_served(settings, (number - done) // settings.accumulate)
    receipts = [None] * SIZE
    distributed.all_gather_object(receipts, run.recorder.state_dict())
    return {"receipt": join_states(receipts)}


def train_accelerate(settings: Settings) -> Any:
    from accelerate import Accelerator, skip_first_batches

    from megaindex.adapters import RunLoader

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=settings.accumulate)
    model = torch.nn.Embedding(VOCABULARY, VOCABULARY)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    seen: list[int] = []
    done = 0
    if settings.own:
        torch.manual_seed(0)
        loader: Any = torch.utils.data.DataLoader(Numbered(), settings.micro, shuffle=True)
    else:
        loader = RunLoader(
            settings.lock,
            fields="huggingface",
            micro_batch_size=settings.micro,
            micro_batches_per_step=settings.accumulate,
            device=accelerator.device,
            keys=bool(settings.keys),
        )
        accelerator.register_for_checkpointing(loader)
    model, optimizer, prepared = accelerator.prepare(model, optimizer, loader)
    assert settings.own or prepared is loader
    loader = prepared
    if settings.resume:
        accelerator.load_state(settings.resume)
        if settings.own:  # as its documentation says
            done = 7 * settings.accumulate
            loader = skip_first_batches(loader, done)
        else:
            done = loader.returned
    if not settings.own:
        change_mix(loader, settings)
    for number, batch in enumerate(loader, done + 1):
        if settings.own:
            seen += numbers_of(batch)
        else:
            check_rows(settings, batch["input_ids"], loader.rows)
            assert "key" not in batch
        with accelerator.accumulate(model):
            logits = model(batch["input_ids"])
            accelerator.backward(torch.nn.functional.cross_entropy(logits.mT, batch["labels"]))
            optimizer.step()
            optimizer.zero_grad()
        step = number // settings.accumulate
        if is_last_of_step(number, settings) and step % 7 == 0:
            accelerator.save_state(f"{settings.folder}/{step}")
        if number == settings.until * settings.accumulate:
            break
    return seen if settings.own else state_of(loader, settings)


def train_huggingface(settings: Settings) -> Any:
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    import megaindex.adapters.huggingface as adapter

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=1, **sizes))
    arguments = TrainingArguments(
        output_dir=settings.folder,
        per_device_train_batch_size=settings.micro,
        gradient_accumulation_steps=settings.accumulate,
        num_train_epochs=1,
        max_steps=settings.until,
        use_cpu=True,
        report_to="none",
        save_strategy="steps",
        save_steps=7,
        disable_tqdm=True,
    )
    seen: list[int] = []

    class Recording(Trainer):  # type: ignore[misc]
        def training_step(self, model: Any, inputs: Any, *others: Any) -> Any:
            if settings.own:
                seen.extend(numbers_of(inputs))
            else:
                check_rows(settings, inputs["input_ids"], data.rows)
                assert "key" not in inputs
            if "shift_labels" in inputs:
                check_huggingface_labels(model, inputs)
            return super().training_step(model, inputs, *others)

    trainer = Recording(
        model=model, args=arguments, train_dataset=Numbered() if settings.own else None
    )
    if settings.own:
        trainer.train(resume_from_checkpoint=settings.resume or None)
        return seen
    data = adapter.attach(trainer, settings.lock, keys=bool(settings.keys))

    class Mixing(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, *others: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                change_mix(data.run, settings)

    trainer.add_callback(Mixing())
    trainer.train(resume_from_checkpoint=settings.resume or None)
    return state_of(data.run, settings)


def check_huggingface_labels(model: Any, inputs: Any) -> None:
    """The loss of the model is the cross entropy of its logits and the next tokens, unshifted."""
    with torch.no_grad():
        found = model(**inputs)
    labels = inputs["shift_labels"]
    assert torch.equal(labels[:, :-1], inputs["input_ids"][:, 1:])
    expected = torch.nn.functional.cross_entropy(found.logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(found.loss, expected)


def train_lightning(settings: Settings) -> Any:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    from megaindex.adapters.lightning import LockedDataModule

    seen: list[int] = []

    class Bigram(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(VOCABULARY, VOCABULARY))

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            if settings.own:
                seen.extend(numbers_of(batch))
            elif number == settings.accumulate:
                change_mix(data.run, settings)
            if not settings.own:
                check_rows(settings, batch["tokens"], data.run.rows)
                assert ("key" in batch) == bool(settings.keys)
            return loss_of(self.weight, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    saving = ModelCheckpoint(
        settings.folder, filename="{step}", every_n_train_steps=7, save_top_k=-1
    )
    trainer = lightning.Trainer(
        max_epochs=1,
        max_steps=settings.until,
        accumulate_grad_batches=settings.accumulate,
        accelerator="cpu",
        devices=SIZE,
        strategy="ddp",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[saving],
    )
    if settings.own:
        torch.manual_seed(0)
        loader = torch.utils.data.DataLoader(Numbered(), settings.micro, shuffle=True)
        trainer.fit(Bigram(), loader, ckpt_path=settings.resume or None)
        return seen
    data = LockedDataModule(
        settings.lock, micro_batch_size=settings.micro, keys=bool(settings.keys)
    )
    trainer.fit(Bigram(), datamodule=data, ckpt_path=settings.resume or None)
    return state_of(data.run, settings)


def train_torchtitan(settings: Settings) -> Any:
    from trainers.torchtitan_on_cpu import config_of

    config = config_of(settings, SIZE)
    config.dataloader.keys = bool(settings.keys)
    trainer = config.build()
    take = trainer.post_dataloading_process

    def checked(inputs: Any, labels: Any) -> Any:
        taken = take(inputs, labels)
        check_rows(settings, taken[0], trainer.dataloader.rows)
        assert "key" not in taken[2]
        return taken

    trainer.post_dataloading_process = checked
    change_mix(trainer.dataloader.run, settings)
    trainer.train()
    state_of(trainer.dataloader.run, settings)
    state = json.loads(trainer.dataloader.state_dict()["megaindex"])
    trainer.close()
    return state


def train_automodel(settings: Settings) -> Any:
    from trainers.automodel_on_cpu import recipe_of

    import megaindex.adapters.automodel as adapter

    recipe = recipe_of(settings, SIZE)
    adapter.attach(recipe, settings.lock, keys=bool(settings.keys))
    recipe.setup()
    step = recipe._forward_backward_step

    def checked(number: int, batch: Any, *others: Any, **more: Any) -> Any:
        tokens, rows = batch["input_ids"], recipe.dataloader.rows
        result = step(number, batch, *others, **more)
        check_rows(settings, tokens, rows)
        assert "key" not in batch
        return result

    recipe._forward_backward_step = checked
    change_mix(recipe.dataloader.run, settings)
    recipe.run_train_validation_loop()
    return state_of(recipe.dataloader.run, settings)


def train_bridge(settings: Settings) -> Any:
    """Megatron-Bridge's data loaders, after ``install(lock=…)``, compared with the lock's samples;
    none trains. A checkpoint has the state of its training."""
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
    from support.megatron_dataset import Tokenizer
    from trainers.bridge_on_cpu import GPTDatasetConfig, TrainingConfig, TrainState, loaders, utils

    import megaindex.adapters.megatron as adapter
    from megaindex.adapters import status
    from megaindex.loader import SampleOptions
    from megaindex.lock import open_run, read_lock

    distributed.init_process_group("gloo")
    lock = read_lock(settings.lock)
    adapter.install(lock=lock, keys=True)
    data = Path(settings.lock).parent
    dataset = GPTDatasetConfig(
        seq_length=64, random_seed=1234, blend=([f"{data}/web", f"{data}/code"], [0.7, 0.3]),
        split="100,0,0", path_to_cache=f"{settings.folder}/cache", tokenizer=Tokenizer(),
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
        create_attention_mask=False, dataloader_type="single", num_workers=0, pin_memory=False,
    )  # fmt: skip
    dataset.finalize()
    train = TrainingConfig(
        micro_batch_size=settings.micro, global_batch_size=24, train_iters=20, eval_iters=0
    )
    # as Megatron-Bridge's initialize_megatron, before a loader is made
    init_num_microbatches_calculator(RANK, None, 24, settings.micro, SIZE)
    state = TrainState()
    if settings.resume:
        state.load_state_dict(torch.load(settings.resume))
    loader, *_ = loaders.build_train_valid_test_data_loaders(
        SimpleNamespace(train=train, dataset=dataset),
        state,
        utils.pretrain_train_valid_test_datasets_provider,
        distributed.group.WORLD,
    )
    ranks = {"data_parallel_rank": RANK, "data_parallel_size": SIZE}
    options = SampleOptions(keys=True)
    run = open_run(lock, micro_batch_size=settings.micro, options=options, **ranks)
    past = state.consumed_train_samples // (settings.micro * SIZE)
    expected = itertools.islice(run, past, settings.until * settings.accumulate)
    for ours, theirs in zip(expected, loader, strict=settings.until == 20):
        assert torch.equal(ours["tokens"], theirs["tokens"])
        assert torch.equal(ours["labels"], theirs["labels"])
        rows = adapter.rows()
        assert sorted(rows) == sorted(ROWS)
        assert all(torch.equal(ours[name], rows[name]) for name in ROWS)
        assert not {*ROWS} & {*theirs}
        state.consumed_train_samples += settings.micro * SIZE
    waited = status().waits["Megatron"]
    steps = settings.until - past // settings.accumulate
    assert waited.steps in (steps, steps * settings.accumulate), waited
    if RANK == 0:
        torch.save(state.state_dict(), f"{settings.folder}/{settings.until}.pt")
    return state.consumed_train_samples


def main(name: str, ranks: int, settings: Settings) -> int:
    """Return the number of ranks that failed."""
    importlib.import_module(IMPORTED[name])
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child:
            children.append(child)
            continue
        with open(f"{settings.folder}/log-{ranks}-{rank}.txt", "w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        status = 1
        try:
            run(name, rank, ranks, settings)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    return sum(os.waitpid(child, 0)[1] != 0 for child in children)


def run(name: str, rank: int, ranks: int, settings: Settings) -> None:
    global RANK, SIZE
    RANK, SIZE = rank, ranks
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), NODE_RANK="0")
    state = globals()[f"train_{name}"](settings)
    if settings.own or rank == 0:
        Path(settings.folder, f"result-{ranks}-{rank}.json").write_text(json.dumps(state))
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), Settings(**json.loads(sys.argv[3]))))
