"""The README says what the commands print."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megaindex.cli import VERBS, main

README = (Path(__file__).parents[1] / "README.md").read_text()


COMMAND = """
plan --tokens-per-epoch 2113896210 --seq-length 2048 --micro-batch-size 4 --data-parallel-size 8
--gradient-accumulation-steps 4 --epochs 1 --order neox
"""


def test_the_printed_plan_is_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """The block of GPT-NeoX issue 1164, but for the width of a terminal."""
    assert main(COMMAND.split()) == 0
    printed = capsys.readouterr().out
    block = README.split("with `--order neox`:\n\n```\n")[1].split("\n```")[0]

    def words(text: str) -> list[str]:
        return re.sub(r"[─━│╭╮╰╯]", " ", text).split()

    assert words(block) == words(printed)


def test_the_recipe_prints_its_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "run.yaml"
    recipe.write_text(README.split("```yaml\n")[1].split("```")[0])
    assert main(["plan", "--recipe", str(recipe)]) == 0
    printed = capsys.readouterr().out
    block = README.split("when it begins to repeat:\n\n```\n")[1].split("\n```")[0]
    lines = [line.strip() for line in printed.strip().splitlines()]
    assert [line.strip() for line in block.splitlines()] == lines


def test_every_verb_and_file_it_names_exists() -> None:
    for verb in re.findall(r"megaindex (\w+) ", README):
        assert verb in VERBS or verb in ("decides", "is", "and", "installs")
    for link in re.findall(r"\]\(([\w/.-]+)\)", README):
        assert (Path(__file__).parents[1] / link).exists(), link
