"""Runs tasks that may run anywhere, and twice: in processes of this machine, or on Ray."""

from __future__ import annotations

from megaindex.engine.choice import open_engine
from megaindex.engine.protocol import Engine

__all__ = ["Engine", "open_engine"]
