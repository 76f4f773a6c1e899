"""Writes mixture_limits.json: what OLMo-core's own code selects of each source, or refuses.

    python tests/golden/make_mixture_limits.py SOURCE COMMIT > tests/golden/mixture_limits.json

SOURCE is src/olmo_core/data/source_mixture.py of OLMo-core at COMMIT, which runs as it stands. What
it imports of its own package is replaced by stand-ins, and files by their sizes.
"""

from __future__ import annotations

import importlib.util
import json
import platform
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import numpy as np

S = 16
BATCH = 2  # instances
TOKEN_BYTES = 2

# instances to select; of each source: instances it has, target_ratio, max_source_fraction,
# max_repetition_ratio
CASES: list[tuple[int, list[tuple[int, float, float, float]]]] = [
    (16, [(10, 0.5, 1.0, 1.0), (100, 0.5, 1.0, 1.0)]),
    (16, [(10, 0.5, 0.5, 1.0), (100, 0.5, 1.0, 1.0)]),
    (16, [(10, 0.5, 0.5, 2.0), (100, 0.5, 1.0, 1.0)]),
    (40, [(10, 0.5, 1.0, 2.0), (100, 0.5, 0.25, 1.0)]),
    (40, [(10, 0.5, 1.0, 1.5), (100, 0.5, 1.0, 1.0)]),
    (40, [(20, 0.25, 0.5, 1.0), (20, 0.25, 0.75, 1.0), (20, 0.5, 1.0, 1.0)]),
    (40, [(20, 0.25, 0.25, 1.0), (20, 0.25, 0.75, 1.0), (20, 0.5, 1.0, 1.0)]),
    (64, [(16, 0.75, 1.0, 4.0), (16, 0.25, 1.0, 1.0)]),
    (64, [(16, 0.75, 1.0, 2.5), (16, 0.25, 1.0, 1.0)]),
]


class Refused(Exception):
    """In place of OLMoConfigurationError."""


def module_of(path: Path) -> Any:
    package = MagicMock()
    package.Config, package.OLMoConfigurationError = object, Refused
    package.file_exists = lambda name: True
    # a path is its number of instances, and what makes it its own
    package.get_file_size = lambda name: int(name.split("/")[0]) * S * TOKEN_BYTES
    names = ("aliases", "config", "data", "data.types", "exceptions", "io")
    sys.modules["olmo_core"] = ModuleType("olmo_core")
    sys.modules.update({f"olmo_core.{name}": package for name in names})
    spec = importlib.util.spec_from_file_location("source_mixture", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["source_mixture"] = module  # its dataclasses look it up
    spec.loader.exec_module(module)
    return module


def case_of(module: Any, instances: int, sources: list[tuple[int, float, float, float]]) -> Any:
    configs = [
        module.SourceMixtureConfig(
            source_name=str(k), target_ratio=ratio, paths=[f"{population}/{k}"],
            max_source_fraction=fraction, max_repetition_ratio=repetitions,
        )
        for k, (population, ratio, fraction, repetitions) in enumerate(sources)
    ]  # fmt: skip
    mixture = module.SourceMixtureDatasetConfig(
        source_list=module.SourceMixtureList(sources=configs), requested_tokens=instances * S,
        global_batch_size=BATCH * S, render_tables=False, quiet=True,
    )  # fmt: skip
    case: dict[str, Any] = {"instances": instances, "sources": sources}
    try:
        dataset = mixture.build(npdtype=np.uint16, sequence_length=S)
    except Refused as error:
        return {**case, "error": str(error)}
    selected = [sum(path.tokens for path in source.path_tokens) // S for source in dataset.sources]
    return {**case, "selected": selected}


def main() -> None:
    path, commit = Path(sys.argv[1]), sys.argv[2]
    module = module_of(path)
    content = {
        "program": "OLMo-core, src/olmo_core/data/source_mixture.py",
        "version": commit,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "command": f"python tests/golden/make_mixture_limits.py SOURCE {commit}",
        "sequence_length": S,
        "cases": [case_of(module, *case) for case in CASES],
    }
    print(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
