"""Runs tasks that may run anywhere, and twice: in processes of this machine, or on Ray."""

from megaindex.engine.protocol import Engine

__all__ = ["Engine"]
