from megaindex.tokenize.run import Tokenized as Tokenized
from megaindex.tokenize.run import tokenize as tokenize
