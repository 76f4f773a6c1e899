"""GPT-NeoX's data loaders with megaindex under them serve its own batches."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support import neox_stand_in
from support.neox_corpora import GOLDEN, write_corpus_and_companions
from support.neox_running import SIZES, arguments, batches, dataset_of, loaders_of, pairs_of, texts

import megaindex.adapters.neox as adapter
import megaindex.helpers
from megaindex.adapters import status
from megaindex.errors import FormatError, InvalidArgument, MissingFile, OutOfRange
from megaindex.index.balance import CostModel
from megaindex.index.skips import Skip
from megaindex.loader import torch_dataset


def golden_arguments(case: dict[str, Any], folder: Path) -> SimpleNamespace:
    labels = case["kind"] in ("labels", "overflow")
    args = arguments(
        folder, case["sizes"], prompts=case["prompts"], labels=labels, weights=case["weights"],
        **case["given"],
    )  # fmt: skip
    if case["kind"] == "split":
        args.data_path = args.paths[0]
    return args


@pytest.mark.parametrize("case", GOLDEN["loaders"], ids=lambda case: case["kind"])
def test_every_batch_is_the_frameworks(case: dict[str, Any], neox: Any, tmp_path: Path) -> None:
    adapter.install()
    args = golden_arguments(case, tmp_path)
    assert {name: len(loader) for name, loader in loaders_of(args).items()} == case["lengths"]
    compared = 0
    for part, (name, expected) in enumerate(case["batches"].items()):
        for ours, theirs in zip(batches(args, len(expected), part), expected, strict=True):
            assert ours.keys() == theirs.keys(), name
            for field, values in theirs.items():
                np.testing.assert_array_equal(ours[field], values, err_msg=name)
            compared += 1
    assert compared


def saved_by_neox(case: dict[str, Any], folder: Path) -> tuple[str, dict[str, bytes]]:
    """The arrays of a golden case under the names that GPT-NeoX gives them."""
    base = (
        f"{folder / 'c0'}_train_indexmap_{case['num_samples']}ns_{case['sequence_length']}sl_"
        f"{case['seed']}s_{case['pack_impl']}pi{'_ac' * case['allow_chopped']}"
    )
    for ours, theirs in (("document_index", "doc_idx"), ("sample_index", "sample_idx"),
                         ("shuffle_index", "shuffle_idx")):  # fmt: skip
        np.save(f"{base}_{theirs}.npy", np.array(case[ours]["values"], case[ours]["dtype"]))
    return base, {p.name: p.read_bytes() for p in folder.glob("*.npy")}


@pytest.mark.parametrize("case", [c for c in GOLDEN["indices"] if "error" not in c][:15])
def test_arrays_that_neox_wrote_are_accepted_and_kept(
    case: dict[str, Any], neox: Any, tmp_path: Path
) -> None:
    adapter.install()
    arguments(tmp_path, [case["sizes"]], prompts=[case["prompts"] or [0] * len(case["sizes"])])
    base, files = saved_by_neox(case, tmp_path)
    for _ in range(2):  # checked, then taken from the sidecar's word
        dataset = dataset_of(case, tmp_path)
        assert len(dataset) == case["len"]
        for k in range(case["len"]):
            if case["served"][k] is not None:
                for field, values in case["served"][k].items():
                    np.testing.assert_array_equal(dataset[k][field], np.float32(values))
        assert '"origin":"found"' in Path(f"{base}-megaindex.json").read_text()
    assert {p.name: p.read_bytes() for p in tmp_path.glob("*.npy")} == files


@pytest.mark.parametrize("pack_impl", ["packed", "unpacked", "pack_until_overflow"])
def test_arrays_of_another_corpus_are_refused_and_kept(
    pack_impl: str, neox: Any, tmp_path: Path
) -> None:
    adapter.install()
    case = next(c for c in GOLDEN["indices"] if c["pack_impl"] == pack_impl and "error" not in c)
    sizes = [*case["sizes"][::-1][:-1], case["sizes"][0] + 40]
    changed = {**case, "sizes": sizes, "prompts": case["prompts"] and [0] * len(sizes)}
    arguments(tmp_path, [sizes])
    _, files = saved_by_neox(case, tmp_path)
    with pytest.raises(FormatError, match="remove the files of that name"):
        dataset_of(changed, tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.glob("*.npy")} == files


def test_arrays_of_a_corpus_that_changed_are_built_again(neox: Any, tmp_path: Path) -> None:
    """GPT-NeoX finds them by path, and goes on with the old ones."""
    adapter.install()
    case = next(c for c in GOLDEN["indices"] if c["pack_impl"] == "packed")
    old = np.array(dataset_of(case, tmp_path).sample_idx)
    for path in [*tmp_path.glob("*.idx"), *tmp_path.glob("*.bin")]:
        path.unlink()
    dataset = dataset_of({**case, "sizes": case["sizes"][::-1], "prompts": None}, tmp_path)
    assert not np.array_equal(dataset.sample_idx, old)
    np.testing.assert_array_equal(dataset.doc_idx, case["document_index"]["values"])


def test_labels_that_changed_are_noticed(neox: Any, tmp_path: Path) -> None:
    adapter.install()
    settings = {"sizes": [9, 9, 9], "num_documents": 3, "pack_impl": "unpacked", "seed": 1,
                "num_samples": 4, "sequence_length": 10, "allow_chopped": True, "reward": False,
                "ref": False}  # fmt: skip
    assert set(dataset_of({**settings, "prompts": [9, 0, 0]}, tmp_path).doc_idx) == {1, 2}
    for path in tmp_path.glob("*_label.*"):
        path.unlink()
    write_corpus_and_companions(tmp_path / "other", [9, 9, 9], [0, 9, 0])
    for suffix in (".bin", ".idx"):
        (tmp_path / f"other_label{suffix}").rename(tmp_path / f"c0_label{suffix}")
    assert set(dataset_of({**settings, "prompts": [0, 9, 0]}, tmp_path).doc_idx) == {0, 2}


def snapshot(neox: Any) -> dict[tuple[str, ...], Any]:
    seen: dict[tuple[str, ...], Any] = {}
    for name, module in sys.modules.items():
        if name.split(".")[0] == "megatron":
            for attribute, value in vars(module).items():
                seen[name, attribute] = value
                if isinstance(value, type):
                    seen |= {(name, attribute, n): v for n, v in vars(value).items()}
    return seen


@pytest.mark.parametrize("exact", [False, True])
def test_uninstall_puts_everything_back(exact: bool, neox: Any) -> None:
    before = snapshot(neox)
    adapter.install(exact=exact)
    adapter.install(exact=exact)
    installed = snapshot(neox)
    changed = {key for key in installed if installed[key] is not before.get(key)}
    assert ("megatron.training", "shift_and_wrap_data_loaders") in changed
    exactly = ("megatron.data.data_utils", "get_normalized_weights_and_num_samples")
    assert (exactly in changed) == exact
    assert ("megatron.data.data_utils", "make_indexed_dataset") in changed
    assert ("megatron.data.gpt2_dataset", "GPT2Dataset", "__getitems__") in changed
    assert "megatron.data.helpers" in sys.modules
    adapter.uninstall()
    after = snapshot(neox)
    assert after.keys() == before.keys()
    assert all(after[key] is before[key] for key in before)
    assert "megatron.data.helpers" not in sys.modules
    assert itertools.cycle is sys.modules["megatron.data.data_utils"].cycle


def test_datasets_made_before_uninstall_are_complete(neox: Any, tmp_path: Path) -> None:
    """Attributes that nobody asked for while the patches were there."""
    args = arguments(tmp_path, SIZES[:1])
    names = ("doc_idx", "sample_idx", "shuffle_idx", "sample_idx_len", "shuffle_idx_len")
    adapter.install()
    asked, unasked = (loaders_of(args)["train"].dataset.datasets[0] for _ in range(2))
    values = [getattr(asked, name) for name in names]
    adapter.uninstall()
    for name, value in zip(names, values, strict=True):
        np.testing.assert_array_equal(getattr(unasked, name), value, err_msg=name)
    assert unasked.sample_idx.shape == (unasked.sample_idx_len + 1, 2)
    assert unasked.shuffle_idx.size == unasked.shuffle_idx_len + 1


def test_the_helpers_are_megaindex_and_nothing_is_compiled(
    neox: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter.install()
    from megatron.data import helpers  # as GPT-NeoX does where it needs them

    assert helpers is megaindex.helpers
    monkeypatch.setenv("PATH", "")
    neox_stand_in.data_utils().compile_helper()


def test_without_the_framework_installing_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adapter.uninstall()
    monkeypatch.setitem(sys.modules, "megatron.data", None)
    with pytest.raises(InvalidArgument, match="PYTHONPATH"):
        adapter.install()


def test_ids_beyond_the_samples_are_taken_modulo_where_that_is_asked(
    neox: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adapter.install()
    case = next(c for c in GOLDEN["indices"] if c["pack_impl"] == "packed")
    dataset = dataset_of(case, tmp_path)
    samples = dataset.shuffle_idx.size
    for wrong in (samples, samples + 3, 5 * samples):
        np.testing.assert_array_equal(
            dataset[wrong]["text"], dataset[wrong % (samples - 1)]["text"]
        )
    assert caplog.text.count("is served in its place") == 1
    with pytest.raises(OutOfRange):
        dataset[-1]


def test_the_only_sample_of_a_source_comes_again(neox: Any, tmp_path: Path) -> None:
    """Its dataset has length 0; the blend's NumPy integers modulo 0 are 0."""
    adapter.install()
    epochs = {"train_iters": None, "train_epochs": 1, "seq_length": 8}
    shape = {"batch_size": 1, "train_batch_size": 1}
    args = arguments(tmp_path, [[9], [81]], **epochs, **shape)
    rows = texts(args, 9)
    drawn = loaders_of(args)["train"].dataset.dataset_index.tolist()
    assert drawn.count(0) == 5
    only = rows[drawn.index(0)]
    assert [row == only for row in rows] == [number == 0 for number in drawn]


