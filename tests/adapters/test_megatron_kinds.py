"""Datasets of megatron-core besides GPTDataset, built and read with and without the adapter."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.inputs import for_each
from support.megatron_blends import assert_equal, build, files, flat, installed, places, samples

from megaindex import IndexedDatasetWriter

WORDS = 200
SIZES = (40, 9, 5)
SPLIT = {"split": "80,15,5", "mid_level_dataset_surplus": 0.8}
MASKING: dict[str, Any] = {
    "masking_probability": 0.15,
    "short_sequence_probability": 0.1,
    "masking_max_ngram": 3,
    "masking_do_full_word": True,
    "masking_do_permutation": False,
    "masking_use_longer_ngrams": False,
    "masking_use_geometric_distribution": False,
}


class WordPieces:
    """A tokenizer of WordPieces; every third continues a word."""

    vocab_size = WORDS + 50
    cls, sep, mask, pad, bos, eos, eod = range(WORDS, WORDS + 7)
    additional_special_tokens_ids = tuple(range(WORDS + 10, WORDS + 50))
    inv_vocab = {i: f"##{i}" if i % 3 == 2 else f"{i}" for i in range(WORDS + 50)}
    unique_identifiers: OrderedDict[str, str] = OrderedDict(name="word pieces")


@pytest.fixture(scope="module")
def sentences(megatron_datasets: Any, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Prefixes of corpora of documents of several sentences each, one sequence a sentence."""
    generator = np.random.default_rng(7)
    prefixes = []
    for number, dtype in enumerate((np.uint16, np.int32, np.uint16)):
        prefix = tmp_path_factory.mktemp("sentences") / f"c{number}"
        with IndexedDatasetWriter(str(prefix), dtype) as writer:
            for _ in range(60):
                lengths = generator.integers(3, 30, int(generator.integers(2, 7)))
                writer.add_document(generator.integers(0, WORDS, int(lengths.sum())), lengths)
        prefixes.append(str(prefix))
    return prefixes


def kinds(core: Any) -> dict[str, dict[str, Any]]:
    """For each kind its class, and the settings it needs."""
    from megatron.core.datasets import bert_dataset, gpt_dataset, multimodal_dataset, t5_dataset

    class SmallMock(multimodal_dataset.MockMultimodalDataset):  # type: ignore[misc]
        @staticmethod
        def build_low_level_dataset(path: None, config: Any) -> Any:
            low_level = gpt_dataset.MockGPTLowLevelDataset(config.tokenizer)
            low_level.size = 200
            low_level.sequence_lengths = low_level.sequence_lengths[:200]
            return low_level

    masks = dict.fromkeys(("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), False)
    bert = {
        "cls": bert_dataset.BERTMaskedWordPieceDataset,
        "config_cls": bert_dataset.BERTMaskedWordPieceDatasetConfig,
        "sequence_length": 64,
        **MASKING,
    }
    return {
        "bert": {**bert, "classification_head": True},
        "bert without a head": {**bert, "classification_head": False},
        "t5": {
            "cls": t5_dataset.T5MaskedWordPieceDataset,
            "config_cls": t5_dataset.T5MaskedWordPieceDatasetConfig,
            "sequence_length": 64,
            "sequence_length_decoder": 40,
            **MASKING,
            "masking_max_ngram": 10,
            "masking_do_full_word": False,
            "masking_use_geometric_distribution": True,
        },
        "multimodal": {
            "cls": SmallMock,
            "config_cls": multimodal_dataset.MultimodalDatasetConfig,
            "image_h": 4,
            "image_w": 5,
            **masks,
        },
    }


def made(core: Any, kind: str, cache: Path, **config: Any) -> list[Any]:
    chosen = kinds(core)[kind]
    part: dict[str, Any] = {} if kind == "multimodal" else {**SPLIT, **config}
    return build(core, SIZES, cache, tokenizer=WordPieces(), **chosen, **part)


def read(datasets: list[Any]) -> list[list[Any]]:
    """Samples with arrays as tensors, to be compared with `assert_equal`."""
    import torch

    return [
        [
            {n: torch.as_tensor(v) if isinstance(v, np.ndarray) else v for n, v in row.items()}
            for row in rows
        ]
        for rows in samples(datasets)
    ]


@for_each(
    ("kind", "sources"),
    [("bert", 1), ("bert", 3), ("bert without a head", 1), ("t5", 1), ("t5", 3), ("multimodal", 1)],
)
def test_samples_and_cache_are_equal(
    kind: str, sources: int, core: Any, sentences: list[str], tmp_path: Path
) -> None:
    blend = (sentences[:sources], None if sources == 1 else [0.5, 0.3, 0.2])
    theirs_in, ours_in = tmp_path / "theirs", tmp_path / "ours"
    theirs = read(made(core, kind, theirs_in, blend=blend))
    with installed():
        ours = made(core, kind, ours_in, blend=blend)
        assert_equal(read(ours), theirs)
        assert_equal(read(made(core, kind, theirs_in, blend=blend)), theirs)
        for dataset, expected in zip(flat(ours), theirs, strict=True):
            if hasattr(dataset, "__getitems__"):
                batch = [dataset.__getitems__([i])[0] for i in places(dataset)]
                assert [list(sample) for sample in batch] == [list(sample) for sample in expected]
        if kind != "multimodal":  # its mock documents are not on disk
            assert files(ours_in) == files(theirs_in)
    assert_equal(read(made(core, kind, ours_in, blend=blend)), theirs)
    assert_equal(read(ours), theirs)  # go on after the adapter was taken out


def test_blocks_of_a_corpus_on_disk(
    core: Any, sentences: list[str], megatron_helpers: Any, tmp_path: Path
) -> None:
    """REALM's call: views of the .idx of the blocks and of their titles."""
    import megaindex.helpers

    with installed():
        blocks = core.IndexedDataset(sentences[0])
        documents = blocks.document_indices.size - 1
        with IndexedDatasetWriter(str(tmp_path / "titles"), np.uint16) as writer:
            for number in range(documents):
                writer.add_document(np.zeros(1 + number % 5, np.uint16))
        titles = core.IndexedDataset(str(tmp_path / "titles"))
        arrays = (blocks.document_indices, blocks.sequence_lengths, titles.sequence_lengths)
        assert not any(array.flags.aligned for array in arrays)
        for one in (True, False):
            numbers = (3, 2**63 - 1 if one else 50, 45, 1234, False, one)
            np.testing.assert_array_equal(
                megaindex.helpers.build_blocks_mapping(*arrays, *numbers),
                megatron_helpers.build_blocks_mapping(*arrays, *numbers),
            )
