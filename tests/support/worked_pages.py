"""The commands of the pages in docs/, and what they print.

A page shows files, in blocks whose first line is a comment with their name, and commands, in
``console`` blocks: a line ``$ megaindex …`` or ``$ python FILE``, and under it the output. All run
in one empty folder, from top to bottom.

    python tests/support/worked_pages.py          # writes the outputs of all pages anew
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megaindex.cli import main as megaindex_main

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("llm-foundry.md", "nanotron.md", "maxtext.md", "paddlenlp.md", "neox.md")

_BLOCK = re.compile(r"```(python|yaml|console)\n(.*?)```", re.DOTALL)


def run_page(text: str, folder: Path) -> str:
    """The page with the outputs that its commands give in ``folder``."""
    with _inside(folder):
        return _BLOCK.sub(_with_output, text)


def _with_output(block: re.Match[str]) -> str:
    language, body = block.groups()
    if language != "console":
        first = re.match(r"# (\S+\.(?:py|yaml))\n", body)
        if first:
            Path(first[1]).write_text(body)
        return block[0]
    lines = "".join(f"$ {command}\n{_run(command)}" for command in _commands(body))
    return f"```console\n{lines}```"


def _commands(body: str) -> Iterator[str]:
    """Commands of a block; one may go on after a backslash."""
    for match in re.finditer(r"^\$ ((?:.*\\\n)*.*)$", body, re.MULTILINE):
        yield match[1]


def _run(command: str) -> str:
    program, *words = shlex.split(command.replace("\\\n", " "))
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        if program == "megaindex":
            assert megaindex_main(words) == 0, command
        elif program == "python":
            runpy.run_path(words[0], run_name="__main__")
        else:
            raise ValueError(f"pages run megaindex and python, not {command!r}")
    text = "\n".join(line.rstrip() for line in out.getvalue().strip("\n").split("\n"))
    return f"{text}\n" if text else ""


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def main() -> None:
    for name in PAGES:
        page = DOCS / name
        with tempfile.TemporaryDirectory() as folder:
            page.write_text(run_page(page.read_text(), Path(folder)))


if __name__ == "__main__":
    main()