def test_a_sample_without_a_next_document_is_the_first_one(neox: Any, tmp_path: Path) -> None:
    adapter.install()
    for k, case in enumerate(GOLDEN["indices"]):
        if case["pack_impl"] != "pack_until_overflow" or "error" in case:
            continue
        dataset = dataset_of(case, tmp_path / str(k))
        last = case["shuffle_index"]["values"].index(case["num_samples"] - 1)
        if last > 0:
            np.testing.assert_array_equal(dataset[last]["text"], dataset[0]["text"])
        else:  # GPT-NeoX ends in a RecursionError
            document = case["document_index"]["values"][-1]
            begin = sum(case["sizes"][:document])
            assert dataset[0]["text"][0] == begin


def test_more_datasets_than_a_byte_counts(neox: Any, tmp_path: Path) -> None:
    adapter.install()

    class One:
        def __init__(self, number: int) -> None:
            self.number = number

        def __len__(self) -> int:
            return 2

        def __getitem__(self, k: int) -> tuple[int, int]:
            return self.number, k

    blend = neox_stand_in.BlendableDataset([One(k) for k in range(300)], [1.0] * 300)
    assert blend.dataset_index.dtype == np.int16
    assert {blend[k] for k in range(600)} == {(n, k) for n in range(300) for k in range(2)}
    with pytest.raises(OutOfRange, match="sample -1 was requested, .* samples 0 to 599"):
        blend[-1]
    for count, dtype in ((254, np.uint8), (255, np.int16), (256, np.int16)):
        few = neox_stand_in.BlendableDataset([One(k) for k in range(count)], [1.0] * count)
        assert few.dataset_index.dtype == dtype
    for weights in ([1.0], [0.0] * 300, [-1.0] + [1.0] * 299):
        with pytest.raises(InvalidArgument):
            neox_stand_in.BlendableDataset([One(k) for k in range(300)], weights)


