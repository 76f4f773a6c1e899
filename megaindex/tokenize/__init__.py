"""Raw text to .bin/.idx pairs: cut into parts, each tokenized on its own, then put together.

sources    what the input files are: format, packing, size and time
settings   which text, tokenizer, end and token type; tokenizers, libraries: text to ids
parts      inputs cut into tasks, each with a key that says all that its result depends on
encode     the task: reading (lines, unpacking, rows) to records, records to ids, ids to a pair
work       the work folder: parts that are finished, by key; holding: one run at a time in it
run        what is not finished goes to an engine; then all parts are merged; report, watch

"""

from megaindex.tokenize.report import Tokenized
from megaindex.tokenize.run import tokenize

__all__ = ["Tokenized", "tokenize"]
