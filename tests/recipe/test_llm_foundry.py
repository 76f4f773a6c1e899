"""LLM-Foundry configurations as recipes."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from support.corpora import write_corpus

from megaindex.cli import main
from megaindex.errors import InvalidArgument, MissingFile
from megaindex.recipe import Recipe, open_recipe, read_llm_foundry

CONFIG = """
variables:
  max_seq_len: 64
  data: mds
  seed: 17
max_seq_len: ${variables.max_seq_len}
model: {name: mpt_causal_lm, max_seq_len: "${variables.max_seq_len}"}
train_loader:
  name: text
  dataset:
    streams:
      web: {local: "${variables.data}/web", split: train, proportion: 0.75}
      code: {local: "${variables.data}/code", proportion: 0.25, download_retry: 3}
    split: train
    shuffle: true
    epoch_size: 80
    max_seq_len: ${variables.max_seq_len}
    shuffle_seed: ${variables.seed}
  drop_last: true
  num_workers: 8
eval_loader:
  name: text
  dataset: {local: "${variables.data}/web", split: val, shuffle: false}
  drop_last: false
max_duration: 2ep
eval_interval: 5ba
eval_subset_num_batches: -1
global_train_batch_size: 16
device_train_microbatch_size: 4
device_eval_batch_size: 2
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, count in (("web/train", 60), ("web/val", 9), ("code/train", 30)):
        (tmp_path / "mds" / name).mkdir(parents=True)
        write_corpus(tmp_path / "mds" / name, np.full(count, 100))
    (tmp_path / "run.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(old: str = "", new: str = "", **given: int) -> Recipe:
    assert old in CONFIG
    Path("run.yaml").write_text(CONFIG.replace(old, new, 1))
    return read_llm_foundry("run.yaml", **given)


def test_a_configuration_with_references(folder: Path) -> None:
    recipe = read()
    assert (recipe.sequence_length, recipe.batch.final, recipe.seed) == (64, 16, 17)
    assert [source.path for source in recipe.sources] == ["mds/web/train", "mds/code/train"]
    (stage,) = recipe.stages
    assert [stream.proportion for stream in stage.streams] == [Fraction(3, 4), Fraction(1, 4)]
    assert (stage.batching, stage.rounding, stage.epoch_size) == ("random", "streaming", 80)
    assert stage.length is not None
    assert (stage.length.kind, stage.length.value) == ("epochs", 2)
    assert recipe.evaluation is not None
    assert (recipe.evaluation.source.path, recipe.evaluation.interval) == ("mds/web/val", 5)
    layout = open_recipe(recipe).layout
    assert (layout.num_samples, layout.drawn()) == (160, [120, 40])


def test_a_value_that_is_one_reference_keeps_its_type(folder: Path) -> None:
    plain = read()
    web = '{local: "${variables.data}/web", split: train, proportion: 0.75}'
    moved = CONFIG.replace(web, "${variables.web}", 1).replace("shuffle: true", "shuffle: ${mix}")
    Path("run.yaml").write_text(moved.replace("  data:", f"  web: {web}\n  data:") + "mix: true\n")
    assert read_llm_foundry("run.yaml") == plain


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [("3", "epochs", 3), ("48ba", "iterations", 48), ("1_0BA", "iterations", 10),
     ("1023tok", "iterations", 1), ("1.025e3tok", "iterations", 2), ("64sp", "iterations", 4),
     ("65SP", "iterations", 5), ("2e1tok", "iterations", 1)],
)  # fmt: skip
def test_durations(folder: Path, text: str, kind: str, value: int) -> None:
    length = read("max_duration: 2ep", f"max_duration: {text}").stages[0].length
    assert length is not None
    assert (length.kind, length.value) == (kind, value)


