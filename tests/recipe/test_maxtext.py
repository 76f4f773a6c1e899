"""MaxText configurations as recipes, and in Megatron's order against golden/maxtext.json."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.command_line import cli, plan_json
from support.corpora import write_corpus

from megaindex import IndexedDatasetWriter
from megaindex.cli import main
from megaindex.errors import InvalidArgument
from megaindex.recipe import open_recipe, read_maxtext
from megaindex.run.from_settings import run_of_settings
from megaindex.settings.arguments import read_settings
from megaindex.settings.run_builder import resolve
from megaindex.settings.run_settings import Target

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/maxtext.json").read_text())
CONFIG = """
base_config: base.yml
max_target_length: 64
per_device_batch_size: 2.0
dataset_type: grain
grain_train_files: "web-*.array_record,0.25;code.array_record,0.75"
steps: 20
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, lengths in GOLDEN["lengths"].items():
        write_corpus(tmp_path / name, np.array(lengths))
    (tmp_path / "base.yml").write_text("steps: 5\nnum_epoch: 3\ndata_shuffle_seed: 7\n")
    (tmp_path / "run.yml").write_text(CONFIG)
    (tmp_path / "mix.json").write_text('{"a": {"path": "web"}}')
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=range(len(GOLDEN["cases"])))
def test_megatron_order_equals_that_of_maxtext(folder: Path, case: dict[str, Any]) -> None:
    words = ["run.yml", "grain_file_type=mmap_npy", *case["words"]]
    run = resolve(read_settings({"maxtext_config": words, "world_size": case["devices"]}))
    index: Any = run_of_settings(run).index
    parts = getattr(index, "indices", (index,))
    assert [part.document_index[:64].tolist() for part in parts] == case["documents"]
    assert [part.shuffle_index[:64].tolist() for part in parts] == case["shuffle"]
    assert [part.num_samples for part in parts] == case["samples"]
    if case["blend"]:
        assert index.dataset_index.tolist() == case["blend"][0]
        assert index.dataset_sample_index.tolist() == case["blend"][1]


def test_a_scaled_recipe_is_named_as_the_configuration_before_its_settings(folder: Path) -> None:
    words = ("run.yml", "max_target_length=16", "--world-size", 4, "--scale", "1/2")
    status, out, err = cli("plan", "--maxtext-config", *words)
    assert status in (0, 1), err
    assert "wrote run-1-2.yaml" in out


def test_a_recipe_of_array_records(folder: Path) -> None:
    recipe = read_maxtext(["run.yml", "gradient_accumulation_steps=2"], 4)
    assert recipe is not None
    assert (recipe.sequence_length, recipe.batch.final, recipe.seed) == (64, 16, 7)
    assert (recipe.micro_batch_size, recipe.data_parallel_size) == (2, 4)
    assert [source.path for source in recipe.sources] == ["web", "code"]
    assert {source.order for source in recipe.sources} == {"packed"}
    assert {source.long_documents for source in recipe.sources} == {"truncate"}
    assert [stream.proportion for stream in recipe.stages[0].streams] == [
        Fraction(1, 4), Fraction(3, 4)
    ]  # fmt: skip
    layout = open_recipe(recipe).layout
    assert layout.stopped_by == "code.array_record"  # after its three epochs
    assert layout.drawn()[1] <= 3 * layout.sizes[1].samples


def test_a_plan_names_the_settings_of_maxtext(folder: Path) -> None:
    """Also where a source is exhausted in the stage, which is in the plan with what it serves."""
    words = ("run.yml", "max_target_length=16", "steps=200")
    plan = plan_json("--maxtext-config", *words, "--world-size", 4)
    (stage,) = plan["stages"]
    assert plan["stopped_by"] == "code.array_record"
    assert stage["samples"] == plan["samples_consumed"] < stage["samples_wanted"] == 1600
    told = " ".join(plan["warnings"])
    assert "raise num_epoch" in told
    assert "use_truncation: false" in told
    assert "max_target_length" in told
    assert not any(name in told for name in ("max_epochs", "sequence_length", "long_documents"))


@pytest.mark.parametrize(
    ("words", "order", "kind"),
    [
        ((), "packed", "pretraining"),
        (("grain_packing_type=concat_then_split",), "epoch", "pretraining"),
        (("packing=false",), "epoch", "finetuning"),
        (("grain_file_type=mmap", "grain_train_files=web,1;code,1"), "epoch", "pretraining"),
    ],
)
def test_rows_are_made_as_the_packing_says(
    folder: Path, words: tuple[str, ...], order: str, kind: str
) -> None:
    recipe = read_maxtext(["run.yml", *words], 4)
    assert recipe is not None
    assert {(source.order, source.kind) for source in recipe.sources} == {(order, kind)}


