"""Train in plain PyTorch; under torchrun, each rank reads its share of every step."""

import os

import torch

import megaindex
from megaindex.loader import Loader, MicroBatchSampler

corpus = megaindex.IndexedDataset("my_corpus")  # my_corpus.bin and my_corpus.idx
index = megaindex.build_index(corpus, sequence_length=128, epochs=2, order="epoch")
sampler = MicroBatchSampler(
    num_samples=index.num_samples,
    micro_batch_size=4,
    data_parallel_rank=int(os.environ.get("RANK", "0")),
    data_parallel_size=int(os.environ.get("WORLD_SIZE", "1")),
)
loader = Loader(index, corpus, sampler)  # with device="cuda", batches are copied ahead of use
if os.path.exists("data.pt"):
    loader.load_state_dict(torch.load("data.pt"))

logits = torch.zeros(256, 256, requires_grad=True)  # a bigram model: next token by this token
for step, batch in enumerate(loader, 1):
    # the labels are the next tokens already: no shift
    losses = torch.nn.functional.cross_entropy(
        logits[batch["tokens"]].mT, batch["labels"], reduction="none"
    )
    loss = (losses * batch["loss_mask"]).sum() / batch["loss_mask"].sum()
    (gradient,) = torch.autograd.grad(loss, logits)
    logits.data -= 20 * gradient
    if step % 20 == 0:
        torch.save(loader.state_dict(), "data.pt")  # beside the model's checkpoint
print(f"{step} steps to sample {loader.consumed_samples} of {index.num_samples}, loss {loss:.2f}")
