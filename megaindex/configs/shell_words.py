"""Words of launch scripts in Bash: variables, their expansion, tests and sums.

An unknown value is a character that stands for the construct that is not evaluated and its line.
"""

from __future__ import annotations

import ast
import operator
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

from megaindex.configs.shell_tokens import ASSIGNMENT, PARAMETER, Token, piece_end, read_tokens
from megaindex.errors import InvalidArgument

_ONE, _MANY, _SPLIT, _KEEP = "\U000f0000", "\U00100000", "\U0010fff0", "\U0010fff1"
_MARK = re.compile("[\U000f0000-\U0010ffef]")  # of one unknown word, or of any number of words
_MOST_EXPANDED, _MOST_UNKNOWN = 1 << 22, 10_000  # characters of all expansions; marks
NAME = re.compile(r"[A-Za-z_]\w*", re.A)
_INTEGER = re.compile(r"-?(?:0|[1-9]\d{0,17})", re.A)
_GLOB, _BRACE = re.compile(r"[*?]|\[.+\]"), re.compile(r"\{.*(,|\.\.).*\}|^~", re.S)
_READ = re.compile(r"IFS=\S*(?=\s+read\b)|\$(\w+|\{\w+(\[[@*\d]+\])?\})", re.A)
_ASSIGNING = re.compile(r"\$(\(\(|\[|\{).*(=|\+\+|--)", re.S)
_OWN_FOLDER = re.compile(
    r"""\$\((cd "?\$\()?dirname "?\$(0|\{?BASH_SOURCE(\[0\])?\}?)"?\)"""
    r"""("?( *>/dev/null( 2>&1)?)? && pwd\))?"""
)
_OF_BASH = re.compile(
    r"S?RANDOM|SECONDS|LINENO|EPOCHSECONDS|EPOCHREALTIME|HOSTNAME|(HOST|MACH|OS)TYPE|E?UID|PPID|"
    r"BASH\w*|SHELLOPTS|FUNCNAME|SHLVL|PIPESTATUS|GROUPS|OLDPWD|DIRSTACK|OPTIND|OPTARG|COLUMNS|"
    r"LINES|REPLY|MAPFILE|COPROC|[_?!$-]"
)
_SUMS: dict[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    ast.Mod: lambda a, b: abs(a) % abs(b) * (-1 if a < 0 else 1),
}  # fmt: skip
_COMPARED = {f"-{name}": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}


class Unknown(NamedTuple):
    """A construct that is not evaluated, or the expansion of a name without a value."""

    text: str
    line: str
    undefined: bool = False


def is_unknown(text: str) -> bool:
    return max(text, default="") >= _ONE


def is_several(text: str) -> bool:
    """Return True if a word may be any number of words."""
    return max(text, default="") >= _MANY


