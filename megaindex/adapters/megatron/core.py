"""The modules of megatron-core, imported once, and the names that differ between releases."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
import re
import runpy
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from megaindex.adapters.policy import Policy, make_policy
from megaindex.errors import InvalidArgument

if TYPE_CHECKING:
    from megaindex.adapters.loader_rows import LoaderRows

logger = logging.getLogger("megaindex")

_PACKAGE = "megatron.core.datasets"
HELPERS = (f"{_PACKAGE}.helpers_cpp", f"{_PACKAGE}.helpers")

SIZES = "_get_size_per_split_per_dataset"
"""The builder's function that computes the samples requested of each source."""
OLDEST, NEWEST = (0, 12), (0, 20)
"""Oldest and newest supported release of megatron-core; NEWEST is Megatron-LM main of 2026-08."""


METHODS: dict[str, dict[str, Callable[..., Any]]] = {}
"""megaindex's methods by class and method of Megatron; the module ``patches`` registers them."""
STANDALONE: dict[str, dict[str, Callable[..., Any]]] = {}
"""Additional methods of the subclasses of `load_class`."""


class ReleaseNames(NamedTuple):
    """Names that differ between releases."""

    is_object_storage_path: str
    object_storage_config: str


RELEASE_NAMES = {
    (0, 12): ReleaseNames("is_s3_path", "s3_config"),
    (0, 13): ReleaseNames("is_object_storage_path", "object_storage_config"),
}
"""The names by the first release that has them."""


@dataclass(kw_only=True)
class MegatronCore:
    """``megatron.core.datasets``, and its own functions as they were before anything was patched.

    ``originals`` has them by class and name: ``originals["GPTDataset", "__getitem__"]``; functions
    of a module under an empty class.
    """

    helpers: ModuleType | None
    """None where they are not compiled, as in a checkout."""
    utils: ModuleType
    indexed_dataset: ModuleType
    gpt_dataset: ModuleType
    blended_dataset: ModuleType
    builder: ModuleType
    originals: dict[tuple[str, str], Callable[..., Any]]
    version: str
    names: ReleaseNames
    policy: Policy = field(default_factory=functools.partial(make_policy, "megatron"))
    """The settings of the last `install`."""
    rows: LoaderRows | None = None
    """Rows of the training loader of this process."""
    loaded: dict[str, Any] | None = None
    """megaindex's part of the checkpoint that was loaded; None if none was."""

    def is_object_storage_path(self, path: str) -> bool:
        """Return whether Megatron reads this path from an object store."""
        return bool(getattr(self.indexed_dataset, self.names.is_object_storage_path)(path))

    def is_plain(self, cls: type, base: str, *names: str) -> bool:
        """Return whether a class has these methods of Megatron's class ``base`` from Megatron or
        from megaindex, not from a subclass of the user's.

        Functions are compared, not their names: one that wraps Megatron's has the same name.
        """
        return all(
            getattr(cls, name, None) in (self.originals.get((base, name)), METHODS[base].get(name))
            for name in names
        )


@functools.cache
def core() -> MegatronCore:
    """Return megatron-core's dataset modules.

    Raises:
        InvalidArgument: megatron-core cannot be imported, or its release is not supported.
    """
    version, names = _version()
    try:
        utils, indexed, gpt, blended, builder = (
            importlib.import_module(f"{_PACKAGE}.{name}")
            for name in (
                "utils",
                "indexed_dataset",
                "gpt_dataset",
                "blended_dataset",
                "blended_megatron_dataset_builder",
            )
        )
        is_compiled = importlib.util.find_spec(HELPERS[0]) is not None
        helpers = importlib.import_module(HELPERS[1]) if is_compiled else None
    except ImportError as error:
        raise InvalidArgument(
            f"{_PACKAGE} cannot be imported ({error}); install megatron-core, or put a checkout "
            "of Megatron-LM on PYTHONPATH"
        ) from error
    classes = (
        indexed.IndexedDataset,
        indexed.IndexedDatasetBuilder,
        indexed._IndexWriter,
        gpt.GPTDataset,
        blended.BlendedDataset,
        builder.BlendedMegatronDatasetBuilder,
    )
    originals = {
        (owner.__name__, name): function.__func__
        if isinstance(function, staticmethod)
        else function
        for owner in classes
        for name, function in vars(owner).items()
        if callable(function) or isinstance(function, staticmethod)
    }
    originals["", SIZES] = getattr(builder, SIZES)
    return MegatronCore(
        helpers=helpers,
        utils=utils,
        indexed_dataset=indexed,
        gpt_dataset=gpt,
        blended_dataset=blended,
        builder=builder,
        originals=originals,
        version=version,
        names=names,
    )