@pytest.mark.parametrize(
    ("rows", "devices", "micro"),
    [("auto", 4, None), (8, None, 8), (17, None, 16), (3, None, None), (4, 4, 4), (8, 4, 4),
     (3, 4, None)],
)  # fmt: skip
def test_micro_batches(folder: Path, rows: object, devices: int | None, micro: int | None) -> None:
    """LLM-Foundry lowers them to the rows of a device; of 3 in 4 rows the last one has 1."""
    read("microbatch_size: 4", f"microbatch_size: {rows}")
    assert read_llm_foundry("run.yaml", devices=devices).micro_batch_size == micro


@pytest.mark.parametrize(
    "one",
    ["local: mds/web", "local: mds/web/", "remote: mds/web", "{local: mds/web, remote: s3://b/c}"],
)
def test_one_folder_is_one_stream(folder: Path, one: str) -> None:
    start, end = CONFIG.index("    streams:"), CONFIG.index("    split: train\n")
    given = one.strip("{}").replace(", ", "\n    ")
    recipe = read(CONFIG[start:end], f"    {given}\n")
    assert [source.path for source in recipe.sources] == ["mds/web/train"]
    assert recipe.stages[0].weighting is not None  # of the samples of an epoch_size
    (folder / "run.yaml").write_text(Path("run.yaml").read_text().replace("epoch_size: 80", ""))
    assert read_llm_foundry("run.yaml").stages[0].weighting is None


def test_streams_are_weighted_by_size_if_none_says_how_much(folder: Path) -> None:
    alone = CONFIG.replace(", proportion: 0.75", "")
    (folder / "run.yaml").write_text(alone.replace(", proportion: 0.25", ""))
    (stage,) = read_llm_foundry("run.yaml").stages
    assert stage.weighting is not None
    (folder / "run.yaml").write_text(alone.replace(", proportion: 0.25", ", repeat: 2"))
    with pytest.raises(InvalidArgument, match="epoch_size, .* is divided by proportions, got 80"):
        read_llm_foundry("run.yaml")


def test_what_a_configuration_leaves_out(folder: Path) -> None:
    """The length of the model, Streaming's seed, complete batches alone; 0 is a seed."""
    assert read("    max_seq_len: ${variables.max_seq_len}\n").sequence_length == 64
    assert read("    max_seq_len: ${variables.max_seq_len}\n",
                "    max_seq_len: 32\n").sequence_length == 32  # fmt: skip
    for old, new, seed in (
        ("shuffle_seed: ${variables.seed}", "", 9176),
        ("seed: 17", "seed: 0", 0),
    ):
        assert read(old, new).seed == seed
    for old, new, tail in (
        ("drop_last: true", "drop_last: true", "drop"),
        ("  drop_last: true\n", "", "drop"),
        ("drop_last: true", "drop_last: false", "pad"),
    ):
        assert read(old, new).tail == tail
    # a split of a stream, even none, takes the place of that of all
    (folder / "mds/web.idx").write_bytes((folder / "mds/web/train.idx").read_bytes())
    assert read('web", split: train, ', 'web/", split: null, ').sources[0].path == "mds/web"


def test_finetuning_takes_loss_masks(folder: Path) -> None:
    with pytest.raises(MissingFile, match=r"web: mds/web/train_loss_mask\.idx does not exist"):
        read(
            "name: text\n  dataset:\n",
            "name: finetuning\n  dataset:\n    decoder_only_format: true\n",
        )
    for name, count in (("web", 60), ("code", 30)):
        write_corpus(folder / f"mds/{name}/train_loss_mask", np.full(count, 100))
    packed = "    decoder_only_format: true\n    packing_ratio: auto\n"
    text = CONFIG.replace("name: text\n  dataset:\n", f"name: finetuning\n  dataset:\n{packed}", 1)
    Path("run.yaml").write_text(text.replace("    epoch_size: 80\n", ""))
    recipe = read_llm_foundry("run.yaml")
    assert {(source.kind, source.packed) for source in recipe.sources} == {("finetuning", True)}
    assert recipe.sources[0].loss_mask == "mds/web/train_loss_mask"
    (folder / "mds/web/train_loss_mask.idx").unlink()
    text = (
        Path("run.yaml").read_text().replace("ratio: auto", "ratio: auto\n    target_prompts: all")
    )
    for ratio, packed in (("1", False), ("1.0", False), ("null", False), ("2", True)):
        Path("run.yaml").write_text(text.replace("auto\n", f"{ratio}\n"))
        source = read_llm_foundry("run.yaml").sources[0]
        assert (source.packed, source.loss_mask) == (packed, "")


