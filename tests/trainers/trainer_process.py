"""One process of a tiny run under a real trainer, on CPU, with gloo.

``trainer_process.py NAME SETTINGS`` trains on the samples of a lock and writes the state of all
ranks to a file. With ``own``, the trainer reads numbered samples with its own loader instead, and
each rank writes the numbers that it trained on.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed

OWN_SAMPLES = 487  # not a multiple of the 24 samples of a step
VOCABULARY = 256
RANK, SIZE = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))  # Lightning removes them


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
    )
    if settings.resume:
        loader.load_state_dict(torch.load(settings.resume))
    weight = torch.zeros(VOCABULARY, VOCABULARY, requires_grad=True)
    for batch in loader:
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
    return loader.state_dict()


def train_stateful_dataloader(settings: Settings) -> Any:
    """torchdata's loader with worker processes; its state is that of rank 0 for all."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    from megaindex.loader import collate, join_states, receipted
    from megaindex.lock import open_run

    distributed.init_process_group("gloo")
    run = open_run(
        settings.lock,
        data_parallel_rank=RANK,
        data_parallel_size=SIZE,
        micro_batch_size=settings.micro,
    )
    loader = StatefulDataLoader(
        run.dataset(receipts=True), batch_sampler=run.sampler, collate_fn=collate, num_workers=2
    )
    if settings.resume:
        state = torch.load(settings.resume)
        loader.load_state_dict(state["loader"])
        run.recorder.load_state_dict(state["receipts"])
    done = len(run) - len(run.sampler)
    for number, _batch in enumerate(receipted(loader, run.recorder, run.sampler), 1 + done):
        step = number // settings.accumulate
        if is_last_of_step(number, settings) and step % 7 == 0:
            receipts = [None] * SIZE
            distributed.all_gather_object(receipts, run.recorder.state_dict())
            state = {"loader": loader.state_dict(), "receipts": join_states(receipts)}
            if RANK == 0:
                torch.save(state, f"{settings.folder}/{step}.pt")
        if number == settings.until * settings.accumulate:
            break
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
    for number, batch in enumerate(loader, done + 1):
        if settings.own:
            seen += numbers_of(batch)
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
    return seen if settings.own else loader.state_dict()


def train_huggingface(settings: Settings) -> Any:
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Trainer,
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
            elif "shift_labels" in inputs:
                check_huggingface_labels(model, inputs)
            return super().training_step(model, inputs, *others)

    trainer = Recording(
        model=model, args=arguments, train_dataset=Numbered() if settings.own else None
    )
    if not settings.own:
        adapter.attach(trainer, settings.lock)
    trainer.train(resume_from_checkpoint=settings.resume or None)
    if settings.own:
        return seen
    (data,) = [c for c in trainer.callback_handler.callbacks if hasattr(c, "run")]
    return data.run.state_dict()


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

        def training_step(self, batch: Any) -> torch.Tensor:
            if settings.own:
                seen.extend(numbers_of(batch))
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
    data = LockedDataModule(settings.lock, micro_batch_size=settings.micro)
    trainer.fit(Bigram(), datamodule=data, ckpt_path=settings.resume or None)
    assert data.run is not None
    return data.run.state_dict()


def train_torchtitan(settings: Settings) -> Any:
    from trainers.torchtitan_on_cpu import config_of

    config = config_of(settings, SIZE)
    trainer = config.build()
    trainer.train()
    state = json.loads(trainer.dataloader.state_dict()["megaindex"])
    trainer.close()
    return state


def train_automodel(settings: Settings) -> Any:
    from trainers.automodel_on_cpu import recipe_of

    import megaindex.adapters.automodel as adapter

    recipe = recipe_of(settings, SIZE)
    adapter.attach(recipe, settings.lock)
    recipe.setup()
    recipe.run_train_validation_loop()
    return recipe.dataloader.run.state_dict()


def main(name: str, settings: Settings) -> None:
    state = globals()[f"train_{name}"](settings)
    if settings.own or RANK == 0:
        Path(settings.folder, f"result-{SIZE}-{RANK}.json").write_text(json.dumps(state))
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Settings(**json.loads(sys.argv[2])))
