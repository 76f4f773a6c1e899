"""The exceptions of megaindex: each message names file or setting, rule, value and remedy.

Messages and log lines quote names and values from outside, which `visible` makes safe to show.
"""

import logging
import re
from numbers import Number

_HIDDEN = re.compile(
    "[\x00-\x1f\x7f-\x9f"  # control characters, such as escape sequences and ends of lines
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # that change the direction of what follows
    "\u2028\u2029\ud800-\udfff]"  # separators of lines; bytes of names that are not UTF-8
)


def visible(text: str) -> str:
    """Return a text in which characters that a terminal or a log does not show are escaped."""
    return _HIDDEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def _make_visible(record: logging.LogRecord) -> bool:
    """Escape a log record: numbers stay, everything else is shown as text."""
    record.msg = visible(str(record.msg))
    if isinstance(record.args, tuple):
        record.args = tuple(
            each if isinstance(each, Number) else visible(str(each)) for each in record.args
        )
    return True


logging.getLogger("megaindex").addFilter(_make_visible)

_LONGEST_MESSAGE = 4000
_END_SHOWN = 1000


class MegaIndexError(Exception):
    """Base class of the exceptions of megaindex.

    `str` escapes characters that are not shown, and leaves out the middle of a message of more than
    4,000 characters (a message may quote a long value); ``args`` holds the whole message.
    """

    def __str__(self) -> str:
        text = visible(super().__str__())
        left_out = len(text) - _LONGEST_MESSAGE
        if left_out <= 0:
            return text
        begin = text[: _LONGEST_MESSAGE - _END_SHOWN]
        return f"{begin} … [{left_out} characters left out] … {text[-_END_SHOWN:]}"


class InvalidArgument(MegaIndexError, ValueError):
    """An argument or setting is out of range, of the wrong kind, or contradicts another."""


class MissingAttribute(InvalidArgument, AttributeError):
    """An attribute that an object does not have; `hasattr` returns False for it."""


class FormatError(MegaIndexError, ValueError):
    """The bytes of a file break a rule of its format."""


class OutOfRange(MegaIndexError, IndexError):
    """A requested sample, sequence or token does not exist."""


class StorageError(MegaIndexError, OSError):
    """A file or directory cannot be read, written or published."""


class MissingFile(StorageError, FileNotFoundError):
    """A file that must exist does not."""


class EngineError(MegaIndexError, RuntimeError):
    """The engine that runs a command's tasks cannot be reached, or a task failed repeatedly."""
