"""NeMo Automodel's recipe on CPU with gloo.

Replaced are the choice of the device and the counters of its memory. Triton is not imported, since
version 0.7.0 has a kernel that Triton 3.9 does not accept.
"""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType
from typing import Any

import torch

sys.modules["triton"] = None  # type: ignore[assignment]
for name in ("reset_peak_memory_stats", "empty_cache", "max_memory_allocated"):
    setattr(torch.cuda, name, lambda: 0)
torch.cuda.current_device = lambda: "cpu"

from nemo_automodel._transformers import auto_model  # noqa: E402
from nemo_automodel.components.checkpoint.checkpointing import Checkpointer  # noqa: E402
from nemo_automodel.components.config.loader import ConfigNode  # noqa: E402
from nemo_automodel.recipes._typed_config import RecipeConfig  # noqa: E402
from nemo_automodel.recipes.llm import train_ft  # noqa: E402

__all__ = ["Checkpointer", "ConfigNode", "RecipeConfig", "recipe_of"]


class _TorchOnCpu(ModuleType):
    """PyTorch, whose devices are all the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def device(*_: Any) -> torch.device:
        return torch.device("cpu")


auto_model.torch = _TorchOnCpu("torch")
_initialize = train_ft.initialize_distributed
train_ft.initialize_distributed = lambda **given: dataclasses.replace(
    _initialize(**given), device=torch.device("cpu")
)


def recipe_of(settings: Any, ranks: int) -> Any:
    """Return Automodel's recipe of a model of one layer, without a dataset."""
    steps = {
        "global_batch_size": settings.micro * settings.accumulate * ranks,
        "local_batch_size": settings.micro,
        "ckpt_every_steps": 7,
        "save_checkpoint_every_epoch": False,
        "max_steps": settings.until if settings.until > 0 else None,
        "num_epochs": 1,
    }
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config = {
        "step_scheduler": steps,
        "dist_env": {"backend": "gloo"},
        "distributed": {"strategy": "ddp"},
        "model": {
            "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_config",
            "torch_dtype": "float32",
            "config": {
                "_target_": "transformers.LlamaConfig",
                "vocab_size": 256,
                "num_hidden_layers": 1,
                **sizes,
            },
        },
        "loss_fn": {"_target_": "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy"},
        "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.01},
        "checkpoint": {
            "enabled": True,
            "checkpoint_dir": settings.folder,
            "model_save_format": "torch_save",
            "save_consolidated": False,
            "restore_from": settings.resume or None,
        },
    }
    return train_ft.TrainFinetuneRecipeForNextTokenPrediction(ConfigNode(config))