def read_beyond(self: Any, idx: int, offset: int = 0, length: int = 0) -> Any:
    """GPT-NeoX's ``get`` reads on into the next sequence."""
    begin = self._index[idx][0] + 4 * offset
    return np.frombuffer(self._bin_buffer, np.int32, length, begin)


@pytest.mark.parametrize("settings", [{}, {"exact": True}, {"skip": Skip(steps="1")}])
def test_pairs_are_read_by_gpt_neox_itself(
    settings: dict[str, Any], neox: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps can be skipped: they are positions."""
    monkeypatch.setattr(neox_stand_in.MMapIndexedDataset, "get", read_beyond)
    adapter.install(**settings)
    pairs, samples = pairs_of(tmp_path)
    assert [{k: v.tolist() for k, v in pairs[n].items()} for n in range(3)] == samples
    args = SimpleNamespace(batch_size=1, world_size=1, rank=0, train_iters=3, train_batch_size=1)
    utils = neox_stand_in.data_utils()
    served = [samples[k] for k in range(3) if not (settings.get("skip") and k == 1)]
    for dataset in (pairs, neox_stand_in.BlendableDataset([pairs], [1.0])):
        loader = utils.make_data_loader(dataset, args)
        found = [{name: rows[0].tolist() for name, rows in batch.items()} for batch in loader]
        assert found == served
    line = f"PairwiseDataset train_0 of {tmp_path / 'pos'}: left to GPT-NeoX, megaindex has no"
    assert line in str(status())
    adapter.uninstall()
    assert [{k: v.tolist() for k, v in pairs[n].items()} for n in range(3)] == samples


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"balance": CostModel(linear=0, attention=1)}, "got PairwiseDataset"),
        ({"skip": Skip(documents=[1])}, "got PairwiseDataset"),
        ({"separate_final_epoch": "always"}, "has no separate_final_epoch always"),
    ],
)
def test_what_needs_documents_is_refused_for_pairs(
    settings: dict[str, Any], message: str, neox: Any, tmp_path: Path
) -> None:
    adapter.install(**settings)
    args = SimpleNamespace(batch_size=1, world_size=1, rank=0, train_iters=3, train_batch_size=1,
                           gradient_accumulation_steps=1, iteration=0, eval_iters=0)  # fmt: skip

    def run() -> None:
        utils = neox_stand_in.data_utils()
        loader = utils.make_data_loader(pairs_of(tmp_path)[0], args)
        utils.shift_and_wrap_data_loaders(args, {"train": loader, "valid": None, "test": None})

    with pytest.raises(InvalidArgument, match=message):
        run()


@pytest.mark.parametrize("exact", [False, True])
def test_data_without_one_batch_are_refused(exact: bool, neox: Any, tmp_path: Path) -> None:
    """GPT-NeoX divides by zero."""
    adapter.install(exact=exact)
    args = arguments(tmp_path, SIZES, batch_size=400)
    with pytest.raises(InvalidArgument, match="samples are fewer than one batch of 400"):
        batches(args, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_samples": None}, "neither samples nor epochs"),
        (
            {"pack_impl": "pack_until_overflow", "num_samples": 0},
            "pack_impl pack_until_overflow",
        ),
        ({"pack_impl": "tight"}, "pack_impl must be one of"),
        ({"pack_impl": "packed", "reward": True}, "rewards need pack_impl unpacked"),
        ({"num_samples": None, "num_epochs": 1, "sequence_length": 900}, "one sample needs 901"),
    ],
)
def test_what_cannot_be_asked(
    changes: dict[str, Any], message: str, neox: Any, tmp_path: Path
) -> None:
    adapter.install()
    case = next(c for c in GOLDEN["indices"] if c["pack_impl"] == "packed")
    with pytest.raises(InvalidArgument, match=message):
        dataset_of(case, tmp_path, **changes)


def test_pairs_that_are_not_there_are_named(neox: Any, tmp_path: Path) -> None:
    """GPT-NeoX ends in AttributeError of None, or trains without the labels that were named."""
    adapter.install()
    args = arguments(tmp_path, SIZES, labels=True)
    utils, missing = neox_stand_in.data_utils(), str(tmp_path / "nothing")
    settings = {"name": "train_0", "data_impl": "mmap", "num_samples": 4, "num_epochs": None,
                "seq_length": 16, "seed": 1}  # fmt: skip
    with pytest.raises(MissingFile, match=f"{missing}.idx and {missing}.bin: at least one"):
        utils.build_the_dataset(missing, **settings)
    with pytest.raises(MissingFile, match=f"{missing}.idx"):
        utils.build_the_dataset(args.paths[0], label_prefix=missing, **settings)
    with pytest.raises(MissingFile, match=f"{missing}.idx"):
        utils.build_train_valid_test_datasets(missing, "mmap", [(0, 1)] * 3, [1] * 3, [None] * 3)
    with pytest.raises(MissingFile, match=f"{missing}.idx"):
        neox_stand_in.GPT2Dataset("train", missing, np.arange(3), None, 4, None, 16, 1)
    # reference values may be missing: GPT-NeoX goes on without them
    dataset = utils.build_the_dataset(args.paths[0], precompute_model_name="nothing", **settings)
    assert dataset.ref_dataset is None
    (tmp_path / "half.idx").write_bytes(Path(args.paths[0] + ".idx").read_bytes())
    with pytest.raises(MissingFile, match="half.bin"):
        utils.build_the_dataset(str(tmp_path / "half"), **settings)


@pytest.mark.parametrize("exact", [False, True])
def test_parts_of_less_than_one_sample(exact: bool, neox: Any, tmp_path: Path) -> None:
    """Where none is asked for they are empty; in GPT-NeoX their length is -1."""
    adapter.install(exact=exact)
    case = {**next(c for c in GOLDEN["indices"] if c["pack_impl"] == "packed"), "num_epochs": None}
    empty = dataset_of(case, tmp_path, num_samples=0, sequence_length=900)
    assert len(empty) == 0
    blend = neox_stand_in.BlendableDataset([empty, dataset_of(case, tmp_path)], [0.5, 0.5])
    assert (len(blend) == 0) == exact  # it ends where a source is spent
    if not exact:
        with pytest.raises(OutOfRange):
            blend[int((blend.dataset_index == 0).argmax())]
    args = arguments(tmp_path / "run", SIZES)
    loaders = {name: neox_stand_in.make_data_loader(empty, args) for name in ("train", "valid")}
    with pytest.raises(InvalidArgument, match="its 0 samples are fewer than one batch"):
        neox_stand_in.data_utils().shift_and_wrap_data_loaders(args, {**loaders, "test": None})


def test_a_test_part_of_less_than_one_batch_is_warned_of(
    neox: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adapter.install()
    args = arguments(tmp_path, SIZES)
    loaders = loaders_of(args)
    args.batch_size = 4000
    loaders["test"] = neox_stand_in.make_data_loader(loaders["test"].dataset, args)
    iterators = neox_stand_in.data_utils().shift_and_wrap_data_loaders(args, loaders)
    assert "are fewer than one batch of 4000 of all ranks together: testing will end" in caplog.text
    assert next(iterators[2], None) is None


def test_fields_have_the_frameworks_order(neox: Any, tmp_path: Path) -> None:
    """The golden vectors were served by GPT-NeoX, field by field."""
    adapter.install()
    seen = set()
    for number, case in enumerate(GOLDEN["indices"]):
        served = next((row for row in case.get("served", ()) if row), None)
        if served is None or tuple(served) in seen:
            continue
        seen.add(tuple(served))
        (tmp_path / str(number)).mkdir()
        dataset = dataset_of(case, tmp_path / str(number))
        assert list(dataset[case["served"].index(served)]) == list(served)
    assert ("text", "label", "reward", "ref") in seen


@pytest.mark.parametrize("fields", [["text"], ["text", "label"]])
def test_workers_send_the_same_batches_in_few_slots(
    fields: list[str], neox: Any, tmp_path: Path
) -> None:
    adapter.install()
    sizes = [[300, 500, 17], [900, 80]]
    args = arguments(tmp_path, sizes, labels="label" in fields, train_iters=40)
    expected = [clone(batch) for batch in loaders_of(args)["train"]]
    args.num_workers = 2
    loader = loaders_of(args)["train"]
    held = []
    for number, batch in enumerate(loader):
        assert_same(batch, expected[number], fields)
        if number % 2:
            held.append((number, batch))
    assert number == len(expected) - 1 >= 39
    for number, batch in held:
        assert_same(batch, expected[number], fields)
    held.clear()
    for batch, theirs in zip(loader, expected, strict=True):
        assert_same(batch, theirs, fields)
        for tensor in batch.values():  # this batch is the trainer's
            tensor.zero_()
    assert 0 < len(torch_dataset._slots) <= 2 * 2 * 16


def clone(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: values.clone() for name, values in batch.items()}


def assert_same(ours: dict[str, Any], theirs: dict[str, Any], fields: list[str]) -> None:
    assert list(ours) == list(theirs) == fields
    for name in fields:
        assert ours[name].dtype == theirs[name].dtype
        assert ours[name].tolist() == theirs[name].tolist()


def test_arrays_of_a_read_only_corpus_have_a_folder_of_their_own(neox: Any, tmp_path: Path) -> None:
    """Two corpora of one name, in two folders, have arrays of their own."""
    args = arguments(tmp_path / "data", SIZES)
    adapter.install()
    beside = batches(args, 5)
    for file in (tmp_path / "data").glob("*_indexmap_*"):
        file.unlink()
    names = sorted(path.name for path in (tmp_path / "data").iterdir())
    adapter.install(cache_dir=tmp_path / "cache" / "arrays")
    for ours, theirs in zip(batches(args, 5), beside, strict=True):
        for field, values in theirs.items():
            np.testing.assert_array_equal(ours[field], values)
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == names
    there = {path.name for path in (tmp_path / "cache" / "arrays").glob("*.npy")}
    batches(arguments(tmp_path / "other", [row[::-1] for row in SIZES]), 5)
    assert len({path.name for path in (tmp_path / "cache" / "arrays").glob("*.npy")}) == 2 * len(
        there
    )


@pytest.mark.parametrize(
    "given", [{"exact": "yes"}, {"amend": {}}, {"cache_dir": 3}, {"cache_dir": ""}], ids=str
)
def test_settings_of_a_wrong_type_are_named(neox: Any, given: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(given))):
        adapter.install(**given)


@pytest.mark.parametrize("missing", ["idx", "bin"])
def test_a_missing_half_of_a_pair_is_named(neox: Any, missing: str, tmp_path: Path) -> None:
    path = Path(arguments(tmp_path, SIZES).paths[0])
    adapter.install()
    path.with_suffix(f".{missing}").unlink()
    settings = {"name": "train_0", "data_impl": "mmap", "num_samples": 4, "num_epochs": None,
                "seq_length": 16, "seed": 1}  # fmt: skip
    with pytest.raises(MissingFile, match=rf"c0\.{missing}: missing, although"):
        neox_stand_in.data_utils().build_the_dataset(str(path), **settings)
