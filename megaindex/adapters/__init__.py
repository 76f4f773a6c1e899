"""Adapters for the data loaders of training frameworks, one module or package for each."""

from megaindex._lazy import lazy_exports

lazy_exports(__name__)