def test_mixture_files_and_evaluations(folder: Path) -> None:
    mixture = {"a": {"path": "web", "weight": 3}, "b": {"path": "code", "weight": 0}}
    (folder / "mix.json").write_text(json.dumps(mixture))
    words = ["grain_train_mixture_config_path=mix.json", "eval_interval=10", "eval_steps=2",
             "grain_eval_files=chat", "eval_per_device_batch_size=1.5"]  # fmt: skip
    recipe = read_maxtext(["run.yml", *words], 4)
    assert recipe is not None
    assert [source.name for source in recipe.sources] == ["a"]
    assert recipe.evaluation is not None
    assert (recipe.evaluation.iterations, recipe.evaluation.batch_size) == (2, 6)
    for interval, steps, expected in ((-1, 2, None), (0, 2, None), (1, 1, (1, 1)),
                                      (1, 0, (1, None))):  # fmt: skip
        words += [f"eval_interval={interval}", f"eval_steps={steps}"]
        found = read_maxtext(["run.yml", *words], 4)
        assert found is not None
        evaluation = found.evaluation
        assert (evaluation and (evaluation.interval, evaluation.iterations)) == expected


def test_evaluation_in_megatron_order_is_not_planned(folder: Path) -> None:
    """MaxText begins its samples anew in each round; a split leaves its documents out."""
    words = ["run.yml", "grain_file_type=mmap_npy", "grain_train_files=x|web"]
    plain = read_settings({"maxtext_config": words, "world_size": 4})
    for interval, noted in ((-1, False), (0, False), (1, True)):
        given = [*words, f"eval_interval={interval}", "grain_eval_files=y|code"]
        found = read_settings({"maxtext_config": given, "world_size": 4})
        assert (found.notes != (), replace(found, notes=()) == plain) == (noted, True)
    blend = [*words[:2], "grain_train_files=x|web,1;y|chat,0;z|code,3"]
    run = resolve(read_settings({"maxtext_config": blend, "world_size": 4}))
    assert [source.path for source in run.data.train] == ["web", "code"]
    splits = []
    for split in ("90,10", "90,10,0", "90,10,0.0"):
        shares = [*words, f"mmap_npy_split={split}", "enable_data_shuffling=false"]
        run = resolve(read_settings({"maxtext_config": shares, "world_size": 4}))
        assert [source.path for source in run.data.train] == ["web"]
        splits.append(run.data.split)
    assert splits[0] is not None
    assert splits[1:] == splits[:1] * 2


def test_documents_of_several_sequences_have_another_order(folder: Path) -> None:
    words = ["run.yml", "grain_train_files=x|many"]
    with IndexedDatasetWriter(folder / "many", dtype="uint16") as pair:
        pair.add_document(np.arange(9))
        pair.add_document(np.arange(9), lengths=[4, 5])
    with pytest.raises(InvalidArgument, match="many has documents of several sequences"):
        read_settings({"maxtext_config": [*words, "grain_file_type=mmap_npy"], "world_size": 4})
    mmap = [words[0], "grain_train_files=many", "grain_file_type=mmap"]
    assert read_maxtext(mmap, 4) is not None


