"""Corpora in object stores, read through obstore: metadata, byte ranges and local copies.

Only this package imports obstore. `megaindex.objects.files` serves files and objects alike.
"""
