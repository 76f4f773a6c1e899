"""Kinds of runs: small corpora, and one run of each kind over them.

Every token of the corpora occurs once, so that a batch says which of them it holds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import megaindex
from megaindex import AmendedBlend, BlendChange, IndexedDatasetWriter
from megaindex.lock import Lock, make_lock

PAGE = Path(__file__).parents[2] / "docs" / "matrix.md"
S = 16
FIRST_TOKEN = {"web": 1, "code": 10_001, "chat": 20_001}
TOKENS = {"web": 650, "code": 330, "chat": 280}
"""Tokens of each corpus, about."""


@dataclass(frozen=True)
class Kind:
    """A kind of run.

    Attributes:
        name: its row in docs/matrix.md.
        words: the run by the names of the flags of ``megaindex plan``; ``recipe`` and
            ``neox_config`` are the content of the file.
        made: function that makes a run or an index without settings.
        locked: function that makes its lock.
        files: other files, by name: text, or an array.
        to: framework for which it is exported; empty: its arrays cannot hold it.
        cells: what is not answered beside another answer: a rule, by question.
    """

    name: str
    words: Mapping[str, Any] = field(default_factory=dict)
    made: Callable[[], Any] | None = None
    locked: Callable[[], Lock] | None = None
    files: Mapping[str, Any] = field(default_factory=dict)
    to: str = ""
    cells: Mapping[str, str] = field(default_factory=dict)

    def cell(self, question: str) -> str:
        """Expected answer: `YES`, `ALONE`, or the name of a rule."""
        usual = {"export": YES if self.to else "format", "evaluation": NONE}.get(question, YES)
        return self.cells.get(question, usual)


YES = "yes"
"""An answer that agrees with those beside it."""
NONE = "none"
"""A question about an evaluation, of a run without one."""
ALONE = "alone"
"""An answer with which no other can be compared."""

RULES = {
    "no files": "the sources have no files, but numbers of tokens or lengths",
    "ranks": "ranks decide which samples a step reads, which is no order of one run",
    "no training": "the run trains on nothing, and reads its evaluation alone",
    "stops": "the framework stops with an error, or serves other samples than its blend draws",
    "own": "the arrays are one's own, and follow from no settings",
    "settings": "the settings are not known, which decide it",
    "format": "arrays or locks cannot hold it: a lock has no whole documents as GPT-NeoX chooses "
    "them by the tokens of labels, and the arrays of a framework are of one corpus, one sequence "
    "length and whole batches, whose samples are ranges of whole documents cut at both ends, and "
    "have neither labels nor skips",
}
"""Rules by which a question is refused, by their name in docs/matrix.md."""

REFUSALS = {
    "no files": (
        "have no documents to audit", "path must be given to read it",
        "an order is exported of documents",
    ),
    "ranks": ("dataloader.type cyclic: its order", "micro batches and ranks decide"),
    "stops": ("the run fails or repeats samples", "less than one micro batch"),
    "own": ("run must be a recipe or settings of a framework, got",),
    "settings": ("takes settings or a lock",),
    "format": (
        "a lock cannot hold samples of whole documents",
        "the arrays are those of one corpus", "joins tokens .* to other documents",
        "the framework drops the samples", "skips are applied by megaindex",
        "labels are read with other arrays", "the arrays are those of a whole run",
        "reads the arrays of one epoch again", "the arrays hold an order from its first sample on",
        "trains on the padding or fails at it", "a run of the framework has one of each",
        "give the batch sizes of its run",
    ),
    "no training": ("the run trains on nothing",),
    NONE: (
        "has no subset valid", "the run has no valid data",
        "reads nothing of the valid data", "reads no such data",
    ),
}  # fmt: skip
"""Words of the errors of each rule."""


def one(order: str, **words: Any) -> dict[str, Any]:
    """A run over one corpus, by flags."""
    return {"data_path": ["web"], **_SIZES, "order": order, "train_iters": 14, **words}


def blend(order: str, *weights: int, **words: Any) -> dict[str, Any]:
    """A run over two corpora, by flags."""
    pairs = zip(map(str, weights), ("web", "code"), strict=True)
    paths = [word for pair in pairs for word in pair] if weights else ["web", "code"]
    return {**one(order, **words), "data_path": paths}


def recipe(stages: str, sources: str = "web: web, code: code", **more: str) -> dict[str, Any]:
    """A run of a recipe."""
    texts = {"sequence_length": S, "batch": _BATCH, "sources": f"{{{sources}}}", **more}
    lines = [f"{name}: {text}" for name, text in texts.items()]
    return {"recipe": "\n".join([*lines, "stages:", *(f"  {line}" for line in stages.split("\n"))])}


def only_planned(reason: str, **others: str) -> dict[str, str]:
    """Cells of a run that is planned, and nothing else."""
    return {"plan": ALONE, "check": ALONE, **dict.fromkeys(_OTHERS, reason), **others}


def without_settings(reason: str) -> dict[str, str]:
    """Cells of an index that is made in Python."""
    return {"export": "settings", **dict.fromkeys(_LOCKS, reason)}


def neox(**keys: Any) -> dict[str, Any]:
    """A run of a configuration of GPT-NeoX."""
    given = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2,
             "seq_length": S, "eval_iters": 0, "seed": 7, **keys}  # fmt: skip
    return {"neox_config": given, "world_size": 2}


_SIZES = {"seq_length": S, "micro_batch_size": 1, "data_parallel_size": 2,
          "gradient_accumulation_steps": 2}  # fmt: skip
_BATCH = "{micro_batch_size: 1, data_parallel_size: 2, global_batch_size: 4}"
_OTHERS = ("lock", "verify", "audit", "report", "trace", "diff-order", "export", "load", "resume",
           "prove", "evaluation")  # fmt: skip
_LOCKS = ("lock", "verify", "report", "diff-order", "prove", "evaluation")
_ONE = "all: {steps: 12, mix: {web: 3, code: 1}}"
_HALF = 2**30
_NANOTRON = {
    "data_stages": [
        {"name": name, "start_training_step": first, "data": {"seed": 42, "dataset": {
            "dataset_folder": ["web", "code"], "dataset_weights": weights}}}
        for name, first, weights in (("stable", 1, [0.9, 0.1]), ("decay", 9, [0.5, 0.5]))
    ],
    "parallelism": {"dp": 2, "tp": 1, "pp": 1},
    "tokens": {"sequence_length": S, "train_steps": 12, "micro_batch_size": 1,
               "batch_accumulation_per_replica": 2, "val_check_interval": -1,
               "limit_val_batches": 0},
}  # fmt: skip
_LLM_FOUNDRY = {
    "max_seq_len": S, "max_duration": "2ep", "global_train_batch_size": 4,
    "device_train_microbatch_size": 2,
    "train_loader": {"name": "text", "dataset": {
        "shuffle": True, "epoch_size": 24, "streams": {
            "web": {"local": "web", "proportion": 0.75},
            "code": {"local": "code", "proportion": 0.25}}}},
}  # fmt: skip
_MAXTEXT = {"dataset_type": "grain", "grain_file_type": "arrayrecord",
            "grain_train_files": "web.array_record", "max_target_length": S,
            "per_device_batch_size": 2, "steps": 8, "num_epoch": 2}  # fmt: skip


class Backwards:
    """Samples of an index from the last to the first."""

    def __init__(self, index: Any) -> None:
        self._index, self.datasets = index, index.datasets
        self.num_samples, self.num_epochs = index.num_samples, index.num_epochs
        self.sequence_length, self.add_extra_token = index.sequence_length, index.add_extra_token
        self.tokens_per_epoch = index.tokens_per_epoch

    def locate(self, sample_ids: Any) -> Any:
        return self._index.locate(self.num_samples - 1 - np.asarray(sample_ids))


def _own() -> Any:
    return Backwards(megaindex.build_index("web", sequence_length=S, order="epoch"))


_CHANGES = [BlendChange(consumed_samples=24, weights={"web": 0.2, "code": 0.4, "chat": 0.4})]


def _amended() -> Any:
    return megaindex.amend_run(
        ["web", "code"], weights=[3, 1], sequence_length=S, num_samples=56, changes=_CHANGES
    )


def _lock_of_amended() -> Lock:
    today = ["0.2", "web", "0.4", "code", "0.4", "chat"]
    began = AmendedBlend(data_path=[3, "web", 1, "code"], num_samples=56, changes=_CHANGES)
    return make_lock(
        amend=began, data_path=today, sequence_length=S, global_batch_size=4, train_iters=14,
        tokens=True,
    )  # fmt: skip


def _extended() -> Any:
    return megaindex.extend_run(
        "web", sequence_length=S, num_samples=30, consumed_samples=20, more_samples=32
    )


def _lock_of_extended() -> Lock:
    began = AmendedBlend(data_path=["web"], num_samples=30, consumed_samples=20)
    return make_lock(
        amend=began, data_path=["web"], sequence_length=S, global_batch_size=4, train_iters=13,
        tokens=True,
    )  # fmt: skip


KINDS = (
    Kind("one corpus, order megatron", one("megatron"), to="neox"),
    Kind("one corpus, order neox", one("neox"), to="neox"),
    Kind("one corpus, order megatron-legacy", one("megatron-legacy"), to="neox"),
    Kind("one corpus, order paddlenlp", one("paddlenlp", split="90,10,0"),
         to="paddlenlp", cells={"evaluation": YES}),
    Kind("one corpus, order epoch", one("epoch"), to="neox"),
    Kind("order epoch, left-over tokens carried", one("epoch", left_over="carry"), to="neox"),
    Kind("order epoch, epochs mixed", one("epoch", epochs_mixed=2), to="neox"),
    Kind("one corpus, order window", one("window"), to="neox"),
    Kind("one corpus, order packed", one("packed")),
    Kind("packed documents at multiples of 4 tokens", one("packed", align=4)),
    Kind("half of a corpus", one("epoch", document_subset="1/2"), to="neox"),
    Kind("half of each source of a blend", blend("packed", 3, 1, document_subset="1/2")),
    Kind("a blend of Megatron-LM", blend("megatron", 3, 1)),
    Kind("a blend of Megatron-LM without weights", blend("megatron")),
    Kind("a blend that draws more than was built", blend("megatron", epochs=2, train_iters=None),
         cells=only_planned("stops", export="format", evaluation="none")),
    Kind("a blend of GPT-NeoX", blend("neox", 3, 1)),
    Kind("a blend in order megatron-legacy", blend("megatron-legacy", 3, 1)),
    Kind("a blend of PaddleNLP", blend("paddlenlp", 3, 1)),
    Kind("a blend in order epoch", blend("epoch", 3, 1)),
    Kind("a blend in order window", blend("window", 3, 1)),
    Kind("a blend in order packed", blend("packed", 3, 1)),
    Kind("phases of Megatron-LM", blend("megatron", phase_transition_iterations=[5])),
    Kind("a resumed run", blend("megatron", 3, 1, consumed_samples=20)),
    Kind("a ramp of batch sizes", one("megatron", rampup_batch_size=[2, 2, 12], global_batch_size=6,
         gradient_accumulation_steps=None, train_samples=60, train_iters=None), to="neox"),
    Kind("a schedule of batch sizes", one("epoch", batch_schedule="0:2 320:4", train_samples=60,
         gradient_accumulation_steps=None, train_iters=None), to="neox"),
    Kind("a padded last batch", one(
        "epoch", epochs=1, train_iters=None, tail="pad", gradient_accumulation_steps=3)),
    Kind("evaluations", one("megatron", split="80,10,10", eval_interval=5, eval_iters=1),
         to="neox", cells={"evaluation": YES}),
    Kind("the cyclic loader of Megatron-LM", one("megatron", dataloader_type="cyclic"),
         cells=only_planned("ranks")),
    Kind("full validation of Megatron-LM", one("megatron", split="80,20,0", full_validation=True),
         to="neox", cells={"evaluation": "ranks"}),
    Kind("an evaluation of Megatron-LM without training", one(
        "megatron", split="80,20,0", skip_train=True, eval_iters=1),
         cells=only_planned("no training", evaluation=YES)),
    Kind("a configuration of GPT-NeoX", neox(data_path="web", train_iters=14, split="90,10,0"),
         to="neox"),
    Kind("train_epochs under install(exact=True)", {
        "neox_config": json.dumps(neox(
            data_path="web", train_epochs=2, split="90,10,0")["neox_config"])
        + "\n# megaindex.adapters.neox.install(exact=True)\n", "world_size": 2}),
    Kind("validation of GPT-NeoX without a micro batch", neox(
        data_path="web", train_epochs=2, split="98,2,0", eval_iters=1),
         cells=only_planned("stops")),
    Kind("train_epochs of a blend under install(exact=True)", {
        "neox_config": json.dumps(neox(
            train_data_paths=["web", "code"], valid_data_paths=["web"], test_data_paths=["web"],
            train_epochs=3)["neox_config"])
        + "\n# megaindex.adapters.neox.install(exact=True)\n", "world_size": 2}),
    Kind("weights of GPT-NeoX by numbers of documents", neox(
        train_data_paths=["web", "code"], valid_data_paths=["chat"], test_data_paths=["chat"],
        train_iters=14, weight_by_num_documents=True, weighted_sampler_alpha=0.3)),
    Kind("epochs of each source", blend("epoch", epochs="1,2", train_iters=None)),
    Kind("a wrapped last batch", one(
        "epoch", epochs=1, train_iters=None, tail="wrap", gradient_accumulation_steps=3)),
    Kind("a launch script of Megatron-LM", {"megatron_args": (
        f"python pretrain_gpt.py --data-path 0.3 web 0.7 code --seq-length {S} --split 90,10,0 "
        "--micro-batch-size 1 --global-batch-size 4 --train-iters 14 --eval-iters 1 "
        "--eval-interval 5\n"), "world_size": 2}, cells={"evaluation": YES}),
    Kind("a configuration of Nanotron", {"nanotron_config": _NANOTRON}),
    Kind("a configuration of LLM-Foundry", {"llm_foundry_config": _LLM_FOUNDRY}),
    Kind("a configuration of MaxText", {"maxtext_config": _MAXTEXT, "world_size": 2}),
    Kind("a configuration of MaxText in Megatron-LM's order", {
        "maxtext_config": {**_MAXTEXT, "grain_file_type": "mmap_npy",
                           "grain_train_files": "cache|web"}, "world_size": 2}, to="neox"),
    Kind("train_epochs of GPT-NeoX", neox(
        train_data_paths=["web", "code"], valid_data_paths=["web"], test_data_paths=["web"],
        train_epochs=2)),
    Kind("train_epochs, resumed", {**neox(
        train_data_paths=["web", "code"], valid_data_paths=["web"], test_data_paths=["web"],
        train_epochs=2), "consumed_samples": 40}),
    Kind("packed documents of GPT-NeoX", neox(
        data_path="chat", train_iters=9, pack_impl="pack_until_overflow"),
        cells=only_planned("format")),
    Kind("skipped steps", blend("megatron", 3, 1, skip_steps=["2", "5-6"])),
    Kind("skipped steps where the loader starts over", {
        **neox(data_path="web", split="60,20,20", train_epochs=3), "skip_steps": ["1"]}),
    Kind("skipped steps of a phase of Megatron-LM", blend(
        "megatron", phase_transition_iterations=[5], skip_steps=["3-6"])),
    Kind("moved steps", one("epoch", skip_steps=["2", "5-6"], move_skipped=True)),
    Kind("skipped documents", blend("megatron", 3, 1, skip_documents=["ids.txt:code"],
         skip_from_step=3), files={"ids.txt": "0 1 2 3 4 5 6 7 8 9"}),
    Kind("removed documents", blend("megatron", 3, 1, skip_documents=["ids.txt:code"],
         skip_from_step=3, remove_skipped=True), files={"ids.txt": "0 1 2 3 4 5 6 7 8 9"}),
    Kind("iterations that Megatron-LM skips", one(
        "megatron", iterations_to_skip=[2, 3], split="80,10,10", eval_interval=4, eval_iters=1),
         cells={"evaluation": YES}),
    Kind("a recipe of one stage", recipe(_ONE)),
    Kind("a recipe of one source", recipe("all: {epochs: 2, mix: {web: 1}}", "web: web"),
         to="neox"),
    Kind("stages of several lengths", recipe(
        "short: {steps: 6, mix: {web: 3, code: 1}}\n"
        "long: {steps: 3, sequence_length: 32, batch: {global_batch_size: 2}, mix: {web: 1}}\n"
        "again: {steps: 3, mix: {web: 1, code: 1}}",
        "web: {path: web, block_tokens: 100}, code: {path: code, block_tokens: 100}")),
    Kind("a source that begins again in another length", recipe(
        "short: {steps: 5, mix: {web: 1}}\n"
        "long: {steps: 3, sequence_length: 32, mix: {web: {proportion: 1, restart: true}}}",
        "web: {path: web, block_tokens: 100}")),
    Kind("a limit at which the run stops", recipe(
        "all: {steps: 30, mix: {web: 1, code: 1}}", "web: web, code: {path: code, max_epochs: 1}",
        exhaustion="stop")),
    Kind("a limit at which the others continue", recipe(
        "all: {steps: 14, mix: {web: 1, code: 2}}", "web: web, code: {path: code, max_epochs: 1}",
        exhaustion="continue")),
    Kind("changes of the mix", recipe(
        _ONE, mix_changes="{file: mix.npy, sources: [code, web]}"),
        files={"mix.npy": np.array([[8, _HALF, _HALF], [24, _HALF // 2, 3 * _HALF // 2]])}),
    Kind("a batch size for each source", recipe(
        "all: {steps: 12, batching: per_stream, "
        "mix: {web: {proportion: 1, batch_size: 4}, code: {proportion: 1, batch_size: 2}}}")),
    Kind("a past in another system", recipe(
        _ONE, past="{steps: 50, read: {web: {epochs: 1}, code: {tokens: 90}}}")),
    Kind("a recipe with an evaluation", recipe(
        _ONE, evaluation="{source: chat, interval: 4, iterations: 2}"), cells={"evaluation": YES}),
    Kind("a recipe of subsets, with an evaluation on what they hold out", recipe(
        _ONE, "web: {path: web, subset: 2/3, held_out: 1/4}, "
        "code: {path: code, order: window, subset: 1/2, subset_seed: 5}",
        evaluation="{source: {path: web, held_out: 1/4}, interval: 5}"), cells={"evaluation": YES}),
    Kind("sources in order blocks, packed and window", recipe(
        "all: {samples: 42, batching: random, mix: {web: 2, code: 1, chat: 1}}",
        "web: {path: web, order: blocks, block_tokens: 100}, code: {path: code, order: packed}, "
        "chat: {path: chat, order: window}", tail="pad")),
    Kind("bins of instruction data", recipe(
        "all: {epochs: 2, mix: {chat: 1}}",
        "chat: {path: chat, kind: finetuning, loss_mask: chat_mask}")),
    Kind("skips of a recipe", recipe(
        _ONE, skip="[{steps: '2 7'}, {steps: '4', move: true}, "
        "{documents: ids.txt, source: web, from_step: 3}]"), files={"ids.txt": "0 1 2 3 4 5"}),
    Kind("an amended run", made=_amended, locked=_lock_of_amended),
    Kind("an extended run", made=_extended, locked=_lock_of_extended, to="neox"),
    Kind("an index of one's own", made=_own, cells=without_settings("own")),
    Kind("tokens without files", {
        **one("epoch", tokens_per_epoch=["650"]), "data_path": None},
        cells=only_planned("no files")),
    Kind("lengths without files", {
        **one("epoch", length_histogram=["lengths.csv"]), "data_path": None},
        files={"lengths.csv": "3 10\n20 31\n"},
         cells=only_planned("no files")),
    Kind("a recipe without files", recipe(
        "all: {steps: 12, mix: {web: 1}}", "web: {tokens: 650}"),
         cells=only_planned("no files", evaluation="none")),
)  # fmt: skip


def write_corpora(folder: Path) -> None:
    """Write the corpora of all kinds, and the loss mask of one."""
    rng = np.random.default_rng(3)
    for name, first in FIRST_TOKEN.items():
        many = 40 if name == "chat" else 30
        lengths = rng.multinomial(TOKENS[name] - 2 * many, [1 / many] * many) + 2
        begins = np.cumsum(lengths) - lengths
        with IndexedDatasetWriter(str(folder / name), np.uint16) as writer:
            for begin, length in zip(begins, lengths, strict=True):
                writer.add_document(np.arange(first + begin, first + begin + length))
        if name == "chat":
            with IndexedDatasetWriter(str(folder / "chat_mask"), np.uint8) as writer:
                for length in lengths:
                    writer.add_document((np.arange(length) > 0).astype(np.uint8))


def page(text: str, questions: Iterable[str]) -> str:
    """Return the text of docs/matrix.md with its two tables as they should be."""
    names = list(questions)
    kinds: dict[str, list[str]] = {}
    for kind in KINDS:
        kinds.setdefault(_exceptions(kind, names), []).append(kind.name)
    meanings = {
        ALONE: "answered, and compared with nothing, because the other questions are refused",
        **RULES,
    }
    rows = [("; ".join(names), exceptions) for exceptions, names in kinds.items()]
    tables = iter(
        [_table(("runs", "exceptions"), rows), _table(("cell", "meaning"), meanings.items())]
    )
    return re.sub(r"(^\|.*\n)+", lambda _: next(tables), text, flags=re.MULTILINE)


def _exceptions(kind: Kind, questions: Sequence[str]) -> str:
    """Return the questions that are refused or not compared, by cell: the most frequent last."""
    cells: dict[str, list[str]] = {}
    for question in questions:
        cells.setdefault(kind.cell(question), []).append(question)
    found = sorted((c for c in cells if c not in (YES, NONE)), key=lambda cell: len(cells[cell]))
    several = [f"{cell}: {', '.join(cells[cell])}" for cell in found]
    if found and len(cells[found[-1]]) > len(questions) // 2:
        several[-1] = f"{found[-1]}: all others"
    return "; ".join(several) or "none"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |\n" for row in (head, *rows)]
    return "".join([lines[0], f"|{'---|' * len(head)}\n", *lines[1:]])


if __name__ == "__main__":
    from support.run_questions import QUESTIONS

    PAGE.write_text(page(PAGE.read_text(), QUESTIONS))
