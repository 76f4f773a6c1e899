"""README.md: what its examples need besides running, see test_worked_pages.py."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

from support.worked_pages import DOCS, ROOT

from megaindex.cli import VERBS
from megaindex.format import IndexedDataset

README = (ROOT / "README.md").read_text()


def test_every_verb_exists() -> None:
    verbs = re.findall(r"(?m)(?:`|^)megaindex ([\w-]+)", README.split("\n\n", 2)[2])
    assert {"plan", "audit", "trace", "prove"} <= set(verbs) <= set(VERBS)


def test_both_pictures_show_the_same() -> None:
    """The dark one is the light one in other colours."""
    light, dark = (DOCS / f"audit-exposure{kind}.svg" for kind in ("", "-dark"))
    restyled = runpy.run_path(str(DOCS / "audit_sample.py"))["dark"]
    assert restyled(light.read_text()) == dark.read_text()
    for picture in (light, dark):
        assert f"docs/{picture.name}" in README


def test_the_first_screen_has_three_doors() -> None:
    """The same on the front page of the site, each of four commands."""
    doors = re.compile(r"(?m)^\*\*(I have text|I have Megatron corpora|My loss spiked)")
    for page in (README, (DOCS / "index.md").read_text()):
        first = page.split("\n## ")[0]
        assert len(doors.findall(first)) == 3
        assert first.index("<picture>") < first.index("**I have text")
        for block in re.findall(r"```sh\n(.*?)```", first, re.DOTALL):
            assert len(re.findall(r"^(?:pip|megaindex|python) ", block, re.MULTILINE)) == 4


def test_four_commands_go_from_a_wheel_to_a_batch(tmp_path: Path) -> None:
    """The first block, without its installation, which packaging/wheels.py runs, and a compiler."""
    block = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)[0]
    commands = re.findall(r"^(pip|megaindex|python) ", block, re.MULTILINE)
    assert commands == ["pip", "megaindex", "megaindex", "python"]
    install, _, rest = block.partition("\n")
    assert install.startswith("pip install ./megaindex-*.whl ")
    (tmp_path / "bin").mkdir()
    for name, words in (("megaindex", " -m megaindex"), ("python", "")):
        script = tmp_path / "bin" / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}"{words} "$@"\n')
        script.chmod(0o755)
    (tmp_path / "my_text.txt").write_text("A document of mine.\n" * 20)
    result = subprocess.run(
        ["/bin/sh", "-eu", "-c", rest], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "PATH": str(tmp_path / "bin")},
    )  # fmt: skip
    assert (result.returncode, result.stderr) == (0, "megaindex plan: a pair\n")
    tokens = IndexedDataset(tmp_path / "my_corpus").num_tokens
    assert tokens == 20 * (len("A document of mine.") + 1)
    assert "my_corpus: 20 documents, 400 tokens" in result.stdout
    assert " │ train_iters 3 " in result.stdout  # 399 // 32 samples
    assert re.search(r"\[\[ *\d+ .*\]\]\n$", result.stdout, re.DOTALL)
