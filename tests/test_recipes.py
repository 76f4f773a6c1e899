"""A recipe from its file to plan, index and audit: the same run everywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.command_line import cli
from support.corpora import write_corpus

from megaindex import IndexedDatasetWriter
from megaindex.builders.recipe import open_recipe
from megaindex.errors import FormatError, InvalidArgument
from megaindex.loader import loader_of_recipe
from megaindex.loader.batch_reader import Batch
from megaindex.settings.recipe_file import read_recipe

RECIPE = """
sequence_length: 16
batch: {micro_batch_size: 2, data_parallel_size: 2}
sources:
  web: web
  code: {path: code, order: window}
  chat: {path: chat, kind: finetuning, labels: chat_labels}
stages:
  stable: {steps: 40, mix: {web: 3, code: 1}}
  decay: {steps: 20, batching: random, mix: {web: 1, chat: 1}}
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    rng = np.random.default_rng(3)
    write_corpus(tmp_path / "web", rng.integers(1, 60, 80))
    write_corpus(tmp_path / "code", rng.integers(1, 60, 20))
    lengths = rng.integers(2, 14, 50)
    for name in ("chat", "chat_labels"):
        write_corpus(tmp_path / name, lengths)
    path = tmp_path / "run.yaml"
    path.write_text(RECIPE)
    return path


def remove(prefix: Path) -> None:
    for suffix in (".bin", ".idx"):
        prefix.with_suffix(suffix).unlink()


@pytest.mark.parametrize("steps", [1, 3, 9])
def test_a_source_that_is_read_from_its_start_again_repeats_at_once(
    run_file: Path, steps: int
) -> None:
    run_file.write_text(
        "sequence_length: 16\nbatch: {global_batch_size: 1}\nsources: {web: web}\nstages:\n"
        "  one: {steps: 4, mix: {web: 1}}\n"
        f"  two: {{steps: {steps}, mix: {{web: {{proportion: 1, restart: true}}}}}}\n"
    )
    draws = json.loads(cli("plan", "--recipe", run_file, "--json")[1])["draws"]
    assert [draw["first_repeat"] for draw in draws] == [None, 4]
    index = open_recipe(read_recipe(run_file)).index
    assert index.origin(np.arange(4 + steps))[1].tolist() == [*range(4), *range(steps)]


