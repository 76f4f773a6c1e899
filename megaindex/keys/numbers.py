"""Random numbers that are functions of a row's key alone, as docs/keys.md specifies them.

Word i of a key and a stream is ``mix(mix(key) ^ mix(stream + (i + 1) * GAMMA))`` modulo 2**64, with
the finaliser of SplitMix64: word i of the shuffle key (stream, mix(key)) in docs/lock-format.md.
The inner term is the same for all rows, so that a number costs one finaliser.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt
import xxhash

from megaindex._lazy import torch_needed
from megaindex._types import F64, U64
from megaindex.errors import InvalidArgument
from megaindex.validation import check_between, check_text, shown

if TYPE_CHECKING:
    import torch

GAMMA = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31
_FNV_BASE, _FNV_PRIME = 0xCBF29CE484222325, 0x100000001B3
_WORD = 2**64 - 1
_FRACTION_BITS = 53
_WORDS_AT_ONCE = 1 << 15
"""Words that stay in a processor's cache while they are mixed."""


@overload
def uniform(key: torch.Tensor, n: int, stream: int | str = 0) -> torch.Tensor: ...
@overload
def uniform(key: npt.ArrayLike, n: int, stream: int | str = 0) -> F64: ...
def uniform(key: Any, n: int, stream: int | str = 0) -> Any:
    """Return ``n`` numbers in [0, 1) for each key, multiples of 2**-53.

    They depend on key, stream and place alone, not on ranks, threads, devices or releases, and are
    the same in NumPy and Torch; the first numbers of a longer row are those of a shorter one.

    Args:
        key: 64-bit integers of any shape, signed or not, such as ``batch["key"]``, or one integer;
            an array, or a tensor on any device that has float64.
        n: numbers a key, from 0.
        stream: name or number from 0 to 2**64 - 1 of the use. Two uses of one row need two streams,
            or they draw the same numbers.

    Returns:
        float64[..., n], an array; for a tensor, a tensor on its device.

    Raises:
        InvalidArgument: ``key`` holds no integers, ``n`` is negative, or ``stream`` is neither.
    """
    columns = mixed(_counters(stream_number(stream), check_between("n", n, 0)))
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(key, torch.Tensor):
        return _uniform_array(key, columns)
    if key.device.type == "cpu":
        return torch.from_numpy(_uniform_array(key.numpy(), columns))
    return _uniform_tensor(key, columns)


def generator(key: int, stream: int | str = 0) -> np.random.Generator:
    """Return a NumPy generator for one key: Philox4x64-10 with the key (``key``, ``stream``).

    Its raw words are the same everywhere. What its methods make of them may change with a release
    of NumPy (NEP 19).

    Raises:
        InvalidArgument: as `uniform`.
    """
    words = np.array([_key_number(key), stream_number(stream)], np.uint64)
    return np.random.Generator(np.random.Philox(key=words))


def torch_generator(
    key: int, stream: int | str = 0, device: str | torch.device = "cpu"
) -> torch.Generator:
    """Return a Torch generator for one key, seeded with its first word.

    Torch draws other numbers on another kind of device, and its CPU generator keeps 32 bits of the
    seed. Where numbers must be the same everywhere, take `uniform` of a tensor.

    Raises:
        InvalidArgument: as `uniform`; or torch is not installed.
    """
    with torch_needed("megaindex.keys.torch_generator"):
        import torch
    words = mixed(np.array([_key_number(key)], np.uint64))
    words = mixed(words ^ mixed(_counters(stream_number(stream), 1)))
    return torch.Generator(device).manual_seed(int(words[0]))


def key_of(text: str) -> U64:
    """Return uint64[2]: XXH3-128 of the text, low word first."""
    number = xxhash.xxh3_128_intdigest(text.encode())
    return np.array([number & _WORD, number >> 64], np.uint64)


@functools.lru_cache(maxsize=256)
def stream_number(stream: int | str) -> int:
    """Return the number of a stream: of a name the 64-bit FNV-1a hash of its UTF-8 bytes.

    Raises:
        InvalidArgument: it is neither a name nor a number from 0 to 2**64 - 1.
    """
    if not isinstance(stream, str):
        return check_between("stream", stream, 0, _WORD)
    number = _FNV_BASE
    for byte in check_text("stream", stream).encode():
        number = (number ^ byte) * _FNV_PRIME & _WORD
    return number


def _key_number(key: object) -> int:
    """Return one key as an unsigned number; one that a signed integer holds may be negative."""
    return check_between("key", key, -(2**63), _WORD) & _WORD


def _key_array(key: Any) -> U64:
    if isinstance(key, int):
        return np.array(_key_number(key), np.uint64)
    keys = np.asarray(key)
    if keys.dtype.kind not in "iu":
        raise _no_keys(keys.dtype, key)
    return keys.astype(np.uint64)  # of a negative integer, its two's complement


def _no_keys(dtype: object, key: object) -> InvalidArgument:
    return InvalidArgument(
        f"key must hold integers of 64 bits, such as batch['key'], got {dtype}: {shown(key)}"
    )


def _counters(stream: int, n: int) -> U64:
    """Return uint64[n], stream + (i + 1) * GAMMA."""
    counters = np.arange(1, n + 1, dtype=np.uint64)
    counters *= np.uint64(GAMMA)
    counters += np.uint64(stream)
    return counters


def mixed(words: U64) -> U64:
    """Return the finaliser of SplitMix64 of each word."""
    words = words.copy()
    mix_in_place(words, np.empty_like(words))
    return words


def mix_in_place(words: U64, spare: U64) -> None:
    """Replace each word by `mixed` of it; ``spare`` is an array of their size, which it fills."""
    for shift, factor in _ROUNDS:
        np.right_shift(words, np.uint64(shift), out=spare)
        words ^= spare
        words *= np.uint64(factor)
    np.right_shift(words, np.uint64(_LAST_SHIFT), out=spare)
    words ^= spare


def _uniform_array(key: Any, columns: U64) -> F64:
    keys = _key_array(key)
    rows = mixed(keys.reshape(-1, 1))
    numbers = np.empty((rows.size, columns.size))
    step = max(1, _WORDS_AT_ONCE // max(1, columns.size))
    for begin in range(0, rows.size, step):
        words = mixed(rows[begin : begin + step] ^ columns)
        words >>= np.uint64(64 - _FRACTION_BITS)
        np.multiply(words.view(np.int64), 2.0**-_FRACTION_BITS, out=numbers[begin : begin + step])
    return numbers.reshape(*keys.shape, columns.size)


def _uniform_tensor(key: torch.Tensor, columns: U64) -> torch.Tensor:
    import torch

    if key.is_floating_point() or key.is_complex() or key.dtype == torch.bool:
        raise _no_keys(key.dtype, key)
    places = torch.from_numpy(columns.view(np.int64)).to(key.device)
    words = _mixed_tensor(_mixed_tensor(key.to(torch.int64)).unsqueeze(-1) ^ places)
    fractions = _shifted(words, 64 - _FRACTION_BITS).to(torch.float64)
    return fractions.mul_(2.0**-_FRACTION_BITS)


def _mixed_tensor(words: torch.Tensor) -> torch.Tensor:
    for shift, factor in _ROUNDS:
        words = (words ^ _shifted(words, shift)) * (factor - 2**64)
    return words ^ _shifted(words, _LAST_SHIFT)


def _shifted(words: torch.Tensor, shift: int) -> torch.Tensor:
    """Return a logical shift to the right, which Torch does not have for int64."""
    return (words >> shift) & ((1 << 64 - shift) - 1)
