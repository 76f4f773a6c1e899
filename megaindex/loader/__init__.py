"""Batches of tokens for training: readers, samplers, checkpoints, receipts and PyTorch datasets."""

from megaindex._lazy import lazy_exports

lazy_exports(__name__)
