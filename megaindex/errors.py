"""What megaindex raises: each message names file or setting, rule, value and remedy."""


class MegaIndexError(Exception):
    """Base of everything megaindex raises on purpose."""


class InvalidArgument(MegaIndexError, ValueError):
    """An argument or setting is out of range, of the wrong kind, or contradicts another."""


class FormatError(MegaIndexError, ValueError):
    """The bytes of a file break a rule of its format."""


class OutOfRange(MegaIndexError, IndexError):
    """A sample, sequence or token outside what exists was asked for."""


class StorageError(MegaIndexError, OSError):
    """A file or directory cannot be read, written or published."""


class MissingFile(StorageError, FileNotFoundError):
    """A file that must exist does not."""


class EngineError(MegaIndexError, RuntimeError):
    """What runs the tasks of a command cannot be reached, or keeps losing one of them."""
