"""GPT-NeoX files as settings."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from support.inputs import for_each

from megaindex import NeoxDocumentsOrder
from megaindex.errors import InvalidArgument, MissingFile, StorageError
from megaindex.settings.neox_yaml import NAMES, merged_files, neox_settings, read_neox
from megaindex.settings.run_builder import resolve
from megaindex.settings.run_settings import Target
from megaindex.settings.settings import Settings, merged

MODEL = """
# a model
{
  "pipe-parallel-size": 2,   # stages
  "model_parallel_size": 4,
  "seq_length": 2048,
  "train_micro_batch_size_per_gpu": 8,
  "gradient_accumulation_steps": 3,
  "optimizer": {"type": "Adam", "params": {"lr": 6e-4}},
  "train-iters": 1000, "eval-interval": 100, "eval_iters": 7,
}
"""
DATA = (
    'train-data-paths: ["/d/a", "/d/b"]\ntrain-data-weights: [1., 3.]\n'
    'valid-data-paths: ["/d/c"]\ntest-data-paths: ["/d/c"]\ndata-impl: mmap\n'
)

BASE = {"seq_length": 8, "train_iters": 1, "data_path": "/d/a"}


def write(folder: Path, **texts: str) -> list[Path]:
    paths = []
    for name, text in texts.items():
        paths.append(folder / f"{name}.yml")
        paths[-1].write_text(text)
    return paths


def test_several_files_make_one_configuration(tmp_path: Path) -> None:
    settings = read_neox(write(tmp_path, model=MODEL, data=DATA, gpus="{global_num_gpus: 64}"))
    run = resolve(settings)
    assert run.row.order == "neox"
    assert run.sequence_length == 2048
    assert run.data_parallel_size == 8
    assert run.batch.final == 8 * 3 * 8
    assert [(s.path, s.weight) for s in run.data.train] == [("/d/a", 1.0), ("/d/b", 3.0)]
    assert run.target.kind == "iterations"
    assert run.target.value == 1000
    assert (run.evaluation.interval, run.evaluation.iterations) == (100, 7)
    assert run.seed == 1234


def test_without_accumulation_steps_there_is_one_as_in_neox() -> None:
    sizes = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4}
    assert resolve(neox_settings({**BASE, **sizes})).data_parallel_size == 8
    assert resolve(neox_settings({**BASE, **sizes, "global_num_gpus": 8})).unit == 32
    with pytest.raises(InvalidArgument, match="x --gradient-accumulation-steps 1 = 16"):
        resolve(neox_settings({**BASE, **sizes, "global_num_gpus": 4}))
    given = {**sizes, "gradient_accumulation_steps": 2, "global_num_gpus": 4}
    assert resolve(neox_settings({**BASE, **given})).unit == 16
    missing = {**sizes, "gradient_accumulation_steps": None, "global_num_gpus": 4}
    assert resolve(neox_settings({**BASE, **missing})).gradient_accumulation_steps == 2


def test_a_key_given_twice_is_refused_as_written_and_replaced_with_hyphens(tmp_path: Path) -> None:
    one, two, hyphen = write(
        tmp_path, one="train_iters: 1", two="train_iters: 2", hyphen="train-iters: 3"
    )
    with pytest.raises(InvalidArgument, match=r"two.yml: train_iters is set by an earlier file"):
        merged_files([one, two])
    assert merged_files([one, hyphen]) == {"train_iters": 3}
    (twice,) = write(tmp_path, twice="train_iters: 1\ntrain_iters: 2")
    assert merged_files([twice]) == {"train_iters": 2}  # in one file, as YAML's own loader


def test_one_path_takes_the_default_split_and_no_weight() -> None:
    settings = neox_settings({"data_path": "/d/a"})
    assert settings.data_path == ("/d/a",)
    assert settings.split == "969,30,1"
    assert neox_settings({"data_path": "/d/a", "split": "8, 1, 1"}).split == "8,1,1"


def test_paths_of_a_split_are_weighed_alike_by_default() -> None:
    settings = neox_settings(
        {"train_data_paths": ["a", "b"], "valid_data_paths": ["c"], "test_data_paths": ["c"]}
    )
    assert settings.train_data_path == ("1.0", "a", "1.0", "b")
    assert settings.valid_data_path == ("1.0", "c")


@for_each(
    ("config", "gpus"),
    [
        ({}, 20),
        ({"num_nodes": 2}, 12),
        ({"num_nodes": 0}, 20),
        ({"num_gpus": 0}, 20),
        ({"num_gpus": 4}, 12),
        ({"num_gpus": 1}, 3),
        ({"num_nodes": 1, "num_gpus": 4}, 4),
        ({"include": "a"}, None),
        ({"exclude": "a"}, None),
    ],
)
def test_gpus_come_from_the_host_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, object], gpus: int | None
) -> None:
    hosts = tmp_path / "hostfile"
    hosts.write_text("# cluster\na slots=8\nb slots=4 # small\n\nc slots=8\n")
    assert neox_settings({"hostfile": str(hosts), **config}).world_size == gpus
    monkeypatch.setenv("DLTS_HOSTFILE", str(hosts))  # as GPT-NeoX's launcher takes it
    assert neox_settings(config).world_size == gpus


def test_without_hosts_the_world_size_is_asked_for(tmp_path: Path) -> None:
    settings = neox_settings(
        {"seq_length": 8, "train_micro_batch_size_per_gpu": 2, "hostfile": "/-"}
    )
    assert settings.world_size is None
    with pytest.raises(InvalidArgument, match="--world-size"):
        resolve(settings)


def test_train_epochs_are_a_target_of_their_own() -> None:
    settings = neox_settings({"train_epochs": 3, "data_path": "/d/a", "seq_length": 8})
    assert (settings.train_epochs, settings.epochs, settings.variance_buffer) == (3, None, None)
    sized = merged(settings, Settings(micro_batch_size=2, world_size=1))
    assert resolve(sized).target == Target(kind="loader_epochs", value=Fraction(3))
    with pytest.raises(InvalidArgument, match="found --train-iters and train_epochs"):
        resolve(replace(sized, train_iters=5))
    with pytest.raises(InvalidArgument, match="train_epochs must be at least 1"):
        resolve(replace(sized, train_epochs=0))
    assert resolve(merged(sized, Settings(epochs="2"))).target.kind == "epochs"


SOME = {f"{split}_data_paths": ["a"] for split in ("train", "valid", "test")}
PAIRS = {f"pos_{key}": ["a"] for key in SOME}


@for_each(
    ("config", "reason"),
    [
        ({"train_iters": "many"}, "train_iters must be an integer"),
        ({"train_iters": True}, "train_iters must be an integer"),
        ({"train_data_paths": "a"}, "train_data_paths must be a list"),
        ({"data_path": ["a"]}, "data_path must be one path"),
        ({"data_path": "a", "train_data_paths": ["b"]}, "exclude each other"),
        ({**SOME, "train_data_weights": [1, 2]}, "one weight for each path"),
        ({"train_data_paths": ["a"]}, "or of none of them; give valid_data_paths and test_data_"),
        ({"pack_impl": "padded"}, "pack_impl: 'padded' is not planned"),
        ({"dataset_impl": "online"}, "dataset_impl: 'online' is not planned"),
        ({"dataset_impl": "pairwise", **PAIRS}, "dataset_impl: 'pairwise' is .* left to GPT-NeoX"),
        (PAIRS, "pos_train_data_paths is a key of dataset_impl 'pairwise', not 'gpt2'"),
        (
            {"train_epochs": 1, **SOME, "train_data_weights": [2.0]},
            "train_epochs with train_dat",
        ),
        ({"train_epochs": 1, "pack_impl": "unpacked"}, "train_epochs with pack_impl: 'unpacked'"),
    ],
)
def test_bad_values_name_the_setting(config: dict[str, object], reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        neox_settings(config)


def test_bad_values_name_the_file(tmp_path: Path) -> None:
    one, two = write(tmp_path, one="seq-length: zero\ntrain_iters: 3", two="data_path: [a]")
    with pytest.raises(InvalidArgument, match=r"^\S*two.yml: data_path must be one path"):
        read_neox([one, two])
    with pytest.raises(InvalidArgument, match=r"^\S*one.yml: seq_length"):
        read_neox([one])
    paths = write(tmp_path, some="train_data_paths: [a]", other="seed: 1")
    with pytest.raises(InvalidArgument, match=r"^\S*some.yml, \S*other.yml: NeoX takes data paths"):
        read_neox(paths)


@for_each("text", ["[1, 2]", "just words", "", "{a: [}", "\tkey: 1", "a: \x00"])
def test_files_of_another_shape_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidArgument, match="--neox-config: .*bad.yml") as caught:
        read_neox(write(tmp_path, bad=text))
    assert "\n" not in str(caught.value)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(MissingFile, match=r"none.yml does not exist"):
        read_neox([tmp_path / "none.yml"])
    with pytest.raises(StorageError, match="cannot be read|regular file"):
        read_neox([tmp_path])


@for_each(
    ("key", "near"),
    [
        ("train_data_weight", "train_data_weights"),
        ("train-data-path", "train_data_paths"),
        ("eval_iter", "eval_iters"),
        ("train_epoch", "train_epochs"),
        ("packing_impl", "pack_impl"),
        ("seq_len", "seq_length"),
    ],
)
def test_a_slip_in_a_key_of_the_data_is_refused(tmp_path: Path, key: str, near: str) -> None:
    (path,) = write(tmp_path, slip=f"{key}: 1")
    with pytest.raises(InvalidArgument, match=rf"slip.yml: .* no argument {key} .*mean {near}\?"):
        read_neox([path])


def test_a_mapping_in_place_of_a_value(tmp_path: Path) -> None:
    (path,) = write(tmp_path, nested="data_path: web\nsplit: {a: 1}")
    with pytest.raises(InvalidArgument, match="split must hold plain values"):
        read_neox([path])


def test_other_keys_that_neox_refuses_are_listed(tmp_path: Path) -> None:
    (path,) = write(tmp_path, old="{attention_type: x, decay-lr-to: 1, warmup_iters: 3}")
    assert "no argument attention_type, decay_lr_to, warmup_iters" in read_neox([path]).notes[0]
    assert len(NAMES) == 318


def test_what_touches_the_data_and_is_not_planned_is_listed() -> None:
    config = {
        "data_path": "/d", "train_iters": 100, "exit_interval": 40,
        "curriculum_learning": {"enabled": True}, "data_efficiency": {"enabled": False},
        "elasticity": {"enabled": True},
    }  # fmt: skip
    notes = neox_settings(config).notes
    assert [note.split()[0] for note in notes] == [
        "data_impl", "curriculum_learning", "elasticity", "exit_interval",
    ]  # fmt: skip


def test_the_adapter_in_a_comment_is_part_of_the_settings(tmp_path: Path) -> None:
    line = '# megaindex.adapters.neox.install(variance_buffer="exact")\n'
    one, number, wrong, other = write(
        tmp_path, one=line + MODEL, number="{\n  # megaindex.adapters.neox.install("
        "variance_buffer=1.25, separate_final_epoch='always')\n}",
        wrong="# megaindex.adapters.neox.install(cache_dir='d')\na: 1",
        other="# megaindex.adapters.megatron.install(variance_buffer=2)\na: 1",
    )  # fmt: skip
    assert read_neox([one]).variance_buffer == "exact"
    settings = read_neox([number])
    assert (settings.variance_buffer, settings.separate_final_epoch) == ("1.25", "always")
    for path in (wrong, other):
        with pytest.raises(InvalidArgument, match="the comment megaindex.* is not planned"):
            read_neox([path])


def test_packings_and_their_companions_are_read() -> None:
    labels = {f"{split}_label_data_paths": [f"{split}_l"] for split in ("train", "valid", "test")}
    base = {"seq_length": 8, "train_batch_size": 1, "train_iters": 1}
    run = resolve(neox_settings({**base, **SOME, **labels, "pack_impl": "unpacked"}))
    assert run.packing == NeoxDocumentsOrder(pack_impl="unpacked", allow_chopped=True)
    assert (run.data.valid[0].path, run.data.valid[0].labels) == ("a", "valid_l")
    packed = {"pack_impl": "pack_until_overflow", "allow_chopped": False}
    run = resolve(neox_settings({**base, **SOME, **packed}))
    assert run.packing == NeoxDocumentsOrder(pack_impl="pack_until_overflow", allow_chopped=False)
    assert [(s.path, s.labels) for s in run.data.test] == [("a", "")]
    assert neox_settings({**base, **SOME, **labels}).labels is None
    with pytest.raises(InvalidArgument, match="unpacked: a has no labels"):
        resolve(neox_settings({**base, **SOME, "pack_impl": "unpacked"}))
    weighed = {"weight_by_num_documents": True, "weighted_sampler_alpha": 0.5}
    assert resolve(neox_settings({**base, **SOME, **weighed})).data.documents_alpha == 0.5