def test_batches_of_an_evaluation_need_the_number_of_devices(folder: Path) -> None:
    change = ("eval_subset_num_batches: -1", "eval_subset_num_batches: 2")
    with pytest.raises(InvalidArgument, match="give both, and --world-size"):
        read(*change)
    evaluation = read(*change, devices=4).evaluation
    assert evaluation is not None
    assert (evaluation.iterations, evaluation.batch_size) == (2, 8)


def test_packed_rows_are_not_counted_as_examples(folder: Path) -> None:
    for name, count in (("web", 60), ("code", 30)):
        write_corpus(folder / f"mds/{name}/train_loss_mask", np.full(count, 100))
    packed = "    decoder_only_format: true\n    packing_ratio: auto\n"
    loader = ("name: text\n  dataset:\n", f"name: finetuning\n  dataset:\n{packed}")
    with pytest.raises(InvalidArgument, match="train_loader.dataset: epoch_size and choose count"):
        read(*loader)
    text = Path("run.yaml").read_text().replace("    epoch_size: 80\n", "")
    for old, new, refused in (
        ("2ep", "2ep", ""),
        ("proportion: 0.75", "choose: 9", "epoch_size and choose count examples"),
        ("2ep", "4tok", "max_duration must be in ep, ba or sp: of rows with padding, tokens are"),
        ("proportion: 0.75", "repeat: 2", ""),
    ):
        Path("run.yaml").write_text(
            text.replace(old, new).replace(
                "proportion: 0.25", "proportion: 0.25" if new != "repeat: 2" else "repeat: 1"
            )
        )
        if refused:
            with pytest.raises(InvalidArgument, match=refused):
                read_llm_foundry("run.yaml")
        else:
            assert read_llm_foundry("run.yaml").sources[0].packed


def test_rows_are_the_samples_of_mds(folder: Path) -> None:
    """A document is a row: Streaming counts them, and LLM-Foundry cuts them to max_seq_len."""
    web = 'streams:\n      web: {local: "${variables.data}/web", split: train, proportion: 0.75}\n'
    code = '      code: {local: "${variables.data}/code", proportion: 0.25, download_retry: 3}\n'
    text = CONFIG.replace(web + code, "local: mds/web\n").replace("    epoch_size: 80\n", "")
    Path("run.yaml").write_text(text)
    opened = open_recipe(read_llm_foundry("run.yaml"))
    assert opened.layout.num_samples == 112  # 2 epochs of 60, in 7 batches of 16
    spans = opened.index.locate(np.arange(60))
    assert np.array_equal(np.sort(spans.document), np.arange(60))
    assert (set(spans.offset.tolist()), set(spans.length.tolist())) == ({0}, {65})


def test_settings_of_their_default_are_read(folder: Path) -> None:
    for number in ("-1", "null"):
        more = f"train_subset_num_batches: {number}\ncallbacks: {{lr_monitor: {{}}}}\n"
        assert read("max_duration", f"eval_first: false\n{more}max_duration") == read()


def test_settings_without_effect_may_be_nested(folder: Path) -> None:
    deep = "{a: " * 80 + "1" + "}" * 80
    assert read("num_workers: 8", f"num_workers: {deep}") == read()


