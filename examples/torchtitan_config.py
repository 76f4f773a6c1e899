"""A configuration of torchtitan with the samples of a lock. Its Trainer needs a GPU.

torchrun -m torchtitan.train --module torchtitan_config --config debug
"""

import torch
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from megaindex.adapters.torchtitan import LockedDataLoader


def debug() -> Trainer.Config:
    if not torch.cuda.is_available():
        raise SystemExit("torchtitan's Trainer needs a GPU, and PyTorch finds none here")
    return locked()


def locked() -> Trainer.Config:
    config = llama3_debugmodel()
    config.dataloader = LockedDataLoader.Config(lock="run.lock")  # of `megaindex lock`
    config.training.seq_len = 128  # those of the lock
    config.training.global_batch_size = 4
    config.training.local_batch_size = 4
    config.training.steps = 26
    return config
