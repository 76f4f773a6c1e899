"""Train in a loop of Accelerate, on any number of processes."""

import torch
from accelerate import Accelerator

import megaindex
from megaindex.loader import Loader, MicroBatchSampler

accelerator = Accelerator(cpu=True)
corpus = megaindex.IndexedDataset("my_corpus")
index = megaindex.build_index(corpus, sequence_length=128, epochs=1, order="epoch")
sampler = MicroBatchSampler(
    num_samples=index.num_samples,
    micro_batch_size=4,
    data_parallel_rank=accelerator.process_index,
    data_parallel_size=accelerator.num_processes,
)
loader = Loader(index, corpus, sampler, device=accelerator.device)

model = torch.nn.Embedding(256, 256, _weight=torch.zeros(256, 256))  # next token by this token
optimizer = torch.optim.SGD(model.parameters(), lr=20.0)
# without the loader: its sampler has divided each step between the processes, and prepare() would
# divide the batches of each process once more; with two processes half the samples were not read
model, optimizer = accelerator.prepare(model, optimizer)
for batch in loader:
    # the labels are the next tokens already: no shift
    loss = torch.nn.functional.cross_entropy(model(batch["tokens"]).mT, batch["labels"])
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
step = len(sampler)
accelerator.print(f"{step} steps to sample {loader.consumed_samples} of {index.num_samples}")
accelerator.end_training()
