"""Raw text to .bin/.idx pairs: cut into parts, each tokenized on its own, then merged.

inputs       the input files: format, packing, size and time
settings     keys, tokenizer, end token and token type; tokenizers: from text to ids
parts        inputs cut into tasks, each with a key of all that its result depends on
reading      pieces of inputs to lines and rows; records: from those to texts
encode       the task: a part to its pairs
work_folder  finished parts by key, and the lock that one run at a time holds
run          tasks to an engine, then all parts into the output; report: the result
byte_level   text files as a corpus of bytes, without a tokenizer
"""

from megaindex._lazy import lazy_exports

lazy_exports(__name__)
