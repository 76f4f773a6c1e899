"""The squared lengths of a sample's documents, and a step's samples assigned by their work."""

from __future__ import annotations

from megaindex._types import I64


def squared_lengths(length: I64, row_splits: I64, width: int, out: I64) -> None:
    """Fill ``out`` with the sum over each sample's documents of the square of their input tokens.

    The runs of sample k are ``row_splits[k]:row_splits[k + 1]`` of ``length``, and its first
    ``width`` tokens are input. With a width of 8, runs of 3 and 6 tokens are 3² + 5² = 34.

    Args:
        length: int64[runs], tokens of each run, none negative.
        row_splits: int64[samples + 1].
        width: input tokens of a sample, below 2**31.
        out: int64[samples].
    """
    for k in range(out.size):
        room, total = width, 0
        for tokens in length[row_splits[k] : row_splits[k + 1]].tolist():
            inputs = min(tokens, room)
            total += inputs**2
            room -= inputs
        out[k] = total


def balance_rows(
    work: I64, served: int, rows_served: int, ranks: int, micro_batch_size: int, out: I64
) -> None:
    """Assign the samples of a step to micro batches so that the ranks have equal work.

    Samples are sorted by work, the largest first, equal ones by number. The micro batches of a
    round, one on every rank, take the samples that follow in this order; each of them goes to the
    rank with the least work since the beginning of the step, the first of equal ones, that has room
    in its micro batch. Samples are spread evenly over micro batches: the first have one more if
    they are fewer than the rows, and in a round where only some have, the ranks with the least
    work. With work 5 1 9 7 on 2 ranks and micro batches of 1: samples 2, 3 in the first round, and
    1 for rank 0, which has done 9, and 0 for rank 1 in the second.

    Args:
        work: int64[samples], work of each sample beyond that of padding; none negative, with a sum
            below 2**63.
        served: number of samples that were served in earlier rounds of the step.
        rows_served: rows of these rounds, a multiple of ``ranks * micro_batch_size``.
        ranks: number of ranks.
        micro_batch_size: rows of a micro batch.
        out: int64[rows] of the other rounds, filled with the numbers of samples by round, rank and
            row; -1 is padding.
    """
    order = sorted(range(work.size), key=lambda k: (-int(work[k]), k))
    loads = [0] * ranks
    _assign(order[:served], rows_served, work, loads, micro_batch_size)
    numbers = _assign(order[served:], out.size, work, loads, micro_batch_size)
    out[:] = [number for rows in numbers for number in rows]


def _assign(
    samples: list[int], rows: int, work: I64, loads: list[int], micro_batch_size: int
) -> list[list[int]]:
    """Return the micro batches of all rounds, and add the work of each rank to ``loads``."""
    batches: list[list[int]] = []
    ranks = range(len(loads))
    left = iter(samples)
    each, longer = divmod(len(samples), rows // micro_batch_size) if rows else (0, 0)
    for _ in range(rows // (len(loads) * micro_batch_size)):
        held: list[list[int]] = [[] for _ in ranks]
        larger = min(longer, len(loads))  # micro batches of this round with one sample more
        longer -= larger
        for _ in range(each * len(loads) + larger):
            sample = next(left)
            rank = min(
                (k for k in ranks if len(held[k]) < each or (len(held[k]) == each and larger)),
                key=lambda k: (loads[k], k),
            )
            larger -= len(held[rank]) == each
            held[rank].append(sample)
            loads[rank] += int(work[sample])
        batches += [numbers + [-1] * (micro_batch_size - len(numbers)) for numbers in held]
    return batches
