"""Locks: text files that pin the data, the order and the receipts of a run.

>>> make_lock(read_recipe("run.yaml")).write("run.lock")
>>> verify_lock("run.lock").is_clean
True
>>> loader = open_run("run.lock", data_parallel_rank=rank, data_parallel_size=ranks)
"""

from megaindex._lazy import lazy_exports

lazy_exports(__name__)
