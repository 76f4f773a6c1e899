"""Cost model of a row, and the work of an index's samples.

Attention within documents does work that grows with the square of a document's length, everything
else with the number of tokens. docs/balance.md derives the constants.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from megaindex._types import F64, I64
from megaindex.arithmetic import INT64_MAX
from megaindex.errors import InvalidArgument
from megaindex.index.spans import Index, sequence_lengths_at
from megaindex.kernels import active
from megaindex.validation import (
    CheckpointReader,
    check_between,
    check_choice,
    check_exact,
    check_flag,
    check_setting,
    shown,
)

_MOST_SHAPE = 2**31 - 1  # of each number of a shape


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Work of a row: ``linear`` for each of its tokens, and ``attention`` for each squared token of
    its documents' lengths.

    A row of S tokens with documents of a, b, … tokens is ``linear * S + attention * (a² + b² +
    …)``. The unit is free: floating-point operations as from `from_shape`, or measured seconds.

    Args:
        linear: work of a token apart from attention.
        attention: work of a squared token of a document's length.
        context_parallel_size: ranks that share a row, each of them S / size of its tokens.
        partition: ``"document"`` gives each of these ranks the same part of the attention of every
            document, as kernels that take ``cu_seqlens_padded`` divide it; ``"row"`` cuts the row
            into 2 x size equal parts, of which rank r has r and 2 x size - 1 - r, whatever
            documents lie in them.

    Raises:
        InvalidArgument: a constant is negative, not finite or too large, or both are zero; a size
            is below 1, or the partition another.
    """

    linear: int | float
    attention: int | float
    context_parallel_size: int = 1
    partition: Literal["document", "row"] = "document"

    def __post_init__(self) -> None:
        for name in ("linear", "attention"):
            value = check_exact(name, getattr(self, name))
            plain = int(value) if isinstance(value, int) else float(value)
            if plain < 0:
                raise InvalidArgument(f"{name} must be >= 0, got {shown(plain)}")
            if plain > _MOST_CONSTANT:
                raise InvalidArgument(
                    f"{name} must be at most {_MOST_CONSTANT:.0e}, so that the work of a run is "
                    f"finite, got {shown(plain)}; use a larger unit"
                )
            object.__setattr__(self, name, plain)
        if self.linear == self.attention == 0:
            raise InvalidArgument(
                "linear and attention must not both be 0: rows would have no work; give the "
                "constants of the model, as from CostModel.from_shape"
            )
        size = check_between("context_parallel_size", self.context_parallel_size, 1)
        object.__setattr__(self, "context_parallel_size", size)
        check_choice("partition", self.partition, ("document", "row"))

    @classmethod
    def from_shape(
        cls,
        *,
        hidden_size: int,
        num_layers: int,
        num_attention_heads: int,
        ffn_hidden_size: int,
        vocab_size: int,
        num_query_groups: int | None = None,
        kv_channels: int | None = None,
        gated: bool = True,
        num_experts: int | None = None,
        moe_router_topk: int | None = None,
        causal: bool = True,
    ) -> CostModel:
        """Return the floating-point operations of forward and backward pass, exact integers.

        Args:
            hidden_size: width of the model.
            num_layers: number of transformer layers.
            num_attention_heads: query heads of a layer.
            ffn_hidden_size: inner width of the feed-forward network, or of one expert.
            vocab_size: entries of the vocabulary, with padding.
            num_query_groups: key and value heads of a layer. Default: ``num_attention_heads``.
            kv_channels: width of a head. Default: ``hidden_size / num_attention_heads``.
            gated: the feed-forward network has three matrices, as with SwiGLU, instead of two.
            num_experts: experts of a layer, among which a router chooses. Default: one network.
            moe_router_topk: experts that a token passes through.
            causal: tokens attend only to themselves and those before, half of all pairs.

        Raises:
            InvalidArgument: a number is out of range, or does not divide another that it must.
        """
        head = kv_channels
        if head is None:
            heads = _shape("num_attention_heads", num_attention_heads)
            head, rest = divmod(_shape("hidden_size", hidden_size), heads)
            if rest:
                raise InvalidArgument(
                    f"hidden_size {hidden_size} must be a multiple of num_attention_heads {heads}; "
                    "or give kv_channels, the width of a head"
                )
        if (num_experts is None) != (moe_router_topk is None):
            raise InvalidArgument(
                "num_experts and moe_router_topk must be given together: the experts of a layer, "
                f"and those of a token, got {shown(num_experts)} and {shown(moe_router_topk)}"
            )
        width = _shape("hidden_size", hidden_size)
        layers = _shape("num_layers", num_layers)
        queries = _shape("num_attention_heads", num_attention_heads) * _shape("kv_channels", head)
        groups = num_attention_heads if num_query_groups is None else num_query_groups
        groups = _shape("num_query_groups", groups)
        if num_attention_heads % groups:
            raise InvalidArgument(
                f"num_attention_heads {num_attention_heads} must be a multiple of "
                f"num_query_groups {groups}"
            )
        network = (
            (2 + check_flag("gated", gated)) * width * _shape("ffn_hidden_size", ffn_hidden_size)
        )
        if num_experts is not None and moe_router_topk is not None:
            experts = _shape("num_experts", num_experts)
            network *= check_between(
                "moe_router_topk", moe_router_topk, 1, experts, most_is="num_experts"
            )
            network += width * experts  # the router
        keys_and_values = 2 * width * groups * head
        weights = layers * (2 * width * queries + keys_and_values + network)
        weights += width * _shape("vocab_size", vocab_size)
        # two operations for each weight or pair forward, and twice as many backward
        pairs = 12 * layers * queries
        return cls(linear=6 * weights, attention=pairs // (1 + check_flag("causal", causal)))

    @classmethod
    def preset(cls, name: str) -> CostModel:
        """Return the cost model of a published shape: one of `PRESETS`.

        Raises:
            InvalidArgument: the name is not one of a preset.
        """
        if not isinstance(name, str) or name not in PRESETS:
            raise InvalidArgument(
                f"the cost model must be one of {', '.join(PRESETS)}, got {shown(name)}; or use "
                "CostModel.from_shape"
            )
        return cls.from_shape(**PRESETS[name])

    @classmethod
    def parse(cls, text: str, name: str = "the cost model") -> CostModel:
        """Return the cost model of a text: the name of a preset, or ``LINEAR:ATTENTION``.

        Raises:
            InvalidArgument: the text is neither, or a constant is out of range.
        """
        if text in PRESETS:
            return cls.preset(text)
        linear, colon, attention = text.partition(":")
        if not colon:
            raise InvalidArgument(
                f"{name} must be one of {', '.join(PRESETS)}, or LINEAR:ATTENTION such as "
                f"4.5e10:786432, got {shown(text)}"
            )
        constants: dict[str, Any] = {
            "linear": _constant(linear, f"{name}: linear"),
            "attention": _constant(attention, f"{name}: attention"),
        }
        try:
            return cls(**constants)
        except InvalidArgument as error:
            raise InvalidArgument(f"{name}: {error}") from None

    @property
    def crossover(self) -> float:
        """Length of a document whose attention is as much work as the rest; inf without
        attention."""
        return self.linear / self.attention if self.attention else math.inf

    def row_work(self, squares: npt.ArrayLike, sequence_length: int) -> F64:
        """Return the work of each rank on rows of ``sequence_length`` tokens, float64.

        Args:
            squares: of `squared_lengths` for rows that one rank works on, of `rank_squares` for
                those that several share; 0 for padding.
            sequence_length: tokens of a row.
        """
        length = check_setting("sequence_length", sequence_length)
        attention = float(self.attention) * np.asarray(squares, np.float64)
        linear = float(self.linear) * length / self.context_parallel_size
        return np.asarray(linear + attention, np.float64)

    def to_dict(self) -> dict[str, Any]:
        """Return the constants as JSON values."""
        shared = {"context_parallel_size": self.context_parallel_size, "partition": self.partition}
        # one rank a row has no partition
        constants = {"linear": self.linear, "attention": self.attention}
        return constants if self.context_parallel_size == 1 else {**constants, **shared}

    @classmethod
    def from_dict(cls, values: Any) -> CostModel:
        """Read a result of `to_dict`, or raise FormatError."""
        stored = CheckpointReader("the cost model of a checkpoint", values)
        found: dict[str, Any] = {}
        for name in ("linear", "attention"):
            found[name] = stored.checked(
                name,
                f"must be a number from 0 to {_MOST_CONSTANT:.0e}",
                lambda value: (
                    isinstance(value, (int, float))
                    and not isinstance(value, bool)
                    and 0 <= value <= _MOST_CONSTANT
                ),
            )
        if not any(found.values()):
            raise stored.error("linear and attention must not both be 0", values)
        if "context_parallel_size" in stored.values:
            found["context_parallel_size"] = stored.integer("context_parallel_size", least=2)
            found["partition"] = stored.checked(
                "partition", "must be document or row", ("document", "row").__contains__
            )
        return cls(**found)


_MOST_CONSTANT = 1e200

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "llama3-8b": {
        "hidden_size": 4096, "num_layers": 32, "num_attention_heads": 32, "num_query_groups": 8,
        "ffn_hidden_size": 14_336, "vocab_size": 128_256,
    },
    "llama3-70b": {
        "hidden_size": 8192, "num_layers": 80, "num_attention_heads": 64, "num_query_groups": 8,
        "ffn_hidden_size": 28_672, "vocab_size": 128_256,
    },
    "mixtral-8x7b": {
        "hidden_size": 4096, "num_layers": 32, "num_attention_heads": 32, "num_query_groups": 8,
        "ffn_hidden_size": 14_336, "vocab_size": 32_000, "num_experts": 8, "moe_router_topk": 2,
    },
}  # fmt: skip
"""Shapes of published models, arguments of `CostModel.from_shape`."""


