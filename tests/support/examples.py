"""The number of examples of property tests that are repeated for many parameters."""

from __future__ import annotations

from hypothesis import settings


def one_in(number: int) -> settings:
    """Return the settings for one in so many of the profile's examples, and at least one."""
    return settings(max_examples=max(1, settings.default.max_examples // number))
