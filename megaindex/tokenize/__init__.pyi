from megaindex.tokenize.report import Tokenized as Tokenized
from megaindex.tokenize.run import tokenize as tokenize
