"""Plans and printed settings against the training code of releases of Megatron-LM.

MEGATRON_TAGS is a folder of checkouts: ``megatron-0.16.1``, …, ``megatron-main``; without it the
tests are skipped. MEGATRON_SEED and MEGATRON_COUNT choose the random runs of each.
"""

from __future__ import annotations

import json
import os
import select
import shlex
import site
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.corpora import write_corpus

from megaindex.errors import MegaIndexError
from megaindex.plan import make_plan
from megaindex.plan.export import export_settings
from megaindex.settings.arguments import read_settings
from megaindex.settings.megatron_versions import find_version
from megaindex.settings.run_builder import resolve

FOLDER = os.environ.get("MEGATRON_TAGS", "")
SEED = int(os.environ.get("MEGATRON_SEED", "38"))
COUNT = int(os.environ.get("MEGATRON_COUNT", "12"))
SECONDS = 180  # of a run, after which its process is replaced
TAGS = sorted(path.name.partition("-")[2] for path in Path(FOLDER).glob("megatron-*"))

pytestmark = [
    pytest.mark.not_quick,
    pytest.mark.skipif(not FOLDER, reason="MEGATRON_TAGS names no folder of checkouts"),
]

STOPS = (
    "without end",
    "stops with",
    "stops after",
    "runs out of samples",
    "exceeds",
    "at which Megatron's blend",
)


