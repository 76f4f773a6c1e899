"""Raw text to .bin/.idx pairs: cut into parts, each tokenized on its own, then put together."""

from megaindex.corpus.tokenize.report import Tokenized
from megaindex.corpus.tokenize.run import tokenize

__all__ = ["Tokenized", "tokenize"]
