"""Words of the commands in a shell script, variables expanded where they are defined.

Understands what training scripts are made of: assignments, arrays, continued lines, quotes,
comments, ``$VAR``, ``${VAR:-default}``, ``${ARRAY[@]}`` and ``$((A * B))``. Nothing is executed.
What it cannot expand stays as written, so that whoever needs the word can name what is missing.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

Piece = tuple[str, str]
"""Text and the quote around it: a double or a single one, or none."""
Word = list[Piece]

_ASSIGNMENT = re.compile(r"(\w+)(\+?)=(\(?)")
_PREFIXES = ("export", "local", "readonly", "declare")
_DEEPEST = 8
_MOST_EXPANDED = 1 << 22  # characters that all expansions of a script add, and
_COST = 100  # for each of them
_LONGEST_SUM = 400  # characters; the parser of Python has no limit of its own to nesting
_EXPANSION = re.compile(
    rf"\$\(\((?P<sum>.{{0,{_LONGEST_SUM}}}?)\)\)(?!\))"
    r"|\$\{(?P<name>\w+)(?P<all>\[[@*]\])?(?:(?P<colon>:?)-(?P<default>[^{}]*))?\}"
    r"|\$(?P<plain>\w+)",
    re.S,
)
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


class Script:
    """The commands of a script, and the variables that stand when it ends."""

    def __init__(self, text: str, environment: Mapping[str, str]) -> None:
        self.variables: dict[str, str | list[str]] = dict(environment)
        self.commands: list[list[str]] = []
        self._room = _MOST_EXPANDED
        for statement in _statements(text):
            self._take(statement)

    def _take(self, words: list[Word]) -> None:
        while words and _bare(words[0]) in _PREFIXES:
            words = words[1:]
        assignments: list[tuple[str, str | list[str]]] = []
        while words and (match := _ASSIGNMENT.match(_bare(words[0]))):
            name, append, is_array = match.groups()
            if is_array:
                end = next((i for i, w in enumerate(words) if _bare(w) == ")"), len(words))
                items = [field for word in words[1:end] for field in self._fields(word)]
                assignments.append((name, self._appended(name, append, items)))
                words = words[end + 1 :]
                continue
            (text, quote), *rest = words[0]
            value = self._fields([(text[match.end() :], quote), *rest])
            assignments.append((name, " ".join(value)))
            words = words[1:]
        command = [field for word in words for field in self._fields(word)]
        if command:
            # `A=1 command` sets A for that command alone.
            self.commands.append(command)
        else:
            self.variables.update(assignments)

    def _appended(self, name: str, append: str, items: list[str]) -> list[str]:
        held = self.variables.get(name, []) if append else []
        return [*([held] if isinstance(held, str) else held), *items]

    def _fields(self, word: Word) -> list[str]:
        """The words one written word becomes: unquoted expansions split at blanks."""
        if len(word) == 1 and (items := self._whole_array(*word[0])) is not None:
            return items
        fields = [""]
        quoted = any(quote for _, quote in word)
        for text, quote in word:
            expanded = text if quote == "'" else self._expand(text)
            if quote or expanded == text:
                fields[-1] += expanded
                continue
            first, *more = expanded.split() or [""]
            fields[-1] += first
            fields += more
        return fields if quoted or fields != [""] else []

    def _whole_array(self, text: str, quote: str) -> list[str] | None:
        match = _EXPANSION.fullmatch(text) if quote != "'" else None
        held = self.variables.get(match["name"] or "") if match and match["all"] else None
        if not isinstance(held, list) or self._room < 0:
            return None
        self._room -= _COST * len(held)
        return held if quote else [part for item in held for part in item.split()]

    def _expand(self, text: str, depth: int = 0) -> str:
        """Again and again, since a default may hold variables of its own.

        ``A=$B$B B=$C$C C=…`` doubles with every line, and sums may hold themselves: what a script
        makes of itself is bounded, and the rest stays as written.
        """
        for _ in range(_DEEPEST - depth):
            new = _EXPANSION.sub(lambda match: self._value(match, depth), text)
            if new == text:
                break
            text = new
        return text

    def _value(self, match: re.Match[str], depth: int) -> str:
        if self._room < 0:
            return match[0]
        new = self._variable(match) if match["sum"] is None else self._sum(match, depth)
        self._room -= len(new) + _COST
        return new

    def _variable(self, match: re.Match[str]) -> str:
        held = self.variables.get(match["name"] or match["plain"])
        if isinstance(held, list):
            return " ".join(held)
        if held or (held is not None and not match["colon"]):
            return held
        return match[0] if match["default"] is None else match["default"].strip("\"'")

    def _sum(self, match: re.Match[str], depth: int) -> str:
        """An arithmetic expansion, where names may stand without a dollar sign."""
        text = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\b\}?", r"${\1}", match["sum"])
        text = self._expand(text, depth + 1).strip()
        if len(text) > _LONGEST_SUM:
            return match[0]
        try:
            return str(_integer(ast.parse(text, mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return match[0]


def _statements(text: str) -> Iterator[list[Word]]:
    """Simple commands, each a list of words; an array is ``A=(``, its items and ``)``."""
    words: list[Word] = []
    word: Word = []
    in_array = False
    for piece in _pieces(text.replace("\\\n", " ")):
        if isinstance(piece, tuple):
            word.append(piece)
            if piece[1] == "" and _ASSIGNMENT.fullmatch(piece[0]) and piece[0].endswith("("):
                words, word, in_array = [*words, word], [], True
            continue
        words, word = [*words, *([word] if word else [])], []
        if piece == ")" and in_array:
            words.append([(")", "")])
            in_array = False
        elif piece != " " and not in_array and words:
            yield words
            words = []
    if words or word:
        yield [*words, *([word] if word else [])]


_PIECES = re.compile(
    r"(?P<comment>(?:(?<=\s)|(?<=^))\#[^\n]*)"
    r"|(?P<array>(?<![^\s;])\w+\+?=\()"
    r"|'(?P<single>[^']*)'"
    r"|\"(?P<double>(?:\\.|[^\"\\])*)\""
    r"|(?P<plain>(?:\$\(\((?:[^()]|\([^()]*\))*\)\)|\$\([^()]*\)|\$\{[^}]*\}|\\.|[^\s;&|()'\"\\])+)"
    r"|(?P<blank>[ \t\r]+)"
    r"|(?P<end>[\n;&|()])",
    re.S,
)


def _pieces(text: str) -> Iterator[Piece | str]:
    """Pieces of words, `" "` for blanks, and the character that ends a statement."""
    for match in _PIECES.finditer(text):
        kind = match.lastgroup
        if kind == "single":
            yield match["single"], "'"
        elif kind == "double":
            yield re.sub(r'\\(["\\$`])', r"\1", match["double"]), '"'
        elif kind in ("plain", "array"):
            yield re.sub(r"\\(.)", r"\1", match[0]), ""
        elif kind == "blank":
            yield " "
        elif kind == "end":
            yield match["end"]


def _bare(word: Sequence[Piece]) -> str:
    """Text of the unquoted beginning of a word."""
    return word[0][0] if word[0][1] == "" else ""


def _integer(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_integer(node.left), _integer(node.right))
    raise ValueError(ast.dump(node))
