"""Where two orders differ, how much, and why."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.command_line import cli
from support.corpora import write_corpus
from support.files import closed
from support.inputs import for_each
from support.locked_runs import RUNS, write_inputs
from support.megatron_dataset import Tokenizer

from megaindex import PackedOrder, Skip, build_index
from megaindex.audit.diff import compare
from megaindex.audit.diff_inputs import (
    Side,
    existing,
    read_settings,
    side_from_arrays,
    side_from_settings,
)
from megaindex.corpus import corpus_fingerprint
from megaindex.errors import FormatError, StorageError
from megaindex.format import IndexedDataset
from megaindex.lock import make_lock, read_lock
from megaindex.recipe import read_recipe


def diff(prefix: Path | None, *words: object) -> dict[str, Any]:
    """What ``megaindex diff-order --json`` prints, its exit status checked against it."""
    common = [] if prefix is None else ["--data-path", prefix, "--seq-length", 16]
    status, out, err = cli("diff-order", *common, *words, "--json")
    assert err == ""
    content: dict[str, Any] = json.loads(out)
    assert status == (content["relation"] != "equal")
    text_status, text, _ = cli("diff-order", *common, *words)
    assert text_status == status
    for cause in content["causes"]:
        assert cause["words"] in text
    return content


def settings_of(content: dict[str, Any]) -> list[str]:
    return [cause["setting"] for cause in content["causes"]]


def entry(prefix: Path, cache: Path, **settings: Any) -> Path:
    """The cache entry of an index."""
    build_index(str(prefix), **{"sequence_length": 16, "seed": 1, **settings}, cache_dir=cache)
    (found,) = [path.parent for path in cache.glob("*/manifest.json")]
    return found


def test_equal_orders(prefix: Path) -> None:
    content = diff(prefix, "--epochs", 2, "seed=3", "seed=3")
    assert content["relation"] == "equal"
    assert content["causes"] == []
    assert content["first_difference"] is None
    assert content["samples_in_common"] == content["num_samples"][0]


def test_a_setting_without_effect_is_named_and_equal(prefix: Path) -> None:
    """One epoch is shuffled alike by both."""
    content = diff(prefix, "--a", "order=megatron,seed=1", "--b", "order=neox,seed=1")
    assert content["relation"] == "equal"
    assert settings_of(content) == ["order"]


@for_each(
    ("a", "b", "differing", "words"),
    [
        ("seed=1", "seed=2", ["seed"], "the random stream differs"),
        ("epochs=2", "epochs=3", ["num_epochs"], "also moves the samples of the first epoch"),
        (
            "epochs=1.3",
            "epochs=1.3,order=neox",
            ["order", "final_epoch_apart"],
            "its share used is below the threshold; neox shuffles",
        ),
        (
            "epochs=1.3",
            "epochs=1.3,separate_final_epoch=never",
            ["final_epoch_apart"],
            "the last epoch is shuffled separately on one side",
        ),
        ("split=9,1,0", "split=8,2,0,seed=1234", ["documents"], "as by another split"),
        (
            "subset=train,split=8,2,0",
            "subset=valid,split=8,2,0",
            ["documents"],
            "different documents",
        ),
        ("seq_length=16", "sequence_length=17", ["sequence_length"], "cut at other positions"),
        ("add_extra_token=0", "add_extra_token=1", ["add_extra_token"], "one token more"),
        (
            "drop_last_partial=true",
            "drop_last_partial=false",
            ["drop_last_partial"],
            "a shorter last sample",
        ),
    ],
)
def test_each_setting_is_a_cause(
    prefix: Path, a: str, b: str, differing: list[str], words: str
) -> None:
    content = diff(prefix, a, b)
    assert content["relation"] != "equal"
    assert settings_of(content) == differing
    assert words in content["causes"][0]["words"]


def locked(
    folder: Path, name: str, prefix: Path, skip: Sequence[Skip] = (), **settings: Any
) -> Path:
    run = {"order": "epoch", "sequence_length": 16, "epochs": "1", "global_batch_size": 4}
    lock = make_lock(data_path=str(prefix), **{**run, **settings}, skip=list(skip))
    return Path(lock.write(folder / f"{name}.lock").path)


@for_each(
    ("first", "second", "settings", "relation", "causes"),
    [
        ([], [Skip(steps="2-3")], {}, "other samples", ["skip"]),
        ([Skip(steps="2-3")], [Skip(steps="2-3", move=True)], {}, "prefix", ["skip"]),
        ([Skip(steps="2 3")], [Skip(steps="3"), Skip(steps="2")], {}, "equal", []),
        ([], [Skip(documents="a.ids")], {}, "equal", ["mask"]),
        ([Skip(documents="a.ids")], [Skip(documents="b.ids")], {}, "equal", ["mask"]),
        ([Skip(documents="a.ids")], [Skip(documents="a.ids", from_step=1)], {}, "equal", ["mask"]),
        ([Skip(documents="a.ids")], [Skip(documents="a.ids")], {}, "equal", []),
        ([Skip(documents="a.ids")], [Skip(documents="a.ids", remove=True)], {}, "equal",
         ["mask", "removal"]),
        ([], [Skip(steps="2"), Skip(documents="a.ids")], {"seed": 5}, "other samples",
         ["skip", "mask", "run.seed"]),
    ],
)  # fmt: skip
def test_skips_of_locks_are_causes(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: list[Skip],
    second: list[Skip], settings: dict[str, Any], relation: str, causes: list[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("a.ids").write_text("1 2 3")
    Path("b.ids").write_text("1 2 4")
    sides = locked(tmp_path, "a", prefix, first), locked(tmp_path, "b", prefix, second, **settings)
    content = diff(None, *sides)
    assert (content["relation"], settings_of(content)) == (relation, causes)
    for cause in content["causes"]:
        asks = cause["setting"] in ("skip", "mask", "removal")
        assert (f"megaindex prove {sides[0]} {sides[1]}" in cause["words"]) == asks
    printed = cli("diff-order", *sides)[1]
    assert ("the loss differs" in printed) == ("mask" in causes)
    assert ("inputs and loss differ" in printed) == ("removal" in causes)


def test_identities_of_two_locks_are_shown_behind_what_was_compared(
    prefix: Path, tmp_path: Path
) -> None:
    first = locked(tmp_path, "a", prefix)
    same = locked(tmp_path, "b", prefix, micro_batch_size=2, data_parallel_size=2)
    ours = read_lock(first).identity
    assert read_lock(same).identity == ours
    assert diff(None, first, same)["identities"] == [ours, ours]
    lines = cli("diff-order", first, same)[1].splitlines()
    assert lines[3].startswith("equal: ")
    assert lines[4] == f"identity: {ours} in both, with the same steps, masks and evaluation"
    for changes, more in (
        ({"global_batch_size": 8}, "; their steps, masks or evaluation may differ"),
        ({"seed": 5}, ""),
    ):
        other = locked(tmp_path, "c", prefix, **changes)
        theirs = read_lock(other).identity
        line = f"identity: {ours} in A, {theirs} in B{more}"
        assert cli("diff-order", first, other)[1].splitlines()[4] == line
        other.unlink()
    content = diff(prefix, first, "order=epoch,epochs=1")
    assert content["identities"] == [ours, None]
    words = ("--data-path", prefix, "--seq-length", 16, first, "order=epoch,epochs=1")
    assert "identity" not in cli("diff-order", *words)[1]


def test_the_name_of_the_shuffle_is_a_cause_where_it_was_given(
    prefix: Path, tmp_path: Path
) -> None:
    def recipe(name: str, settings: str = "") -> str:
        file = tmp_path / "run.yaml"
        file.write_text(
            f"{{sequence_length: 16, batch: {{global_batch_size: 4}}, sources: {{web: {{path: "
            f"{prefix}{settings}}}}}, stages: {{main: {{epochs: 1, mix: {{web: 1}}}}}}}}"
        )
        return make_lock(read_recipe(file)).write(tmp_path / name).path

    ours, flags = recipe("recipe.lock"), locked(tmp_path, "flags", prefix)
    named = recipe("named.lock", ", shuffle_name: x")
    content = diff(None, ours, flags)
    assert (content["relation"], settings_of(content)) == ("equal", [])
    other = locked(tmp_path, "seed", prefix, seed=5)
    assert settings_of(diff(None, ours, other)) == ["seed"]
    content = diff(None, named, flags)
    assert settings_of(content) == ["source_name"]
    assert (content["causes"][0]["a"], content["causes"][0]["b"]) == ("x", None)
    assert settings_of(diff(None, ours, named)) == [
        "source_name", "recipe.sources.web.shuffle_name"
    ]  # fmt: skip
    assert settings_of(diff(prefix, ours, "order=epoch,source_name=x")) == ["source_name"]
    same = diff(prefix, ours, "order=epoch,epochs=3")
    assert (same["relation"], settings_of(same)) == ("prefix", [""])
    assert "damaged" not in same["causes"][0]["words"]
    again = diff(prefix, named, "order=epoch,epochs=3,source_name=x")
    assert (again["relation"], settings_of(again)) == ("prefix", [""])
    own = corpus_fingerprint(IndexedDataset(str(prefix)))
    as_usual = recipe("usual.lock", f", shuffle_name: {own}")
    content = diff(None, as_usual, flags)
    assert (content["relation"], settings_of(content)) == ("equal", [])
    further = recipe("further.lock", f", shuffle_name: {own}/1")
    assert settings_of(diff(None, further, flags)) == ["source_name"]


def test_locks_of_all_kinds_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_inputs(tmp_path)
    for name, words in RUNS.items():
        assert cli("lock", *words.split(), "--out", f"{name}.lock")[0] == 0
    first, *others = RUNS
    for a, b in {*itertools.pairwise(RUNS), *itertools.product([first], others)}:
        content = diff(None, f"{a}.lock", f"{b}.lock")
        assert content["causes"]
        assert "" not in settings_of(content), (a, b, content["causes"])
    settings = "order=epoch,left_over=carry,data_path=data/web,seq_length=32,epochs=2.5"
    assert diff(None, "flags.lock", settings)["relation"] == "prefix"


def test_the_first_difference_and_the_share_are_those_of_the_samples(prefix: Path) -> None:
    content = diff(prefix, "--epochs", 2, "seed=1", "seed=2")
    one, two = (
        build_index(str(prefix), sequence_length=16, seed=seed, epochs=2) for seed in (1, 2)
    )

    def runs(index: Any, sample: int) -> list[tuple[int, ...]]:
        return list(zip(*(column.tolist() for column in index.locate([sample])), strict=True))

    differ = [k for k in range(one.num_samples) if runs(one, k) != runs(two, k)]
    assert content["first_difference"] == differ[0]
    assert content["positions_differing"] == len(differ)
    for index, side in ((one, "a"), (two, "b")):
        assert [tuple(run.values()) for run in content["samples"][side]] == runs(index, differ[0])
    bags = [sorted(tuple(runs(index, k)) for k in range(index.num_samples)) for index in (one, two)]
    common = 0
    for sample in bags[0]:
        if sample in bags[1]:
            bags[1].remove(sample)
            common += 1
    assert content["samples_in_common"] == common


@pytest.mark.parametrize("size", [6, 7])
def test_of_a_sample_of_many_documents_the_first_six_are_shown(tmp_path: Path, size: int) -> None:
    """Documents of one token, of which a sample has those of its labels too."""
    write_corpus(tmp_path / "c", [1] * 200)
    order = f"data_path={tmp_path / 'c'},seq_length={size - 1},epochs=1"
    status, out, _ = cli("diff-order", f"{order},seed=1", f"{order},seed=2")
    assert status == 1
    assert ("and 1 more" in out) == (size == 7)
    assert "and 0 more" not in out


def test_the_same_samples_in_another_order(prefix: Path, tmp_path: Path) -> None:
    first = entry(prefix, tmp_path / "one")
    second = framework_copy(first, tmp_path / "two")
    path = second / "x-shuffle_index.npy"
    shuffle = np.load(path)
    shuffle[[4, 9]] = shuffle[[9, 4]]
    np.save(path, shuffle)
    content = diff(None, first, second)
    assert content["relation"] == "reordered"
    assert (content["first_difference"], content["positions_differing"]) == (4, 2)
    assert "no recorded setting differs" in content["causes"][0]["words"]


def test_one_order_continues_the_other(prefix: Path, tmp_path: Path) -> None:
    first = entry(prefix, tmp_path / "one")
    second = framework_copy(first, tmp_path / "two")
    path = second / "x-shuffle_index.npy"
    np.save(path, np.load(path)[:-5])
    content = diff(None, first, second)
    assert content["relation"] == "prefix"
    assert content["positions_differing"] == 0
    assert content["num_samples"][0] == content["num_samples"][1] + 5


def test_more_epochs_of_order_epoch_continue_it(prefix: Path) -> None:
    content = diff(prefix, "--order", "epoch", "epochs=1", "epochs=3")
    assert content["relation"] == "prefix"
    assert settings_of(content) == ["num_epochs"]
    assert "which stay as they are" in content["causes"][0]["words"]


@pytest.mark.parametrize(
    ("b", "setting"),
    [
        ("epochs_mixed=2", "epochs_mixed"),
        ("left_over=carry", "left_over"),
        ("order=window", "order"),
    ],
)
def test_settings_of_our_orders_are_causes(prefix: Path, b: str, setting: str) -> None:
    content = diff(prefix, "--order", "epoch", "--epochs", 2, "seed=1234", b)
    assert content["relation"] == "other samples"
    assert settings_of(content)[0] == setting


@pytest.mark.parametrize("b", ["max_documents=2", "long_documents=skip", "align=2"])
def test_settings_of_order_packed_are_causes(prefix: Path, b: str) -> None:
    content = diff(prefix, "--order", "packed", "--epochs", 1, "seed=1234", b)
    assert content["relation"] != "equal"
    assert settings_of(content) == [b.partition("=")[0]]


def test_arrays_without_lengths_against_an_order_without_arrays(
    prefix: Path, tmp_path: Path
) -> None:
    first = entry(prefix, tmp_path / "one")
    settings = f"order=epoch,data_path={prefix},seq_length=16"
    status, _, err = cli("diff-order", first, settings)
    assert status == 2
    assert "has no index arrays" in err
    assert "order" in settings_of(diff(prefix, first, settings))


def test_cache_entries_tell_their_settings(prefix: Path, tmp_path: Path) -> None:
    first = entry(prefix, tmp_path / "one", seed=1)
    second = entry(prefix, tmp_path / "two", seed=2)
    for data in (None, prefix):
        content = diff(data, first, second)
        assert content["relation"] == "other samples"
        assert settings_of(content) == ["seed"]
    # against settings: the same index is the same
    assert diff(prefix, first, "seed=1")["relation"] == "equal"
    assert settings_of(diff(prefix, first, "seed=2")) == ["seed"]


def test_an_entry_of_order_packed_is_refused_with_its_settings(
    prefix: Path, tmp_path: Path
) -> None:
    order = PackedOrder(max_documents=5, long_documents="skip")
    found = entry(prefix, tmp_path / "cache", order=order)
    status, out, err = cli("diff-order", "--data-path", prefix, found, "seed=1")
    assert (status, out) == (2, "")
    assert f"{found}: a cache entry of order packed holds documents sorted by length" in err
    words = err[err.index("order=packed") :].replace("seed=N,epochs=E", "seed=1,epochs=2").strip()
    side = side_from_settings("named", read_settings(words, {"data_path": str(prefix)}))
    settings: dict[str, Any] = {"sequence_length": 16, "seed": 1, "epochs": 2, "order": order}
    index = build_index(str(prefix), **settings)
    ours, theirs = (Side(name="", index=each, settings={}) for each in (side.index, index))
    assert compare(ours, theirs).equal


def test_the_same_settings_on_another_corpus(prefix: Path, tmp_path: Path) -> None:
    lengths = np.random.default_rng(6).integers(1, 80, 400)
    write_corpus(tmp_path / "other", lengths)
    content = diff(prefix, "seed=1", f"seed=1,data_path={tmp_path / 'other'}")
    assert settings_of(content)[0] == "corpus"
    assert "content fingerprint differs" in content["causes"][0]["words"]
    first = entry(prefix, tmp_path / "one")
    second = entry(tmp_path / "other", tmp_path / "two")
    assert settings_of(diff(None, first, second)) == ["corpus"]


def test_an_entry_is_not_read_with_the_lengths_of_another_corpus(
    prefix: Path, tmp_path: Path
) -> None:
    other = write_corpus(tmp_path / "other", [9] * 3000)
    found = entry(prefix, tmp_path / "cache")
    side = side_from_arrays(found, other)
    own = side_from_arrays(found)
    assert not side.has_lengths
    assert side.settings == own.settings
    assert side_from_arrays(found, IndexedDataset(str(prefix))).has_lengths


def test_a_damaged_entry_is_named(prefix: Path, tmp_path: Path) -> None:
    first = entry(prefix, tmp_path / "one")
    second = tmp_path / "two"
    shutil.copytree(first, second)
    path = second / "shuffle_index.npy"
    content = bytearray(path.read_bytes())
    content[-4:], content[-8:-4] = content[-8:-4], content[-4:]
    path.write_bytes(content)
    (cause,) = diff(None, first, second)["causes"]
    assert "shuffle_index.npy does not match the checksum" in cause["words"]
    assert str(second) in cause["words"]


def test_arrays_of_more_documents_than_the_pair_are_refused(prefix: Path, tmp_path: Path) -> None:
    folder = framework_copy(entry(prefix, tmp_path / "cache"), tmp_path / "arrays")
    lengths = IndexedDataset(prefix).sequence_lengths
    for count in (len(lengths), len(lengths) - 1):
        pair = write_corpus(tmp_path / f"of{count}", lengths[:count])
        if count == len(lengths):
            side_from_arrays(folder, pair)
            continue
        with pytest.raises(FormatError) as caught:
            side_from_arrays(folder, pair)
        assert str(caught.value) == (
            f"{folder}: document_index has sequence id {count}, the dataset {count} sequences; "
            "give the --data-path that the index was built for"
        )


def test_a_threshold_is_a_number(prefix: Path) -> None:
    given = {"data_path": str(prefix), "sequence_length": 16}
    settings = read_settings("order=megatron,final_epoch_threshold=0.25", given)
    assert settings["final_epoch_threshold"] == 0.25


def test_the_same_settings_and_corpus_but_another_order(prefix: Path) -> None:
    settings = read_settings("seed=1", {"data_path": str(prefix), "sequence_length": 16})
    one = side_from_settings("a", settings)
    two = side_from_settings("b", {**settings, "seed": 2})
    (cause,) = compare(one, Side(name="b", index=two.index, settings=one.settings)).causes
    assert "damaged after it was built, or built by another version" in cause.words


def framework_copy(entry: Path, folder: Path, description: dict[str, Any] | None = None) -> Path:
    """Arrays of a cache entry under Megatron's names."""
    folder.mkdir(parents=True)
    for name in ("document_index", "sample_index", "shuffle_index"):
        np.save(folder / f"x-{name}.npy", np.load(entry / f"{name}.npy"))
    if description is not None:
        (folder / "x-description.txt").write_text(json.dumps(description))
    return folder


