"""What a sample consists of besides its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from megaindex.errors import InvalidArgument
from megaindex.index.plain import check_choice, make_plain

TOKEN_DTYPES = ("int64", "int32")


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """The options of Megatron's GPTDataset by its names, and a few more.

    Raises:
        InvalidArgument: an option needs another one, or an id does not fit the tokens.
    """

    eod_id: int | None = None
    """Id of the end-of-document token."""
    pad_id: int = -1
    """Id that fills up short samples. Tokens of the corpus that have it count as padding too."""
    eod_mask_loss: bool = False
    """No loss where the model reads an end-of-document token."""
    reset_position_ids: bool = False
    """Positions start again with each document."""
    reset_attention_mask: bool = False
    """Tokens do not attend to other documents; acts on ``attention_mask``."""
    create_attention_mask: bool = False
    """Return a [1, S, S] mask, True where attention is forbidden."""
    cu_seqlens: bool = False
    """Return what variable-length attention takes: ``cu_seqlens``, int32[S + 1], where documents
    begin, and S to the end of the row; and ``max_seqlen``, int32, tokens of the longest. Positions
    start again with each document. Shapes are those of Megatron-LM's inter-document masking, whose
    trainer strips the trailing S and joins the rows of a micro batch."""
    boundaries: Literal["eod", "documents"] = "eod"
    """Where documents meet, for position ids, attention mask and cu_seqlens: after each
    end-of-document token, as Megatron's resets have it; or as the index knows it, whatever the
    tokens, as its inter-document masking does."""
    dataset_id: bool = False
    """Return the number of the source, int16, as Megatron's BlendedDataset does."""
    token_dtype: Literal["int64", "int32"] = "int64"
    """Of tokens and labels. Megatron's trainer takes int64; int32 halves the bytes to copy."""

    def __post_init__(self) -> None:
        check_choice("boundaries", self.boundaries, ("eod", "documents"))
        check_choice("token_dtype", self.token_dtype, TOKEN_DTYPES)
        make_plain(self, "pad_id", optional=["eod_id"])
        for name, value in (("pad_id", self.pad_id), ("eod_id", self.eod_id)):
            limits = np.iinfo(self.token_dtype)
            if value is not None and not limits.min <= value <= limits.max:
                raise InvalidArgument(f"{name} must fit {self.token_dtype}, got {value}")
        by_token = self.boundaries == "eod" and self.tells_documents_apart
        if self.eod_id is None and (self.eod_mask_loss or by_token):
            raise InvalidArgument(
                "eod_mask_loss, reset_position_ids, reset_attention_mask and cu_seqlens act on the "
                "end-of-document token; give its id as eod_id, or take the documents of the index "
                "with boundaries='documents'"
            )

    @property
    def tells_documents_apart(self) -> bool:
        return self.reset_position_ids or self.reset_attention_mask or self.cu_seqlens

    @property
    def resets_positions(self) -> bool:
        return self.reset_position_ids or self.cu_seqlens
