"""The audit: what a run has served and will serve, and how two orders differ.

``stream`` says what is served when, through `megaindex.index.spans.Index` alone; ``exposure``
counts it; ``lookup`` answers single questions; ``page`` and ``render`` show it. ``diff`` compares.
"""
