"""Locks under the data loaders of a GPT-NeoX checkout: ``neox_locks.py CHECKOUT FOLDER``.

Its NeoXArgs, data_utils, samplers and update_iterations run as they stand, see
tests/golden/make_neox_runs.py, one rank after the other. Writes FOLDER/result.json: of each run,
its rows and those that differ from the lock's index; of each wrong setting, the error.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import yaml

HERE = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(HERE.parent), str(HERE), str(HERE / "golden")]

from make_neox_runs import MODEL, Neox  # noqa: E402
from support.neox_corpora import write_pair  # noqa: E402

import megaindex.adapters.neox as adapter  # noqa: E402
from megaindex import CostModel, Skip  # noqa: E402
from megaindex.errors import MegaIndexError  # noqa: E402
from megaindex.lock import make_lock  # noqa: E402
from megaindex.lock.opening import run_of_lock  # noqa: E402

RANKS = 2
COMMON = {
    "seq_length": 16, "seed": 5, "train_micro_batch_size_per_gpu": 2, "eval_interval": 20,
    "eval_iters": 1, "gradient_accumulation_steps": 2, "global_num_gpus": RANKS,
}  # fmt: skip


class Job:
    """A configuration over corpora whose tokens are all different."""

    def __init__(self, neox: Neox, folder: Path, **keys: Any) -> None:
        self.neox, self.folder, self.keys = neox, folder, {**COMMON, **keys}

    def config(self, **changes: Any) -> str:
        keys = {key: v for key, v in {**MODEL, **self.keys, **changes}.items() if v is not None}
        path = self.folder / "job.yml"
        path.write_text(yaml.dump(keys))
        return str(path)

    def rows(
        self, iteration: int = 0, count: int | None = None, late: Any = None, **changes: Any
    ) -> list[list[int]]:
        """The rows from an iteration on, of all ranks, in the order of their positions.

        ``late`` is called with what was made so far: "loaders", "iterators".
        """
        mpu, data, found = self.neox.mpu, self.neox.data, []
        for rank in range(RANKS):
            mpu.get_data_parallel_world_size.return_value = RANKS
            mpu.get_data_parallel_rank.return_value = rank
            args = self.neox.args.from_ymls([self.config(**changes)])
            args.iteration = 0
            loaders = data.build_train_valid_test_data_loaders(args)
            self.neox.loops["update_iterations"](args, loaders)
            args.iteration = iteration  # as a checkpoint sets it
            late and late("loaders")
            iterator = data.shift_and_wrap_data_loaders(args, loaders)[0]
            late and late("iterators")
            steps = (count or args.train_iters) - iteration
            micro = itertools.islice(iterator, steps * args.gradient_accumulation_steps)
            found.append([batch["text"].tolist() for batch in micro])
        return [row for batches in zip(*found, strict=True) for part in batches for row in part]


def compared(job: Job, lock: Any, iteration: int = 0, **changes: Any) -> dict[str, int]:
    """Rows served, and how many of them are not the lock's."""
    rows = job.rows(iteration, **changes)
    index = run_of_lock(lock).index
    batch = COMMON["train_micro_batch_size_per_gpu"] * RANKS * COMMON["gradient_accumulation_steps"]
    first = iteration * batch
    spans = index.locate(np.arange(first, first + len(rows)))
    columns = (spans.source, spans.document, spans.offset, spans.length)
    pieces = [
        range(BASES[source][document] + offset, BASES[source][document] + offset + length)
        for source, document, offset, length in zip(*(c.tolist() for c in columns), strict=True)
    ]
    splits = spans.row_splits.tolist()
    expected = [
        [token for piece in pieces[a:b] for token in piece] for a, b in itertools.pairwise(splits)
    ]
    return {
        "rows": len(rows),
        "differ": sum(a != b for a, b in zip(rows, expected, strict=True)),
    }


BASES: list[list[int]] = []
"""First token of each document, by source."""


def corpus(folder: Path, name: str, sizes: list[int], first: int) -> int:
    ends = np.cumsum([first, *sizes])
    write_pair(str(folder / name), np.int32, [np.arange(a, b) for a, b in itertools.pairwise(ends)])
    BASES.append(ends[:-1].tolist())
    return int(ends[-1])


