"""megaindex under other programs' data loaders; each has a module or package of its own."""

from megaindex.adapters.reports import Served, Status, status

__all__ = ["Served", "Status", "status"]
