"""The planner: what a training run will see, before anything is built.

`make_plan(run)` answers in Python, ``python -m megaindex.plan`` on the command line. Names are
resolved on first use, so that the command answers Ctrl-C from its first moment.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megaindex.plan.estimate import make_plan
    from megaindex.plan.model import Coverage, Plan, Row

__all__ = ["Coverage", "Plan", "Row", "make_plan"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'megaindex.plan' has no attribute {name!r}")
    home = "estimate" if name == "make_plan" else "model"
    value = getattr(importlib.import_module(f"megaindex.plan.{home}"), name)
    globals()[name] = value
    return value
