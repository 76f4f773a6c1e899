from megaindex.keys.numbers import generator as generator
from megaindex.keys.numbers import torch_generator as torch_generator
from megaindex.keys.numbers import uniform as uniform
from megaindex.keys.row_content import content as content
from megaindex.keys.store import Store as Store
from megaindex.keys.store import StoreWriter as StoreWriter
