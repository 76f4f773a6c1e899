"""The number of examples of property tests that take long, or are fast."""

from __future__ import annotations

from hypothesis import settings


def one_in(number: int) -> settings:
    """Return the settings for one in so many of the profile's examples, and at least one."""
    return settings(max_examples=max(1, settings.default.max_examples // number))


def times(number: int) -> settings:
    """Return the settings for so many times the profile's examples."""
    return settings(max_examples=settings.default.max_examples * number)
