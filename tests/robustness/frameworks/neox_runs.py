"""Random configurations of GPT-NeoX: their plans and printed settings against its own code.

    python tests/robustness/frameworks/neox_runs.py CHECKOUT [SEED] [COUNT] [FIRST]

CHECKOUT is GPT-NeoX, run as tests/golden/make_neox_runs.py runs it, with its compiled helpers if it
has them. A case is a random file, half of them resumed at a random iteration, or random flags whose
printed settings run. Compared are train_iters, samples built and read, the loaders' lengths, and
the shares of tokens by times served; a run that ends with an error must be refused or open the
plan. A run of the most iterations that a plan names without a repeat must run, and repeat nothing.
A difference is printed with its case, whose number repeats it.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import os
import random
import signal
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(TESTS), str(TESTS / "golden"), str(TESTS / "plan")]
import make_neox_runs as neox_runs  # noqa: E402
from test_neox_runs import assert_split  # noqa: E402

import megaindex.adapters.neox  # noqa: E402
from megaindex.cli.plan import main as plan_main  # noqa: E402
from megaindex.errors import InvalidArgument  # noqa: E402
from megaindex.plan import Plan, make_plan  # noqa: E402
from megaindex.plan.export import export_settings  # noqa: E402
from megaindex.settings.arguments import read_settings  # noqa: E402
from megaindex.settings.run_builder import resolve  # noqa: E402

SECONDS = 30  # of a run, after which it is taken to be endless
EXACT = "# megaindex.adapters.neox.install(exact=True)"
MOST_LIMIT = 400  # iterations of a run at the plan's limit


def with_compiled_helpers(neox: neox_runs.Neox) -> bool:
    """Replace megaindex.helpers by those of the checkout; False if it has none."""
    del sys.modules["megatron.data.helpers"]
    try:
        helpers = importlib.import_module("megatron.data.helpers")
    except ImportError:
        sys.modules["megatron.data.helpers"] = megaindex.helpers
        return False
    sys.modules["megatron.data"].helpers = helpers
    return True


def changed(keys: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Keys that a random case of the golden file does not have."""
    for split in neox_runs.SPLITS:
        weights = keys.get(f"{split}_data_weights")
        if weights and rng.random() < 0.25:
            weights[rng.randrange(len(weights))] = rng.choice([0, 0.0])
    if "split" in keys and rng.random() < 0.25:
        keys["split"] = rng.choice(["50,25,20,60", "8/1/1/5", "7,2", "9", " 6 , 2 , 2 "])
    if "train_iters" in keys and rng.random() < 0.15:
        keys["train_epochs"] = rng.choice([0, 0, None, 1])
    if rng.random() < 0.1:
        keys["eval_iters"] = 0
    return keys


