"""What the Megatron adapter does in single cases: classes, batches, files."""

from __future__ import annotations

import functools
import gc
import logging
import pickle
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.corpora import write_corpus
from support.megatron_blends import (
    assert_equal,
    build,
    files,
    installed,
    places,
    samples,
)
from support.megatron_dataset import Tokenizer

import megaindex
import megaindex.adapters.megatron as adapter
from megaindex.adapters.megatron import patches
from megaindex.adapters.megatron.batches import unbatched_reason
from megaindex.adapters.megatron.core import HELPERS, METHODS, class_of, rerun_iterator
from megaindex.adapters.megatron.core import core as core_modules
from megaindex.adapters.megatron.indexed_dataset import unsupported_reason
from megaindex.errors import InvalidArgument, OutOfRange

SPLIT = {"split": "60,20,20"}
SIZES = (60, 9, 5)


def test_uninstall_restores_every_attribute(core: Any) -> None:
    import megatron.core.datasets.blended_dataset as blended
    from megatron.core.datasets import helpers, utils

    owners = [class_of(name) for name in METHODS] + [blended, helpers, utils]
    before = [dict(vars(owner)) for owner in owners]
    adapter.install()
    adapter.install()
    assert adapter.is_installed()
    assert helpers.build_sample_idx is megaindex.helpers.build_sample_idx
    adapter.uninstall()
    adapter.uninstall()
    assert not adapter.is_installed()
    assert [dict(vars(owner)) for owner in owners] == before


@pytest.mark.parametrize("compiled", [True, False])
def test_no_compiler_runs(
    core: Any, corpora: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    """Where the helpers were compiled before, and in a checkout where they were not."""
    import megatron.core.datasets as package
    from megatron.core.datasets import utils

    importer = ModuleType("megatron.bridge.training.initialize")  # which imports it by name
    importer.compile_helpers = utils.compile_helpers  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, importer.__name__, importer)
    config = {"blend": (corpora, None), **SPLIT}
    theirs = build(core, SIZES, tmp_path / "theirs", **config)
    expected = samples(theirs)
    cpp, helpers = HELPERS
    if not compiled:
        monkeypatch.setitem(sys.modules, cpp, None)
        monkeypatch.delitem(sys.modules, helpers)
        monkeypatch.delattr(package, "helpers")
        core_modules.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="make"):
        utils.compile_helpers()
    with installed():
        utils.compile_helpers()
        importer.compile_helpers()
        assert_equal(samples(build(core, SIZES, tmp_path / "ours", **config)), expected)
        from megatron.core.datasets import helpers as found

        assert found.build_mapping is megaindex.helpers.build_mapping
    assert importer.compile_helpers is utils.compile_helpers
    if not compiled:
        assert helpers not in sys.modules
        core_modules.cache_clear()


def test_a_package_that_cannot_be_imported_is_named(
    core: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AttributeError, match="^T5Dataset$"):
        class_of("T5Dataset")
    assert rerun_iterator().__name__ == "RerunDataIterator"
    monkeypatch.setitem(sys.modules, "megatron.core.rerun_state_machine", None)
    assert rerun_iterator() is None  # of releases without
    monkeypatch.setitem(sys.modules, "megatron.core.datasets.gpt_dataset", None)
    core_modules.cache_clear()
    try:
        with pytest.raises(InvalidArgument, match=r"core\.datasets cannot be imported .*gpt_"):
            adapter.install()
    finally:
        core_modules.cache_clear()


def test_data_of_an_object_store_are_left_to_megatron(core: Any, corpora: list[str]) -> None:
    config = build(core, SIZES, None, blend=([corpora[0]], None), **SPLIT)[0].config
    for prefix, reason in (("s3://b/p", "it lies in an object store"), (corpora[0], None)):
        assert unsupported_reason({"path_prefix": prefix}) == reason
        with installed():
            builder = SimpleNamespace(cls=core.GPTDataset, config=config)
            factories = patches._factories(builder, [corpora[1], prefix], [None, (0.0, 1.0), None])
        assert (factories is None) == (reason is not None)
    assert not patches.coordinates(lambda: core.GPTDataset, config)


