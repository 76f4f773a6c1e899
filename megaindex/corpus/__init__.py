"""Tools for .bin/.idx pairs: tokenize, import, merge, split, verify, repair, fingerprint."""

from megaindex._lazy import lazy_exports

lazy_exports(__name__)
