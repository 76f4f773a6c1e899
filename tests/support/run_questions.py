"""Questions to a run, each by its public door, with the answers that others gave beside it."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from support.command_line import cli, shares_by_times
from support.run_kinds import FIRST_TOKEN, Kind

import megaindex
from megaindex import IndexedDataset, Skip
from megaindex.audit import (
    Run,
    RunSource,
    documents_of,
    run_of_index,
    run_of_settings,
)
from megaindex.audit import audit as audit_run
from megaindex.corpus import corpus_fingerprint
from megaindex.errors import InvalidArgument, MegaIndexError
from megaindex.index.array_index import ArrayIndex
from megaindex.index.receipts import fingerprint_keys, receipts_between
from megaindex.index.spans import datasets_of
from megaindex.loader import Loader, Recorder, SampleOptions, join_states
from megaindex.loader.run_sampler import sampler_of
from megaindex.lock import Lock, make_lock, read_lock, run_of_lock
from megaindex.plan import make_plan

RECIPE_FILES = {"recipe", "nanotron_config", "llm_foundry_config", "maxtext_config"}
FILES = {*RECIPE_FILES, "neox_config", "megatron_args"}
END = 10**9  # no token of a corpus


class Alone(Exception):
    """An answer that no other can be compared with, because the others are refused."""


class NoDoor(Exception):
    """A question that takes settings or a lock, of a run that has neither."""


class Asked:
    """A run of a kind, and what it answered; in a folder with the corpora."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.stem = kind.name.replace(" ", "-").replace(",", "")
        for name, content in kind.files.items():
            if isinstance(content, str):
                Path(name).write_text(content)
            else:
                np.save(name, content)
        self.settings = {name: value for name, value in kind.words.items() if value is not None}
        for name in FILES & self.settings.keys():
            content, path = self.settings[name], f"{self.stem}.txt"
            Path(path).write_text(content if isinstance(content, str) else json.dumps(content))
            self.settings[name] = path

    @property
    def is_recipe(self) -> bool:
        """True for a recipe, by whatever file; False for MaxText in the order of Megatron-LM."""
        of_framework = "mmap_npy" in str(self.kind.words)
        return bool(RECIPE_FILES & self.settings.keys()) and not of_framework

    @cached_property
    def named(self) -> tuple[list[str], dict[str, Any]]:
        """What names the run, and its other settings."""
        given = dict(self.settings)
        names = [given.pop(name) for name in FILES & given.keys()]
        return given.pop("data_path", names), given

    @property
    def words(self) -> list[str]:
        """The run on a command line."""
        names, settings = self.named
        found = [*names]
        for name, value in settings.items():
            values = value if isinstance(value, list) else [] if value is True else [value]
            found += [f"--{name.replace('_', '-')}", *map(str, values)]
        return found

    @property
    def past(self) -> int:
        """Samples that are served before the run goes on."""
        run = self.run
        return int((served_positions(run) < run.step_bounds[run.past_steps]).sum())

    def answer(self, verb: str, *more: object, statuses: tuple[int, ...] = (0,)) -> str:
        """What a command prints about the run of its settings."""
        if self.made is not None:
            raise NoDoor(f"megaindex {verb} takes settings or a lock")
        return command(verb, *self.words, *more, statuses=statuses)

    @cached_property
    def made(self) -> Any:
        """What the function of the kind made."""
        return None if self.kind.made is None else self.kind.made()

    @cached_property
    def run(self) -> Run:
        """The run, in Python."""
        if self.made is not None:
            return run_of_index(getattr(self.made, "index", self.made), global_batch_size=4)
        return run_of_settings(**self.arguments) if self.opened is None else self.opened.run

    @property
    def arguments(self) -> dict[str, Any]:
        """The settings in Python."""
        return python_settings(self.settings)

    @cached_property
    def opened(self) -> Any:
        """The run by its names; None without any."""
        names, settings = self.named
        return megaindex.open_run(*names, **python_settings(settings)) if names else None

    @cached_property
    def plan(self) -> dict[str, Any]:
        """The plan, as JSON."""
        if self.made is not None:
            return make_plan(self.run).to_json()
        return json.loads(self.answer("plan", "--json"))

    @cached_property
    def lock(self) -> Lock:
        """The lock."""
        path = f"{self.stem}.lock"
        if self.made is not None:
            made = make_lock(self.made) if self.kind.locked is None else self.kind.locked()
            made.write(path)
        else:
            self.answer("lock", "--out", path, "--tokens")
        return read_lock(path)

    @property
    def locked_receipt(self) -> str:
        """The receipt of all samples in the lock."""
        return str(self.lock.content["subsets"]["train"]["receipts"]["total"])

    @cached_property
    def locked(self) -> Run:
        """The run of the lock."""
        return run_of_lock(self.lock)

    @cached_property
    def audit(self) -> dict[str, Any]:
        """The audit, as JSON."""
        if self.made is not None:
            return audit_run(self.run).to_json()
        return json.loads(self.answer("audit", "--json"))

    def loader(self, rank: int, ranks: int, **loading: Any) -> Any:
        """The loader of a rank, by its settings."""
        sizes: dict[str, Any] = {"data_parallel_rank": rank, "data_parallel_size": ranks}
        loading = self.options | loading
        if self.made is None and (self.is_recipe or not self.run.past_steps):
            sizes |= {} if self.is_recipe else {"recorder": self.recorder}
            return self.opened.loader(**sizes, micro_batch_size=1, **loading)
        run = replace(self.run, past_steps=0)
        sampler = sampler_of(run, **sizes, micro_batch_size=1)
        return Loader(run.index, sampler, recorder=self.recorder, **loading)

    @property
    def options(self) -> dict[str, Any]:
        """Options of loaders: the end token, where documents are removed."""
        removes = self.run.skips is not None and self.run.skips.removes
        return {"options": SampleOptions(eod_id=END)} if removes else {}

    @property
    def recorder(self) -> Recorder:
        """A recorder of receipts."""
        return Recorder(self.fingerprints)

    @property
    def order(self) -> str:
        """Name of the order."""
        return self.run.order

    @property
    def fingerprints(self) -> list[str]:
        return [corpus_fingerprint(dataset) for dataset in datasets_of(self.run.index)]

    @cached_property
    def batches(self) -> list[Any]:
        """All batches of one rank, read without threads, and `state` behind them."""
        loader = self.loader(0, 1, read_ahead=0)
        batches = [as_arrays(batch) for batch in loader]
        self.state = loader.state_dict()
        return batches