def test_classes_without_installing(core: Any, corpora: list[str], tmp_path: Path) -> None:
    config = {"blend": (corpora, None), **SPLIT}
    theirs = build(core, SIZES, tmp_path / "theirs", **config)
    ours = build(
        core, SIZES, tmp_path / "ours",
        cls=adapter.GPTDataset, builder=adapter.BlendedMegatronDatasetBuilder, **config,
    )  # fmt: skip
    assert not adapter.is_installed()
    assert isinstance(ours[0], adapter.BlendedDataset)
    assert isinstance(ours[0].datasets[0].dataset, adapter.IndexedDataset)
    assert_equal([d.__getitems__(places(d)) for d in ours], samples(theirs))
    assert files(tmp_path / "ours") == files(tmp_path / "theirs")
    single = adapter.GPTDataset.build_low_level_dataset(corpora[0], ours[0].config)
    assert isinstance(single, adapter.IndexedDataset)
    with installed():
        single = adapter.GPTDataset.build_low_level_dataset(corpora[0], ours[0].config)
        assert type(single) is core.IndexedDataset  # which is ours already
    with pytest.raises(AttributeError, match="no attribute 'T5Dataset'"):
        _ = adapter.T5Dataset


def test_subclasses(core: Any, corpora: list[str], tmp_path: Path) -> None:
    """A subclass's own way of reading a sample is kept, in batches too."""

    class Reversed(core.GPTDataset):  # type: ignore[misc]
        def _query_document_sample_shuffle_indices(self, idx: int) -> Any:
            text, *rest = super()._query_document_sample_shuffle_indices(idx)
            return (text[::-1].copy(), *rest)

    class Marked(core.GPTDataset):  # type: ignore[misc]
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.mark = int(self.shuffle_index[0])

        def __getitem__(self, idx: int | None) -> Any:
            return {**super().__getitem__(idx), "mark": self.mark}

    class Wrapped(core.GPTDataset):  # type: ignore[misc]
        @functools.wraps(core.GPTDataset.__getitem__)
        def __getitem__(self, idx: int | None) -> Any:
            return {**core.GPTDataset.__getitem__(self, idx), "mark": idx}

    class Shifted(core.IndexedDataset):  # type: ignore[misc]
        def get(self, *args: Any, **kwargs: Any) -> Any:
            return super().get(*args, **kwargs) + 1

    class OfShifted(core.GPTDataset):  # type: ignore[misc]
        @staticmethod
        def build_low_level_dataset(dataset_path: str, config: Any) -> Any:
            return Shifted(dataset_path, mmap=config.mmap_bin_files)

    for cls in (Reversed, Marked, Wrapped, OfShifted):
        config = {"cls": cls, "blend": (corpora[:2], None), **SPLIT}
        theirs = samples(build(core, SIZES, tmp_path / f"theirs-{cls.__name__}", **config))
        with installed():
            ours = build(core, SIZES, tmp_path / cls.__name__, **config)
            assert_equal(samples(ours), theirs)
            assert_equal([d.__getitems__(places(d)) for d in ours], theirs)


def test_a_query_that_draws_random_numbers(core: Any, corpora: list[str], tmp_path: Path) -> None:
    """As in fill-in-the-middle, samples depend on the number of queries, and may be padded."""

    class Drawing(core.GPTDataset):  # type: ignore[misc]
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.rng = np.random.RandomState(3)

        def _query_document_sample_shuffle_indices(self, idx: int) -> Any:
            text, *rest = super()._query_document_sample_shuffle_indices(idx)
            cut = int(self.rng.randint(1, text.size))
            pad = [self._pad_token_id] * int(self.rng.randint(2))
            return (np.concatenate((text[cut:], text[:cut], pad))[-text.size :], *rest)

    config = {"cls": Drawing, "blend": (corpora[:2], None), "create_attention_mask": False, **SPLIT}
    theirs = build(core, SIZES, tmp_path / "theirs", **config)[0]
    expected = [theirs[place] for place in places(theirs)]
    with installed():
        ours = build(core, SIZES, tmp_path / "ours", **config)[0]
        assert_equal([ours[place] for place in places(ours)], expected)


