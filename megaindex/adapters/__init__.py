"""megaindex under other programs' data loaders; each has a module or package of its own."""

from megaindex._lazy import lazy_exports

lazy_exports(__name__)