def test_settings_longer_than_any_path(prefix: Path) -> None:
    long = "x" * 5000
    assert existing(f"order=epoch,source_name={long}") is None
    content = diff(prefix, f"order=epoch,source_name={long}", "order=epoch,source_name=y")
    assert settings_of(content) == ["source_name"]
    with pytest.raises(StorageError, match="x: cannot read its status"):
        existing(long)
    status, _, err = cli("diff-order", long, "order=neox")
    assert status == 2
    assert err.startswith(f"megaindex diff-order: {long[:2000]}")  # the message is cut
    assert "characters left out" in err
    assert "x: cannot read its status: File name too long" in err


def test_what_one_may_not_look_at_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "folder/entry").mkdir(parents=True)
    path = tmp_path / "folder/entry"
    with closed(tmp_path / "folder"):
        with pytest.raises(StorageError, match="entry: cannot read its status"):
            existing(str(path))
        with pytest.raises(StorageError, match="entry: cannot read its status"):
            read_settings(str(path), {})
        with pytest.raises(StorageError, match="entry: cannot look into it"):
            side_from_arrays(path)
        assert existing("order=neox") is None


@for_each(
    ("text", "message"),
    [
        ("[" * 100_000, "must be the JSON that Megatron writes, but it is nested too deeply"),
        ("[]", "but it is not a JSON object"),
        ("9" * 5000, "but it is not valid JSON"),
        ('{"sequence_length": "x"}', "sequence_length must be of type int"),
        ('{"sequence_length": 1e400}', "sequence_length must be of type int"),
        ('{"sequence_length": -1}', "sequence_length must be .* at least 0"),
    ],
)
def test_a_bad_description_is_refused(
    prefix: Path, tmp_path: Path, text: str, message: str
) -> None:
    folder = framework_copy(entry(prefix, tmp_path / "cache"), tmp_path / "arrays", {})
    (folder / "x-description.txt").write_text(text)
    with pytest.raises(FormatError, match=message):
        side_from_arrays(folder)


