"""Run the examples of README.md and docs/*.md, and rewrite the outputs that they show.

All examples of a page run in one empty folder, from top to bottom:

- a ``python`` or ``yaml`` block that begins with a comment ``# FILE`` is written there, and so is
  the text of an ``sh`` block ``cat > FILE <<'END'``;
- any other ``python`` block is executed, all of a page in one namespace;
- a ``console`` block has lines ``$ megaindex …`` or ``$ python FILE``, each followed by its output;
- ``tests/pages/PAGE.py`` runs there first, if there is one, in the namespace of the page, and its
  function ``check_page`` last;
- ``<!-- setup … -->`` is Python that runs in its place, and that readers do not see;
- ``<!-- not executed: REASON -->`` on the line before a block leaves it out.

Times and rates of an output may differ from those shown. A line ``…`` of an output stands for lines
that the page leaves out; if others differ, the whole output is written.

    PYTHONPATH=.:tests python tests/support/worked_pages.py    # rewrite the outputs of all pages
"""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.folders import inside

from megaindex.cli import main as megaindex_main

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SETUPS = ROOT / "tests" / "pages"

_EXAMPLE = re.compile(
    r"(?P<skipped><!-- not executed: [^>]+-->\n+```.*?\n```)"
    r"|<!-- setup\n(?P<setup>.*?)-->"
    r"|```(?P<language>python|yaml|sh|console)\n(?P<body>.*?)```",
    re.DOTALL,
)
_TIME = re.compile(r"[\d,.]+ (?:s\b|[MG]B/s|tokens/s)")


def _has_examples(page: Path) -> bool:
    return any(match["language"] for match in _EXAMPLE.finditer(page.read_text()))


# docs/megatron.md has a test of its own, which runs it under the real megatron-core
PAGES = tuple(
    str(page.relative_to(ROOT))
    for page in (ROOT / "README.md", *sorted(DOCS.glob("*.md")))
    if page.name != "megatron.md" and _has_examples(page)
)


def setup_of(name: str) -> str:
    """Return the code that runs before the examples of a page."""
    file = SETUPS / f"{Path(name).stem.replace('-', '_')}.py"
    return file.read_text() if file.exists() else ""


def run_page(text: str, folder: Path, setup: str = "") -> str:
    """Return the page with the outputs that its commands give in ``folder``."""
    names: dict[str, Any] = {"__name__": "page"}

    def with_output(example: re.Match[str]) -> str:
        setup, language, body = example["setup"], example["language"], example["body"]
        if setup:
            _execute(setup, names)
        elif language == "console":
            lines = "".join(
                f"$ {command}\n{_run(command, shown)}" for command, shown in _commands(body)
            )
            return f"```console\n{lines}```"
        elif language:
            named = re.match(r"# (\S+\.\w+)\n", body)
            inline = re.match(r"cat > (\S+) <<'END'\n(.*)END\n", body, re.DOTALL)
            if inline:
                Path(inline[1]).write_text(inline[2])
            elif named:
                Path(named[1]).write_text(body)
            elif language == "python":
                _execute(body, names)
        return example[0]

    with inside(folder):
        _execute(setup, names)
        found = _EXAMPLE.sub(with_output, text)
        if "check_page" in names:
            names["check_page"]()
    return found


def _execute(code: str, names: dict[str, Any]) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        exec(code, names)


def _commands(body: str) -> Iterator[tuple[str, str]]:
    """Yield each command, which may go on after a backslash, and the output shown under it."""
    for match in re.finditer(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", body, re.MULTILINE):
        yield match[1], match[2]


def _run(command: str, shown: str) -> str:
    program, *words = shlex.split(command.replace("\\\n", " "))
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        if program == "megaindex":
            assert megaindex_main(words) in (0, 1), command  # 1: plan --check, diff-order, verify
        elif program == "python":
            runpy.run_path(words[0], run_name="__main__")
        else:
            raise ValueError(f"pages run megaindex and python, not {command!r}")
    text = "\n".join(line.rstrip() for line in out.getvalue().strip("\n").split("\n"))
    text = f"{text}\n" if text else ""
    return shown if _is_shown(text, shown) else text


def _is_shown(text: str, shown: str) -> bool:
    """Return True if a page shows this output, but for times and lines that it leaves out."""
    parts = re.split(r"(?m)^…\n", _TIME.sub("#", shown))
    pattern = r"(?:.*\n)+?".join(map(re.escape, parts))
    return re.fullmatch(pattern, _TIME.sub("#", text)) is not None


def main() -> None:
    for name in sys.argv[1:] or PAGES:
        page = ROOT / name
        with tempfile.TemporaryDirectory() as folder:
            page.write_text(run_page(page.read_text(), Path(folder), setup_of(name)))


if __name__ == "__main__":
    main()