def test_draws_of_stages_are_those_of_the_index(run_file: Path) -> None:
    status, out, err = cli("plan", "--recipe", run_file, "--json")
    assert (status, err) == (0, "")
    plan = json.loads(out)
    opened = open_recipe(read_recipe(run_file))
    index = opened.index
    assert plan["train_iters"] == 60
    assert plan["samples_consumed"] == index.num_samples == 240
    source, sample = index.origin(np.arange(240))
    names = [s.corpus.name for s in opened.sources]
    for draw in plan["draws"]:
        steps = slice(draw["first_step"] * 4, draw["end_step"] * 4)
        mine = np.flatnonzero(source[steps] == names.index(draw["source"])) + steps.start
        assert mine.size == draw["samples"]
        per_epoch = opened.sources[names.index(draw["source"])].size.samples
        assert sample[mine[0]] == round(draw["epochs_begin"] * per_epoch)
        repeats = mine[sample[mine] >= per_epoch]
        assert draw["first_repeat"] == (repeats[0] // 4 if repeats.size else None)
    status, out, _ = cli("audit", "--recipe", run_file, "--consumed-samples", 100, "--json")
    assert (status, json.loads(out)["past_steps"]) == (0, 25)
    status, _, err = cli("audit", "--recipe", run_file, "--subset", "valid")
    assert (status, "--subset valid: the recipe reads no such data" in err) == (2, True)
    status, out, _ = cli("build", "--recipe", run_file)
    assert status == 0
    assert "240 samples of 16 tokens in 60 steps, from 3 sources" in out


def test_the_printed_plan_names_stages_and_repeats(run_file: Path) -> None:
    status, out, _ = cli("plan", "--recipe", run_file)
    assert status == 0
    for words in ("train_iters 60", "stable", "0 … 39", "decay", "40 … 59", "every rank reads 120"):
        assert words in out
    status, _, err = cli("plan", "--recipe", run_file, "--check")
    assert status == 1
    assert "check: 60 iterations build 2 epochs of web; up to 52 iterations repeat no" in err


def test_no_sample_of_instructions_crosses_a_document(run_file: Path) -> None:
    opened = open_recipe(read_recipe(run_file))
    spans = opened.index.locate(np.arange(160, 240))
    chat = spans.source == 2
    lengths = opened.datasets[2].sequence_lengths
    assert chat.sum() > 40
    assert (spans.offset[chat] == 0).all()
    assert (spans.length[chat] == lengths[spans.document[chat]]).all()


def test_labels_must_fit_their_corpus(run_file: Path) -> None:
    remove(run_file.parent / "chat_labels")
    write_corpus(run_file.parent / "chat_labels", np.full(50, 3))
    with pytest.raises(FormatError, match=r"one entry for each token"):
        open_recipe(read_recipe(run_file))
    remove(run_file.parent / "chat_labels")
    write_corpus(run_file.parent / "chat_labels", np.full(49, 3))
    with pytest.raises(FormatError, match="must have 50 sequences, .* got 49"):
        open_recipe(read_recipe(run_file))


def test_an_opened_recipe_is_a_line(run_file: Path) -> None:
    opened = open_recipe(read_recipe(run_file))
    assert repr(opened) == f"OpenRecipe({opened.layout!r})"
    assert "60 steps, 240 samples, Recipe(stages stable, decay; " in repr(opened)


def test_documents_of_instructions_have_one_sequence(run_file: Path) -> None:
    for name in ("chat", "chat_labels"):
        remove(run_file.parent / name)
        with IndexedDatasetWriter(run_file.parent / name, np.int32) as writer:
            writer.add_document(np.arange(5), [5])
            writer.add_document(np.arange(9), [3, 6])
    with pytest.raises(
        FormatError, match="source chat: .*one sequence per document, got 3 seq.* 2"
    ):
        open_recipe(read_recipe(run_file))


@pytest.mark.parametrize("longest", [17, 18])
def test_a_source_of_instructions_has_a_sample(run_file: Path, longest: int) -> None:
    for name in ("chat", "chat_labels"):
        remove(run_file.parent / name)
        write_corpus(run_file.parent / name, np.full(50, longest))
    skip = "labels: chat_labels, packed: false, long_documents: skip"
    run_file.write_text(RECIPE.replace("labels: chat_labels", skip))
    if longest == 17:
        assert open_recipe(read_recipe(run_file)).sources[2].size.samples == 50
    else:
        with pytest.raises(InvalidArgument, match="source chat: no document gives a sample: .* 17"):
            open_recipe(read_recipe(run_file))


def test_weights_by_documents_need_files(tmp_path: Path) -> None:
    write_corpus(tmp_path / "code", np.full(9, 30))
    head = RECIPE.split("sources", maxsplit=1)[0]
    path = tmp_path / "run.yaml"
    for by, drawn, says in (
        ("documents", "web, code", "weights by documents need the path of source web, which has"),
        ("documents", "code", ""),
        ("tokens", "web, code", ""),
    ):
        mix = ", ".join(f"{name}: " for name in drawn.split(", "))
        path.write_text(
            f"{head}sources: {{web: {{tokens: 5000}}, code: code}}\n"
            f"stages: {{one: {{steps: 9, weights: {{by: {by}, alpha: 0.5}}, mix: {{{mix}}}}}, "
            "two: {steps: 1, mix: {web: 1}}}\n"
        )
        status, _, err = cli("plan", "--recipe", path)
        assert (status, says in err) == (2 if says else 0, True), err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ("--recipe", "run.yaml", "--epochs", "1"),
            "--recipe describes the whole run, so does --epochs",
        ),
        (("--recipe", "none.yaml"), "none.yaml does not exist"),
        (("--recipe", "run.yaml", "--nanotron-config", "x"), "so does --nanotron-config"),
    ],
)
def test_a_recipe_stands_alone(
    run_file: Path, words: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run_file.parent)
    for verb in ("plan", "audit"):
        status, _, err = cli(verb, *words)
        assert status == 2
        assert says in err


