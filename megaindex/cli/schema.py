"""Print the JSON schema of recipes, by which editors complete and check them, or that of locks.

Write it to a file, and name that file in the first line of a recipe:
# yaml-language-server: $schema=recipe.schema.json"""

from __future__ import annotations

from collections.abc import Sequence

from megaindex.cli.options import Parser, print_json


def main(arguments: Sequence[str]) -> int:
    parser = Parser(prog="megaindex schema", description=__doc__, allow_abbrev=False)
    parser.add_argument("--locks", action="store_true", help="print the schema of run.lock")
    options = parser.parse_args(arguments)
    from megaindex.lock.shape import lock_schema
    from megaindex.settings.schema import recipe_schema

    print_json(lock_schema() if options.locks else recipe_schema())
    return 0
