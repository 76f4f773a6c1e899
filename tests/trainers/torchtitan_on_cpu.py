"""torchtitan's Trainer on CPU with gloo.

Replaced are the choice of the device, the monitor of its memory, the reduction that scales
gradients, which gloo lacks, and a barrier with devices. Attention is PyTorch's, since flex
attention has no backward on CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch._utils

torch._utils._get_available_device_type = lambda: "cpu"  # before torchtitan is imported

import torchtitan.distributed.utils as distributed  # noqa: E402
from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torchtitan.components import metrics  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
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


def config_of(settings: Any) -> Any:
    """Return torchtitan's debug model of one layer, with the data of a lock."""
    config = llama3_debugmodel()
    config.dataloader = LockedDataLoader.Config(lock=settings.lock)
    config.tokenizer = NoTokenizer.Config()
    config.training.seq_len = 64
    config.training.global_batch_size = 24
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
