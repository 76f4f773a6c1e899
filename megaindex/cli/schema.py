"""Print the JSON schema of recipes, by which editors complete and check them.

Write it to a file, and name that file in the first line of a recipe:
# yaml-language-server: $schema=recipe.schema.json"""

from __future__ import annotations

from collections.abc import Sequence

from megaindex.cli.options import Parser, print_json


def main(arguments: Sequence[str]) -> int:
    parser = Parser(prog="megaindex schema", description=__doc__, allow_abbrev=False)
    parser.parse_args(arguments)
    from megaindex.settings.schema import recipe_schema

    print_json(recipe_schema())
    return 0
