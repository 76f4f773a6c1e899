"""A JSON schema of recipes, by which editors complete and check them.

It is made from the same tables and dataclasses as the reader. What it cannot say, such as that
lengths exclude each other or that a stage's sources exist, the reader checks.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from megaindex.settings.past import Past, PastRead
from megaindex.settings.recipe import (
    EXHAUSTIONS,
    LENGTH_KEYS,
    RecipeEvaluation,
    RecipeSource,
    RecipeStage,
    Stream,
    Weighting,
)
from megaindex.settings.run_settings import TAILS
from megaindex.settings.yaml_sections import COUNTS

Schema = dict[str, Any]

_SHARE: Schema = {"anyOf": [{"type": "number", "minimum": 0}, {"type": "string"}, {"type": "null"}]}
_TEXT: Schema = {"type": "string"}
_STEPS: Schema = {"anyOf": [{"type": "integer", "minimum": 0}, _TEXT]}
_NOTHING: Schema = {"type": "null"}


def recipe_schema() -> Schema:
    """Return the schema, of JSON Schema 2020-12."""
    source = _fields(RecipeSource, "name")
    batch = _mapping(
        {
            **{name: _integer(name) for name in ("micro_batch_size", "data_parallel_size",
               "gradient_accumulation_steps", "global_batch_size")},
            "schedule": _TEXT,
            "rampup": {
                "type": ["array", "null"],
                "items": {"type": "integer"},
                "minItems": 3,
                "maxItems": 3,
            },
        }
    )  # fmt: skip
    of_stage = _fields(
        RecipeStage, "name", "streams", "length", "weighting", "batch", "micro_batch_size",
        "data_parallel_size", "gradient_accumulation_steps",
    )["properties"]  # fmt: skip
    stage = _mapping(
        {
            **{key: _SHARE if key == "epochs" else _integer(key) for key in LENGTH_KEYS.values()},
            **of_stage,
            "weights": _fields(Weighting),
            "batch": batch,
            "mix": _each({"anyOf": [_SHARE, _NOTHING, _fields(Stream, "source")]}),
        },
        "mix",
    )
    path_or_source = {"anyOf": [_TEXT, source]}
    evaluation = _fields(RecipeEvaluation)["properties"]
    iterations = {"anyOf": [_integer("iterations"), {"const": "all"}]}
    skip = _mapping(
        {
            "steps": {"anyOf": [_STEPS, {"type": "array", "items": _STEPS}]},
            "move": {"type": "boolean"},
            "remove": {"type": "boolean"},
            "documents": _TEXT,
            "source": _STEPS,
            "from_step": _integer("from_step", least=0),
        }
    )
    past = _fields(Past)["properties"]
    top = _mapping(
        {
            "sequence_length": _integer("sequence_length"),
            "batch": batch,
            "sources": _each(path_or_source),
            "stages": _each(stage),
            "seed": _integer("seed", least=0),
            "tail": {"enum": [*TAILS]},
            "exhaustion": {"enum": [*EXHAUSTIONS]},
            "evaluation": _mapping(
                {**evaluation, "iterations": iterations, "source": path_or_source}, "source"
            ),
            "skip": {"anyOf": [skip, {"type": "array", "items": skip}]},
            "past": _mapping(
                {**past, "read": _each(_fields(PastRead, "source")), "mix": _each(_SHARE)}, "steps"
            ),
            "mix_changes": {
                "anyOf": [
                    _TEXT,
                    _mapping({"file": _TEXT, "sources": {"type": "array"}}, "file"),
                ]
            },
            "mix_bounds": _each({"type": "array", "items": _SHARE, "minItems": 2, "maxItems": 2}),
        },
        *("sequence_length", "batch", "sources", "stages"),
    )
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "megaindex recipe",
        **top,
    }


def _mapping(properties: Schema, *required: str) -> Schema:
    found: Schema = {"type": "object", "additionalProperties": False, "properties": properties}
    return {**found, "required": [*required]} if required else found


def _each(value: Schema) -> Schema:
    """Return the schema of a mapping of names to values of one schema."""
    return {"type": "object", "additionalProperties": value}


def _integer(name: str, least: int = 1) -> Schema:
    number: Schema = {"type": "integer", "minimum": least}
    ending = r"\s*[KMBT]?" if name in COUNTS else ""
    text = {**_TEXT, "pattern": rf"^[0-9._]+([eE]\+?[0-9]+)?{ending}$"}
    return {"anyOf": [number, text, _NOTHING]}


def _fields(kind: type[Any], *left_out: str) -> Schema:
    """Return the schema of a mapping with the fields of a dataclass."""
    hints = get_type_hints(kind)
    names = [field.name for field in fields(kind) if field.name not in left_out]
    return _mapping({name: _of_type(name, hints[name]) for name in names})


def _of_type(name: str, hint: Any) -> Schema:
    kinds = [hint, *get_args(hint)] if get_origin(hint) is not Literal else [hint]
    for kind in kinds:
        if get_origin(kind) is Literal:
            return {"enum": [*get_args(kind)]}
    if bool in kinds:
        return {"type": "boolean"}
    if int in kinds:
        return _integer(name, least=0)
    return _TEXT if str in kinds else _SHARE
