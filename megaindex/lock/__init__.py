"""Locks: text files that pin the data and the order of a run."""