def test_what_megatron_wrote_is_read(megatron_datasets: Any, prefix: Path, tmp_path: Path) -> None:
    """Arrays and description as megatron-core 0.16.1 writes them."""
    core = megatron_datasets
    folders = []
    for seed in (1, 2):
        config = core.GPTDatasetConfig(
            random_seed=seed,
            sequence_length=16,
            blend=([str(prefix)], None),
            split="1",
            tokenizer=Tokenizer(),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            path_to_cache=str(tmp_path / str(seed)),
        )
        data = core.IndexedDataset(str(prefix))
        documents = np.arange(len(data), dtype=np.int32)
        core.GPTDataset(data, str(prefix), documents, 500, core.Split.train, config)
        folders.append(tmp_path / str(seed))
    content = diff(None, *folders)
    assert settings_of(content) == ["seed"]
    assert content["samples"]["a"][0].keys() == {"source", "document", "offset", "length"}
    assert diff(prefix, folders[0], "seed=1,num_samples=500")["relation"] == "equal"


def test_neox_names_tell_settings(prefix: Path, tmp_path: Path) -> None:
    found = entry(prefix, tmp_path / "cache")
    folder = tmp_path / "neox"
    folder.mkdir()
    for seed in (1, 2):
        for ours, theirs in (("document", "doc"), ("sample", "sample"), ("shuffle", "shuffle")):
            name = f"my_text_train_indexmap_300ns_16sl_{seed}s_packedpi_ac_{theirs}_idx.npy"
            array = np.load(found / f"{ours}_index.npy")
            np.save(folder / name, array if seed == 1 or ours == "sample" else array[::-1])
    sides = [folder / f"my_text_train_indexmap_300ns_16sl_{seed}s" for seed in (1, 2)]
    status, _, err = cli("diff-order", folder, folder)
    assert status == 2
    assert "holds 2 indices" in err
    content = diff(None, *sides)
    assert settings_of(content) == ["seed"]


