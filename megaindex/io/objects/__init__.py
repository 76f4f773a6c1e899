"""Corpora in object stores, read through obstore: what an object is, its bytes, a copy of it here.

Nothing but this package knows obstore; `megaindex.io.locations` is the door to it for paths that
may be files or objects.
"""