def _shape(name: str, value: object) -> int:
    return check_between(name, value, 1, _MOST_SHAPE)


def _constant(text: str, name: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise InvalidArgument(
            f"{name} must be a number, got {shown(text)}; write LINEAR:ATTENTION such as "
            f"4.5e10:786432, or one of {', '.join(PRESETS)}"
        ) from None


def check_balance(balance: object) -> CostModel | None:
    """Return the cost model of an argument ``balance``; None for None."""
    if balance is None or isinstance(balance, CostModel):
        return balance
    raise InvalidArgument(
        f"balance must be a CostModel or None, got {shown(balance)}; use CostModel.from_shape, or "
        "CostModel(linear=…, attention=…)"
    )


def squared_lengths(index: Index, sample_ids: npt.ArrayLike) -> I64:
    """Return the sum of the squared input lengths of each sample's documents, int64[n]."""
    return squares_and_documents(index, sample_ids)[0]


def squares_and_documents(index: Index, sample_ids: npt.ArrayLike) -> tuple[I64, I64]:
    """Return `squared_lengths` and the number of documents in each sample, parts included."""
    spans = index.locate(sample_ids)
    out = np.empty(spans.row_splits.size - 1, np.int64)
    width = np.unique(sequence_lengths_at(index, np.asarray(sample_ids)))
    if width.size > 1:
        raise InvalidArgument(
            f"balance: the rows must have one sequence length, got {width.tolist()}; give those of "
            "one step"
        )
    active().squared_lengths(
        np.ascontiguousarray(spans.length),
        np.ascontiguousarray(spans.row_splits),
        int(width[0]) if width.size else index.sequence_length,
        out,
    )
    return out, np.diff(spans.row_splits)


def rank_squares(index: Index, sample_ids: npt.ArrayLike, squares: I64, cost: CostModel) -> F64:
    """Return the squared lengths that each rank of a row works on, float64[n, ranks].

    A causal query at token q of a document does work in proportion to q + 1, so tokens x to y of a
    document are y² - x² of its squared length.

    Args:
        squares: int64[n], `squared_lengths` of the samples.

    Raises:
        InvalidArgument: the rows cannot be cut into twice as many equal parts as ranks.
    """
    ranks, width = cost.context_parallel_size, index.sequence_length
    if ranks == 1 or cost.partition == "document":
        return np.repeat(squares[:, None] / ranks, ranks, axis=1)
    if width % (2 * ranks):
        raise InvalidArgument(
            f"context_parallel_size: rows of {width} tokens must be a multiple of 2 x {ranks} "
            "tokens to be shared; use another size or sequence length"
        )
    spans = index.locate(sample_ids)
    begins, ends = (np.minimum(each, width)[:, None] for each in spans.bounds_in_samples())
    bounds = np.arange(2 * ranks + 1) * (width // (2 * ranks))
    parts = np.diff((np.clip(bounds, begins, ends) - begins) ** 2, axis=1)
    rows = np.zeros((spans.row_splits.size - 1, 2 * ranks), np.int64)
    np.add.at(rows, spans.rows, parts)
    return np.asarray(rows[:, :ranks] + rows[:, : ranks - 1 : -1], np.float64)


def check_sum(rows: int, sequence_length: int) -> None:
    """Raise InvalidArgument if the sum of a step's squared lengths may not fit 64 bits."""
    if rows * sequence_length**2 > INT64_MAX:
        raise InvalidArgument(
            f"balance: the squared lengths of {rows} rows of {sequence_length} tokens must sum to "
            "less than 2**63; use a smaller global batch, or leave balance out"
        )


def balanced_rows(
    squares: I64,
    *,
    rows: int,
    ranks: int,
    micro_batch_size: int,
    served: int = 0,
    rows_served: int = 0,
) -> I64:
    """Assign the samples of a step, int64[rounds, ranks, micro_batch_size]; -1 for padding.

    All rows of a step have the same number of tokens, so that their work differs by their squared
    lengths alone.

    Args:
        squares: int64[samples], sums of the squared lengths of the step's samples.
        rows: rows of the step, a multiple of those of a round.
        ranks: number of ranks.
        micro_batch_size: rows of one micro batch of a rank.
        served: samples that were served in the ``rows_served`` rows before, on any ranks.
        rows_served: rows before those to assign.
    """
    stride = ranks * micro_batch_size
    out = np.empty(rows - rows_served, np.int64)
    # rows that other ranks served may be a part of a round of these
    before = -(-rows_served // stride) * stride
    active().balance_rows(squares, served, before, ranks, micro_batch_size, out)
    return out.reshape(-1, ranks, micro_batch_size)


def lost_time(work: F64) -> float:
    """Return the share of the ranks' time that they wait for the slowest.

    Args:
        work: float64[…, ranks], the work of each rank between two synchronisations.
    """
    slowest = float(work.max(axis=-1).sum()) * work.shape[-1] if work.size else 0.0
    return 1 - float(work.sum()) / slowest if slowest else 0.0