def test_settings_files(prefix: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.yml"
    path.write_text(f"data-path: {prefix}\nseq-length: 16\nseed: 1\nsplit: 9,1,0\n")
    other = tmp_path / "b.json"
    other.write_text(json.dumps({"data_path": str(prefix), "seq_length": 16, "seed": 2}))
    assert settings_of(diff(None, path, other)) == ["documents", "seed"]
    assert diff(prefix, path, "seed=1,split=9,1,0")["relation"] == "equal"


@for_each(
    ("words", "message"),
    [
        (["seed=1"], "two sides are needed"),
        (["seed=1", "sed=2"], "unknown setting sed"),
        (["seed=1", "seed=x"], "seed cannot be 'x'"),
        (["seed=1", "nowhere"], "no such directory or file"),
        (["seed=1", "order=best"], "order must be one of"),
        (["seed=1", "drop_last_partial=maybe"], "drop_last_partial cannot be 'maybe'"),
        (["seed=1", "{empty}"], "has neither manifest.json nor"),
        (["seed=1", "{list}"], "must be a mapping"),
        (["seed=1", "{broken}"], "must be YAML or JSON"),
        (["seed=1", "{pickled}"], "must be a .npy file of integers"),
        (["seed=1", "{shuffle}"], "shuffle_index must be in [0, 1), got 1 to 1"),
        (["seed=1", "{negative}"], "shuffle_index must be in [0, 1), got -1 to -1"),
        (["seed=1", "{document}"], "sample_index must be in [0, 9), got 0 to 9"),
        (["seed=1", "{float}"], "must have integers"),
        (["seed=1", "{falling}"], "sample_index must not decrease"),
    ],
)
def test_bad_input_ends_in_one_line(
    prefix: Path, tmp_path: Path, words: list[str], message: str
) -> None:
    (tmp_path / "list").write_text("[1, 2]")
    (tmp_path / "broken").write_text("{a: [")
    for name, documents in (
        ("empty", None),
        ("pickled", np.array([{}], object)),
        ("shuffle", np.zeros(9, np.int32)),
        ("negative", np.zeros(9, np.int32)),
        ("document", np.zeros(9, np.int32)),
        ("float", np.zeros(3)),
        ("falling", np.zeros(9, np.int32)),
    ):
        (tmp_path / name).mkdir()
        if documents is not None:
            np.save(tmp_path / name / "document_index.npy", documents)
            begin, end = {"falling": (1, 0), "document": (0, 9)}.get(name, (0, 0))
            np.save(tmp_path / name / "sample_index.npy", [[begin, 0], [end, 0]])
            shuffle = {"shuffle": 1, "negative": -1}.get(name, 0)
            np.save(tmp_path / name / "shuffle_index.npy", [shuffle])
    sides = [word.replace("{", f"{tmp_path}/").replace("}", "") for word in words]
    common = ["--data-path", prefix, "--seq-length", 16]
    status, out, err = cli("diff-order", *common, *sides)
    assert (status, out) == (2, "")
    assert message in err
    status, _, err = cli("diff-order", "seed=1", "seed=2")
    assert status == 2
    assert "data_path is missing" in err
