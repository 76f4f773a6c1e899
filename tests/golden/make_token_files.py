"""Writes token_files/: small token files by the code of the programs that define their formats.

    python tests/golden/make_token_files.py NEOX COMMIT DATATROVE VERSION tests/golden/token_files

NEOX is a checkout of GPT-NeoX at COMMIT, whose IndexedDatasetBuilder writes the lazy and cached
.bin/.idx; DATATROVE an unpacked wheel of datatrove VERSION, whose TokenizedFile writes .ds files.

Both modules run as they stand. What they import besides numpy and is not installed is replaced by
stand-ins; none of it takes part in the writing, except humanize, which words the third line of a
.metadata file.
"""

from __future__ import annotations

import importlib
import json
import platform
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np

# documents of sequences of tokens
DOCUMENTS: list[list[list[int]]] = [
    [[5, 6, 7], [8]],
    [[], [9, 10, 11, 12, 50256]],
    [[70, 71]],
    [[65535, 0, 1], [2, 3, 4, 5, 6], [1]],
]
WIDE = 70_000  # added to the ids of files with wide tokens


def main() -> None:
    neox, commit, datatrove, version, out = sys.argv[1:]
    target = Path(out)
    target.mkdir(exist_ok=True)
    write_tntidx(Path(neox), target)
    write_ds(Path(datatrove), target)
    made_by = {
        "tntidx": f"GPT-NeoX {commit}, megatron/data/indexed_dataset.py",
        "datatrove": f"datatrove {version}, datatrove/pipeline/tokens/tokenizer.py",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "command": "python tests/golden/make_token_files.py NEOX COMMIT DATATROVE VERSION OUT",
        "documents": DOCUMENTS,
        "added_to_wide_ids": WIDE,
    }
    (target / "made_by.json").write_text(json.dumps(made_by, indent=1) + "\n")


def write_tntidx(neox: Path, target: Path) -> None:
    dataset = SimpleNamespace(utils=SimpleNamespace(data=SimpleNamespace(Dataset=object)))
    sys.modules["torch"] = dataset  # type: ignore[assignment]
    package = ModuleType("megatron")
    package.print_rank_0 = print  # type: ignore[attr-defined]
    sys.modules["megatron"] = package
    source = (neox / "megatron/data/indexed_dataset.py").read_text()
    module: dict[str, Any] = {"__name__": "indexed_dataset"}
    exec(compile(source, "indexed_dataset.py", "exec"), module)
    for dtype in (np.int32, np.int64):
        prefix = str(target / f"tntidx_{np.dtype(dtype)}")
        builder = module["IndexedDatasetBuilder"](prefix + ".bin", dtype)
        for document in DOCUMENTS:
            for sequence in document:
                builder.add_item(np.array(sequence, dtype) + dtype(WIDE))
            builder.end_document()
        builder.finalize(prefix + ".idx")


def write_ds(datatrove: Path, target: Path) -> None:
    sys.path.insert(0, str(datatrove))
    for name in ("humanize", "loguru", "multiprocess", "dill", "tqdm", "tokenizers"):
        sys.modules.setdefault(name, MagicMock())
    sys.modules["humanize"].metric = lambda count, unit: f"{count} {unit}"  # type: ignore[attr-defined]
    sys.modules["huggingface_hub"] = sys.modules["tokenizers.processors"] = MagicMock()
    module = importlib.import_module("datatrove.pipeline.tokens.tokenizer")
    for size, added in ((2, 0), (4, WIDE)):
        file = module.TokenizedFile(
            str(target),
            f"datatrove_{size}.ds",
            token_size=size,
            tokenizer_name_or_path="gpt2",
            save_final_metadata=True,
        )
        for document in DOCUMENTS:
            file.write([token + added for sequence in document for token in sequence], None)
        file.close()


if __name__ == "__main__":
    main()
