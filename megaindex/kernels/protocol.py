"""The interface of all backends, for type checkers.

`megaindex.kernels.reference` specifies and documents each function; a test compares the others
with it, name by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

NATIVE_INTERFACE = 8
"""Version of the native core's functions, as in csrc/python/module.cpp: both are raised when the
arguments of a function change, so that a core of an earlier build is refused."""

if TYPE_CHECKING:
    from megaindex.kernels import reference

    class Backend:
        """One implementation of all kernels: the reference, or another with its functions."""

        seed_state = staticmethod(reference.seed_state)
        shuffle = staticmethod(reference.shuffle)
        shuffled_range = staticmethod(reference.shuffled_range)
        shuffled_documents = staticmethod(reference.shuffled_documents)
        cut_samples = staticmethod(reference.cut_samples)
        bijection_apply = staticmethod(reference.bijection_apply)
        bijection_invert = staticmethod(reference.bijection_invert)
        bijection_range = staticmethod(reference.bijection_range)
        bijection_inverse_range = staticmethod(reference.bijection_inverse_range)
        epoch_starts = staticmethod(reference.epoch_starts)
        epoch_begins = staticmethod(reference.epoch_begins)
        epoch_spans = staticmethod(reference.epoch_spans)
        array_spans = staticmethod(reference.array_spans)
        window_spans = staticmethod(reference.window_spans)
        tokens_within = staticmethod(reference.tokens_within)
        receipt_add = staticmethod(reference.receipt_add)
        row_keys = staticmethod(reference.row_keys)
        pack_documents = staticmethod(reference.pack_documents)
        count_pieces = staticmethod(reference.count_pieces)
        sort_pieces = staticmethod(reference.sort_pieces)
        pack_pieces = staticmethod(reference.pack_pieces)
        packed_spans = staticmethod(reference.packed_spans)
        packed_bins = staticmethod(reference.packed_bins)
        span_table = staticmethod(reference.span_table)
        blended_spans = staticmethod(reference.blended_spans)
        token_table = staticmethod(reference.token_table)
        gather = staticmethod(reference.gather)
        row_table = staticmethod(reference.row_table)
        read_rows = staticmethod(reference.read_rows)
        mask_loss = staticmethod(reference.mask_loss)
        documents_by_token = staticmethod(reference.documents_by_token)
        documents_by_run = staticmethod(reference.documents_by_run)
        squared_lengths = staticmethod(reference.squared_lengths)
        balance_rows = staticmethod(reference.balance_rows)
        least_seen = staticmethod(reference.least_seen)
        blend_greedy = staticmethod(reference.blend_greedy)
        blend_exhaustive = staticmethod(reference.blend_exhaustive)
        divisor_counts = staticmethod(reference.divisor_counts)
        divisor_fill = staticmethod(reference.divisor_fill)
        mix_table = staticmethod(reference.mix_table)
        mix_fill = staticmethod(reference.mix_fill)
        map_sentences = staticmethod(reference.map_sentences)
        map_blocks = staticmethod(reference.map_blocks)
