"""torchtitan's Trainer on CPU with gloo.

Replaced are the choice of the device, the monitor of its memory, the reduction that scales
gradients, which gloo lacks, and a barrier with devices. Attention is PyTorch's, since flex
attention has no backward on CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch._utils

torch._utils._get_available_device_type = lambda: "cpu"  # before torchtitan is imported

import torchtitan.distributed.utils as distributed  # noqa: E402
from datasets import load_dataset  # noqa: E402
from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torchtitan.components import metrics  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.hf_datasets import DatasetConfig, text_datasets  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import parallelize  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402

from megaindex.adapters.torchtitan import LockedDataLoader  # noqa: E402

_shard = parallelize.apply_fsdp_to_decoder


def _shard_for_gloo(model: Any, *args: Any, **kwargs: Any) -> None:
    _shard(model, *args, **kwargs)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


parallelize.apply_fsdp_to_decoder = _shard_for_gloo
distributed.set_pg_timeouts = lambda **_: None
metrics.build_device_memory_monitor = lambda: SimpleNamespace(
    device_name="cpu",
    get_peak_stats=lambda: metrics.DeviceMemStats(0.0, 0.0, 0.0, 0.0, 0, 0),
    reset_peak_stats=lambda: None,
)


class NoTokenizer(BaseTokenizer):  # type: ignore[misc]
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        pass

    def encode(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    decode = encode

    def get_vocab_size(self) -> int:
        return 256


class NumberedTokenizer(NoTokenizer):
    """Makes the samples of a text ``begin end``: each token is the number of its sample."""

    def encode(self, text: str, **_: Any) -> list[int]:
        begin, end = map(int, text.split())
        return [number for number in range(begin, end) for _ in range(self.length)] + [end]


def numbered_loader(folder: Path, length: int, rank: int, ranks: int, rows: int) -> Any:
    """Return torchtitan's loader of documents.jsonl in a folder, for one epoch."""
    text_datasets.DATASETS["numbered"] = DatasetConfig(
        path=str(folder / "documents.jsonl"),
        loader=lambda path: load_dataset("json", data_files=path, split="train"),
        sample_processor=lambda sample: sample["text"],
    )
    tokenizer = NumberedTokenizer(NoTokenizer.Config())
    tokenizer.length = length
    config = text_datasets.HuggingFaceTextDataLoader.Config(dataset="numbered", infinite=False)
    return config.build(
        dp_world_size=ranks, dp_rank=rank, tokenizer=tokenizer, seq_len=length,
        local_batch_size=rows,
    )  # fmt: skip


def config_of(settings: Any, ranks: int) -> Any:
    """Return torchtitan's debug model of one layer, with the data of a lock."""
    config = llama3_debugmodel()
    config.dataloader = LockedDataLoader.Config(lock=settings.lock)
    config.tokenizer = NoTokenizer.Config()
    config.training.seq_len = 64
    config.training.global_batch_size = settings.micro * settings.accumulate * ranks
    config.training.local_batch_size = settings.micro
    config.training.steps = settings.until
    config.training.disable_cuda_graphs = True
    config.training.mixed_precision_param = "float32"
    config.parallelism.spmd_backend = "partial_dtensor"
    config.activation_checkpoint = None
    config.checkpoint.enable = True
    config.checkpoint.interval = 7
    config.checkpoint.keep_latest_k = 0
    config.checkpoint.load_step = int(settings.resume or -1)
    config.dump_folder = settings.folder
    model = config.model_spec.model
    model.layers = model.layers[:1]
    model.layers[0].attention.inner_attention = ScaledDotProductAttention.Config()
    return config
