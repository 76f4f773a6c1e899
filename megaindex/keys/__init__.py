"""Random numbers and stored arrays by the key of a row: functions of the row, not of the cluster.

>>> masked = uniform(batch["key"], 2048, "mlm") < 0.15
>>> logits = Store("teacher").get(wide_keys)
"""

from megaindex._lazy import lazy_exports

lazy_exports(__name__)
