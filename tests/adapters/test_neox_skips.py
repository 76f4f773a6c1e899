"""Skips under GPT-NeoX: iterations are numbered on, steps keep their data, masks are labels."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support import neox_stand_in
from support.neox_running import arguments, batches, loaders_of

import megaindex.adapters.neox as adapter
from megaindex import FormatError, IndexedDataset, InvalidArgument, Skip
from megaindex.adapters.neox.skips import samples_index
from megaindex.index.balance import CostModel

LENGTHS = np.random.default_rng(8).integers(1, 40, 150).tolist()


def settings(folder: Path, blend: bool = False, **given: Any) -> SimpleNamespace:
    sizes = [LENGTHS, LENGTHS[::-1], LENGTHS[:70]] if blend else [LENGTHS]
    args = arguments(
        folder, sizes, **{"train_iters": 10, "batch_size": 2, "train_batch_size": 4,
                          "gradient_accumulation_steps": 2, **given},
    )  # fmt: skip
    args.data_path = None if blend or args.labels else args.paths[0]
    return args


def served(args: SimpleNamespace, iterations: int, part: int = 0) -> list[list[Any]]:
    """The rows of each iteration of one rank."""
    utils = neox_stand_in.data_utils()
    iterator = utils.shift_and_wrap_data_loaders(args, loaders_of(args))[part]
    micro = [batch["text"].tolist() for batch in itertools.islice(iterator, 2 * iterations)]
    return [[*a, *b] for a, b in zip(micro[::2], micro[1::2], strict=True)]


@pytest.mark.parametrize("blend", [False, True])
def test_steps_are_dropped_and_moved(neox: Any, tmp_path: Path, blend: bool) -> None:
    adapter.install()
    plain = served(settings(tmp_path, blend), 10)
    valid = served(settings(tmp_path, blend), 1, part=1)
    adapter.install(skip=[Skip(steps="2-3"), Skip(steps=6, move=True)])
    args = settings(tmp_path, blend)
    expected = [plain[k] for k in (0, 1, 4, 5, 7, 8, 9, 6)]
    assert served(args, 8) == expected
    assert args.train_iters == 8
    again = settings(tmp_path, blend, iteration=3)
    assert served(again, 5) == expected[3:]
    assert served(settings(tmp_path, blend), 1, part=1) == valid
    adapter.install(skip=Skip(steps="2-3"), balance=CostModel(linear=0, attention=1))
    balanced = served(settings(tmp_path, blend), 8)
    assert [sorted(step) for step in balanced] == [sorted(plain[k]) for k in (0, 1, *range(4, 10))]


def test_documents_are_masked_in_their_labels(neox: Any, tmp_path: Path) -> None:
    adapter.install()
    args = settings(tmp_path, labels=True)
    plain = batches(args, 20)
    index = samples_index(loaders_of(args)["train"].dataset)
    adapter.install(skip=Skip(documents=[3, 7, 8, 40], from_step=3))
    args = settings(tmp_path, labels=True)
    rows = 0
    for number, (batch, other) in enumerate(zip(batches(args, 20), plain, strict=True)):
        assert np.array_equal(batch["text"], other["text"])
        for row in range(2):
            position = 2 * number + row
            spans = index.locate([position])
            expected = other["label"][row].copy()
            at = 0
            for document, length in zip(spans.document, spans.length, strict=True):
                if document in (3, 7, 8, 40) and position >= 12:
                    expected[max(1, at) : at + length] = -100
                    rows += 1
                at += length
            assert batch["label"][row].tolist() == expected.tolist()
    assert rows


@pytest.mark.parametrize("labels", [True, False])
def test_documents_are_removed(neox: Any, tmp_path: Path, labels: bool) -> None:
    """With labels, or without where every document ends in an end token."""
    end = 7
    own = {"labels": labels, "eod_mask_loss": True, "tokenizer": SimpleNamespace(eod=end)}
    adapter.install()
    path = settings(tmp_path, **own).paths[0]
    tokens = np.memmap(path + ".bin", IndexedDataset(path).dtype, "r+")
    if not labels:
        tokens[np.cumsum(LENGTHS) - 1] = end
    tokens.flush()
    plain = batches(settings(tmp_path, **own), 20)
    index = samples_index(loaders_of(settings(tmp_path, **own))["train"].dataset)
    skip = Skip(documents=[3, 7, 8, 40], from_step=3, remove=True)
    adapter.install(skip=skip)
    rows = 0
    found = batches(settings(tmp_path, **own), 20)
    for number, (batch, other) in enumerate(zip(found, plain, strict=True)):
        for row in range(2):
            spans = index.locate([2 * number + row])
            removed = np.isin(np.repeat(spans.document, spans.length), (3, 7, 8, 40))
            removed &= 2 * number + row >= 12
            rows += int(removed.any())
            expected = np.where(removed, end, other["text"][row])
            assert batch["text"][row].tolist() == expected.tolist()
            lost = removed | np.append(False, removed[:-1])
            if labels:
                expected = np.where(lost, -100, other["label"][row])
                assert batch["label"][row].tolist() == expected.tolist()
            else:
                assert (batch["text"][row][:-1][lost[1:]] == end).all()
    assert rows > 2
    if labels:
        return
    with pytest.raises(InvalidArgument, match="remove: without labels.* eod_mask_loss"):
        loaders_of(settings(tmp_path, **{**own, "eod_mask_loss": False}))
    with pytest.raises(InvalidArgument, match="remove: .* eod"):
        loaders_of(settings(tmp_path, **{**own, "tokenizer": SimpleNamespace()}))
    served = loaders_of(settings(tmp_path, **own))["train"].dataset
    tokens[np.cumsum(LENGTHS) - 1] = end + 1
    tokens.flush()
    with pytest.raises(InvalidArgument, match="each document must end with one, 7"):
        loaders_of(settings(tmp_path, **own))  # of documents looked at
    with pytest.raises(InvalidArgument, match="each document must end with one, 7"):
        served.__getitems__(list(range(12, len(served))))  # of those before removed ones


def test_a_checkpoint_holds_the_skips(neox: Any, tmp_path: Path) -> None:
    """A run goes on with the same skips and with more of them; others are refused."""
    adapter.install()
    plain = served(settings(tmp_path), 10)

    def launch(skip: Any, iteration: int, iterations: int) -> list[Any]:
        """Go on after an iteration, and save as GPT-NeoX does."""
        adapter.install(skip=skip)
        args = settings(tmp_path, iteration=iteration, load=str(tmp_path / "saved"))
        args.config_files = {"a.yml": "{}"} if iteration else None
        found = served(args, iterations)
        folder = tmp_path / "saved" / f"global_step{iteration + iterations}" / "configs"
        folder.mkdir(parents=True)
        for name, text in (args.config_files or {}).items():
            (folder / name).write_text(text)
        return found

    assert launch(None, 0, 2) == plain[:2]
    with pytest.raises(InvalidArgument, match=r"step2/configs/.*json: skip: samples 4 to 7 are to"):
        launch(Skip(steps="1"), 2, 1)
    first = [Skip(steps="3"), Skip(steps="4", move=True)]
    assert launch(first, 2, 2) == [plain[2], plain[5]]
    for wrong, reason in (
        (None, "skips samples 12 to 15 .dropped., and this one does not"),
        ([*first, Skip(steps="5")], "samples 20 to 23 are to be skipped, and 16 samples were"),
    ):
        with pytest.raises(InvalidArgument, match=reason):
            launch(wrong, 4, 1)
    more = [*first, Skip(steps="6")]
    assert launch(more, 4, 3) == plain[7:]
    assert launch(more, 7, 1) == [plain[4]]
    record = next((tmp_path / "saved/global_step7/configs").glob("megaindex*"))
    record.write_text("{")
    with pytest.raises(FormatError, match="not valid JSON"):
        launch(more, 7, 1)


def test_what_is_refused(neox: Any, tmp_path: Path) -> None:
    adapter.install(skip=Skip(documents=[3]))
    with pytest.raises(InvalidArgument, match="give train_label_data_paths"):
        loaders_of(settings(tmp_path))
    adapter.install(skip=Skip(steps="3"))
    with pytest.raises(InvalidArgument, match="train_epochs reads the data again"):
        loaders_of(settings(tmp_path, train_epochs=1))
    args = settings(tmp_path, train_iters=40)
    loaders = loaders_of(args)
    args.train_iters = 4000
    with pytest.raises(InvalidArgument, match="the run reads 16000 samples"):
        neox_stand_in.data_utils().make_data_loader(loaders["train"].dataset._dataset, args)
    adapter.install(skip=Skip(steps="12"))
    with pytest.raises(InvalidArgument, match="step 12 lies beyond the end"):
        loaders_of(settings(tmp_path))
