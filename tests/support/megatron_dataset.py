"""megatron-core's GPTDataset over a corpus, without its cache and without torch.distributed."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np

EOD = 50_256


class Tokenizer:
    vocab_size = 50_257
    eod = EOD
    pad = -1
    unique_identifiers: OrderedDict[str, str] = OrderedDict(name="test")


def megatron_dataset(
    core: Any,
    prefix: str,
    *,
    num_samples: int | None,
    sequence_length: int,
    seed: int,
    split: str = "1",
    subset: str = "train",
    **config: Any,
) -> Any:
    """``core`` is the fixture megatron_datasets; other settings are GPTDatasetConfig's."""
    masks = dict.fromkeys(("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), False)
    settings = core.GPTDatasetConfig(
        random_seed=seed,
        sequence_length=sequence_length,
        blend=([prefix], None),
        split=split,
        tokenizer=Tokenizer(),
        **{**masks, **config},
    )
    low_level = core.IndexedDataset(prefix)
    part = core.Split[subset]
    begin, end = settings.split_matrix[part.value]
    n = float(len(low_level))
    documents = np.arange(round(begin * n), round(end * n), dtype=np.int32)
    settings.mock = True  # else it writes a cache beside the data
    return core.GPTDataset(low_level, prefix, documents, num_samples, part, settings)
