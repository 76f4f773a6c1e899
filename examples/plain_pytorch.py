"""Train in plain PyTorch; under torchrun, each rank reads its share of every step."""

import os

import torch

import megaindex
from megaindex.loader import Loader, MicroBatchSampler

rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
if ranks > 1:
    torch.distributed.init_process_group("gloo")
index = megaindex.build_index("my_corpus", sequence_length=128, epochs=2, order="epoch")
sampler = MicroBatchSampler(
    num_samples=index.num_samples,
    micro_batch_size=4,
    data_parallel_rank=rank,
    data_parallel_size=ranks,
)
loader = Loader(index, sampler)  # with device="cuda", batches are copied ahead of use
logits = torch.zeros(257, 257, requires_grad=True)  # a bigram model: next token by this token
if os.path.exists("checkpoint.pt"):
    checkpoint = torch.load("checkpoint.pt")
    loader.load_state_dict(checkpoint["data"])
    logits.data = checkpoint["model"]

for step, batch in enumerate(loader, 1):
    # the labels are the next tokens already: no shift
    losses = torch.nn.functional.cross_entropy(
        logits[batch["tokens"]].mT, batch["labels"], reduction="none"
    )
    loss = (losses * batch["loss_mask"]).sum() / batch["loss_mask"].sum()
    (gradient,) = torch.autograd.grad(loss, logits)
    if ranks > 1:
        torch.distributed.all_reduce(gradient)
    logits.data -= 20 * gradient / ranks
    if step % 20 == 0 and rank == 0:  # the state of the data is equal on all ranks
        torch.save({"data": loader.state_dict(), "model": logits.data}, "checkpoint.pt")
print(f"{step} steps to sample {loader.consumed_samples} of {index.num_samples}, loss {loss:.2f}")
if ranks > 1:
    torch.distributed.destroy_process_group()