class Tester:
    """Cases of one seed, and what was compared."""

    def __init__(self, neox: neox_runs.Neox, seed: str) -> None:
        self.neox, self.seed, self.compared = neox, seed, Counter()

    def difference(self, number: int) -> str:
        """Return a case and its difference, or an empty string."""
        try:
            self.case(number)
        except Exception:
            return f"case {number} of seed {self.seed}:\n{traceback.format_exc()}\n"
        return ""

    def case(self, number: int) -> None:
        rng = random.Random(f"{self.seed} {number}")
        with tempfile.TemporaryDirectory() as name:
            self.folder = Path(name)
            builder = importlib.import_module("megatron.data.indexed_dataset")
            self.made = neox_runs.Case(rng, builder.MMapIndexedDatasetBuilder, self.folder)
            if number % 4 == 3:
                self._flags(rng)
            elif number % 8 == 5:
                self._exact(rng)
            else:
                kind = neox_runs.KINDS[rng.randrange(len(neox_runs.KINDS))]
                self._file(rng, changed(neox_runs.settings(self.made, kind), rng))

    def _file(self, rng: random.Random, keys: dict[str, Any]) -> None:
        planned = self._planned(self._write("c.yml", keys))
        if isinstance(planned, Plan) and planned.train_iters > 1 and rng.random() < 0.5:
            resumed = rng.randint(1, planned.train_iters)
            again = self._planned(self.folder / "c.yml", resumed * planned.global_batch_size)
            if self._compare(keys, again, resumed):
                self.compared["resumed runs"] += 1
            return
        if self._compare(keys, planned) and isinstance(planned, Plan):
            self.compared["runs"] += 1
            run = resolve(read_settings({"neox_config": [self.folder / "c.yml"]}))
            self._printed(export_settings(planned, run, "neox"), planned, keys["global_num_gpus"])
            last = planned.max_train_iters_without_repeat
            if "train_iters" in keys and 0 < last <= MOST_LIMIT:
                self._at_the_limit({**keys, "train_iters": last})

    def _exact(self, rng: random.Random) -> None:
        """Compare train_epochs under the adapter's exact mode, also resumed, with its plan."""
        keys = neox_runs.settings(self.made, rng.choice(["split epochs", "blend epochs"]))
        keys["train_epochs"] = rng.randint(1, 5)
        file = self._write("c.yml", keys)
        file.write_text(f"{EXACT}\n{file.read_text()}")
        planned, resumed = self._planned(file), 0
        if isinstance(planned, Plan) and planned.train_iters > 1 and rng.random() < 0.5:
            resumed = rng.randint(1, planned.train_iters)
            planned = self._planned(file, resumed * planned.global_batch_size)
        megaindex.adapters.neox.install(exact=True)
        try:
            if self._compare(keys, planned, resumed):
                self.compared["exact runs"] += 1
        finally:
            megaindex.adapters.neox.uninstall()

    def _write(self, name: str, keys: dict[str, Any]) -> Path:
        content = {**neox_runs.MODEL, **neox_runs.placed(keys, self.folder)}
        (self.folder / name).write_text(yaml.dump(content))
        return self.folder / name

    def _planned(self, file: Path, consumed: int = 0) -> Plan | str:
        given = {"neox_config": [file], "consumed_samples": str(consumed), "coverage": "exact"}
        try:
            return make_plan(resolve(read_settings(given)))
        except InvalidArgument as refusal:
            return str(refusal)

    def _ran(self, files: list[Path], ranks: int, resumed: int = 0) -> dict[str, Any] | str:
        for file in self.folder.glob("*_indexmap_*"):
            file.unlink()
        signal.alarm(SECONDS)
        try:
            return self.neox.run([str(file) for file in files], ranks, resumed)
        except Exception as error:
            return type(error).__name__
        finally:
            signal.alarm(0)

    def _compare(self, keys: dict[str, Any], planned: Plan | str, resumed: int = 0) -> bool:
        """Compare a run with its plan; False if both end with an error."""
        ran = self._ran([self.folder / "c.yml"], keys["global_num_gpus"], resumed)
        if isinstance(ran, str):
            said = planned if isinstance(planned, str) else planned.caution
            assert said, (ran, "planned")
            assert isinstance(planned, str) or ran in said or ran == "TimeoutError", (ran, said)
            self.compared["errors"] += 1
            return False
        assert isinstance(planned, Plan), (planned, "refused")
        neox_runs.count_shares(self.neox, self.made, keys, ran)
        self._assert_equal(planned, ran, resumed)
        return True

    def _assert_equal(self, plan: Plan, ran: dict[str, Any], resumed: int = 0) -> None:
        assert plan.train_iters + resumed == ran["train_iters"]
        assert not plan.caution.startswith(("train:", "valid:", "test:")), plan.caution
        for split in neox_runs.SPLITS:
            assert_split(plan, split, ran["splits"][split])
            self.compared["coverage values"] += sum(map(len, ran["splits"][split]["served"]))

    def _printed(self, text: str, plan: Plan, ranks: int, dies: bool = False) -> None:
        """Run printed settings with nothing else but the model."""
        (self.folder / "printed.yml").write_text(text)
        model = {**neox_runs.MODEL_ALONE, "global_num_gpus": ranks}
        (self.folder / "model.yml").write_text(yaml.dump(model))
        calls = [line[2:] for line in text.splitlines() if line.startswith("# megaindex.")]
        for call in calls:
            eval(call, {"megaindex": megaindex})
        try:
            ran = self._ran([self.folder / "model.yml", self.folder / "printed.yml"], ranks)
        finally:
            if calls:
                megaindex.adapters.neox.uninstall()
        if dies:
            assert str(ran) in plan.caution, (ran, plan.caution)
            self.compared["errors"] += 1
            return
        assert isinstance(ran, dict), (ran, text)
        neox_runs.count_shares(self.neox, self.made, yaml.safe_load(text), ran)
        self._assert_equal(plan, ran)
        self.compared["printed settings"] += 1

    def _flags(self, rng: random.Random) -> None:
        ranks, flags = rng.choice([1, 2]), neox_runs.flags_of(self.made, rng)
        words = [*neox_runs.placed(flags, self.folder), "--data-parallel-size", str(ranks)]
        texts = []
        for last in (["--print-config", "neox"], ["--json", "--coverage", "exact"]):
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                status = plan_main([*words, *last])
            assert status == 0, (words, err.getvalue())
            texts.append(out.getvalue())
        (self.folder / "printed.yml").write_text(texts[0])
        plan = self._planned_of(self.folder / "printed.yml", ranks)
        flat = json.loads(texts[1])
        assert [row["coverage"] for row in flat["datasets"]] == [
            row.coverage.to_json() for row in plan.datasets
        ]
        dies = plan.caution.startswith(("train:", "valid:", "test:", "train_iters 0"))
        self._printed(texts[0], plan, ranks, dies)

    def _planned_of(self, file: Path, ranks: int) -> Plan:
        given = {"neox_config": [file], "data_parallel_size": ranks, "coverage": "exact"}
        return make_plan(resolve(read_settings(given)))

    def _at_the_limit(self, keys: dict[str, Any]) -> None:
        file = self._write("limit.yml", keys)
        ran = self._ran([file], keys["global_num_gpus"])
        assert isinstance(ran, dict), (ran, "at the limit", keys["train_iters"])
        neox_runs.count_shares(self.neox, self.made, keys, ran)
        for shares in ran["splits"]["train"]["served"]:
            # samples of whole documents may end with the first token of the next one
            again = ran["splits"]["train"]["rows"] if "pack_impl" in keys else 0
            most = sum(shares[2:])
            assert most <= again, ("repeated at the limit", keys["train_iters"], shares)
        self.compared["limits"] += 1


def endless(*_: Any) -> None:
    raise TimeoutError


def main() -> int:
    source, seed, count, first = [*sys.argv[1:], *["0", "200", "0"][len(sys.argv) - 2 :]]
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the framework prints to standard output
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGALRM, endless)
    different = 0
    with contextlib.redirect_stdout(io.StringIO()):
        neox = neox_runs.Neox(Path(source).resolve())
        compiled = with_compiled_helpers(neox)
        tester = Tester(neox, seed)
        for number in range(int(first), int(first) + int(count)):
            text = tester.difference(number)
            answer.write(text)
            different += bool(text)
    helpers = "compiled helpers" if compiled else "megaindex.helpers"
    counts = ", ".join(f"{value:,} {name}" for name, value in sorted(tester.compared.items()))
    answer.write(f"seed {seed}, {count} cases from {first} with {helpers}: {counts}; ")
    answer.write(f"{different} differ\n")
    return min(different, 1)


if __name__ == "__main__":
    sys.exit(main())
