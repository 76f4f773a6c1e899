"""Tables of the verbs: they look like those of the planner."""

from megaindex.plan.printing import new_table, print_view

__all__ = ["new_table", "print_view"]
