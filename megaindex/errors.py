"""The exceptions of megaindex: each message names file or setting, rule, value and remedy."""

_LONGEST_MESSAGE = 4000
_END_SHOWN = 1000


class MegaIndexError(Exception):
    """Base class of the exceptions of megaindex.

    `str` leaves out the middle of a message of more than 4,000 characters (a message may quote a
    long value); ``args`` holds the whole message.
    """

    def __str__(self) -> str:
        text = super().__str__()
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