def command(verb: str, *words: object, statuses: tuple[int, ...] = (0,)) -> str:
    """What a command prints; InvalidArgument if it refuses its words."""
    status, out, err = cli(verb, *words)
    if status == 2:
        raise InvalidArgument(err.splitlines()[-1].partition(": ")[2])
    assert status in statuses, (status, out, err)
    return out


def python_settings(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The same settings, as arguments."""
    of_skips = ("skip_steps", "skip_documents", "skip_from_step", "move_skipped", "remove_skipped")
    found = {name: value for name, value in flags.items() if name not in of_skips}
    if "seq_length" in found:
        found["sequence_length"] = found.pop("seq_length")
    skips = []
    if "skip_steps" in flags:
        steps = " ".join(flags["skip_steps"])
        skips.append({"steps": steps, "move": bool(flags.get("move_skipped"))})
    for given in flags.get("skip_documents", ()):
        path, _, source = given.partition(":")
        first, remove = flags.get("skip_from_step"), flags.get("remove_skipped", False)
        skips.append({"documents": path, "source": source, "from_step": first, "remove": remove})
    return {**found, **({"skip": [Skip(**skip) for skip in skips]} if skips else {})}


def in_place(value: Any) -> Any:
    """The same with paths relative to this folder."""
    return json.loads(json.dumps(value).replace(f"{Path.cwd()}/", ""))


def as_arrays(batch: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Copies of the tensors of a batch."""
    return {name: values.numpy().copy() for name, values in batch.items()}


def rows_of(batches: list[Any]) -> list[bytes]:
    """Rows of batches in any order, without those of padding."""
    rows = [
        (row[0].tobytes() + row[1].tobytes() + row[2].tobytes())
        for batch in batches
        for row in zip(batch["tokens"], batch["labels"], batch["loss_mask"], strict=True)
        if row[0].any()
    ]
    return sorted(rows)


def served_counts(asked: Asked) -> list[int]:
    """Samples of each source in the batches, by their first token."""
    first = [batch["tokens"][0, (batch["tokens"] != END).argmax()] for batch in asked.batches]
    owned = [tokens_of(source) for source in asked.run.sources]
    return [int(np.isin(first, tokens).sum()) for tokens in owned]


def run_counts(run: Run) -> list[int]:
    """Samples of each source by `Run.counts`."""
    found: list[int] = run.counts(int(run.step_bounds[0]), run.num_samples).tolist()
    return found


def served_positions(run: Run) -> np.ndarray:
    """The positions that are served, in order."""
    samples = [pieces.sample for pieces in run.runs()]
    return np.unique(np.concatenate(samples))


def tokens_of(source: RunSource) -> np.ndarray:
    """The tokens of the documents that an epoch of a source has."""
    lengths = IndexedDataset(source.path_prefix).sequence_lengths
    begins = FIRST_TOKEN[Path(source.path_prefix).name] + np.cumsum(lengths) - lengths
    firsts = begins[source.first_document :][: source.lengths.size]
    each = zip(firsts.tolist(), source.lengths.tolist(), strict=True)
    return np.concatenate([np.arange(first, first + length) for first, length in each])


def receipt_of(state: Mapping[str, Any]) -> str:
    """The receipt of a state of one rank."""
    return str(join_states([state])["receipt"]["receipt"])


def spans_of(run: Run) -> list[list[int]]:
    """All token runs of a run."""
    return [column.tolist() for pieces in run.runs() for column in pieces]


def total_receipt(run: Run, fingerprints: list[str]) -> str:
    bounds = run.step_bounds[[0, -1]].tolist()
    (receipt,) = receipts_between(run.index, bounds, fingerprint_keys(fingerprints))
    return str(receipt)


def beside(asked: Asked) -> Run:
    """The run, to which an answer is compared; Alone if it is refused."""
    try:
        return asked.run
    except MegaIndexError as error:
        raise Alone(str(error)) from error


def plan(asked: Asked) -> None:
    """Samples of each source and steps in the plan are those of the run."""
    planned = asked.plan
    if asked.made is None:
        asked.answer("plan")
    run = beside(asked)
    rows = [row for row in planned["datasets"] if row["split"] == "train"]
    numbers = range(1, len(run.sources) + 1)
    drawn = [sum(row["drawn"] for row in rows if row["source"] == n) for n in numbers]
    assert drawn == run_counts(run)
    if planned.get("skip"):
        steps = run.step_of(served_positions(run)).tolist()
        assert planned["skip"]["steps_made"] == len(set(steps))
    else:  # of a recipe, steps that another system made count too
        past = 0 if asked.is_recipe else run.past_steps
        assert planned["train_iters"] == run.num_steps - past
        assert planned["samples_consumed"] == run.samples_served
    check_coverage(asked, rows)
    if "draws" in planned and run.step_bounds[0] == 0:  # an audit sees nothing of a past elsewhere
        check_first_repeats(asked, planned["draws"])


def check_coverage(asked: Asked, rows: Sequence[Mapping[str, Any]]) -> None:
    """Compare the share of tokens by times seen with the audit's, where one row has a source."""
    for row, counted in zip(rows, asked.audit["sources"], strict=False):
        method = row.get("coverage_method")
        if "phase" not in row or row["phase"] is not None or method in ("expected", "none"):
            continue
        by_times = np.trim_zeros(counted["tokens_by_times_seen"]["total"], "b")
        planned = np.trim_zeros(shares_by_times(row["coverage"]), "b")
        np.testing.assert_allclose(planned, np.array(by_times) / counted["tokens"], rtol=1e-12)


def check_first_repeats(asked: Asked, draws: Sequence[Mapping[str, Any]]) -> None:
    """Compare the first step at which a source repeats with the audit's."""
    for counted in asked.audit["sources"]:
        mine = [d["first_repeat"] for d in draws if d["source"] == counted["path"]]
        steps = [step for step in mine if step is not None]
        assert counted["first_repeated_step"] == min(steps, default=None)


def check(asked: Asked) -> None:
    """The check fails for the reasons of the plan, and where the audit finds a token more often
    than the epochs asked for."""
    reasons = asked.plan["check_failures"]
    if asked.made is None:
        asked.answer("plan", "--check", statuses=(int(bool(reasons)),))
    beside(asked)
    lengths = [each["length"] for each in asked.plan.get("stages", ())]
    asks = max(lengths, default=asked.plan.get("target", ""))
    numbers = [float(number) for number in re.findall(r"[\d.]+", asks) if "epoch" in asks]
    epochs = math.ceil(max(numbers, default=1))
    seen = [source["tokens_by_times_seen"]["total"] for source in asked.audit["sources"]]
    assert reasons or not any(sum(each[epochs + 1 :]) for each in seen)


def lock(asked: Asked) -> None:
    """Counts, spans, steps, receipts and plan of the lock are those of the run."""
    run, locked = asked.run, asked.locked
    assert run_counts(locked) == run_counts(run)
    assert spans_of(locked) == spans_of(run)
    assert locked.step_bounds.tolist() == run.step_bounds.tolist()
    assert asked.locked_receipt == total_receipt(run, asked.fingerprints)
    if asked.made is not None:
        return
    planned = json.loads(command("plan", asked.lock.path, "--json"))
    for name in asked.plan.keys() - {"warnings", "caution"}:  # which name the settings of a file
        assert in_place(planned[name]) == in_place(asked.plan[name])


def verify(asked: Asked) -> None:
    """The lock has no finding."""
    path = asked.lock.path
    for more in ("--all", "--tokens"), ("--step", asked.run.num_steps - 1):
        assert "no findings" in command("verify", path, *more)


def audit(asked: Asked) -> None:
    """The audit counts the tokens that the loader serves, and that of the lock the same."""
    run, audited = asked.run, asked.audit
    assert audited["samples"] == run.samples_served
    tokens = np.concatenate([batch["tokens"].reshape(-1) for batch in asked.batches])
    seen = np.bincount(tokens[tokens != END].astype(np.int64), minlength=30_001)
    for source, counted in zip(run.sources, audited["sources"], strict=True):
        mine = seen[tokens_of(source)]
        by_times = np.trim_zeros(counted["tokens_by_times_seen"]["total"], "b")
        assert by_times == np.bincount(mine).tolist()
    if asked.made is not None and asked.kind.locked is None:
        return
    theirs = json.loads(command("audit", asked.lock.path, "--json"))
    notes = (
        {"run_settings"} if asked.made is None else {"run_settings", "order", "num_epochs_built"}
    )
    for name in audited.keys() - notes:
        assert in_place(audited[name]) == in_place(theirs[name]), name


def report(asked: Asked) -> None:
    """Tokens that are served, unseen and served again are those of the audit, and of the lock."""
    theirs = json.loads(command("report", asked.lock.path, "--json"))
    ours = theirs if asked.made is not None else json.loads(asked.answer("report", "--json"))
    assert (ours["receipt"], ours["identity"]) == (asked.locked_receipt, asked.lock.identity)
    assert ours["samples"] == served_positions(asked.run).size
    for name in ours.keys() - {"lock", "content"}:  # which depend on the hashes of tokens
        assert in_place(ours[name]) == in_place(theirs[name])
    for told, counted in zip(ours["sources"], asked.audit["sources"], strict=True):
        by_times = np.array(counted["tokens_by_times_seen"]["total"])
        served = int(by_times @ np.arange(by_times.size))
        again = served - int(by_times[1:].sum())
        assert (told["served"], told["unseen"]) == (served, by_times[0])
        assert told["served_again"] == again


def trace(asked: Asked) -> None:
    """The spans of a step are those of the run, by settings and by lock."""
    run = asked.run
    step = int(run.step_of(served_positions(run))[-1])
    begin, end = run.step_bounds[step : step + 2].tolist()
    (pieces,) = run.runs(begin, end)
    columns = (pieces.document.tolist(), pieces.offset.tolist(), pieces.length.tolist())
    expected = [*zip(*columns, strict=True)]
    if asked.made is not None:
        for each in run, *([] if asked.kind.locked is None else [asked.locked]):
            found = [(s.document, s.offset, s.length) for s in documents_of(each, step)]
            assert found == expected
        return
    ours = json.loads(asked.answer("trace", "--step", step, "--json"))["spans"]
    assert [(s["document"], s["offset"], s["length"]) for s in ours] == expected
    theirs = json.loads(command("trace", asked.lock.path, "--step", step, "--json"))
    assert in_place(theirs["spans"]) == in_place(ours)


def diff_order(asked: Asked) -> None:
    """The order of the lock is equal to itself, in all samples that are served."""
    path = asked.lock.path
    found = json.loads(command("diff-order", path, path, "--json"))
    assert (found["relation"], found["positions_differing"]) == ("equal", 0)
    assert found["positions_compared"] == served_positions(asked.run).size


def export(asked: Asked) -> None:
    """The arrays that are written, by settings and by lock, serve the spans of the run."""
    words = ["--to", asked.kind.to or "neox", "--subset", "train", "--json", "--overwrite"]
    order = [] if asked.is_recipe or "order" in asked.settings else ["--order", asked.order]
    asks = [lambda: command("export", asked.lock.path, *words)]
    if asked.kind.locked is None:
        asks.insert(0, lambda: asked.answer("export", *order, *words))
    for ask in asks:
        (exported,) = json.loads(ask())["datasets"]
        assert exported["samples_served"] == asked.run.samples_served
        files = [file for file in exported["files"] if file.endswith(".npy")]
        names = ("document_index", "sample_index", "shuffle_index")
        index = ArrayIndex(
            **dict(zip(names, map(np.load, files), strict=True)), order="", num_epochs=1,
            sequence_lengths=datasets_of(asked.run.index)[0].sequence_lengths,
            sequence_length=asked.run.index.sequence_length, tokens_per_epoch=0,
        )  # fmt: skip
        assert spans_of(replace(asked.run, index=index)) == spans_of(asked.run)


def load(asked: Asked) -> None:
    """Rows and receipts of the loader are those of the run and of the opened lock's loader."""
    assert served_counts(asked) == run_counts(asked.run)
    assert receipt_of(asked.state) == total_receipt(asked.run, asked.fingerprints)
    if asked.made is not None and asked.kind.locked is None:
        return
    opened = megaindex.open_run(asked.lock.path)
    loader = opened.loader(data_parallel_size=1, micro_batch_size=1, **asked.options)
    theirs = [as_arrays(batch) for batch in loader]
    ours = asked.batches[asked.past :]
    assert [rows_of([each]) for each in theirs] == [rows_of([each]) for each in ours]
    assert receipt_of(asked.state) == asked.locked_receipt
    if not asked.past:
        assert receipt_of(loader.state_dict()) == asked.locked_receipt


def resume(asked: Asked) -> None:
    """On two ranks and then on one, the batches are those of the run that goes through."""
    first = [asked.loader(rank, 2) for rank in range(2)]
    half = len(first[0]) // 2
    served = [as_arrays(batch) for each in first for batch in itertools.islice(each, half)]
    state = json.loads(json.dumps(join_states([each.state_dict() for each in first])))
    rest = asked.loader(0, 1, read_ahead=0)
    rest.load_state_dict(state)
    served += [as_arrays(batch) for batch in rest]
    assert rows_of(served) == rows_of(asked.batches)
    state = rest.state_dict()
    assert receipt_of(state) == receipt_of(asked.state)
    receipt = state.get("loader", state)["receipt"]
    assert receipt["in_place"] == receipt["samples"]


def prove(asked: Asked) -> None:
    """The lock proves itself, and the state behind the whole run."""
    command("prove", asked.lock.path, asked.lock.path)
    asked.batches  # noqa: B018
    path = Path(f"{asked.stem}.json")
    path.write_text(json.dumps(join_states([asked.state])))
    command("prove", asked.lock.path, path)


def evaluation(asked: Asked) -> None:
    """Samples and audit of the evaluation are those of the plan, and of the lock of training."""
    if asked.made is not None:
        run_of_lock(asked.lock, subset="valid")
    words = ["--subset", "valid", "--json"]
    ours = json.loads(asked.answer("audit", *words))
    if asked.is_recipe:
        served = [int(b["tokens"].any(dim=1).sum()) for b in asked.loader(0, 1).evaluation()]
        samples = sum(served)
        assert samples == asked.plan["evaluation_samples"]
    else:
        run = run_of_settings(**asked.arguments, subset="valid")
        rows = [row["drawn"] for row in asked.plan["datasets"] if row["split"] == "valid"]
        samples = run.samples_served
        assert run_counts(run) == rows
    assert ours["samples"] == samples
    if asked.kind.cell("lock") == "no training":
        return
    locked = run_of_lock(asked.lock, subset="valid")
    assert locked.num_samples == samples
    if not asked.is_recipe:
        assert spans_of(run) == spans_of(locked)
    theirs = json.loads(command("audit", asked.lock.path, *words))
    for name in ours.keys() - {"run_settings"}:
        assert in_place(ours[name]) == in_place(theirs[name])


QUESTIONS: dict[str, Callable[[Asked], None]] = {
    "plan": plan,
    "check": check,
    "lock": lock,
    "verify": verify,
    "audit": audit,
    "report": report,
    "trace": trace,
    "diff-order": diff_order,
    "export": export,
    "load": load,
    "resume": resume,
    "prove": prove,
    "evaluation": evaluation,
}