class Words:
    """Variables, functions and parameters, and what words become with them."""

    def __init__(self, environment: Mapping[str, str], arguments: Sequence[str], path: str) -> None:
        self.unknowns, self.exits_at = list[Unknown](), ""
        self._room, self._line = _MOST_EXPANDED, 0
        # variables, functions "NAME()", parameters "@"; "" stands for all others
        self.state: dict[str, Any] = {**environment, "@": list(arguments), "0": path}
        said, here = environment.get("PWD", ""), os.getcwd()
        self.state["PWD"] = said if said[:1] == "/" and os.path.realpath(said) == here else here
        self.state.pop("IFS", None)
        if is_unknown("".join([*arguments, *environment.values()])):
            self.refuse("a variable or parameter with such characters")

    def refuse(self, text: str) -> NoReturn:
        raise InvalidArgument(f"line {self._line}: `{short(text)}` is not evaluated")

    def _mark(self, text: str, *, undefined: bool = False) -> str:
        found = Unknown(short(text), f"line {self._line}", undefined)
        if found not in self.unknowns[-50:]:
            self.unknowns.append(found)
        if len(self.unknowns) > _MOST_UNKNOWN:
            self.refuse("that many unknown words")
        return chr(ord(_ONE) + self.unknowns.index(found))

    def _of(self, mark: str) -> Unknown:
        return self.unknowns[ord(mark) & 0xFFFF]

    def unknown_in(self, text: str) -> Unknown | None:
        """Return what makes a word unknown; a name without a value last."""
        found = map(self._of, _MARK.findall(text))
        return min(found, key=lambda one: one.undefined, default=None)

    def written(self, text: str) -> str:
        """Return a word with its unknowns as the script has them."""
        return _MARK.sub(lambda match: self._of(match[0]).text, text)

    def _defined(self, text: str) -> str:
        """Return a text with names without a value as nothing."""
        return _MARK.sub(lambda match: "" if self._of(match[0]).undefined else match[0], text)

    def _several(self, text: str) -> str:
        """Return a text whose unknowns are any number of words."""
        many = _MARK.sub(lambda match: chr(ord(_MANY) | ord(match[0]) & 0xFFFF), text)
        return many if self._defined(text) else text

    def _spend(self, length: int) -> None:
        self._room -= 100 + length
        if self._room < 0:
            self.refuse("an expansion of that length")

    def _forget_names(self, text: str, why: str) -> None:
        self._spend(len(text))
        mark = self._mark(why)
        self.state |= dict.fromkeys(NAME.findall(_READ.sub("", text)), mark)

    def _forget_all(self, why: str) -> None:
        mark, names = self._mark(why), [key for key in self.state if key.endswith("()")]
        self.state = {"": mark, "@": mark, "0": self.state["0"], **dict.fromkeys(names)}

    # assignments

    def _assignments(self, tokens: list[Token]) -> bool | None:
        for token in tokens:
            match = ASSIGNMENT.match(token.text)
            assert match is not None
            name, index, append = match.groups()
            held, text = self.state.get(name, self.state.get("")), token.text[match.end() :]
            if index or ":~" in text:
                self._scan(token.text)
                self.state[name] = self._several(self._mark(token.text))
            elif text.startswith("("):
                items = [word for one in _inner_array(text) for word in self._fields(one)]
                before = [self._several(held)] if isinstance(held, str) and held else held or []
                odd = any(re.match(r"\[[^]]*\]\+?=", one) for one in _inner_array(text))
                items = [self._several(self._mark(text))] if odd else items
                self.state[name] = [*before, *items] if append else items
            else:
                value = self._text(text)  # before the name is read, which it may set
                self._assign(name, (self._held(name) or "") * bool(append) + value)
        return None if any(re.search(r"\$\((?!\()|`", one.text) for one in tokens) else True

    def _assign(self, name: str, value: str) -> None:
        """Set a variable, of an array the first element."""
        held = self.state.get(name, self.state.get(""))
        if isinstance(held, list) and held[:1] and is_several(held[0]):
            held = held[0]
        if isinstance(held, str) and is_unknown(held):
            held = [held, self._several(self._mark(name))]  # it may be an array
        self.state[name] = [value, *held[1:]] if isinstance(held, list) and held[1:] else value

    # tests and sums

    def _test(self, words: list[str]) -> bool | None:
        """Return the result of ``test`` with these words, or of ``[[``."""
        if words[:1] == ["!"] and len(words) in (3, 4):
            status = self._test(words[1:])
            return None if status is None else not status
        if len(words) == 1 or any(is_unknown(word) for word in words):
            return None if any(is_unknown(word) for word in words) else words[0] != ""
        if len(words) == 2 and words[0] in ("-n", "-z"):
            return (words[1] == "") is (words[0] == "-z")
        if len(words) == 3 and words[1] in ("=", "==", "!="):
            return (words[0] == words[2]) is (words[1] != "!=")
        if len(words) == 3 and words[1] in _COMPARED:
            if all(_INTEGER.fullmatch(words[n]) for n in (0, 2)):
                return bool(_COMPARED[words[1]](int(words[0]), int(words[2])))
            self._forget_all(" ".join(words))
        return None

    def _sum(self, piece: str) -> str:
        """Return the value of ``$((…))`` of integers; one that assigns is unknown."""
        text = self._defined(self._text(piece[3:-2], quoted=True))
        names = {name: self._defined(self._held(name) or "") or "0" for name in NAME.findall(text)}
        values = "".join(names.values())
        if re.search(r"=|\+\+|--", text + values):
            self._forget_all(piece)
            return self._mark(piece)
        plain = re.fullmatch(r"[\w\s+*/%()-]{1,400}", text, re.A)
        if plain and all(_INTEGER.fullmatch(value) for value in names.values()):
            with suppress(SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
                text = NAME.sub(lambda match: f"({names[match[0]]})", text)
                return str(_integer(ast.parse(f"({text})", mode="eval").body))
        return self._mark(piece)

    # words

    def _fields(self, raw: str, *, empty: bool = False) -> list[str]:
        """Return the words that a word becomes; with ``empty`` undefined names are nothing."""
        if match := re.fullmatch(r'"(\$@|\$\{(?:@|\w+\[@\])\})"', raw, re.A):
            return self._elements(match[1])
        text = self._defined(self._expand(raw)) if empty else self._expand(raw)
        return [one.replace(_KEEP, "") for one in text.split(_SPLIT) if one]

    def _text(self, raw: str, *, quoted: bool = False, empty: bool = False) -> str:
        """Return a word that is not split."""
        text = self._expand(raw, quoted=quoted, splits=False).replace(_KEEP, "")
        text = _MARK.sub(lambda match: chr(ord(_ONE) + (ord(match[0]) & 0xFFFF)), text)
        return self._defined(text) if empty else text

    def _expand(self, raw: str, *, quoted: bool = False, splits: bool = True) -> str:
        found, plain, at = list[str](), "", 0
        while at < len(raw):
            end = piece_end(raw, at, quoted)
            piece, at = raw[at:end], end
            if piece[0] in "$`<>" and len(piece) > 1:
                found.append(self._value(piece, quoted, splits))
            elif piece[0] == "\\":
                kept = quoted and piece[1:] not in ("$", "`", '"', "\\", "\n")
                found.append("" if piece[1:] == "\n" else _KEEP + piece[0] * kept + piece[1:])
            elif len(piece) > 1 and not quoted:
                inner = self._expand(piece[1:-1], quoted=True, splits=splits)
                found.append(_KEEP + (inner if piece[0] == '"' else piece[1:-1]))
            else:
                found.append(piece)
                plain += piece
        if splits and not quoted and (_BRACE.search(plain) or (_GLOB.search(plain))):
            return self._several(self._mark(raw))
        return self._mark(raw) if not quoted and plain[:1] == "~" else "".join(found)

    def _value(self, piece: str, quoted: bool, splits: bool) -> str:
        """Return what an expansion becomes within a word."""
        if re.match(r"\$[@*]|\$\{(\w+\[)?[@*]", piece, re.A):
            items = self._elements(piece)
            value: str = " ".join(items)
            if len(items) != 1 and splits and (quoted or "IFS" in self.state):
                value = (
                    value
                    if "*" in piece and "IFS" not in self.state
                    else self._several(self._mark(piece))
                )
        else:
            value = self._evaluated(piece)
        self._spend(len(value))
        if quoted or not splits:
            return value
        if _GLOB.search(value) or (value and "IFS" in self.state):
            return self._several(self._mark(piece))
        return re.sub(r"[ \t\n]+", _SPLIT, self._several(value))

    def _held(self, name: str) -> str | None:
        """Return the value of a name, of an array the first element; None if it has none."""
        if _OF_BASH.fullmatch(name):
            return self._mark(f"${name}")
        if name == "0" or not (name == "#" or name.isdecimal()):
            held = self.state.get(name, self.state.get(""))
            return next(iter(held), None) if isinstance(held, list) else held
        given = self.state["@"]
        if isinstance(given, str) or is_several("".join(given)):
            return self._mark(f"${name}")
        if name == "#":
            return str(len(given))
        return given[int(name) - 1] if int(name) <= len(given) else None

    def _elements(self, piece: str) -> list[str]:
        """Return the words of ``$@`` or ``${A[@]}``."""
        name = (NAME.search(piece) or ["@"])[0]
        held = self.state.get(name, self.state.get(""))
        match = PARAMETER.fullmatch(piece)
        if match is None or match[4]:
            return [self._several(self._mark(piece))]
        self._spend(sum(100 + len(item) for item in held or []))
        return [self._several(held)] if isinstance(held, str) else held or []

    def _evaluated(self, piece: str) -> str:
        if piece.startswith("$((") and piece.endswith("))"):
            return self._sum(piece)
        match = PARAMETER.fullmatch(piece)
        if match is None:
            self._scan(piece)
            return self._own_folder(piece) or self._mark(piece)
        name, how = match[1] or match[2], match[4] or ""
        held = self._held(name)
        if not how:
            return self._mark(piece, undefined=True) if held is None else held
        defined = self._defined(held or "")
        if how[0] == ":" and defined and not _MARK.sub("", defined):
            return self._mark(piece)  # unknown, and perhaps empty
        given = held is not None and (how[0] != ":" or defined != "")
        if given is (how[-1] == "+"):
            return self._default(piece, name)
        return held or "" if given else ""

    def _default(self, piece: str, name: str) -> str:
        """Return the word of ``${NAME:-word}`` and the like."""
        match = PARAMETER.fullmatch(piece)
        assert match is not None
        word = match[5]
        whole = re.fullmatch(r'"([^"\'\\]*)"', word, re.S)
        value = self._text(whole[1] if whole else word, quoted=True)
        odd = re.search(r"\s|^$", value) if whole else re.search(r"[\"'\\~]", word)
        if odd:
            self._scan(piece)
            return self._mark(piece)
        if match[4][-1] == "=":
            self._assign(name, value)
        return value

    def _scan(self, text: str) -> None:
        """Make unknown what the expansions in a text that is not evaluated could set."""
        if _ASSIGNING.search(text) or text.startswith("{"):
            self._forget_names(text, text)

    def _own_folder(self, text: str) -> str:
        """Return the output of ``dirname`` of the script or file; else nothing."""
        match = _OWN_FOLDER.fullmatch(text)
        if match is None or is_unknown(self.state.get("PWD", _ONE)):
            return ""
        path = (self.state.get("BASH_SOURCE") if "BASH" in text else None) or self.state["0"]
        folder = os.path.dirname(path) or "."
        return os.path.normpath(f"{self.state['PWD']}/{folder}") if "pwd" in text else folder


def short(text: str) -> str:
    return next(iter(text.strip().splitlines()), "")[:60]


def _inner_array(text: str) -> list[str]:
    tokens = [one for one in read_tokens(text[1:-1]) if one.kind != "\n"]
    if any(one.kind != "word" for one in tokens):
        raise ValueError("an array with operators")
    return [one.text for one in tokens]


def test_words(text: str) -> list[Token]:
    """Return the words of ``[[ … ]]``."""
    tokens = read_tokens(text[2:-2])
    compares = tokens[1:2] and tokens[1].text in ("=", "==", "!=")
    odd = compares and _GLOB.search(re.sub(r"[\"'].*?[\"']", "", tokens[-1].text))
    plain = all(one.kind == "word" for one in tokens) and not odd
    return tokens if plain else [*tokens, Token("word", "$(x)")]  # not evaluated


def _integer(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        value = node.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = -_integer(node.operand)
    elif isinstance(node, ast.BinOp) and type(node.op) in _SUMS:
        value = int(_SUMS[type(node.op)](_integer(node.left), _integer(node.right)))
    else:
        raise ValueError(ast.dump(node))
    if not -(2**63) <= value < 2**63:
        raise ValueError(value)
    return value
