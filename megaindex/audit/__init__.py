"""Audits of the samples that a run serves, and comparisons of orders.

>>> result = audit(run_of_index(index, [source], global_batch_size=512))
>>> write_page(result, "audit.html")
"""

from megaindex._lazy import lazy_exports

lazy_exports(__name__)
