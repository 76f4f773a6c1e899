"""The planner: what a training run will see, before anything is built.

`make_plan(run)` answers in Python, ``python -m megaindex.plan`` on the command line.
"""

from megaindex.plan.estimate import make_plan
from megaindex.plan.model import Coverage, Plan, Row

__all__ = ["Coverage", "Plan", "Row", "make_plan"]
