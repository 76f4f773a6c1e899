"""Rows of token ids in Numba; reference/rows.py documents the function."""

from __future__ import annotations

from typing import Any

from megaindex._types import I64
from megaindex.kernels.jit.gather import gather
from megaindex.kernels.jit.spans import blended_spans
from megaindex.kernels.reference.rows import RowTable, assemble_rows


def read_rows(table: RowTable, sample_ids: list[Any], width: int, pad_id: int) -> I64 | None:
    return assemble_rows(blended_spans, gather, table, sample_ids, width, pad_id)