class Checkout:
    """The training code of a release, in a process of its own."""

    def __init__(self, tag: str, errors: Path) -> None:
        paths = [
            f"{FOLDER}/megatron-{tag}",
            str(Path(__file__).parents[1]),
            *site.getsitepackages(),
        ]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        self.tag, self.errors, self.environment = tag, errors, environment
        self.start()

    def start(self) -> None:
        """Start the process."""
        with self.errors.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "support.megatron_runs"],
                env=self.environment,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True,
            )  # fmt: skip

    def run(self, ranks: int, words: list[str], stop: int | None = None) -> dict[str, Any]:
        """Return what a run with these arguments did."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps({"ranks": ranks, "args": words, "stop": stop}), file=self.process.stdin,
              flush=True)  # fmt: skip
        if not select.select([self.process.stdout], [], [], SECONDS)[0]:  # in compiled code
            self.process.kill()
            self.process.communicate()
            self.start()
            return {"error": f"no answer in {SECONDS} s", "where": "run"}
        line = self.process.stdout.readline()
        assert line, self.errors.read_text()[-2000:]
        found: dict[str, Any] = json.loads(line)
        return found


@pytest.fixture(scope="module", params=TAGS)
def checkout(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Checkout]:
    real = Checkout(request.param, tmp_path_factory.mktemp("log") / "errors")
    yield real
    real.process.communicate()


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    rng = np.random.default_rng(3)
    paths = [tmp_path_factory.mktemp("corpora") / name for name in "abcd"]
    for path, count in zip(paths, (300, 120, 60, 30), strict=True):
        write_corpus(path, rng.integers(1, 40, count))
    return [str(path) for path in paths]


BASE = ["--seq-length", "16", "--micro-batch-size", "2", "--eval-interval", "4"]


def test_the_table_of_versions(checkout: Checkout, corpora: list[str]) -> None:
    """Each rule of a release, as its own code has it."""
    rules = find_version(checkout.tag)
    one = [*BASE, "--data-path", corpora[0], "--split", "90,5,5", "--global-batch-size", "8"]
    blend = [*BASE, "--data-path", "2", corpora[0], "1", corpora[1], "--split", "90,5,5"]
    blend += ["--global-batch-size", "8", "--train-iters", "8"]
    skipped = checkout.run(2, [*one, "--train-iters", "8", "--iterations-to-skip", "3"])["skipped"]
    assert skipped == [3 - rules.first_skipped]
    ramp = [*one, "--train-samples", "80", "--rampup-batch-size", "4", "4", "40", "--eval-iters"]
    assert (checkout.run(2, [*ramp, "1"])["train_iters"] > 10) == rules.ramps
    no_interval = [word for word in one if word not in BASE[-2:]]
    stopped = checkout.run(2, [*no_interval, "--train-iters", "8"]).get("error", "")
    assert ("TypeError" in stopped) == (rules.eval_interval is None)
    stopped = checkout.run(2, [*blend, "--eval-iters", "0"]).get("error", "")
    assert ("AssertionError" in stopped) == (not rules.empty_loaders)
    alone = [*BASE, "--train-data-path", corpora[0], "--global-batch-size", "8", "--train-iters"]
    assert ("error" in checkout.run(2, [*alone, "8", "--eval-iters", "1"])) == (
        rules.needs_validation
    )
    for flag, value in (("--start-eval-at-iter", "4"), ("--step-batch-size-schedule", "0:4")):
        words = [*BASE, "--data-path", corpora[0], "--split", "90,5,5", "--train-iters", "8"]
        unknown = checkout.run(2, [*words, flag, value]).get("where") == "setup"
        assert unknown == (rules.since < (0, 18))


def test_a_cyclic_loader_divides_by_zero(checkout: Checkout, tmp_path: Path) -> None:
    for name in ("x", "y"):
        write_corpus(tmp_path / name, [3 * 16 + 1])
    write_corpus(tmp_path / "train", [16 * 100])
    few = ["--valid-data-path", str(tmp_path / "x"), str(tmp_path / "y")]
    words = [*BASE, "--train-data-path", str(tmp_path / "train"), *few, "--train-iters", "8"]
    words += ["--dataloader-type", "cyclic", "--eval-iters", "1"]
    outcomes = [checkout.run(ranks, words).get("error", "") for ranks in (3, 4)]
    assert [error.partition(":")[0] for error in outcomes] == ["", "ZeroDivisionError"]


def blend_of(rng: np.random.Generator, corpora: list[str], most: int = 4) -> list[str]:
    """Return a random blend: one path, paths, or weights and paths."""
    chosen = [str(path) for path in rng.permutation(corpora)[: rng.integers(1, most + 1)]]
    if rng.integers(2):
        return chosen
    return [word for path in chosen for word in (f"{rng.uniform(0.1, 9):.3g}", path)]


def random_run(rng: np.random.Generator, tag: str, corpora: list[str]) -> dict[str, Any]:
    """Return random arguments, ranks, and at times an iteration at which the run is resumed."""
    newer = find_version(tag).full_validation == "ranks"
    sequence, micro, ranks = (int(n) for n in rng.integers((6, 1, 1), (33, 5, 5)))
    unit = micro * ranks
    batch = unit * int(rng.integers(1, 4))
    iterations = int(rng.integers(1, 60))
    interval, evals = (
        int(rng.integers(1, 30)),
        int(rng.choice([0, 1, 2, 5], p=[0.2, 0.4, 0.2, 0.2])),
    )
    words = ["--seq-length", sequence, "--micro-batch-size", micro, "--seed", rng.integers(9999)]
    words += ["--eval-interval", interval, "--eval-iters", evals]
    kind = rng.choice(["split", "splits"])
    if kind == "split":
        shares = rng.choice(["100,0,0", "90,5,5", "80,20,0", "90,0,10"])
        words += ["--data-path", *blend_of(rng, corpora), "--split", shares]
    else:
        words += ["--train-data-path", *blend_of(rng, corpora)]
        for split in ("valid", "test"):
            if rng.integers(3):
                words += [f"--{split}-data-path", *blend_of(rng, corpora, 2)]
    samples = iterations * batch + int(rng.integers(batch))
    by_samples = bool(rng.integers(2))
    stop = None
    if newer and rng.random() < 0.3:
        sizes = unit * rng.integers(1, 4, int(rng.integers(1, 4)))
        sizes = np.sort(sizes) if rng.random() < 0.7 else sizes
        firsts = np.cumsum([0, *rng.integers(1, 200, sizes.size - 1)]) * sequence
        pairs = zip(firsts.tolist(), sizes.tolist(), strict=True)
        words += ["--step-batch-size-schedule", " ".join(f"{f}:{size}" for f, size in pairs)]
    else:
        words += ["--global-batch-size", batch]
        if rng.random() < 0.2:
            ramp = [unit, unit, int(rng.integers(1, 3)) * samples // 3]
            if by_samples and batch > unit:
                words += ["--rampup-batch-size", *ramp]
        elif by_samples and iterations > 2 and rng.random() < 0.4:
            stop = int(rng.integers(1, iterations))
    words += ["--train-samples", samples] if by_samples else ["--train-iters", iterations]
    if rng.random() < 0.2:
        words += ["--dataloader-type", "cyclic"]
    if rng.random() < 0.25:
        words += ["--iterations-to-skip", *rng.integers(1, iterations + 3, rng.integers(1, 4))]
    if rng.random() < 0.2:
        words += ["--mid-level-dataset-surplus", rng.choice([0, 0.01, 0.3])]
    if rng.random() < 0.1:
        words += ["--skip-train"]
        stop = None
    if newer and rng.random() < 0.3:
        words += ["--start-eval-at-iter", rng.integers(0, iterations + 9)]
    if newer and rng.random() < 0.3:
        words += ["--eval-global-batch-size", unit * rng.integers(1, 4)]
    return {"ranks": ranks, "words": [str(word) for word in words], "stop": stop}


def differences(plan: Any, run: Any, real: dict[str, Any], stop: int | None) -> list[str]:
    """Return where a plan differs from the run of the framework's code."""
    stated = [text for text in (plan.caution, *plan.warnings) if any(s in text for s in STOPS)]
    found = []

    def same(what: str, planned: Any, made: Any) -> None:
        if planned != made:
            found.append(f"{what}: planned {planned}, real {made}")

    same("stops", bool(stated), "error" in real)
    before = real.get("first_launch", {"skipped": [], "evaluated": [], "drawn": {}})
    if "train_iters" in real:
        same("train_iters", plan.train_iters + (stop or 0), real["train_iters"])
    if "datasets" not in real:
        return found
    for split, made in real["datasets"].items():
        rows = [row for row in plan.rows(split) if row.tokens_per_epoch]
        same(f"{split} built", [row.built for row in rows], [row["built"] for row in made])
        same(f"{split} epochs", [row.epochs for row in rows], [row["epochs"] for row in made])
    evaluation = plan.evaluation
    for place, split in ((1, "valid"), (2, "test")):
        if evaluation is not None and real["datasets"][split]:
            asked = getattr(evaluation, f"{split}_samples")
            same(f"{split} requested", asked, real["requested"][place])
    if "error" in real:
        return found
    drawn = {
        split: {k: each.get("drawn", {}).get(split, {}).get(str(k), 0) + before.get("drawn", {})
                .get(split, {}).get(str(k), 0) for k, _ in enumerate(plan.rows(split))}
        for split in real["datasets"] for each in (real,)
    }  # fmt: skip
    same("skipped", [s for s in run.skipped_steps if s < real["train_iters"]] if not
         run.evaluation.alone else [], sorted({*real["skipped"], *before["skipped"]}))  # fmt: skip
    for row, count in zip(plan.rows("train"), drawn["train"].values(), strict=True):
        low, high = (row.drawn, row.drawn) if row.drawn is not None else row.drawn_bounds
        if not low <= count <= high:
            found.append(f"train drawn of {row.source}: planned {low} to {high}, real {count}")
    if evaluation is not None and run.evaluation.iterations:
        same("evaluations", evaluation.rounds_run * bool(real["datasets"]["valid"]),
             len(real["evaluated"]) + len(before["evaluated"]))  # fmt: skip
        for split in ("valid", "test"):
            read = getattr(evaluation, f"{split}_samples_read")
            same(f"{split} read", read, sum(drawn[split].values()))
    return found


