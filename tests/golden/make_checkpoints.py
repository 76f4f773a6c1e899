"""Writes checkpoints.json: states of loaders, receipts and a cache of an earlier version.

    python tests/golden/make_checkpoints.py > tests/golden/checkpoints.json

Run again only where states, or the samples of a recipe, change on purpose, and read the difference.
Paths of the sources are written as /corpora/….
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support import checkpoint_runs as runs


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs.write_sources(folder)
        golden: dict[str, Any] = {"states": {}, "rest": {}}
        for kind, loader_of in runs.LOADERS.items():
            states, rests = [], []
            for rank in range(runs.RANKS):
                loader = loader_of(folder, rank)
                batches = iter(loader)
                list(runs.take(batches, runs.SERVED[kind]))
                states.append(loader.state_dict())
                rests.append(runs.digest(list(runs.take(batches))))
            golden["states"][kind] = states
            golden["rest"][kind] = rests
        runs.opened(folder, folder / "cache")
        (path,) = (folder / "cache").glob("sources-*-megaindex.json")
        golden["sources"] = json.loads(path.read_text())
        text = json.dumps(golden, indent=1)
    print(text.replace(name, "/corpora"))


if __name__ == "__main__":
    main()
