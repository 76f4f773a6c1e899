"""The file ``run.lock``: its fields, its text, and its digests.

A lock is one JSON object in UTF-8. No number has a fraction or an exponent: other numbers are text.
A table is ``{"columns": [names], "rows": [[values], …]}``. The last field is ``digest``; every byte
before its value is covered by it, and only ``"``, a line feed, ``}`` and a line feed follow it.

=================  =================================================================================
field              meaning
=================  =================================================================================
format             "megaindex run lock"
version            1; a reader refuses other versions
written_by         program and version that wrote the file
settings           mapping that opens the run again:
                   ``kind``: "recipe" or "run"; ``recipe``: the recipe file's mapping, in which
                   every path of a pair is its row in ``sources``; ``run``: fields of a `Run`
                   that differ from their defaults, paths likewise
root               folder of the relative paths in ``sources``; if relative itself, to the folder of
                   the lock
sources            table of the pairs, with those of labels, loss masks and evaluation data:
                   ``path``: prefix of .bin and .idx, relative to ``root``, or absolute, or a URL;
                   ``fingerprint``: 32 hex digits, `corpus_fingerprint`: sizes of both files,
                   sequence lengths and document bounds; the key of the source in receipts;
                   ``idx``: 16 hex digits, XXH3-64 (seed 0) of all bytes of the .idx;
                   ``bin_bytes``: size of the .bin; ``sequences``: number of sequences;
                   ``documents``: number of documents; ``tokens``: sum of all sequence lengths
dialect            "megatron", "neox" or "paddlenlp": meaning of the .idx files' dtype codes
tokens             null, or hashes of the .bin files: ``chunk_bytes``: bytes of a chunk, the last of
                   a file shorter; ``hashes``: for each row of ``sources`` a text of 16 hex
                   digits for each chunk, XXH3-64 (seed 0)
files              lists that the settings name: ``path`` (as in ``sources``), ``bytes``, ``sha256``
subsets            ``train``, and ``valid`` and ``test`` where the run evaluates, each a subset
digests            SHA-256 of the canonical JSON of settings, sources, tokens, files and subsets,
                   by name: keys sorted, no white space, characters beyond ASCII as \\u
                   escapes. They name the section that was changed.
digest             SHA-256, 64 hex digits, of all bytes of the file before these digits
=================  =================================================================================

A subset:

=================  =================================================================================
samples            positions served, numbered from 0 in order of training
sources            row in ``sources`` of each source of ``index``, by its number there
index              description of the index of these samples (`megaindex.index.description`): every
                   integer from which they are computed. The nodes of the sources of a blend or of
                   stages, ``{"common": …, "sources": […]}``, are here ``{"common": …, "columns":
                   [names], "rows": [[values], …]}``, values a node does not have null.
schedule           batch sizes: list of [first sample, samples of a step]: a size holds from the
                   first step that begins at or after its first sample
consumed           samples of steps made before the lock: steps divide [0, consumed) from 0 on, and
                   [consumed, samples) from consumed on, the last of each may be short
steps              number of steps
masked_rows        rows of the last step that are padding without loss
tail               "drop", "pad" or "wrap"
micro_batch_size   samples of a micro batch of one rank, or null: not known
data_parallel_size ranks that share a step, or null
skip               null, or the skips of the run
receipts           ``block_steps``: steps of a block, the last block shorter;
                   ``blocks``: of each block the receipt of its samples, 32 hex digits;
                   ``total``: the receipt of all samples
=================  =================================================================================
"""
