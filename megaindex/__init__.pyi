from megaindex.build import build_index as build_index
from megaindex.build.blend import build_blend as build_blend
from megaindex.build.extend import extend_run as extend_run
from megaindex.build.many import BuildSettings as BuildSettings
from megaindex.build.many import build_many as build_many
from megaindex.corpus.tokenize import Tokenized as Tokenized
from megaindex.corpus.tokenize import tokenize as tokenize
from megaindex.engine import open_engine as open_engine
from megaindex.errors import EngineError as EngineError
from megaindex.errors import FormatError as FormatError
from megaindex.errors import InvalidArgument as InvalidArgument
from megaindex.errors import MegaIndexError as MegaIndexError
from megaindex.errors import MissingFile as MissingFile
from megaindex.errors import OutOfRange as OutOfRange
from megaindex.errors import StorageError as StorageError
from megaindex.format import IndexedDataset as IndexedDataset
from megaindex.format import IndexedDatasetWriter as IndexedDatasetWriter
from megaindex.index.spans import Index as Index
from megaindex.index.spans import Spans as Spans
from megaindex.kernels import backend as backend

__version__: str