def test_the_command_plans_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--llm-foundry-config", "run.yaml"]) == 0
    assert "train_iters 10" in capsys.readouterr().out
    assert main(["plan", "--llm-foundry-config", "run.yaml", "--seed", "3"]) == 2
    assert "describes the whole run, so does --seed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("shuffle: true", "shuffle: false", "train_loader.dataset.shuffle must be true"),
        ("name: text", "name: denoising", "train_loader.name must be text or finetuning"),
        ("split: train, ", "hf: x, ", "unknown setting hf"),
        (
            "shuffle: true",
            "shuffle: true\n    hf_name: c4",
            "hf_name: .*megaindex tokenize PREFIX FILE",
        ),
        ("shuffle: true", "shuffle: true\n    sampling_method: fixed", "sampling_method: fixed"),
        ("shuffle: true", "shuffle: true\n    shufle: 1", "shufle; did you mean shuffle"),
        ("${variables.seed}", "${variables.sed}", r"\$\{variables.sed\} names no key"),
        ("max_seq_len: 64", "max_seq_len: ${max_seq_len}", "leads to itself"),
        ("seed: 17", 'seed: "${variables.seed}${variables.seed}"', "leads to itself, or to too"),
        ("2ep", "2h", "max_duration must be a number with its unit"),
        ("2ep", "0ep", "max_duration must be a number with its unit"),
        ("2ep", "1.5ep", "max_duration must be a number with its unit"),
        ("max_duration", "eval_first: true\nmax_duration", "eval_first must be false"),
        (
            "max_duration",
            "train_subset_num_batches: 10\nmax_duration",
            "train_subset_num_batches must be -1: every epoch would end early",
        ),
        (
            "max_duration",
            "callbacks: {curriculum_learning: {schedule: []}}\nmax_duration",
            "callbacks.curriculum_learning changes the samples in mid-run; write a recipe",
        ),
        (
            "max_duration",
            "algorithms: {seq_length_warmup: {}}\nmax_duration",
            "algorithms.seq_length_warmup changes the samples in mid-run",
        ),
        ("shuffle: true", "shuffle: true\n    mlm_probability: 0.15", "mlm_probability: random"),
        ("eval_interval: 5ba", "", "eval_interval must be a number of batches, .* got '1ep'"),
        ("drop_last: false", "drop_last: true", "eval_loader.drop_last must be false"),
        ("5ba", "1ep", "eval_interval must be a number of batches"),
        ("global_train_batch_size: 16", "", "global_train_batch_size"),
        (", proportion: 0.25", "", "give all streams one, or none"),
        ('local: "${variables.data}/web", split: val, ', "", "dataset: give local, or streams"),
        ("streams:", "local: web\n    streams:", "dataset.local: Streaming takes it or streams"),
        ("streams:", "remote: s3://b\n    streams:", "dataset.remote: Streaming takes it or str"),
        (
            "eval_loader:\n  name: text\n  dataset: {local",
            "eval_loader:\n  name: finetuning\n  dataset: {local",
            "decoder_only_format must be true: encoder-decoder models read",
        ),
        (
            'dataset: {local: "${variables.data}/web", split: val, shuffle: false}',
            "dataset: {streams: {a: {local: mds/web}, b: {local: mds/code}}, split: train}",
            "eval_loader.dataset: a recipe evaluates on one source, got 2 streams; keep one",
        ),
        ('local: "${variables.data}/code", ', "", "streams.code: give local, the folder"),
    ],
)
def test_what_has_no_counterpart_is_refused(folder: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        read(old, new)


def test_an_evaluation_may_be_a_list_of_one_loader(folder: Path) -> None:
    before, rest = CONFIG.split("eval_loader:\n")
    loader, after = rest.split("max_duration")
    item = loader.replace("  name", "  - name").replace("\n  ", "\n    ").rstrip(" ")
    for items, count in ((item, 1), (item * 2, 2), ("  []\n", 0)):
        Path("run.yaml").write_text(f"{before}eval_loader:\n{items}max_duration{after}")
        if count == 1:
            assert read_llm_foundry("run.yaml").evaluation is not None
        else:
            with pytest.raises(InvalidArgument, match=f"on one source, got {count} loaders; keep"):
                read_llm_foundry("run.yaml")


def test_a_stream_without_a_pair_names_the_import(folder: Path) -> None:
    (folder / "mds/code/train.idx").unlink()
    with pytest.raises(MissingFile, match="megaindex import mds mds/code/train mds/code/train"):
        read()
