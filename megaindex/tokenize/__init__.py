"""Tokenization of raw text: inputs are divided into parts, tokenized one by one, then merged.

inputs       input files: format, compression, size and times
settings     keys, tokenizer, end token and token type; tokenizers: text to ids
parts        division of inputs into tasks, each with a key of all that its result depends on
reading      lines and rows of a part; records: their texts
encode       the task: tokenize one part
work_folder  finished parts by key, and the lock of a run
run          run all tasks and merge the parts; report: the result
"""

from megaindex._lazy import lazy_exports

lazy_exports(__name__)
