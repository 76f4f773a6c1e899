"""What a merge, a split or an import made: checked, and said in one line."""

from __future__ import annotations

from dataclasses import dataclass

from megaindex.format import IndexedDataset


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A pair that was written, after every entry of it was checked."""

    path_prefix: str
    documents: int
    tokens: int
    dtype: str
    nbytes: int
    """Of the .bin."""
    how: str
    """"copied", or what kind of link the .bin is."""

    def line(self, seconds: float) -> str:
        """Documents, tokens, token type, how, and the rate."""
        # the clock may not have moved
        rate = self.nbytes / 1e6 / max(seconds, 1e-9)
        return (
            f"{self.path_prefix}: {self.documents:,} documents, {self.tokens:,} tokens, "
            f"{self.dtype}, {self.how}, {self.nbytes / 1e6:,.1f} MB in {seconds:.2f} s "
            f"({rate:,.0f} MB/s)"
        )


def checked_outcome(path_prefix: str, dialect: str, how: str = "copied") -> Outcome:
    """Open the pair, check every entry of its .idx and count it."""
    dataset = IndexedDataset(path_prefix, dialect=dialect)
    dataset.validate()
    return Outcome(
        path_prefix=path_prefix,
        documents=len(dataset.document_indices) - 1,
        tokens=dataset.num_tokens,
        dtype=str(dataset.dtype),
        nbytes=dataset.nbytes,
        how=how,
    )
