"""Tools for .bin/.idx pairs: merge, split, import, inspect, verify, repair and fingerprint."""

from megaindex._lazy import lazy_exports

lazy_exports(__name__)
