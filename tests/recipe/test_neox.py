"""GPT-NeoX files as settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaindex.errors import InvalidArgument, MissingFile, StorageError
from megaindex.recipe.neox import merged_files, neox_settings, read_neox
from megaindex.recipe.settings import resolve

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
DATA = 'train-data-paths: ["/d/a", "/d/b"]\ntrain-data-weights: [1., 3.]\n'


def write(folder: Path, **texts: str) -> list[Path]:
    paths = []
    for name, text in texts.items():
        paths.append(folder / f"{name}.yml")
        paths[-1].write_text(text)
    return paths


def test_several_files_make_one_configuration(tmp_path: Path) -> None:
    settings = read_neox(write(tmp_path, model=MODEL, data=DATA, gpus="{global_num_gpus: 64}"))
    run = resolve(settings)
    assert run.order == "neox"
    assert run.sequence_length == 2048
    assert run.data_parallel_size == 8
    assert run.batch.final == 8 * 3 * 8
    assert [(s.path, s.weight) for s in run.data.train] == [("/d/a", 1.0), ("/d/b", 3.0)]
    assert run.target.kind == "iterations"
    assert run.target.value == 1000
    assert (run.evaluation.interval, run.evaluation.iterations) == (100, 7)
    assert run.seed == 1234


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
    settings = neox_settings({"train_data_paths": ["a", "b"], "valid_data_paths": ["c"]})
    assert settings.train_data_path == ("1.0", "a", "1.0", "b")
    assert settings.valid_data_path == ("1.0", "c")


@pytest.mark.parametrize(
    ("config", "gpus"),
    [
        ({}, 20),
        ({"num_nodes": 2}, 12),
        ({"num_gpus": 4}, 12),
        ({"num_nodes": 1, "num_gpus": 4}, 4),
        ({"include": "a"}, None),
        ({"exclude": "a"}, None),
    ],
)
def test_gpus_come_from_the_host_file(
    tmp_path: Path, config: dict[str, object], gpus: int | None
) -> None:
    hosts = tmp_path / "hostfile"
    hosts.write_text("# cluster\na slots=8\nb slots=4 # small\n\nc slots=8\n")
    assert neox_settings({"hostfile": str(hosts), **config}).world_size == gpus


def test_without_hosts_the_world_size_is_asked_for(tmp_path: Path) -> None:
    settings = neox_settings(
        {"seq_length": 8, "train_micro_batch_size_per_gpu": 2, "hostfile": "/-"}
    )
    assert settings.world_size is None
    with pytest.raises(InvalidArgument, match="--world-size"):
        resolve(settings)


def test_train_epochs_are_one_unbuffered_epoch_that_neox_replays() -> None:
    settings = neox_settings({"train_epochs": 3})
    assert (settings.epochs, settings.variance_buffer) == ("1", "1.0")
    assert "replays it in the same order" in settings.notes[0]
    assert neox_settings({"train_epochs": 1}).notes == ()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"train_iters": "many"}, "train_iters must be a whole number"),
        ({"train_iters": True}, "train_iters must be a whole number"),
        ({"train_data_paths": "a"}, "train_data_paths must be a list"),
        ({"data_path": ["a"]}, "data_path must be one path"),
        ({"data_path": "a", "train_data_paths": ["b"]}, "exclude each other"),
        ({"train_data_paths": ["a"], "train_data_weights": [1, 2]}, "one weight for each path"),
        ({"pack_impl": "unpacked"}, "pack_impl: 'unpacked' is not planned"),
        ({"dataset_impl": "pairwise"}, "dataset_impl: 'pairwise' is not planned"),
        ({"weight_by_num_documents": True}, "train_data_weights and turn it off"),
    ],
)
def test_bad_values_name_the_setting(config: dict[str, object], reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        neox_settings(config)


@pytest.mark.parametrize("text", ["[1, 2]", "just words", "", "{a: [}", "\tkey: 1", "a: \x00"])
def test_files_of_another_shape_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidArgument, match="--neox-config: .*bad.yml") as caught:
        read_neox(write(tmp_path, bad=text))
    assert "\n" not in str(caught.value)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(MissingFile, match=r"none.yml does not exist"):
        read_neox([tmp_path / "none.yml"])
    with pytest.raises(StorageError, match="cannot be read"):
        read_neox([tmp_path])
