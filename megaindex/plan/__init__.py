"""Training iterations, epochs and coverage of a run, before anything is built.

`make_plan(run)` answers in Python, ``python -m megaindex.plan`` on the command line.
"""

from megaindex._lazy import lazy_exports

lazy_exports(__name__)
