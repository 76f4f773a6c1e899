"""Training iterations, epochs and coverage of a run, computed before anything is built.

`make_plan` is the Python interface, ``python -m megaindex.plan`` the command line.
"""

from megaindex._lazy import lazy_exports

lazy_exports(__name__)
