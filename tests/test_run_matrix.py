"""Every question to every kind of run: answers agree with each other, or one of few rules refuses.

docs/matrix.md shows the table; ``PYTHONPATH=.:tests python -m support.run_kinds`` rewrites it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from support.inputs import for_each
from support.run_kinds import ALONE, KINDS, PAGE, REFUSALS, RULES, YES, Kind, page, write_corpora
from support.run_questions import QUESTIONS, Alone, Asked, NoDoor

from megaindex.errors import MegaIndexError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("matrix")
    write_corpora(folder)
    return folder


@pytest.fixture(scope="module")
def runs(folder: Path) -> Iterator[dict[str, Asked]]:
    """The runs that were asked, by kind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield {}


def reason_of(error: Exception) -> str:
    """The rule by which a question was refused."""
    found = [
        name
        for name, words in REFUSALS.items()
        if any(re.search(each, str(error), re.DOTALL) for each in words)
    ]
    assert len(found) == 1, f"a refusal by {found or 'no rule'}: {error}"
    return found[0]


def some_questions(kind: Kind) -> list[str]:
    """A sixth of the questions, of the next kind another, and those that a rule of it refuses."""
    sixth = [*QUESTIONS][KINDS.index(kind) % 6 :: 6]
    return [name for name in QUESTIONS if name in sixth or kind.cells.get(name) in RULES]


@pytest.mark.parametrize(
    "of_kind",
    [some_questions, pytest.param(lambda kind: [*QUESTIONS], id="all", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@for_each("question", QUESTIONS)
def test_answers_agree_or_a_rule_refuses(
    runs: dict[str, Asked], kind: Kind, of_kind: Callable[[Kind], list[str]], question: str
) -> None:
    if question not in of_kind(kind):
        return
    expected = kind.cell(question)
    if kind.name not in runs:
        runs[kind.name] = Asked(kind)
    asked = runs[kind.name]
    try:
        QUESTIONS[question](asked)
        found = YES
    except Alone:
        found = ALONE
    except (MegaIndexError, NoDoor) as error:
        found = reason_of(error)
    assert found == expected


def test_the_page_shows_the_table() -> None:
    text = PAGE.read_text()
    assert text == page(text, QUESTIONS)


def test_every_rule_is_met() -> None:
    cells = {kind.cell(question) for kind in KINDS for question in QUESTIONS}
    assert cells == {YES, ALONE, *REFUSALS}
