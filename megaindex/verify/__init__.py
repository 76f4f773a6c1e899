"""Checks of pairs, caches, arrays and recipes."""
