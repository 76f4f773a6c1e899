"""What orders without index arrays say when they are asked for one."""

from __future__ import annotations

from typing import NoReturn

from megaindex.errors import InvalidArgument
from megaindex.kernels.types import I32, IntArray


class Arrayless:
    """document_index, sample_index and shuffle_index raise, naming what to use instead."""

    def _no_array(self, name: str) -> str:
        """The message for an array of that name."""
        raise NotImplementedError

    @property
    def document_index(self) -> I32:
        self._refuse("document_index")

    @property
    def sample_index(self) -> IntArray:
        self._refuse("sample_index")

    @property
    def shuffle_index(self) -> IntArray:
        self._refuse("shuffle_index")

    def _refuse(self, name: str) -> NoReturn:
        raise InvalidArgument(self._no_array(name))