def test_the_command_plans_both(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--maxtext-config", "run.yml", "--world-size", "4"]) == 0
    assert "2 sources, 64 tokens a sample, 8 samples an iteration" in capsys.readouterr().out
    words = ["grain_file_type=mmap_npy", "grain_train_files=x|web"]
    assert main(["plan", "--maxtext-config", "run.yml", *words, "--world-size", "4"]) == 0
    assert "20 iterations in order megatron" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("dataset_type=hf",), r"dataset_type: hf has no pair; .*megaindex tokenize PREFIX FILE"),
        (("grain_file_type=parquet",), "grain_file_type: parquet is shuffled by files"),
        (("enable_rampup_batch_size=true",), "enable_rampup_batch_size: write a recipe"),
        (("enable_data_shuffling=false",), "enable_data_shuffling must be true"),
        (("expansion_factor_real_data=4",), "expansion_factor_real_data must be -1"),
        (("steps=-1",), "learning_rate_schedule_steps must be at least 1"),
        (("steps=many",), "steps must be an integer, got 'many'"),
        (
            ("per_device_batch_size=-1",),
            "batch_size must be a number of rows of at least 0, got -1",
        ),
        (("per_device_batch_size=null",), "must be a number of rows of at least 0, got None"),
        (("per_device_batch_size=0.99",), "batch_size must be at least 1: below that, hosts read"),
        (("per_device_batch_size=0",), "per_device_batch_size must be at least 1: below that"),
        (
            ("eval_interval=9", "grain_eval_files=web", "eval_per_device_batch_size=0.5"),
            "eval_per_device_batch_size must be at least 1",
        ),
        (("grain_train_files= ",), "grain_train_files=  has no value"),
        (("steps=",), "steps= has no value"),
        (("grain_packing_type=foo",), "grain_packing_type must be one of first_fit"),
        (("grain_train_files=web;code,1",), "web has no weight; write PATH,WEIGHT"),
        (("grain_train_files=web,0;code,0",), "grain_train_files: all weights are 0; raise one"),
        (
            ("grain_file_type=mmap_npy", "grain_train_files=x|web,0;y|code,0"),
            "grain_train_files: all weights are 0; raise one",
        ),
        (("grain_train_files=web,-1;code,1",), "the weight of web must be at least 0, got -1"),
        (("grain_train_files=web:0",), "web:0 is not one file"),
        (("grain_train_files=.",), "is not one file; join its shards with `megaindex merge`"),
        (("eval_interval=3", "grain_eval_files=web,1;code,1"), "evaluates on one source, got 2"),
        (("grain_file_type=mmap_npy", "mmap_npy_split=1,1,1"), "mmap_npy_split must be two"),
        (("grain_file_type=mmap_npy", "mmap_npy_split=1,1,0,0"), "mmap_npy_split must be two"),
        (
            ("grain_file_type=mmap_npy", "grain_train_files=x|web,1;x|code,1", "blend_index_dir=x"),
            "blend_index_dir: a blend that was built before is not read",
        ),
        (
            ("eval_interval=3", "grain_eval_files=web", "eval_start_step=3"),
            "eval_start_step must be 0: a recipe evaluates from the start on, got 3",
        ),
        (("grain_train_mixture_config_path=mix.json",), r"mix.json: a.weight is missing"),
        (
            ("grain_file_type=mmap", "grain_train_mixture_config_path=mix.json"),
            "grain_train_mixture_config_path: MaxText reads it for grain_file_type arrayrecord",
        ),
        (("a=[",), r"a=\[: while parsing"),
        (("grain_train_file=web",), "no setting grain_train_file; did you mean grain_train_files"),
    ],
)
def test_what_cannot_be_read_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    assert main(["plan", "--maxtext-config", "run.yml", *words, "--world-size", "4"]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_later_files_and_words_replace_earlier_ones(folder: Path) -> None:
    (folder / "more.yml").write_text("steps: 7\nnum_epoch:\nexpansion_factor_real_data: 1\n")
    for words, steps in (("run.yml", 20), ("run.yml more.yml", 7), ("more.yml run.yml", 20),
                         ("run.yml more.yml steps=9", 9)):  # fmt: skip
        recipe = read_maxtext(words.split(), 4)
        assert recipe is not None
        (stage,) = recipe.stages
        assert stage.length == Target(kind="iterations", value=Fraction(steps))
        assert {source.max_epochs for source in recipe.sources} == {3}  # an empty value says none


def test_rows_of_a_step_are_those_of_all_devices(folder: Path) -> None:
    for size, batch, micro, ranks in (("1.5", 6, None, None), ("1.0", 4, 1, 4)):
        recipe = read_maxtext(["run.yml", f"per_device_batch_size={size}"], 4)
        assert recipe is not None
        assert recipe.batch.final == batch
        assert (recipe.micro_batch_size, recipe.data_parallel_size) == (micro, ranks)


def test_other_settings_of_maxtext_are_ignored(folder: Path) -> None:
    """Also those whose names are similar to settings of the data."""
    words = ["per_device_batch_size_start=4.0", "eval_start_step=3", "model_name=llama2-7b"]
    assert read_maxtext(["run.yml", *words], 4) == read_maxtext(["run.yml"], 4)


def test_devices_and_files_are_needed(folder: Path) -> None:
    with pytest.raises(InvalidArgument, match="give --world-size, their number"):
        read_maxtext(["run.yml"], None)
    with pytest.raises(InvalidArgument, match="give a YAML file before words"):
        read_maxtext(["steps=1"], 4)
    (folder / "base.yml").write_text("base_config: base.yml\n")
    with pytest.raises(InvalidArgument, match="base_config names more than 16 files"):
        read_maxtext(["run.yml"], 4)
    for files in (16, 17):  # run.yml and those before it
        for k in range(2, files):
            (folder / f"{k}.yml").write_text(f"base_config: {k + 1}.yml\n")
        (folder / f"{files}.yml").write_text("num_epoch: 5\n")
        (folder / "base.yml").write_text("base_config: 3.yml\n")
        if files == 16:
            recipe = read_maxtext(["run.yml"], 4)
            assert recipe is not None
            assert recipe.sources[0].max_epochs == 5
            continue
        with pytest.raises(InvalidArgument, match="base_config names more than 16 files"):
            read_maxtext(["run.yml"], 4)
    with pytest.raises(InvalidArgument, match="exclude each other"):
        read_settings({"maxtext_config": ["run.yml"], "neox_config": ["x.yml"]})
    (folder / "base.yml").write_text("steps: 5\n")
    with pytest.raises(InvalidArgument, match="maxtext_config describes the whole run"):
        read_settings({"maxtext_config": ["run.yml"], "world_size": 4})