def test_sources_without_files_are_planned_and_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(RECIPE.split("sources", maxsplit=1)[0] + "sources: {web: {tokens: 5000}}\n"
                    "stages: {one: {epochs: 2, mix: {web: }}}\n")  # fmt: skip
    status, out, _ = cli("plan", "--recipe", path, "--json")
    assert status == 0
    assert json.loads(out)["samples_consumed"] == 4999 // 16 * 2 // 4 * 4
    with pytest.raises(InvalidArgument, match="path must be given to read it"):
        open_recipe(read_recipe(path))
    assert cli("build", "--recipe", path)[0] == 2


FINETUNING = """
sequence_length: 16
batch: {{global_batch_size: {batch}, micro_batch_size: 1, data_parallel_size: {ranks}}}
tail: {tail}
sources:
  chat: {{path: chat, kind: finetuning{more}}}
stages:
  sft: {{epochs: 1, mix: {{chat: }}}}
"""


def finetuning(folder: Path, lengths: list[int], **settings: object) -> Path:
    """A recipe of one epoch of documents of these lengths, one a sample."""
    write_corpus(folder / "chat", lengths)
    path = folder / "sft.yaml"
    said = {"batch": 8, "ranks": 1, "tail": "drop", "more": ", packed: false", **settings}
    path.write_text(FINETUNING.format(**said))
    return path


def plan_of(path: Path) -> tuple[dict[str, Any], str]:
    """The plan as JSON, and as it is printed, on one line."""
    status, out, err = cli("plan", "--recipe", path, "--json")
    assert (status, err) == (0, "")
    return json.loads(out), " ".join(cli("plan", "--recipe", path)[1].split())


@pytest.mark.parametrize(
    ("more", "cut"),
    [
        ("", (30 - 17) + (60 - 17) + 1),
        (", long_documents: split", 1),
        (", long_documents: skip", 30 + 60 + 1),
        (", packed: true", (17 - 16) + (30 - 16) + (60 - 16) + 1),
    ],
)
def test_tokens_cut_with_long_documents_are_counted(tmp_path: Path, more: str, cut: int) -> None:
    """A single token is in no sample either. One document alone may fill the label's place."""
    lengths = [10, 17, 30, 60, 1, *[9] * 40]
    packed = "" if "packed" in more else ", packed: false"
    path = finetuning(tmp_path, lengths, more=packed + more, batch=1)
    plan, printed = plan_of(path)
    (source,) = plan["sources"]
    assert (source["tokens_per_epoch"], source["cut_tokens"]) == (sum(lengths), cut)
    status, out, _ = cli("audit", "--recipe", path, "--json")
    (audited,) = json.loads(out)["sources"]
    assert (status, audited["cut_tokens"]) == (0, cut)
    opened = open_recipe(read_recipe(path))
    spans = opened.index.locate(np.arange(opened.index.num_samples))
    labels_alone = np.count_nonzero(spans.offset)  # of pieces behind which a document goes on
    assert int(spans.length.sum()) - labels_alone == sum(lengths) - cut
    told = [text for text in plan["warnings"] if "in no sample" in text]
    assert "tokens cut" in printed
    if cut == 1:
        assert not told
    else:
        assert f"leaves {cut} of {sum(lengths)} tokens ({cut / sum(lengths):.1%})" in told[0]
        assert told[0] in printed
    assert f"{cut} tokens" in cli("audit", "--recipe", path)[1]


@pytest.mark.parametrize("more", [", packed: false", ", packed: true", ", order: packed"])
def test_documents_that_are_split_lose_no_input_and_no_target(tmp_path: Path, more: str) -> None:
    """Documents of a length on each side of one, two and three samples of 16 tokens."""
    lengths = [*range(2, 60), *[9] * 6]
    path = finetuning(tmp_path, lengths, more=f"{more}, long_documents: split", batch=1)
    batches = list(loader_of_recipe(open_recipe(read_recipe(path)), micro_batch_size=1))
    assert sum(int(batch["loss_mask"].sum()) for batch in batches) == sum(lengths) - len(lengths)


