"""Megatron-format .bin/.idx pairs: read, check, write."""

from megaindex.format.dataset import IndexedDataset

__all__ = ["IndexedDataset"]
