"""The JSON schema of recipes accepts what the reader accepts, and refuses common mistakes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from recipe.test_recipe_file import FULL
from support.command_line import cli
from support.inputs import for_each

from megaindex.errors import InvalidArgument
from megaindex.settings.recipe_file import recipe_of, to_mapping
from megaindex.settings.schema import recipe_schema

jsonschema = pytest.importorskip("jsonschema")
_KEYS = ("sources", "stages")
ROOT = Path(__file__).parents[2]


def _of_pages() -> list[str]:
    """Return the recipes in the pages of the docs."""
    found = [FULL]
    for page in sorted((ROOT / "docs").glob("*.md")):
        blocks = re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)
        found += [b for b in blocks if all(re.search(f"^{key}:", b, re.M) for key in _KEYS)]
    return found


@pytest.fixture(scope="module")
def validator() -> Any:
    schema = recipe_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_the_recipes_of_the_pages_are_accepted(validator: Any) -> None:
    found = _of_pages()
    assert len(found) > 4
    for text in found:
        validator.validate(yaml.safe_load(text))


def test_what_is_written_is_accepted(validator: Any) -> None:
    recipe = recipe_of(yaml.safe_load(FULL), "run.yaml", Path())
    validator.validate(json.loads(json.dumps(to_mapping(recipe))))


@for_each(
    ("old", "new"),
    [
        ("seed: 7", "sed: 7"),
        ("seed: 7", "seed: -1"),
        ("sequence_length: 2048", "sequence_length: 0"),
        ("sequence_length: 2048", "sequence_length: 2K"),
        ("sequence_length: 2048\n", ""),
        ("tail: pad", "tail: padd"),
        ("exhaustion: continue", "exhaustion: never"),
        ("interval: 100", "interval: 100.5"),
        ("interval: 100", "intervall: 100"),
        ("web: data/web", "web: 3"),
        ("kind: finetuning, labels", "kind: tuning, labels"),
        ("packed: false", "packed: 3"),
        ("order: window", "order: megatron"),
        ("max_documents: 9", "max_documents: many"),
        ("steps: 1000", "steps: soon"),
        ("batching: random", "batching: shuffled"),
        ("choose: 512", "chose: 512"),
        ("restart: true", "restart: 1"),
        ("by: documents", "by: words"),
        ("rounding: streaming", "rounding: up"),
        ("micro_batch_size: 4", "micro_batch_size: 0"),
        ("mix: {web: 0.7, code: 0.3}", "mix: [web, code]"),
    ],
)
def test_mistakes_are_refused_by_both(validator: Any, old: str, new: str) -> None:
    assert old in FULL
    content = yaml.safe_load(FULL.replace(old, new, 1))
    assert not validator.is_valid(content)
    with pytest.raises(InvalidArgument):
        recipe_of(content, "run.yaml", Path())


@for_each(
    ("old", "new"),
    [
        ("seed: 7", "seed: 0"),
        ("seed: 7", "seed:"),
        ("steps: 1000", "steps: 1e3"),
        ('max_epochs: "7/2"', "max_epochs: null"),
        ("tail: pad\n", "tail: pad\nmix_bounds: {}\n"),
        ("tokens: 1B", "tokens: 1.5B"),
        ("steps: 1000", "steps: 10K"),
        ("interval: 100", "interval: '100'"),
        ("iterations: 5", "iterations: all"),
        ("web: 0.7", "web: '7/10'"),
        ("tail: pad\n", "tail: pad\nskip: {steps: 3-4, move: true}\n"),
        ("tail: pad\n", "tail: pad\nskip: [{steps: 7}, {steps: [9, 10]}]\n"),
        ("tail: pad\n", "tail: pad\nmix_bounds: {web: [0.1, 0.9]}\n"),
    ],
)
def test_variants_are_accepted_by_both(validator: Any, old: str, new: str) -> None:
    assert old in FULL
    content = yaml.safe_load(FULL.replace(old, new, 1))
    validator.validate(content)
    recipe_of(content, "run.yaml", Path())


def test_the_command_prints_the_schema() -> None:
    assert json.loads(cli("schema")[1]) == recipe_schema()
