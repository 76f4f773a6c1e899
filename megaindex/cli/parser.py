"""The parser of every verb."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from megaindex.index.dialect import parse_split
from megaindex.index.plain import check_epochs, check_setting


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong, as every other error here, and checks values under the names
    of their flags."""

    def parse_args(self, *arguments: Any, **more: Any) -> Any:
        """The options; raises InvalidArgument for one that breaks its rule."""
        options = super().parse_args(*arguments, **more)
        for name, value in vars(options).items():
            flag = "--" + name.replace("_", "-").replace("sequence", "seq")
            if isinstance(value, int) and not isinstance(value, bool):
                check_setting(name, value, flag)
            elif name in ("epochs", "more_epochs") and value is not None:
                for part in value.split(","):  # one for each source
                    check_epochs(flag, part)
            elif name == "split" and value is not None:
                parse_split(value, options.order or "megatron", flag)
        return options

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; --help lists the arguments\n")
