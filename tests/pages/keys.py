"""What the examples of docs/keys.md need: run before them."""

import numpy as np
import torch

import megaindex
from megaindex.loader import MicroBatchSampler

with megaindex.IndexedDatasetWriter("my_corpus", "uint16") as writer:
    writer.add_document(np.random.default_rng(0).integers(0, 50, 500))
index = megaindex.build_index("my_corpus", sequence_length=32, epochs=1)
sampler = MicroBatchSampler(
    num_samples=index.num_samples, micro_batch_size=4, data_parallel_rank=0, data_parallel_size=1
)


def teacher(tokens: torch.Tensor) -> torch.Tensor:
    return tokens[:, :8].half()


def check_page() -> None:
    """Try the functions of the page, and look rows up: all but those of its first batch."""
    found = 0
    for batch in Loader(index, sampler, options=SampleOptions(keys="wide")):
        check_functions(batch["tokens"], batch["key"])
        wide = keys.content(batch["key"], batch["exposure"], batch["key_high"])
        values, is_found = store.find(wide)
        assert np.array_equal(values[is_found], teacher(batch["tokens"]).numpy()[is_found])
        found += int(is_found.sum())
    assert found == store.num_rows == 8


def check_functions(tokens: torch.Tensor, key: torch.Tensor) -> None:
    """Try masks, fill in the middle and noise, of single rows too."""
    inputs, labels = mask_tokens(tokens, key, 50, 50)
    assert (inputs != tokens).sum() > 3
    assert ((labels == -100) | (labels == tokens)).all()
    assert torch.equal(mask_tokens(tokens[2:], key[2:], 50, 50)[0], inputs[2:])
    moved = fill_in_the_middle(tokens.numpy(), key.numpy(), 51, 52, 53)
    marks = (moved > 50).sum(axis=1)
    assert set(marks) <= {0, 3}
    assert (moved[marks > 0, 0] == 51).all()
    noisy, level = add_noise(tokens, key, 50)
    assert ((noisy == 50).double().mean(dim=1) - level[:, 0]).abs().max() < 0.3
