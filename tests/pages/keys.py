"""What the examples of docs/keys.md need: run before them."""

import numpy as np
import torch

batch = {
    "tokens": torch.arange(4 * 32).reshape(4, 32) % 50,
    "key": torch.tensor([7, -5, 2**62, 11]),
}
wide = np.array([[7, 1], [8, 2], [9, 3], [7, 4]], np.uint64)
logits = np.arange(4 * 8, dtype=np.float16).reshape(4, 8)


def check_page() -> None:
    """Try the functions of the page: masks, fill in the middle, noise."""
    tokens, key = batch.values()
    inputs, labels = mask_tokens(tokens, key, 50, 50)
    assert (inputs != tokens).sum() > 3
    assert ((labels == -100) | (labels == tokens)).all()
    assert torch.equal(mask_tokens(tokens[2:], key[2:], 50, 50)[0], inputs[2:])
    moved = fill_in_the_middle(tokens.numpy(), key.numpy(), 51, 52, 53)
    marks = (moved > 50).sum(axis=1)
    assert set(marks) == {0, 3}
    assert (moved[marks > 0, 0] == 51).all()
    noisy, level = add_noise(tokens, key, 50)
    assert ((noisy == 50).double().mean(dim=1) - level[:, 0]).abs().max() < 0.3
