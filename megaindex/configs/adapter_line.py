"""The call of an adapter's ``install`` beside settings, as a comment: what a framework lacks."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from megaindex.errors import InvalidArgument

ADAPTERS = {"neox": "megaindex.adapters.neox", "megatron": "megaindex.adapters.megatron"}
"""Modules by the order whose framework they serve."""
_LINE = re.compile(r"^\s*#\s*megaindex\.adapters\.(\w+)\.install\((.*)\)\s*$", re.MULTILINE)
_PLANNED = ("variance_buffer", "separate_final_epoch", "final_epoch_threshold")


def adapter_call(order: str, settings: Mapping[str, Any]) -> str:
    """``megaindex.adapters.neox.install(variance_buffer="exact")`` and the like."""
    given = ", ".join(f"{name}={json.dumps(value)}" for name, value in settings.items())
    return f"{ADAPTERS[order]}.install({given})"


def settings_in_comments(text: str, order: str, where: str) -> dict[str, Any]:
    """What the comments of a configuration say that its run calls of the adapter, as `Settings`.

    Raises:
        InvalidArgument: a call of another framework's adapter, or with settings that no plan takes.
    """
    found: dict[str, Any] = {}
    for framework, arguments in _LINE.findall(text):
        said = _keywords(arguments)
        if said is None or framework != order or set(said) - set(_PLANNED):
            raise InvalidArgument(
                f"{where}: the comment megaindex.adapters.{framework}.install({arguments}) is not "
                f"planned; of the {order} adapter {', '.join(_PLANNED)} are: remove it"
            )
        found |= said
    if "variance_buffer" in found:
        found["variance_buffer"] = str(found["variance_buffer"])
    return found


def _keywords(arguments: str) -> dict[str, Any] | None:
    try:
        call = ast.parse(f"_({arguments})", mode="eval").body
        assert isinstance(call, ast.Call)
        names = [keyword.arg or "" for keyword in call.keywords]
        values = [ast.literal_eval(keyword.value) for keyword in call.keywords]
    except (SyntaxError, ValueError, AssertionError):
        return None
    return None if call.args else dict(zip(names, values, strict=True))
