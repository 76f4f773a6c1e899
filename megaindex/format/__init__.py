"""Megatron-format .bin/.idx pairs: read, check, write."""

from megaindex.format.dataset import IndexedDataset
from megaindex.format.writer import IndexedDatasetWriter

__all__ = ["IndexedDataset", "IndexedDatasetWriter"]