def compared(checkout: Checkout, each: dict[str, Any]) -> tuple[str, list[str]]:
    """Return the kind of outcome, and where the plan and the printed settings differ."""
    ranks, words, stop = each["ranks"], each["words"], each["stop"]
    real = checkout.run(ranks, words, stop)
    stop = stop if "consumed" in real else None  # the first launch may end with an error
    given: dict[str, Any] = {
        "megatron_args": shlex.join(words), "world_size": ranks, "framework_version": checkout.tag,
        "consumed_samples": None if stop is None else real.get("consumed"),
    }  # fmt: skip
    try:
        run = resolve(read_settings(given))
        plan = make_plan(run)
    except MegaIndexError as error:
        trains = len(real["skipped"]) < real.get("train_iters", 0) or "--skip-train" in words
        return "refused", [] if "error" in real or not trains else [f"refused: {error}"]
    found = differences(plan, run, real, stop)
    if stop is not None or "error" in real:
        return "stops" if "error" in real else "resumed", found
    try:
        printed = export_settings(plan, run, "megatron")
    except MegaIndexError:
        return "not printed", found
    lines = [line for line in printed.splitlines() if not line.startswith("#")]
    again = shlex.split(" ".join(line.removesuffix("\\") for line in lines))
    skips = words[words.index("--iterations-to-skip") :] if "--iterations-to-skip" in words else []
    end = next((k for k, word in enumerate(skips[1:], 1) if word.startswith("--")), len(skips))
    printed_real = checkout.run(ranks, [*again, *skips[:end]])
    found += [f"printed: {text}" for text in differences(plan, run, printed_real, None)]
    return "printed", found


def test_random_runs(checkout: Checkout, corpora: list[str]) -> None:
    rng = np.random.default_rng([SEED, sum(checkout.tag.encode())])
    kinds: dict[str, int] = {}
    wrong = []
    for number in range(COUNT):
        each = random_run(rng, checkout.tag, corpora)
        kind, found = compared(checkout, each)
        kinds[kind] = kinds.get(kind, 0) + 1
        print(number, kind, *found, flush=True)
        if found:
            text = shlex.join(each["words"]), each["ranks"], each["stop"]
            wrong.append(f"{number} {text}: {found}")
    print(checkout.tag, SEED, COUNT, kinds, len(wrong))
    assert not wrong, "\n".join(wrong[:12])
