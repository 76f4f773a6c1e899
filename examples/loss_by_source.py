"""Log the loss of each source of a blend, the same on any number of ranks."""

import os

import torch

import megaindex
from megaindex.audit import LossBySource
from megaindex.loader import Loader, MicroBatchSampler, SampleOptions

rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
if ranks > 1:
    torch.distributed.init_process_group("gloo")
names = ["my_corpus", "my_code"]
index = megaindex.build_blend(names, weights=[0.7, 0.3], num_samples=240, sequence_length=128)
sampler = MicroBatchSampler(
    num_samples=index.num_samples,
    micro_batch_size=8 // ranks,
    data_parallel_rank=rank,
    data_parallel_size=ranks,
)
loader = Loader(index, sampler, options=SampleOptions(keys=True))
logits = torch.zeros(257, 257, requires_grad=True)  # a bigram model: next token by this token
losses = LossBySource(names)

for step, batch in enumerate(loader, 1):
    token_losses = torch.nn.functional.cross_entropy(
        logits[batch["tokens"]].mT, batch["labels"], reduction="none"
    )
    losses.update(token_losses, batch["source"], batch["loss_mask"])
    loss = (token_losses * batch["loss_mask"]).sum() / batch["loss_mask"].sum()
    (gradient,) = torch.autograd.grad(loss, logits)
    if ranks > 1:
        torch.distributed.all_reduce(gradient)
    logits.data -= 20 * gradient / ranks
    if step % 10 == 0:
        scalars = losses.over_ranks().scalars()  # which every rank has to call
        losses.reset()
        if rank == 0:  # writer.add_scalar(name, value, step), or wandb.log(scalars, step=step)
            print(step, *(f"{name} {value:.2f}" for name, value in scalars.items()))
if ranks > 1:
    torch.distributed.destroy_process_group()