def test_a_subclass_that_counts_epochs_waits_for_rank_0(
    core: Any, corpora: list[str], tmp_path: Path
) -> None:
    """Megatron's code builds its arrays on rank 0, and its barriers make the others wait."""

    class OneMore(core.GPTDataset):  # type: ignore[misc]
        def _get_num_epochs(self, num_tokens_per_epoch: int) -> int:
            return int(super()._get_num_epochs(num_tokens_per_epoch))

    config = {"cls": OneMore, "blend": (corpora[:2], None), **SPLIT}
    theirs = build(core, SIZES, tmp_path / "theirs", **config)
    with installed():
        assert not patches.coordinates(OneMore, theirs[0].config)
        assert patches.coordinates(core.GPTDataset, theirs[0].config)
        assert patches.coordinates(core.BlendedDataset, theirs[0].config)
        ours = build(core, SIZES, tmp_path / "ours", **config)
    assert_equal(samples(ours), samples(theirs))
    assert not list((tmp_path / "ours").glob("*GPTDataset*-megaindex.json"))


def test_uninstalling_when_files_are_gone(
    core: Any, corpora: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Datasets that wait for their files are left incomplete; the others, and the classes, not."""
    gone, kept = str(tmp_path / "gone"), corpora[1]
    write_corpus(Path(gone), [30] * 20)
    before = dict(vars(core.GPTDataset))
    adapter.install()
    try:
        config = {"blend": ([gone, kept], None), "mid_level_dataset_surplus": 1.0, **SPLIT}
        build(core, SIZES, tmp_path / "cache", **config)
        gc.collect()  # the first datasets have the lengths, and could build the files again
        [train, *_] = build(core, SIZES, tmp_path / "cache", **config)
        for path in (tmp_path / "cache").glob(f"{train.datasets[0].unique_description_hash}*"):
            path.unlink()
        for suffix in (".bin", ".idx"):
            Path(gone + suffix).unlink()
    finally:
        adapter.uninstall()
    assert not adapter.is_installed()
    assert dict(vars(core.GPTDataset)) == before
    assert f"{gone}: left incomplete" in caplog.text
    assert train.datasets[1][0]["tokens"].numel() == 16


def test_mock_data(core: Any) -> None:
    from megatron.core.datasets.gpt_dataset import MockGPTDataset, MockGPTLowLevelDataset

    class Small(Tokenizer):
        vocab_size = 100

    class SmallMock(MockGPTDataset):  # type: ignore[misc]
        @staticmethod
        def build_low_level_dataset(path: None, config: Any) -> Any:
            low_level = MockGPTLowLevelDataset(config.tokenizer)
            low_level.size = 200
            low_level.sequence_lengths = low_level.sequence_lengths[:200]
            return low_level

    config = {"cls": SmallMock, "tokenizer": Small(), "sequence_length": 64}
    theirs = samples(build(core, (20, 20, 20), None, **config))
    with installed():
        ours = build(core, (20, 20, 20), None, **config)
        assert_equal(samples(ours), theirs)
        assert_equal([d.__getitems__(places(d)) for d in ours], theirs)


def test_the_loss_mask_of_one_sample_is_its_own(core: Any, tmp_path: Path) -> None:
    """Megatron keeps that of the first sample, padding cleared, for all that follow."""
    write_corpus(tmp_path / "c", [30, 25])
    config = {
        "blend": ([str(tmp_path / "c")], None), "split": "0,100,0",
        "drop_last_partial_validation_sequence": False,
    }  # fmt: skip
    with installed():
        dataset = build(core, (None,) * 3, tmp_path / "cache", **config)[1]
    partial = int(np.argmax(dataset.shuffle_index))
    order = [partial, *(i for i in range(len(dataset)) if i != partial)]
    sums = {i: float(dataset[i]["loss_mask"].sum()) for i in order}
    assert sums[partial] < 16
    with installed():
        fresh = build(core, (None,) * 3, tmp_path / "cache", **config)[1]
        sums = {i: float(fresh[i]["loss_mask"].sum()) for i in order}
        batch = fresh.__getitems__(order)
        assert [float(sample["loss_mask"].sum()) for sample in batch] == [sums[i] for i in order]
    assert all(sums[i] == 16 for i in order[1:])


def test_batches_of_a_blend(
    core: Any, corpora: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each source by itself at first, then all in one read."""
    caplog.set_level(logging.INFO, "megaindex")
    config = {"blend": (corpora[:4], None), **SPLIT}
    theirs = samples(build(core, SIZES, tmp_path, **config))
    with installed():
        ours = build(core, SIZES, tmp_path, **config)
        for _ in range(3):
            assert_equal([d.__getitems__(places(d)) for d in ours], theirs)
        assert_equal(ours[0].__getitems__([-1, 2]), [ours[0][-1], ours[0][2]])

        class Marked(core.BlendedDataset):  # type: ignore[misc]
            def __getitem__(self, idx: int) -> Any:
                return {**super().__getitem__(idx), "mark": idx}

        own = Marked(ours[0].datasets, [1.0] * 4, 40, ours[0].config)
        assert [sample["mark"] for sample in own.__getitems__([3, 1] * 9)] == [3, 1] * 9
    assert "reading Marked: left to Megatron, it has a __getitem__ of its own" in caplog.text


def test_inter_document_masking(core: Any, corpora: list[str], tmp_path: Path) -> None:
    for masking, reason in ((True, "inter_document_masking is on"), (False, None)):
        main = SimpleNamespace(mmap_bin_files=True, inter_document_masking=masking)
        assert unbatched_reason(core.GPTDataset, core.IndexedDataset, main) == reason
    if "inter_document_masking" not in core.GPTDatasetConfig.__dataclass_fields__:
        pytest.skip("Megatron-LM main has it, no release does yet")
    config = {"blend": (corpora[:1], None), **SPLIT, "inter_document_masking": True}
    theirs = samples(build(core, SIZES, tmp_path, **config))
    with installed():
        ours = build(core, SIZES, tmp_path, **config)
        assert_equal(samples(ours), theirs)
        assert_equal([d.__getitems__(places(d)) for d in ours], theirs)


def test_padding_and_places_from_the_end(core: Any, corpora: list[str], tmp_path: Path) -> None:
    config = {"blend": (corpora[:1], None), **SPLIT}
    theirs = build(core, SIZES, tmp_path, **config)[0]
    expected = [theirs[None], theirs[-1], theirs[2]]
    with installed():
        ours = build(core, SIZES, tmp_path, **config)[0]
        assert_equal(ours.__getitems__([None, -1, 2]), expected)
        assert ours.__getitems__([]) == []
        with pytest.raises(IndexError):
            ours.__getitems__([0, len(ours)])


def test_data_loaders(core: Any, corpora: list[str], tmp_path: Path) -> None:
    """Workers, collation and pickling."""
    from torch.utils.data import DataLoader

    config = {"blend": (corpora[:3], None), **SPLIT, "create_attention_mask": False}
    theirs = build(core, SIZES, tmp_path, **config)[0]
    expected = list(DataLoader(theirs, batch_size=4))
    with installed():
        ours = build(core, SIZES, tmp_path, **config)[0]
        assert_equal(list(DataLoader(ours, batch_size=4, num_workers=2)), expected)
        ours = build(core, SIZES, tmp_path, **config)[0]
        copy = pickle.loads(pickle.dumps(ours))
    assert_equal(list(DataLoader(copy, batch_size=4)), expected)


def test_the_low_level_dataset(core: Any, corpora: list[str], tmp_path: Path) -> None:
    theirs = core.IndexedDataset(corpora[1])
    with installed():
        ours = core.IndexedDataset(corpora[1])
        for i in (0, 1, len(ours) - 1, np.int32(3)):
            np.testing.assert_array_equal(ours[i], theirs[i])
            np.testing.assert_array_equal(ours.get(i, 2), theirs.get(i, 2))
        for a, b in zip(ours[2:7], theirs[2:7], strict=True):
            np.testing.assert_array_equal(a, b)
        assert len(ours) == len(theirs)
        assert ours.index.dtype is theirs.index.dtype
        assert isinstance(ours.bin_reader, type(theirs.bin_reader))
        view, lengths = ours[0], ours.sequence_lengths
        with pytest.raises(OutOfRange, match="must be within"):
            ours.get(0, 0, 10_000)  # Megatron reads on into the next sequence
        with pytest.raises(OutOfRange, match="bytes"):
            ours.bin_reader.read(np.uint16, 1, 1 << 40)
        assert_same = pickle.loads(pickle.dumps(ours))
        np.testing.assert_array_equal(assert_same[0], view)
        with pytest.raises(megaindex.MissingFile if hasattr(megaindex, "MissingFile") else OSError):
            core.IndexedDataset(str(tmp_path / "nothing"))
    del ours
    np.testing.assert_array_equal(view, theirs[0])
    np.testing.assert_array_equal(lengths, theirs.sequence_lengths)


def test_the_low_level_builder_writes_the_same_bytes(core: Any, tmp_path: Path) -> None:
    def write(name: str, multimodal: bool) -> list[bytes]:
        prefix = str(tmp_path / name)
        builder = core.IndexedDatasetBuilder(prefix + ".bin", np.uint16, multimodal)
        builder.add_document([1, 2, 3], [1, 2], [0, 1] if multimodal else None)
        builder.add_document([], [], [] if multimodal else None)
        if not multimodal and (tmp_path / "first.idx").exists():
            builder.add_index(str(tmp_path / "first"))
        builder.finalize(prefix + ".idx")
        return [(tmp_path / f"{name}{suffix}").read_bytes() for suffix in (".bin", ".idx")]

    write("first", False)
    for multimodal in (False, True):
        theirs = write("theirs", multimodal)
        with installed():
            assert write("ours", multimodal) == theirs
    with installed():
        builder = core.IndexedDatasetBuilder(str(tmp_path / "mm.bin"), np.int32, True)
        builder.add_document([1, 2, 3], [1, 2])  # releases up to 0.16 fail without modes
        builder.finalize(str(tmp_path / "mm.idx"))
        assert builder.sequence_modes == [0, 0]
        builder = core.IndexedDatasetBuilder(str(tmp_path / "merged.bin"), np.int32)
        builder.sequence_lengths = [np.int32(2**30)] * 3  # as add_index leaves them
        builder.document_indices = [0, 3]
        builder.finalize(str(tmp_path / "merged.idx"))
        pointers = (tmp_path / "merged.idx").read_bytes()[34 + 12 :][:24]
        assert np.frombuffer(pointers, np.int64).tolist() == [0, 2**32, 2**33]
        for wrong, right in ((2**31, 2**31 - 1), (-1, 0)):
            builder = core.IndexedDatasetBuilder(str(tmp_path / "long.bin"), np.int32)
            builder.sequence_lengths, builder.document_indices = [3, wrong], [0, 2]
            with pytest.raises(InvalidArgument, match="sequences hold 0 to 2147483647 tokens"):
                builder.finalize(str(tmp_path / "long.idx"))
            builder.sequence_lengths = [3, right]
            builder.finalize(str(tmp_path / "long.idx"))
