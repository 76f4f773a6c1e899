"""Train under Lightning; its checkpoints hold the position in the data."""

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from megaindex.adapters.lightning import LockedDataModule


class Bigram(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(torch.zeros(257, 257))  # next token by this token

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = self.logits[batch["tokens"]]
        # the labels are the next tokens already: no shift
        return torch.nn.functional.cross_entropy(logits.mT, batch["labels"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=20.0)


def fit(checkpoint: str | None = None) -> None:
    trainer = lightning.Trainer(
        max_epochs=1,  # the order holds all epochs of the data
        callbacks=[
            ModelCheckpoint("checkpoints", filename="{step}", every_n_train_steps=10, save_top_k=-1)
        ],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
    )
    data = LockedDataModule("run.lock", micro_batch_size=4)  # of `megaindex lock`
    trainer.fit(Bigram(), datamodule=data, ckpt_path=checkpoint)
    print(f"{trainer.global_step} steps to sample {trainer.train_dataloader.consumed_samples}")


if __name__ == "__main__":
    for checkpoint in (None, "checkpoints/step=10.ckpt"):
        fit(checkpoint)
