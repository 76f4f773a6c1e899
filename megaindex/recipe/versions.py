"""Releases of Megatron-LM: the rules of the training loop, and the settings each one knows."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, Literal

from megaindex.errors import InvalidArgument

DEFAULT_VERSION = "0.16.1"
NEWEST = "main"
_MAIN = (0, 19)
"""Megatron-LM main of August 2026 has the rules of megatron-core 0.19."""


@dataclass(frozen=True, kw_only=True)
class Version:
    """A release of Megatron-LM."""

    since: tuple[int, int]
    """First release with these rules."""
    name: str = ""
    ramps: bool
    """Whether ``--rampup-batch-size`` changes the batch, or is accepted and ignored."""
    eval_interval: int | None
    """Default of ``--eval-interval``; None: the run stops with a TypeError without it."""
    empty_loaders: bool
    """Whether a blend of no samples is no error, as ``--eval-iters 0`` makes one."""
    full_validation: Literal["samples", "ranks"]
    """Iterations of an evaluation with ``--full-validation``: one for each sample, or one for each
    sample of the rank that has most."""

    @property
    def framework(self) -> str:
        """Framework and version, as printed."""
        release = f"{NEWEST}, 2026-08" if self.name == NEWEST else f"megatron-core {self.name}"
        return f"Megatron-LM ({release})"


_RULES = (
    Version(
        since=(0, 12),
        ramps=True,
        eval_interval=1000,
        empty_loaders=False,
        full_validation="samples",
    ),
    Version(
        since=(0, 16),
        ramps=True,
        eval_interval=None,
        empty_loaders=False,
        full_validation="samples",
    ),
    Version(
        since=(0, 18), ramps=False, eval_interval=None, empty_loaders=True, full_validation="ranks"
    ),
)

# First release with a setting; those not named here are older than every release above.
_SINCE = {
    "full_validation": (0, 14),
    "multiple_validation_sets": (0, 14),
    "phase_transition_iterations": (0, 16),
    "start_eval_at_iter": (0, 18),
    "eval_global_batch_size": (0, 18),
    "eval_micro_batch_size": (0, 18),
    "batch_schedule": (0, 18),
}
_FLAGS = {"batch_schedule": "--step-batch-size-schedule"}


def find_version(name: str) -> Version:
    """Return the rules of a release, such as ``0.16.1`` or ``main``.

    Raises:
        InvalidArgument: no release whose rules are known.
    """
    match = re.fullmatch(r"(\d{1,3})\.(\d{1,3})(\.\w{1,8})?", name)
    number = _MAIN if name == NEWEST else (int(match[1]), int(match[2])) if match else (0, 0)
    if not _RULES[0].since <= number <= _MAIN:
        raise InvalidArgument(
            f"--framework-version: {name!r} is not a release of megatron-core from "
            f"{_text(_RULES[0].since)} to {_text(_MAIN)}, nor {NEWEST}; give one such as "
            f"{DEFAULT_VERSION} or {NEWEST}"
        )
    rules = [row for row in _RULES if row.since <= number][-1]
    return replace(rules, name=name)


def version_of(settings: Any) -> Version:
    """Return the release asked for, else the default one, or main where that lacks a setting.

    Raises:
        InvalidArgument: no such release, or it does not know one of the settings.
    """
    newer = {name: since for name, since in _SINCE.items() if getattr(settings, name) is not None}
    named = settings.framework_version
    version = find_version(named or DEFAULT_VERSION)
    number = _MAIN if version.name == NEWEST else _number(version.name)
    missing = {name: since for name, since in newer.items() if since > number}
    if not missing:
        return version
    if named is None:
        return find_version(NEWEST)
    name, since = next(iter(missing.items()))
    raise InvalidArgument(
        f"{_FLAGS.get(name, '--' + name.replace('_', '-'))} came with megatron-core "
        f"{_text(since)}, and --framework-version {named} does not know it; remove one of them"
    )


def _number(name: str) -> tuple[int, int]:
    major, minor = name.split(".")[:2]
    return int(major), int(minor)


def _text(number: tuple[int, int]) -> str:
    return ".".join(map(str, number))
