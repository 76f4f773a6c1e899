"""Train under Lightning; its checkpoints hold the position in the data."""

from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import megaindex
from megaindex.loader import Loader, MicroBatchSampler


class WholeRun(Loader):
    """Loader whose length stays that of the whole run when it resumes, as Lightning counts."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.num_batches = super().__len__()

    def __len__(self) -> int:
        return self.num_batches


class Bigram(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(torch.zeros(256, 256))  # next token by this token

    def train_dataloader(self) -> WholeRun:
        # made here, where the rank is defined
        corpus = megaindex.IndexedDataset("my_corpus")
        index = megaindex.build_index(corpus, sequence_length=128, epochs=1, order="epoch")
        sampler = MicroBatchSampler(
            num_samples=index.num_samples,
            micro_batch_size=4,
            data_parallel_rank=self.trainer.global_rank,
            data_parallel_size=self.trainer.world_size,
        )
        return WholeRun(index, corpus, sampler)

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = self.logits[batch["tokens"]]
        # the labels are the next tokens already: no shift
        return torch.nn.functional.cross_entropy(logits.mT, batch["labels"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=20.0)


def fit(checkpoint: str | None = None) -> lightning.Trainer:
    trainer = lightning.Trainer(
        max_epochs=1,  # the order holds all epochs of the data
        use_distributed_sampler=False,  # the sampler divides each step between the ranks
        callbacks=[
            ModelCheckpoint("checkpoints", filename="{step}", every_n_train_steps=10, save_top_k=-1)
        ],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(Bigram(), ckpt_path=checkpoint)
    return trainer


if __name__ == "__main__":
    for checkpoint in (None, "checkpoints/step=10.ckpt"):
        trainer = fit(checkpoint)
        loader = trainer.train_dataloader
        print(f"{trainer.global_step} steps to sample {loader.consumed_samples}")
