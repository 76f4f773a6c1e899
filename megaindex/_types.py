"""Type aliases of the arrays that kernels take and return."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

I8: TypeAlias = NDArray[np.int8]
I16: TypeAlias = NDArray[np.int16]
I32: TypeAlias = NDArray[np.int32]
I64: TypeAlias = NDArray[np.int64]
U8: TypeAlias = NDArray[np.uint8]
U16: TypeAlias = NDArray[np.uint16]
U32: TypeAlias = NDArray[np.uint32]
U64: TypeAlias = NDArray[np.uint64]
F32: TypeAlias = NDArray[np.float32]
F64: TypeAlias = NDArray[np.float64]
IntArray: TypeAlias = NDArray[Any]
DatasetIndex: TypeAlias = NDArray[np.int16] | NDArray[np.uint8]

# tokens of the .bin; int64 pointers (bytes) and int32 lengths (tokens) of the .idx
TokenSource: TypeAlias = tuple[NDArray[Any], I64, I32]

# shuffle_index, sample_index, document_index, lengths and the extra token, as for array_spans
IndexArrays: TypeAlias = tuple[IntArray, IntArray, I32, I32, int]