def _version() -> tuple[str, ReleaseNames]:
    """Return the release of megatron-core, read before modules that older releases lack.

    Raises:
        InvalidArgument: the release is older than `OLDEST`.
    """
    version = _read_version()
    numbers = re.match(r"(\d+)\.(\d+)", version)
    release = (int(numbers[1]), int(numbers[2])) if numbers else None
    served = f"{_text(OLDEST)} to {_text(NEWEST)}"
    if release is not None and release < OLDEST:
        raise InvalidArgument(
            f"megatron-core {version} is not served by megaindex, {served} are; upgrade "
            "megatron-core, or leave the adapter out"
        )
    if release is None or release > NEWEST:
        logger.warning(
            "megatron-core %s is newer than the releases that were tested, %s; compare a first "
            "run with and without the adapter (docs/megatron.md, Verify)", version, served,
        )  # fmt: skip
    known = max(first for first in RELEASE_NAMES if release is None or first <= release)
    return version, RELEASE_NAMES[known]


def _read_version() -> str:
    """Return megatron-core's version, read from its file where the package cannot be imported, as
    older releases without their dependencies."""
    name = "megatron.core.package_info"
    try:
        return str(importlib.import_module(name).__version__)
    except AttributeError:
        return "unknown"
    except ImportError:
        try:
            spec = importlib.util.find_spec("megatron")
        except ValueError:  # a module without a spec
            return "unknown"
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = os.path.join(folder, "core", "package_info.py")
        if os.path.isfile(path):
            return str(runpy.run_path(path).get("__version__", "unknown"))
    return "unknown"


def _text(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))


def _calculator() -> Any:
    module = importlib.import_module("megatron.core.num_microbatches_calculator")
    return module._GLOBAL_NUM_MICROBATCHES_CALCULATOR


def microbatch_calculator() -> Any:
    """Return Megatron's calculator of microbatches.

    Raises:
        InvalidArgument: it is not initialised.
    """
    calculator = _calculator()
    if calculator is None:
        raise InvalidArgument(
            "balance, skip and lock need Megatron's calculator of microbatches, which is not "
            "initialised; call init_num_microbatches_calculator before loading"
        )
    return calculator


def rerun_iterator() -> Any:
    """Return Megatron's class of iterators that replay a step; None in releases without."""
    try:
        return importlib.import_module("megatron.core.rerun_state_machine").RerunDataIterator
    except ImportError:
        return None


def micro_batches_of_step() -> int:
    """Return the micro batches of a rank in Megatron's current step; 1 without a calculator."""
    calculator = _calculator()
    return 1 if calculator is None else int(calculator.get() or 1)


def is_built_here(is_built_on_rank: Callable[[], bool]) -> bool:
    """Return whether this process builds the dataset."""
    distributed = importlib.import_module("torch.distributed")
    return not distributed.is_initialized() or bool(is_built_on_rank())


_STATIC = {"build_generic_dataset", "build_low_level_dataset"}


def class_of(name: str) -> Any:
    """Return Megatron's class of that name."""
    modules = core()
    for module in (
        modules.indexed_dataset,
        modules.gpt_dataset,
        modules.blended_dataset,
        modules.builder,
    ):
        cls = getattr(module, name, None)
        if cls is not None and cls.__module__ == module.__name__:
            return cls
    raise AttributeError(name)


def as_attribute(method: str, replacement: Callable[..., Any]) -> Any:
    """Return the class attribute that makes ``replacement`` a method."""
    return staticmethod(replacement) if method in _STATIC else replacement


@functools.cache
def load_class(name: str) -> Any:
    """Return a subclass of Megatron's class with megaindex's methods, for use without `install`.

    Of the same name, since Megatron names its cache files by it.
    """
    base = class_of(name)
    functions = {**METHODS[name], **STANDALONE.get(name, {})}
    methods = {method: as_attribute(method, function) for method, function in functions.items()}
    return type(
        name,
        (base,),
        {**methods, "__module__": "megaindex.adapters.megatron", "__doc__": base.__doc__},
    )
