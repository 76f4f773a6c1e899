"""Train in a loop of Accelerate, on any number of processes; its checkpoints hold the position."""

import os

import torch
from accelerate import Accelerator

from megaindex.adapters import RunLoader

accelerator = Accelerator(cpu=True)
loader = RunLoader("run.lock", device=accelerator.device)  # of `megaindex lock`
model = torch.nn.Embedding(257, 257, _weight=torch.zeros(257, 257))  # next token by this token
optimizer = torch.optim.SGD(model.parameters(), lr=20.0)
model, optimizer = accelerator.prepare(model, optimizer)  # leaves the loader as it is, if given
accelerator.register_for_checkpointing(loader)
if os.path.exists("accelerate-state"):
    accelerator.load_state("accelerate-state")
for batch in loader:
    # the labels are the next tokens already: no shift
    loss = torch.nn.functional.cross_entropy(model(batch["tokens"]).mT, batch["labels"])
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    if loader.returned == 10:
        accelerator.save_state("accelerate-state")
accelerator.print(f"{loader.returned} steps to sample {loader.consumed_samples}")
accelerator.end_training()
