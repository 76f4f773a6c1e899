"""Recipes: runs of several sources and stages, read from YAML or written in Python.

>>> opened = open_recipe(read_recipe("run.yaml"))
>>> opened.index.locate([0, 1, 2])
"""

from megaindex._lazy import lazy_exports

lazy_exports(__name__)