def attempt(job: Job, lock: Any, iteration: int = 0, /, exact: bool = False, **changes: Any) -> Any:
    """What comes of a run with other settings than the lock's: rows that differ, or the error."""
    for path in job.folder.glob("*_indexmap_*"):
        path.unlink()
    adapter.install(exact, lock=lock)
    try:
        return compared(job, lock, iteration, **changes)
    except (MegaIndexError, AttributeError, IndexError, KeyError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        adapter.uninstall()


def too_late(job: Job, moment: str, given: dict[str, Any]) -> Any:
    """What comes of install() after loaders or iterators were made: as if it was never called, or
    the error."""
    expected = job.rows(count=20)
    try:
        found = job.rows(count=20, late=lambda made: made == moment and adapter.install(**given))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        adapter.uninstall()
    return "the same rows" if found == expected else "other rows"


def main(checkout: Path, folder: Path) -> dict[str, Any]:
    neox = Neox(checkout)
    lengths = np.random.default_rng(8).integers(1, 40, 300).tolist()
    first = corpus(folder, "a", lengths, 1)
    corpus(folder, "b", lengths[:100], first)
    a, b = str(folder / "a"), str(folder / "b")
    blend = {f"{part}_data_paths": [a, b] for part in ("train", "valid", "test")}
    weights = {f"{part}_data_weights": [0.7, 0.3] for part in ("train", "valid", "test")}
    epochs = {"train_epochs": 3}
    jobs = {
        "split epochs": {"data_path": a, "split": "90,5,5", **epochs},
        "blend epochs": {**blend, **epochs},
        "split iters": {"data_path": a, "split": "90,5,5", "train_iters": 40},
        "blend iters": {**blend, **weights, "train_iters": 40},
    }
    wrong: dict[str, dict[str, Any]] = {
        "seed": {"seed": 6}, "seq_length": {"seq_length": 24},
        "batch": {"train_micro_batch_size_per_gpu": 1},
        "twice the batch": {"train_micro_batch_size_per_gpu": 4},
    }  # fmt: skip
    found: dict[str, Any] = {}
    for name, keys in jobs.items():
        job = Job(neox, folder, **keys)
        lock = make_lock(neox_config=job.config(), data_parallel_size=RANKS)
        steps = sum(count for _, _, count in lock.content["subsets"]["train"]["steps"])
        resumed = (0, 1, steps // 3, steps // 3 + 1, steps // 2, steps - 1)
        others = {what: dict(changes) for what, changes in wrong.items()}
        others |= {"split": {"split": "100,0,0"}} if "data_path" in keys else {}
        if "epochs" in name:
            others |= {f"{n} epochs": {"train_epochs": n} for n in (1, 2, 4)}
        else:
            others |= {f"{n} iterations": {"train_iters": n} for n in (20, 39, 41, 80)}
            others |= {
                "80 of half a batch": {"train_iters": 80, "gradient_accumulation_steps": 1},
                "resumed, 41 iterations": {"train_iters": 41, "iteration": 20},
            }
        found[name] = {
            "steps": steps,
            "resumed": {k: attempt(job, lock, k) for k in resumed},
            "wrong": {
                what: attempt(job, lock, changes.pop("iteration", 0), **changes)
                for what, changes in others.items()
            },
        }  # fmt: skip
        settings: dict[str, Any] = {
            "": {}, "exact": {"exact": True}, "lock": {"lock": lock},
            "skip": {"skip": Skip(steps="3")}, "variance_buffer": {"variance_buffer": "exact"},
            "balance": {"balance": CostModel(linear=0, attention=1)},
            "separate_final_epoch": {"separate_final_epoch": "always"},
        }  # fmt: skip
        found[name]["too late"] = {
            f"{what} after {moment}": too_late(job, moment, given)
            for what, given in settings.items()
            for moment in ("loaders", "iterators")
        }
        found[name]["exact"] = attempt(job, lock, exact=True)
        found[name]["workers"] = attempt(job, lock, steps // 3, num_workers=2)
    return found


if __name__ == "__main__":
    found_here = main(Path(sys.argv[1]), Path(sys.argv[2]))
    (Path(sys.argv[2]) / "result.json").write_text(json.dumps(found_here, indent=1))