def test_tokens_cut_from_validation_are_warned_of(tmp_path: Path) -> None:
    path = finetuning(tmp_path, [9] * 40)
    write_corpus(tmp_path / "held", [9, 90])
    path.write_text(path.read_text() + "evaluation: {source: {path: held, kind: finetuning}}\n")
    plan, _ = plan_of(path)
    assert any("leaves 74 of 99 tokens" in text for text in plan["warnings"])


def test_a_stage_that_ends_short_of_its_epoch_says_so(tmp_path: Path) -> None:
    plan, printed = plan_of(finetuning(tmp_path, [9] * 20))
    (stage,) = plan["stages"]
    assert stage == {
        "stage": "sft", "length": "epochs: 1", "samples_wanted": 20, "samples": 16,
    }  # fmt: skip
    told = (
        "stage sft: whole batches of 8 end 4 samples short of its 20 (epochs: 1); tail pad serves "
        "them too and masks 4 rows of their batch"
    )
    assert plan["warnings"] == [told]
    assert told in printed


def test_a_short_stage_names_the_one_that_reads_on(tmp_path: Path) -> None:
    path = finetuning(tmp_path, [9] * 20)
    stage = "  sft: {epochs: 1, mix: {chat: }}\n"
    write_corpus(tmp_path / "web", [100])
    path.write_text(path.read_text().replace(stage, stage + "  more: {steps: 2, mix: {chat: }}\n"))
    plan, _ = plan_of(path)
    assert "(epochs: 1); stage more goes on reading its sources from there" in plan["warnings"][0]
    other = "  more: {steps: 2, mix: {web: }}\n"
    path.write_text(path.read_text().split("stages")[0] + f"  web: web\nstages:\n{stage}{other}")
    plan, _ = plan_of(path)
    assert "(epochs: 1); no later stage draws them" in plan["warnings"][0]


@pytest.mark.parametrize(("documents", "batch", "ranks"), [(24, 10, 5), (21, 10, 5), (16, 15, 5)])
def test_ranks_of_padding_only_are_in_the_plan(
    tmp_path: Path, documents: int, batch: int, ranks: int
) -> None:
    """Compared with the micro batches that the ranks are handed."""
    path = finetuning(tmp_path, [9] * documents, tail="pad", batch=batch, ranks=ranks)
    evaluation = "evaluation: {source: {path: chat, kind: finetuning, packed: false}}\n"
    path.write_text(path.read_text() + evaluation)
    plan, printed = plan_of(path)
    opened = open_recipe(read_recipe(path))
    loaders = [loader_of_recipe(opened, data_parallel_rank=r, read_ahead=0) for r in range(ranks)]

    def padding(batches: list[list[Batch]]) -> dict[str, int]:
        empty = [[not batch["loss_mask"].any() for batch in of_rank] for of_rank in batches]
        rows = sum(int((~b["loss_mask"].any(dim=1)).sum()) for of_rank in batches for b in of_rank)
        return {
            "rows": rows,
            "micro_batches": sum(map(sum, empty)),
            "ranks": sum(map(all, empty)),
        }

    rounds = batch // ranks
    assert plan["padding"] == padding([list(loader)[-rounds:] for loader in loaders])
    evaluated = padding([list(loader.evaluation()) for loader in loaders])
    # a rank of padding only is one over the whole round
    assert plan["evaluation_padding"] == evaluated
    assert plan["evaluation_masked"] == evaluated["rows"]
    few = plan["padding"]["ranks"]
    assert few == max(0, ranks - documents % batch)
    if few:
        assert f"the last batch has padding only on {few} of 5 ranks, where a mean" in printed


def test_a_padded_tail_of_a_plan_names_ranks_without_a_sample(tmp_path: Path) -> None:
    words = ["--tokens-per-epoch", 16 * 22 + 1, "--seq-length", 16, "--micro-batch-size", 2,
             "--data-parallel-size", 5, "--epochs", 1, "--order", "epoch"]  # fmt: skip
    _, out, _ = cli("plan", *words, "--json")
    pad = json.loads(out)["tails"][1]
    assert (pad["policy"], pad["samples_masked"], pad["ranks_masked"]) == ("pad", 8, 3)
    assert "masks the loss of 8 samples, all of 3 ranks" in cli("plan", *words)[1]
