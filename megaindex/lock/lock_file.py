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
sequence_length    input tokens of a sample, S
extra_token        1: a sample reads one more token, the label of its last input
seed               seed of all shuffles and mixtures
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
orders             orders of the sources, with all settings of each:
                   ``{"order": "epoch", "epochs_mixed": k, "left_over": "drop" | "carry"}``;
                   ``{"order": "window"}``;
                   ``{"order": "packed", "max_documents": n, "long_documents": how}``;
                   ``{"order": "bins", "capacity": tokens, "packed": true | false,
                   "long_documents": how}`` (recipe sources of kind finetuning);
                   ``{"order": "megatron" | "neox" | "megatron-legacy" | "paddlenlp"}``
subsets            ``train``, and ``valid`` and ``test`` where the run evaluates, each a subset
digests            SHA-256 of the canonical JSON of settings, sources, tokens, files, orders and
                   subsets, by name: keys sorted, no white space, characters beyond ASCII as \\u
                   escapes. They name the section that was changed.
digest             SHA-256, 64 hex digits, of all bytes of the file before these digits
=================  =================================================================================

A subset:

=================  =================================================================================
samples            positions served, numbered from 0 in order of training
indices            table of the indices that samples come from, one for each source (for each
                   source and phase under Megatron's phases), numbered from 0:
                   ``source``: row in ``sources``; ``name``: the name in the keys of orders epoch,
                   window, packed and bins, "" in the frameworks' orders; ``order``: number in
                   ``orders``; ``begin``, ``end``: sequences of an epoch, [begin, end);
                   ``tokens``: tokens of these sequences; ``epochs``: epochs built;
                   ``samples``: samples of all these epochs; ``requested``: samples asked for;
                   ``head``: frameworks' orders: samples that are shuffled apart from those of the
                   last epoch, null if all are shuffled together
segments           parts of the run, one after another, in each of which the mixture is one:
                   ``name``: name of the stage, or ""; ``samples``: positions of the segment;
                   ``rule``: "stratified", "random", "per_stream" (`megaindex.index.mixing`), or
                   "greedy" (the frameworks' blend);
                   ``streams``: numbers of indices, null: all of the subset in order;
                   ``shares``: of each stream an integer from 1 to 2**53 - 1; rule greedy: the
                   16 hex digits of the IEEE 754 double, most significant first;
                   ``restart``: streams (numbers of indices) that begin with their sample 0 again;
                   without it, a stream goes on after its last sample in the segments before;
                   ``pieces``: list of [samples, number, removed]: parts of the segment; before a
                   piece the streams ``removed`` (numbers of indices) leave the mixture, and the
                   draws begin anew with the shares of the others; number is part of the key of
                   rule random: "stage name/number";
                   ``period``: rule random: positions after which a shuffled block ends, else null;
                   only for pieces from which nothing was removed;
                   ``batch_size``: rule per_stream: samples of a batch, else null;
                   ``uncounted``: rule greedy: samples that the framework does not count of each
                   index (1 in GPT-NeoX): draw d of an index with n samples is its sample
                   d if d < n, else d mod max(1, n - uncounted);
                   ``read``: null: positions 0 to samples - 1 of the mixture are served once, in
                   order; else list of [begin, end, times]: positions begin to end - 1 of the
                   mixture, served in order and as many times, one range after another
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
