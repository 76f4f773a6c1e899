"""Walks a recipe's run step by step on clusters of any shape, and checks every row by hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megaindex.builders.recipe import OpenRecipe
from megaindex.loader.batch import BatchMaker
from megaindex.loader.checkpoint import SourceProgress
from megaindex.loader.samplers import MicroBatchSampler
from megaindex.loader.targets import targets_of
from megaindex.loader.token_readers import MappedTokens


@dataclass
class Walk:
    """What a run was handed so far."""

    consumed: int = 0
    served: list[tuple[str, int]] = field(default_factory=list)
    """(source, sample of it), in the order of training."""
    state: dict[str, Any] | None = None

    def go(self, opened: OpenRecipe, cluster: tuple[int, int], steps: int) -> None:
        """Up to ``steps`` steps on a cluster, every row of every rank checked."""
        ranks, micro = cluster
        layout, batch = opened.layout, opened.layout.recipe.batch
        samplers = [self._sampler(opened, rank, ranks, micro) for rank in range(ranks)]
        rounds = zip(*samplers, strict=True)  # every rank has equally many micro batches
        reader = MappedTokens(opened.datasets)
        maker = BatchMaker(opened.index, reader, targets=targets_of(opened))
        buffers = maker.allocate(ranks * micro)
        for _ in range(steps):
            size = batch.samples_after(1, self.consumed) - self.consumed
            ids: list[int] = []
            masked = 0
            for _, dealt in zip(range(size // (ranks * micro)), rounds, strict=False):
                assert {len(rows) for rows in dealt} == {micro}
                together = [i for rows in dealt for i in rows]
                maker.fill(buffers, together)
                check_rows(opened, buffers.arrays, together)
                ids += [i for i in together if i is not None]
                masked += together.count(None)
            if not ids:  # the run is over
                assert self.consumed == layout.num_samples
                return
            assert sorted(ids) == list(range(self.consumed, self.consumed + size - masked))
            assert masked in (0, layout.samples_masked)
            self._account(opened, sorted(ids), samplers[0].state_dict())
            assert masked == 0 or self.consumed == layout.num_samples

    def _sampler(self, opened: OpenRecipe, rank: int, ranks: int, micro: int) -> MicroBatchSampler:
        sampler = MicroBatchSampler(
            num_samples=opened.index.num_samples,
            micro_batch_size=micro,
            data_parallel_rank=rank,
            data_parallel_size=ranks,
            global_batch_size=opened.layout.recipe.batch,
            tail="pad" if opened.layout.samples_masked else "drop",
        )
        if self.state is not None:
            sampler.load_state_dict(self.state)
        return sampler

    def _account(self, opened: OpenRecipe, ids: list[int], state: dict[str, Any]) -> None:
        self.served += origins(opened, ids)
        self.consumed += len(ids)
        self.state = state
        assert state["consumed_samples"] == self.consumed == len(self.served)
        rows = SourceProgress.of_recipe(opened).totals(self.consumed)
        counts = {row.source: row.samples for row in rows}
        assert counts == {name: [s for s, _ in self.served].count(name) for name in counts}


def origins(opened: OpenRecipe, ids: list[int]) -> list[tuple[str, int]]:
    source, sample = opened.index.origin(np.array(ids, np.int64))
    names = [s.corpus.name for s in opened.sources]
    return [(names[i], k) for i, k in zip(source.tolist(), sample.tolist(), strict=True)]


def check_rows(opened: OpenRecipe, arrays: dict[str, Any], ids: list[int | None]) -> None:
    """Tokens are those of the documents, loss is on every token of text, on the answers of
    instruction data, and nowhere on padding."""
    for row, sample in enumerate(ids):
        tokens, loss = expected(opened, sample)
        np.testing.assert_array_equal(arrays["tokens"][row], tokens[:-1])
        np.testing.assert_array_equal(arrays["loss_mask"][row], loss)
        np.testing.assert_array_equal(arrays["labels"][row], tokens[1:] * (loss > 0))


def expected(opened: OpenRecipe, sample: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, one more than a sample has, and loss of a row; None is padding."""
    width = opened.index.sequence_length
    tokens, loss = np.zeros(width + 1, np.int64), np.zeros(width, np.float32)
    if sample is None:
        return tokens, loss
    at = 0
    columns = (column.tolist() for column in opened.index.locate([sample]))
    for source, document, offset, length in zip(*columns, strict=True):
        tokens[at : at + length] = opened.datasets[source].get(document, offset, length)
        mask = opened.sources[source].companion
        if mask is None:
            loss[:] = 1
        else:
            answers = mask.get(document, offset, length)[1:]
            loss[at : at + length - 1] = answers[: width - at]
        at += length
    return tokens, loss
