"""Log lines and status: megaindex is active, which datasets it serves, which it leaves and why."""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support import neox_stand_in
from support.megatron_blends import assert_equal, build, installed, places, samples
from support.neox_running import SIZES as SIZES_OF_NEOX
from support.neox_running import adding, arguments, batches, dataset_of, loaders_of

import megaindex
import megaindex.adapters.megatron
import megaindex.adapters.neox
from megaindex.adapters import reports, status
from megaindex.adapters.neox import framework as framework_module
from megaindex.adapters.neox.framework import framework
from megaindex.adapters.policy import after_import

SPLIT = {"split": "60,20,20"}
SIZES = (60, 9, 5)
CASE = {
    "sizes": [9, 40, 9], "num_documents": 3, "pack_impl": "packed", "seed": 1, "num_samples": 4,
    "sequence_length": 10, "allow_chopped": True, "prompts": None, "reward": False, "ref": False,
}  # fmt: skip


@pytest.fixture(autouse=True)
def at_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "megaindex")


def rows(kind: str) -> list[reports.ServedDataset]:
    return [served for served in status().datasets if served.kind == kind]


def test_lines_of_megatron(
    core: Any, corpora: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One that megaindex is active, one for each dataset, and Megatron's own."""
    caplog.set_level(logging.INFO, "megatron.core.datasets.gpt_dataset")
    config = {"blend": (corpora[:2], [0.5, 0.5]), **SPLIT}
    with installed():
        active = f"megaindex {megaindex.__version__} is active under megatron-core "
        assert caplog.text.count(active) == 1
        build(core, SIZES, tmp_path, **config)
        [train, *_] = build(core, SIZES, tmp_path, **config)
        assert caplog.text.count(active) == 1
        first = train.datasets[0]
        epochs = first.document_index.size // first.indices.size
        samples_of_it = f"{len(first)} samples, {epochs} epoch"
        cache = f"{first.unique_description_hash}"
        for how in ("built", "opened"):
            assert f"GPTDataset {corpora[0]} (train): {how} {samples_of_it}" in caplog.text
            assert f"BlendedDataset train of 2 datasets: {how} {len(train)} samples" in caplog.text
        assert f"from {tmp_path}/{cache}-GPTDataset-train" in caplog.text
        assert "6 datasets of a blend, 6 of them built, in 0." in caplog.text
        assert caplog.text.count("> total number of epochs: ") == 12
        assert f"> total number of epochs: {epochs}" in caplog.text
        assert f"> total number of samples: {len(first)}" in caplog.text
        build(core, SIZES, tmp_path, blend=([corpora[2]], None), **SPLIT)
        assert f"GPTDataset {corpora[2]} (test): built" in caplog.text
        served = {(s.kind, s.name): s for s in status().datasets}
        row = served["GPTDataset", f"{corpora[0]} (train)"]
        assert (row.served_by, row.how, row.samples) == ("megaindex", "opened", len(first))
        assert len(rows("GPTDataset")) == 9
        assert "is active under megatron-core" in str(status())
    assert status() == reports.Status(installed={}, datasets=(), waits={})


def test_nothing_is_said_on_other_ranks(
    core: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: 1)
    with installed():
        reports.MEGATRON.serve("GPTDataset", "web (train)", "built", samples=3)
        reports.MEGATRON.leave("GPTDataset", "code (train)", "it is of another kind")
        assert caplog.text == ""
        assert [served.name for served in status().datasets] == ["web (train)", "code (train)"]


class Foreign:
    """A dataset class of another kind."""

    def __init__(self, *_: Any) -> None:
        pass

    def __len__(self) -> int:
        return 0

    @staticmethod
    def build_low_level_dataset(path: str, config: Any) -> Any:
        return [path]

    @staticmethod
    def numel_low_level_dataset(low_level: Any) -> int:
        return len(low_level)


def test_rank_0_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reports.on_rank_0()
    monkeypatch.setenv("RANK", "3")
    assert not reports.on_rank_0() or torch.distributed.is_initialized()


def test_the_line_waits_for_logging_to_be_set_up(
    core: Any, corpora: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """``python -m megaindex.adapters.megatron`` installs before Megatron configures logging."""
    caplog.set_level(logging.WARNING, "megaindex")
    with installed():
        assert caplog.text == ""
        caplog.set_level(logging.INFO, "megaindex")
        build(core, SIZES, None, cls=Foreign, blend=([corpora[0]], None), **SPLIT)
        lines = [record.getMessage() for record in caplog.records]
        assert "is active under megatron-core" in lines[0]
        assert lines[1].startswith(f"megaindex: Foreign {corpora[0]} (train): left to Megatron, ")


def test_what_is_left_to_megatron(
    core: Any, corpora: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Reversed(core.GPTDataset):  # type: ignore[misc]
        def __getitem__(self, idx: int) -> Any:
            return super().__getitem__(len(self) - 1 - idx)

    class Counting(core.GPTDataset):  # type: ignore[misc]
        def _get_num_epochs(self, num_tokens_per_epoch: int) -> int:
            return int(super()._get_num_epochs(num_tokens_per_epoch))

    with installed():
        for cls in (Reversed, Counting):
            for _ in "12":
                build(core, SIZES, tmp_path, cls=cls, blend=([corpora[0]], None), **SPLIT)
        [read, counted, *_] = [s for s in status().datasets if s.served_by == "Megatron"]
        assert (read.kind, read.how) == ("reading", "Reversed has a __getitem__ of its own")
        assert counted.how == "Counting has a _get_num_epochs of its own"
        assert caplog.text.count("Reversed has a __getitem__ of its own") == 1
        assert caplog.text.count(f"Counting {corpora[0]} (train): left to Megatron") == 1
        build(core, SIZES, None, blend=([corpora[1]], None), mmap_bin_files=False, **SPLIT)
        assert "reading GPTDataset: left to Megatron, mmap_bin_files is off" in caplog.text


@pytest.mark.parametrize("mode", ["fast_cache_load", "defer_npy_index_mmap"])
def test_modes_that_do_not_look(
    core: Any,
    corpora: list[str],
    tmp_path: Path,
    mode: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if mode not in core.GPTDatasetConfig.__dataclass_fields__:
        pytest.skip("this megatron-core has no such mode")
    blend = (corpora[:1] + corpora[2:3], [0.5, 0.5])
    config: dict[str, Any] = {
        "blend_per_split": [blend, None, None],
        "mid_level_dataset_surplus": 1.0,
    }
    with installed():
        build(core, (40, 0, 0), tmp_path, **config)
        caplog.clear()
        modes = {"fast_cache_load": True, mode: True}
        build(core, (40, 0, 0), tmp_path, **config, **modes)
        assert f"GPTDataset {corpora[0]} (train): left to Megatron, fast_cache_load" in caplog.text
        assert "BlendedDataset train of 2 datasets: left to Megatron, fast" in caplog.text
        assert f"IndexedDataset {corpora[0]}: left to Megatron, fast_cache_load" in caplog.text


@pytest.mark.parametrize("version", ["0.8.0", "0.11.0", "0.12.3", "0.16.1", "0.21.0", "1.0", None])
def test_versions(
    version: str | None,
    core: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megaindex.adapters.megatron import core as modules
    from megaindex.errors import InvalidArgument

    stub = ModuleType("package_info")
    if version is not None:
        stub.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.core.package_info", stub)
    modules.core.cache_clear()
    try:
        if version in ("0.8.0", "0.11.0"):
            with pytest.raises(InvalidArgument, match=f"{version} is not .* 0.12 to 0.20 are"):
                megaindex.adapters.megatron.install()
            assert not megaindex.adapters.megatron.is_installed()
        elif version == "0.12.3":
            assert modules._version()[1].object_storage_config == "s3_config"
        else:
            with installed():
                assert modules.core().names.object_storage_config == "object_storage_config"
            with installed():
                warned = caplog.text.count("is newer than the releases that were tested")
                assert warned == (version != "0.16.1")
    finally:
        modules.core.cache_clear()


def test_the_version_of_a_release_that_cannot_be_imported(
    core: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older releases want packages that newer Pythons have not; they are refused as what they
    are."""
    from megatron.core.package_info import __version__

    from megaindex.adapters.megatron import core as modules

    monkeypatch.setitem(sys.modules, "megatron.core.package_info", None)
    assert modules._read_version() == __version__
    elsewhere: Any = ModuleType("megatron")
    monkeypatch.setitem(sys.modules, "megatron", elsewhere)
    assert modules._read_version() == "unknown"  # a module without a spec
    elsewhere.__spec__ = ModuleSpec("megatron", None, is_package=True)
    elsewhere.__spec__.submodule_search_locations = [str(tmp_path)]
    assert modules._read_version() == "unknown"
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "package_info.py").write_text("__version__ = '0.9'")
    assert modules._read_version() == "0.9"


def test_local_files_beside_a_multi_storage_client(
    core: Any,
    corpora: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """megatron-core switches it on where it can be imported; local paths are megaindex's still."""
    feature = pytest.importorskip("megatron.core.msc_utils")
    config = {"blend": (corpora[:2], [0.5, 0.5]), "mid_level_dataset_surplus": 1.0, **SPLIT}
    stub = ModuleType("multistorageclient")
    stub.open = open  # type: ignore[attr-defined]
    monkeypatch.setattr(feature, "msc", stub)
    monkeypatch.setattr(feature.MultiStorageClientFeature, "_enabled", True)
    assert feature.MultiStorageClientFeature.is_enabled()
    for more in ({}, {"mmap_bin_files": False}):
        theirs = samples(build(core, SIZES, tmp_path / f"theirs-{len(more)}", **config, **more))
        with installed():
            ours = build(core, SIZES, tmp_path / f"ours-{len(more)}", **config, **more)
            assert_equal(samples(ours), theirs)
            assert_equal([d.__getitems__(places(d)) for d in ours], theirs)
            served = [s for s in status().datasets if s.kind != "reading"]
            assert {s.served_by for s in served} == {"megaindex"}
    assert "object store" not in caplog.text


def test_lines_of_neox(
    neox: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    megaindex.adapters.neox.install(variance_buffer="exact")
    active = "is active under GPT-NeoX, variance_buffer exact"
    assert caplog.text.count(active) == 1
    args = arguments(tmp_path, [[30] * 9, [50] * 9], train_iters=40)
    for how in ("built", "opened"):
        blend = loaders_of(args)["train"].dataset
        [first, second] = blend.datasets
        out = capsys.readouterr().out
        for dataset in (first, second):
            epochs = dataset.megaindex.epoch(0).index.num_epochs
            size = f"{dataset.shuffle_idx.size} samples, {epochs} epoch"
            assert f"GPT2Dataset {dataset.name} of " in caplog.text
            assert f"{how} {size}" in caplog.text
            assert f"    total number of samples: {dataset.shuffle_idx.size + 1}\n" in out
            assert f"    total number of epochs: {epochs}\n" in out
        assert "   dataset 1, input: 0.5, achieved: 0.5" in out
        assert ("could not find index map files" in out) == (how == "built")
    assert f"BlendableDataset train_0 and 1 more: built {len(blend)} samples" in caplog.text
    assert "left to GPT-NeoX" not in caplog.text
    assert active not in out
    megaindex.adapters.neox.uninstall()
    assert status().datasets == ()


def test_lines_of_neox_where_logging_is_not_set_up(
    neox: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """As in GPT-NeoX's own train.py: they are printed."""
    caplog.set_level(logging.WARNING, "megaindex")
    megaindex.adapters.neox.install()
    dataset_of(CASE, tmp_path)
    out = capsys.readouterr().out
    assert out.count("is active under GPT-NeoX\n") == 1
    assert "megaindex: GPT2Dataset train of " in out
    assert caplog.text == ""
    monkeypatch.delattr(neox_stand_in.data_utils(), "print_rank_0")  # which a fork may lack
    for is_first, printed in ((True, "a line\n"), (False, "")):
        monkeypatch.setattr(framework_module, "on_rank_0", lambda is_first=is_first: is_first)
        framework().print_line("a line")
        assert capsys.readouterr().out == printed


def test_what_is_left_to_neox(
    neox: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(neox_stand_in.GPT2Dataset, "__init__", lambda self, *given: None)
    megaindex.adapters.neox.install()
    utils = neox_stand_in.data_utils()
    prefix = arguments(tmp_path, [[9, 9]]).paths[0]
    for low_level in (
        adding(neox_stand_in.MMapIndexedDataset, "get")(prefix),
        SimpleNamespace(sizes=np.array([4])),
    ):
        neox_stand_in.GPT2Dataset("train", prefix, np.arange(2), low_level, 3, None, 4, 1)
    assert (
        f"train of {prefix}: left to GPT-NeoX, AddingMMapIndexedDataset has reading" in caplog.text
    )
    assert "SimpleNamespace is not one of GPT-NeoX's indexed datasets" in caplog.text
    with monkeypatch.context() as patch:
        subclass = adding(neox_stand_in.GPT2Dataset, "__getitem__")
        patch.setattr(neox_stand_in, "GPT2Dataset", subclass)
        for _ in "12":
            dataset_of(CASE, tmp_path / "own")
    assert caplog.text.count("AddingGPT2Dataset has a __getitem__ of its own") == 1
    args = arguments(tmp_path / "other", [[9, 9]])
    utils.make_data_loader([1, 2, 3, 4], args)
    assert "dataset list: left to GPT-NeoX" in caplog.text
    loader = torch.utils.data.DataLoader([1, 2, 3])
    assert next(utils.cycle(loader)) == 1
    assert "cycle DataLoader: left to GPT-NeoX, itertools.cycle keeps" in caplog.text


def test_status_needs_no_framework() -> None:
    code = (
        "import sys, megaindex.adapters as a; print(a.status());"
        "assert not {'torch', 'megatron'} & set(sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout == "megaindex is installed under no framework\n"


def test_workers_say_nothing(neox: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    megaindex.adapters.neox.install()
    args = arguments(tmp_path, [[30] * 9])
    dataset = loaders_of(args)["train"].dataset
    heard = list(torch.utils.data.DataLoader(Asking(), num_workers=1))
    assert [bool(answer) for answer in heard] == [False]
    assert reports.on_rank_0()
    assert len(batches(args, 2)) == 2
    assert len(dataset) > 0


class Asking(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 1

    def __getitem__(self, k: int) -> bool:
        return reports.on_rank_0()


def test_a_module_is_patched_when_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("patched_late", "patched_never"):
        (tmp_path / f"{name}.py").write_text("VALUE = 1\n")
    seen: list[str] = []
    withdraw = after_import("patched_late", lambda module: seen.append(module.__name__))
    try:
        importlib.import_module("patched_never")
        assert seen == []
        importlib.import_module("patched_late")
        assert seen == ["patched_late"]
    finally:
        withdraw()
        for name in ("patched_late", "patched_never"):
            sys.modules.pop(name, None)


def test_the_waits_of_training_are_measured(neox: Any, tmp_path: Path) -> None:
    """Of two micro batches a step; validation is not measured."""
    megaindex.adapters.neox.install()
    args = arguments(tmp_path, SIZES_OF_NEOX, gradient_accumulation_steps=2, train_batch_size=8)
    batches(args, 1, part=1)
    waits = status().waits["GPT-NeoX"]
    assert waits.steps == 0
    batches(args, 5)
    assert status().waits["GPT-NeoX"] is waits
    assert (waits.steps, sum(waits.histogram)) == (2, 2)
    assert "GPT-NeoX: " in str(status())
    assert "of 2 steps waited" in str(status())
