"""NeMo Automodel's copy of Megatron's datasets with megaindex's kernels: no compiler runs.

    import megaindex.adapters.automodel; megaindex.adapters.automodel.install()

Automodel compiles helpers of its own on every node before it builds ``MegatronPretraining``.
`install` replaces the function that does so, before or after it is imported; samples, order and
cache files stay the same.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import megaindex.helpers
from megaindex.adapters.patching import Patches, after_import
from megaindex.errors import InvalidArgument

__all__ = ["install", "uninstall"]

PACKAGE = "nemo_automodel.components.datasets.llm"
HOME = f"{PACKAGE}.megatron.megatron_utils"
USERS = (f"{PACKAGE}.megatron.helpers", f"{PACKAGE}.megatron_dataset")  # which import it by name

_patches = Patches()
_cancel: list[object] = []


def install() -> None:
    """Replace Automodel's ``compile_helper`` by a function that returns `megaindex.helpers`.

    Raises:
        InvalidArgument: Automodel is not installed.
    """
    if importlib.util.find_spec("nemo_automodel") is None:
        raise InvalidArgument(
            "megaindex.adapters.automodel needs nemo_automodel, which cannot be imported: it is "
            "not installed; pip install nemo-automodel"
        )
    if _patches or _cancel:
        return
    _cancel.append(after_import(HOME, _replace))


def uninstall() -> None:
    """Undo `install`."""
    while _cancel:
        withdraw = _cancel.pop()
        assert callable(withdraw)
        withdraw()
    _patches.undo()


def _replace(home: ModuleType) -> None:
    theirs = home.compile_helper
    for module in (home, *(sys.modules[name] for name in USERS if name in sys.modules)):
        if getattr(module, "compile_helper", None) is theirs:
            _patches.replace(module, "compile_helper", _compiled)


def _compiled() -> ModuleType:
    """Return the functions of the compiled module, by the same names and arguments."""
    return megaindex.helpers
