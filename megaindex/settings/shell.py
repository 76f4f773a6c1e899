"""Launch scripts in Bash: the commands that they certainly start, without running anything.

Assignments, `source`, and lists and conditions on known words are evaluated. All else makes every
name unknown that its text mentions, other than to expand it, or all names. An unknown value is a
character that stands for the construct that is not evaluated and its line.
"""

from __future__ import annotations

import ast
import operator
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn

from megaindex.errors import InvalidArgument
from megaindex.settings import shell_tokens as syntax
from megaindex.settings.shell_tokens import ASSIGNMENT, PARAMETER, Token, read_tokens, split
from megaindex.settings.yaml_sections import read_text

_ONE, _MANY, _SPLIT, _KEEP = "\U000f0000", "\U00100000", "\U0010fff0", "\U0010fff1"
_MARK = re.compile("[\U000f0000-\U0010ffef]")  # of one unknown word, or of any number of words
_MOST_EXPANDED, _MOST_UNKNOWN = 1 << 22, 10_000  # characters of all expansions; marks
_NAME = re.compile(r"[A-Za-z_]\w*", re.A)
_INTEGER = re.compile(r"-?(?:0|[1-9]\d{0,17})", re.A)
_ALL = "$["  # a text that could set every name
_GLOB, _BRACE = re.compile(r"[*?]|\[.+\]"), re.compile(r"\{.*(,|\.\.).*\}|(^|[:=])~", re.S)
_READ = re.compile(r"IFS=\S*(?=\s+read\b)|\$(\w+|\{\w+(\[[@*\d]+\])?\})", re.A)
_HARMLESS = re.compile(r"\d*>&[12]|[12&]?>\s*/dev/null|<<.*", re.S)  # redirections that succeed
_SETTING = re.compile(r"\$(\(\(|\[|\{(?!#?\w+(\[[@*\d]+\])?(\}|:?[-+?]|[%#/^,]))|\{[^}]*\[[^@*\d])")
_COMPARING = re.compile(  # evaluates values
    r"\[\[\s(?!\"?\$#\"? -\w\w \d+ \]\]).*?\s-(eq|ne|[lg][te]|v)\s|\(\(|\w\[(?![\d@*]+\])|"
    r"\s-v\s+[^\w\s]",
    re.S,
)
_OWN_FOLDER = re.compile(
    r"""\$\((cd "?\$\()?dirname "?\$(0|\{?BASH_SOURCE(\[0\])?\}?)"?\)"""
    r"""("?( *>/dev/null( 2>&1)?)? && pwd\))?"""
)
_OF_BASH = re.compile(
    r"S?RANDOM|SECONDS|LINENO|EPOCHSECONDS|EPOCHREALTIME|HOSTNAME|(HOST|MACH|OS)TYPE|E?UID|PPID|"
    r"BASH\w*|SHELLOPTS|FUNCNAME|SHLVL|PIPESTATUS|GROUPS|OLDPWD|DIRSTACK|OPTIND|OPTARG|COLUMNS|"
    r"LINES|REPLY|MAPFILE|COPROC|[_?!$-]"
)
_SETTERS = frozenset(
    ("export", "declare", "typeset", "local", "read", "unset", "wait", "command", "break",
     "continue", "return", "cd", "pushd", "popd")
)  # fmt: skip
_ANY = frozenset(  # they can set every name
    ("eval", "source", ".", "conda", "mamba", "micromamba", "module", "ml", "spack", "deactivate",
     "let", "mapfile", "readarray", "getopts", "coproc", "builtin")
)  # fmt: skip
_CHANGING = re.compile(r"(shopt|alias|unalias|enable|readonly|hash)\b|trap .*\b(DEBUG|ERR|RETURN)|"
                       r"(declare|typeset|local)\b.*\s-\w*[niluAr]|"
                       r"(?!set( --( |$)|( [-+][euvxo]+| errexit| nounset| pipefail| xtrace)*$))"
                       r"set\b", re.S)  # fmt: skip
_ODD = re.compile(
    r"\r|\bIFS\b(?!=('[^']*'|\S*)\s+read\b)|\b(POSIXLY_CORRECT|GLOBIGNORE)=|"
    r"(?<![\s\\])\\\n(?=\S)"
)  # line continuations within a word
_LAUNCHERS = re.compile(
    r"(.*/)?(\w*run|python[\d.]*|sbatch|mpiexec|deepspeed|accelerate|bash|sh|"
    r"exec|env|nohup|command|time|timeout|numactl|xargs|p?d?ssh?|eval)"
)
_SUMS: dict[type[ast.AST], Any] = {
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


class Command(NamedTuple):
    """A program that is started: its words, the variables, and conditions that it depends on."""

    words: list[str]
    variables: Mapping[str, Any]
    assumed: tuple[str, ...]


class _Exit(Exception):
    """End of the script, or of a subshell."""


def is_unknown(text: str) -> bool:
    return max(text, default="") >= _ONE


def is_several(text: str) -> bool:
    """Return True if a word may be any number of words."""
    return max(text, default="") >= _MANY


def _short(text: str) -> str:
    return next(iter(text.strip().splitlines()), "")[:60]


class Script:
    """A script: the `commands` that it starts, and where it `exits_at` before its end, if it does.

    Args:
        environment: variables besides those that it sets.
        arguments: its positional parameters; `path` is its ``$0``.

    Raises:
        InvalidArgument: it has a construct after which nothing is certain.
    """

    def __init__(
        self,
        text: str,
        environment: Mapping[str, str],
        arguments: Sequence[str] = (),
        path: str = "bash",
    ) -> None:
        self.commands, self.unknowns = list[Command](), list[Unknown]()
        self.perhaps: list[tuple[str, list[str]]] = []  # where, and words as written
        self.exits_at, self._assumed = "", list[str]()
        self._room, self._line = _MOST_EXPANDED, 0
        # variables, functions "NAME()", parameters "@"; "" stands for all others
        self.state: dict[str, Any] = {**environment, "@": list(arguments), "0": path}
        said, here = environment.get("PWD", ""), os.getcwd()
        self.state["PWD"] = said if said[:1] == "/" and os.path.realpath(said) == here else here
        self.state.pop("IFS", None)
        if is_unknown("".join([text, *arguments, *environment.values()])):
            self._refuse("a variable or parameter with such characters")
        with suppress(_Exit):
            self._run(text)

    # unknown values

    def _refuse(self, text: str) -> NoReturn:
        raise InvalidArgument(f"line {self._line}: `{_short(text)}` is not evaluated")

    def _mark(self, text: str, *, undefined: bool = False) -> str:
        found = Unknown(_short(text), f"line {self._line}", undefined)
        if found not in self.unknowns[-50:]:
            self.unknowns.append(found)
        if len(self.unknowns) > _MOST_UNKNOWN:
            self._refuse("that many unknown words")
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

    def _forget(self, text: str, why: str = "") -> None:
        """Make unknown what a text that is not evaluated could set."""
        self._spend(len(text))
        mark, functions = self._mark(why or text), [k for k in self.state if k.endswith("()")]
        if _SETTING.search(text) or _COMPARING.search(text) or text.startswith("{"):
            self.state = {"": mark, "@": mark, "0": self.state["0"]} | {
                key: self.state[key] for key in functions}  # fmt: skip
        self.state |= dict.fromkeys(_NAME.findall(_READ.sub("", text)), mark)

    def _spend(self, length: int) -> None:
        self._room -= 100 + length
        if self._room < 0:
            self._refuse("an expansion of that length")

    # lists and conditions: each method returns the success, None if it is unknown

    def _run(self, text: str) -> bool | None:
        held, self._room = self._line, self._room - len(text)
        if odd := _ODD.search(text[: 1 << 18]) or len(text) > 1 << 18:
            self._refuse(repr(odd[0]) if isinstance(odd, re.Match) else "a text of that size")
        try:
            return self._list(read_tokens(text))
        except (ValueError, IndexError, RecursionError) as error:
            if isinstance(error, InvalidArgument):
                raise
            raise InvalidArgument(f"line {self._line}: syntax that is not read: {error}") from None
        finally:
            self._line = held

    def _list(self, tokens: list[Token]) -> bool | None:
        status: bool | None = True
        for _, part, sign in split(tokens, "\n", ";", "&"):
            if part:
                status = self._apart(part) if sign == "&" else self._and_or(part)
        return status

    def _and_or(self, tokens: list[Token]) -> bool | None:
        status: bool | None = True
        wanted = True
        for place, part, sign in split(tokens, "&&", "||"):
            if status is None:
                return self._maybe(tokens[place:], tokens)
            if status is wanted:
                status = self._pipeline(part)
            wanted = sign == "&&"
        return status

    def _pipeline(self, tokens: list[Token]) -> bool | None:
        parts = [part for _, part, _ in split(tokens, "|", "|&")]
        if len(parts) > 1:
            return [self._apart(part) for part in parts][-1]
        if tokens and tokens[0].keyword and tokens[0].text in ("!", "time"):
            status = self._pipeline(tokens[1:])
            return status if status is None else status is (tokens[0].text == "time")
        return self._command(tokens)

    def _apart(self, tokens: list[Token]) -> bool | None:
        """Evaluate commands of a subshell, whose settings are lost."""
        held = dict(self.state)
        with suppress(_Exit):
            self._list(tokens)
        self.state, self.exits_at = held, ""
        return None

    def _command(self, tokens: list[Token]) -> bool | None:
        self._line = tokens[0].line
        texts = [one.text for one in tokens]
        if texts[1:3] == ["(", ")"]:
            if texts[3:4] != ["{"] or texts[-1] != "}":
                raise ValueError("a function without braces")
            self.state[f"{texts[0]}()"] = tokens[4:-1]
            return True
        while tokens[0].keyword and tokens[-1].kind == "<":
            self._scan(tokens[-1].text)
            tokens = tokens[:-1]
        kind = texts[0] + tokens[-1].text if tokens[0].keyword else tokens[0].kind
        if kind in ("{}", "()"):
            return (self._list if kind == "{}" else self._apart)(tokens[1:-1])
        if kind == "iffi":
            return self._if(tokens)
        if tokens[0].keyword or kind not in ("word", "<", "test"):
            return self._maybe(tokens, tokens)
        return self._simple(tokens)

    def _if(self, tokens: list[Token]) -> bool | None:
        places = [n for n, t in enumerate(tokens) if t.keyword and t.depth == tokens[0].depth]
        holds: bool | None = False
        for begin, end in pairwise(places):
            word, part = tokens[begin].text, tokens[begin + 1 : end]
            if word == "else" or (word == "then" and holds):
                return self._list(part)
            if word in ("if", "elif"):
                holds = self._list(part)
                if holds is None:
                    return self._maybe(tokens[end:], tokens)
        return True

    # what is perhaps run

    def _maybe(self, tokens: list[Token], within: Sequence[Token]) -> bool | None:
        """Make unknown what these commands could set, and the functions that they call."""
        why, parts, seen = " ".join(one.text for one in within), [tokens], set[str]()
        where = f"line {self._line}: `{_short(why)}`"
        for part in parts:
            text = " ".join(one.text for one in part)
            self._forget(text, why)
            self.state |= {f"{name}()": None for name in re.findall(r"(\S+) \( \)", text)}
            for key in [key for key in self.state if key.endswith("()") and key not in seen]:
                if re.search(rf"(?<![\w-]){re.escape(key[:-2])}(?![\w-])", text):
                    seen.add(key)
                    parts.append(self.state[key] or self._refuse(key))
            for group in syntax.groups(part):
                self._perhaps(group, where, why)
        return None

    def _perhaps(self, group: list[Token], where: str, why: str) -> None:
        """Make unknown what a command could do besides setting names that it mentions."""
        words = [one.text for one in group if one.kind == "word"]
        name = re.sub(r"[\"'\\]", "", words[0])
        if name[:1] == "-":  # a pattern of `case`
            return
        self._check(words)
        indirect = _SETTERS & set(words) and any(
            "$" in one.partition("=")[0] or "`" in one for one in words[1:])  # fmt: skip
        prints = name == "printf" and re.match(r"printf [\"']?[-$`]", " ".join(words))
        if re.search(r"[$`{*?]", name) or prints or indirect or _ANY & {name, *words}:
            self._forget(_ALL, why)
        if name in ("shift", "set", "cd", "pushd", "popd"):
            self.state["@" if name[0] == "s" else "PWD"] = self._mark(why)
        if {"exit", "exec"} & set(words):
            self._assumed.append(where)
        text = " ".join(words + [one.document or "" for one in group])
        options = name != "echo" and any(one.startswith("--") for one in words)
        if "$" in name or options or _LAUNCHERS.fullmatch(name):
            self.perhaps.append(
                (where, text.split()[name == "eval" or bool({"-c", "-lc"} & set(words)) :])
            )

    def _check(self, words: Sequence[str]) -> None:
        """Refuse a command that changes the meaning of others."""
        if _CHANGING.match(text := " ".join(words)):
            self._refuse(text)

    # simple commands

    def _simple(self, tokens: list[Token]) -> bool | None:
        odd = any(one.kind not in ("word", "<", "test") for one in tokens)
        if odd or tokens[0].text in syntax.KEYWORDS:
            raise ValueError(f"{tokens[0].text!r}")
        redirected = [one.text for one in tokens if one.kind == "<"]
        rest = [one for one in tokens if one.kind != "<"]
        count = next((n for n, one in enumerate(rest) if not one.assigns), len(rest))
        texts = [one.text for one in rest]
        self._check(texts)
        for text in redirected:
            self._scan(text)
        if rest and rest[0].kind == "test":
            return self._test(texts[0])
        if texts[:1] == ["export"]:
            return self._export(tokens, texts[1:])
        words = [word for text in texts[count:] for word in self._fields(text)]
        while words and not self._defined(words[0]):
            del words[0]
        held = dict(self.state)
        self._assign(texts[:count])
        if not words:
            return None if re.search(r"\$\((?!\()|`", " ".join(texts)) else True
        given, self.state = self.state, held
        for text in texts[:count]:
            self._scan(text)
        status = self._start(words, tokens, given)
        return status if all(_HARMLESS.fullmatch(text) for text in redirected) else None

    def _start(
        self, words: list[str], tokens: list[Token], given: Mapping[str, Any]
    ) -> bool | None:
        name, rest = words[0], words[1:]
        self._check(words)
        if name in ("[", "test") and "-v" in rest:
            self._forget(_ALL, " ".join(words))
        prints = name == "printf" and (rest[0][:1] == "-" or is_unknown(rest[0][:1]))
        if f"{name}()" in self.state or name in _SETTERS | _ANY - {"source", "."} or prints:
            return self._maybe(tokens, tokens)
        if name in ("true", ":", "false", "echo"):
            return name != "false"
        if name in ("[", "test"):
            return self._compare(rest[:-1] if name == "[" else rest)
        if name in ("source", "."):
            return self._source(rest, tokens)
        if name in ("set", "shift"):
            return self._set_parameters(words, tokens)
        self._program(words, tokens, given)
        return None

    def _program(self, words: list[str], tokens: list[Token], given: Mapping[str, Any]) -> None:
        if words[0] == "exit":
            self.exits_at = f"line {self._line}"
            raise _Exit
        nested = {"-c", "-lc", "--wrap"} & {*words} or any(one.document for one in tokens)
        if nested and _LAUNCHERS.fullmatch(words[0]):
            text = " ".join([*map(self.written, words), *(one.document or "" for one in tokens)])
            self.perhaps.append((f"line {self._line}: `{_short(text)}`", text.split()[1:]))
        self.commands.append(Command(words, given, tuple(dict.fromkeys(self._assumed))))
        if words[0] == "exec":
            raise _Exit
        if is_unknown(words[0]):
            self._forget(_ALL, " ".join(words))

    def _set_parameters(self, words: list[str], tokens: list[Token]) -> bool | None:
        """Evaluate ``shift`` and ``set --``."""
        held, count = self.state["@"], [*words, "1"][1]
        if words[0] == "set":
            self.state["@"] = words[2:] if words[1:2] == ["--"] else held
        elif is_unknown("".join([*held, *words])) or not count.isdecimal():
            return self._maybe(tokens, tokens)
        elif int(count) > len(held):
            return False
        else:
            self.state["@"] = held[int(count) :]
        return True

    def _source(self, rest: list[str], tokens: list[Token]) -> bool | None:
        """Evaluate a file that is certain."""
        paths = [] if "/" in rest[0] else str(self._held("PATH") or "").split(":")
        searched = any(os.path.exists(os.path.join(path, rest[0])) for path in paths)
        moved = not os.path.isabs(rest[0]) and is_unknown(self._held("PWD") or "")
        try:
            if searched or moved or len(rest) > 1 or is_unknown(rest[0]):
                raise ValueError("not certain")
            text = read_text(rest[0], "source")
        except (OSError, ValueError):
            return self._maybe(tokens, tokens)
        if re.search(r"\b(return|BASH_SOURCE|source)\b|(^|\s)\.\s", text):
            return self._maybe(tokens, tokens)
        return self._run(text)

    # assignments

    def _export(self, tokens: list[Token], texts: list[str]) -> bool | None:
        given = [text for text in texts if ASSIGNMENT.match(text)]
        odd = re.search(r"(?<!\$)\{", " ".join(texts)) or (len(given) > 1 and "$" in "".join(given))
        if odd or not all(one in given or _NAME.fullmatch(one) for one in texts):
            return self._maybe(tokens, tokens)
        self._assign(given)
        return True

    def _assign(self, texts: Sequence[str]) -> None:
        for text in texts:
            match = ASSIGNMENT.match(text)
            assert match is not None
            (name, index, append), value = match.groups(), text[match.end() :]
            if index:
                self._forget(_ALL + text, text)
            elif value.startswith("("):
                raws = [one.text for one in read_tokens(value[1:-1]) if one.kind != "\n"]
                items = [word for raw in raws for word in self._fields(raw)]
                held = self.state.get(name, self.state.get(""))
                before = [self._several(held)] if isinstance(held, str) and held else held or []
                odd = any(re.match(r"\[|[;&|()<>]", raw) for raw in raws)
                items = [self._several(self._mark(text))] if odd else items
                self.state[name] = [*before, *items] if append else items
            else:
                word = self._text(value)  # before the name is read, which it may set
                self._set(name, (self._held(name) or "") * bool(append) + word)

    def _set(self, name: str, value: str) -> None:
        """Set a variable, of an array the first element."""
        held = self.state.get(name, self.state.get(""))
        if isinstance(held, list) and held[:1] and is_several(held[0]):
            held = held[0]
        if isinstance(held, str) and is_unknown(held):
            held = [held, self._several(self._mark(name))]  # it may be an array
        self.state[name] = [value, *held[1:]] if isinstance(held, list) and held[1:] else value

    # tests and sums

    def _test(self, text: str) -> bool | None:
        """Return the result of ``[[ … ]]``."""
        tokens = read_tokens(text[2:-2])
        values = [self._text(one.text, empty=True) for one in tokens]
        numbers = [*values[::2], *values[3:]]
        if _COMPARING.search(text) and not all(map(_INTEGER.fullmatch, numbers)):
            self._forget(_ALL, text)
        for one, value in zip(tokens, values, strict=True):
            operates = value != one.text and re.match(r"[-!=<(]", value)
            if one.kind != "word" or operates or re.search(r"[*?\[\\(]", value):
                return None
        return self._compare(values)

    def _compare(self, words: list[str]) -> bool | None:
        """Return the result of ``test`` with these words."""
        words = [self._defined(word) for word in words]
        if any(is_unknown(word) for word in words):
            return None
        if words[:1] == ["!"] and len(words) in (3, 4):
            status = self._compare(words[1:])
            return None if status is None else not status
        if len(words) == 1 or (len(words) == 2 and words[0] in ("-n", "-z")):
            return (words[-1] == "") is (len(words) == 2 and words[0] == "-z")
        if len(words) == 3 and words[1] in ("=", "==", "!="):
            return (words[0] == words[2]) is (words[1] != "!=")
        integers = all(map(_INTEGER.fullmatch, words[::2]))
        if len(words) == 3 and words[1] in _COMPARED and integers:
            return bool(_COMPARED[words[1]](int(words[0]), int(words[2])))
        return None

    def _sum(self, piece: str) -> str:
        """Return the value of ``$((…))`` of integers; any other value could assign."""
        text = self._defined(self._text(piece[3:-2], quoted=True))
        names = {name: self._defined(self._held(name) or "") or "0" for name in _NAME.findall(text)}
        plain = re.fullmatch(r"(?!.*(\+\+|--))[\w\s+*/%()-]{1,400}", text, re.A | re.S)
        if plain and all(map(_INTEGER.fullmatch, names.values())):
            with suppress(SyntaxError, ValueError, ArithmeticError, RecursionError):
                text = _NAME.sub(lambda match: f"({names[match[0]]})", text)
                return str(_integer(ast.parse(f"({text})", mode="eval").body))
        self._forget(_ALL, piece)
        return self._mark(piece)

    # words

    def _fields(self, raw: str) -> list[str]:
        """Return the words that a word becomes."""
        if match := re.fullmatch(r'"(\$@|\$\{(?:@|\w+\[@\])\})"', raw, re.A):
            return self._elements(match[1])
        return [one.replace(_KEEP, "") for one in self._expand(raw).split(_SPLIT) if one]

    def _text(self, raw: str, *, quoted: bool = False, empty: bool = False) -> str:
        """Return a word that is not split; with ``empty`` undefined names are nothing."""
        text = self._expand(raw, quoted=quoted, splits=False).replace(_KEEP, "")
        text = _MARK.sub(lambda match: chr(ord(_ONE) + (ord(match[0]) & 0xFFFF)), text)
        return self._defined(text) if empty else text

    def _expand(self, raw: str, *, quoted: bool = False, splits: bool = True) -> str:
        found, plain, at = list[str](), "", 0
        while at < len(raw):
            end = syntax.piece_end(raw, at, quoted)
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
        if not quoted and (_BRACE.search(plain) or _GLOB.search(plain)):
            mark = self._mark(raw)
            if splits or "~" in plain:
                return self._several(mark) if splits else mark
        return "".join(found)

    def _value(self, piece: str, quoted: bool, splits: bool) -> str:
        """Return what an expansion becomes within a word."""
        if re.match(r"\$[@*]|\$\{(\w+\[)?[@*]", piece, re.A):
            items = self._elements(piece)
            value = " ".join(items)
            if quoted and splits and len(items) != 1 and "*" not in piece:
                value = self._several(self._mark(piece))
        else:
            value = self._evaluated(piece)
        self._spend(len(value))
        if quoted or not splits:
            return value
        if _GLOB.search(value):
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
        name = (_NAME.search(piece) or ["@"])[0]
        held = self.state.get(name, self.state.get(""))
        match = PARAMETER.fullmatch(piece)
        if match is None or match[4]:
            self._scan(piece)
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
        name, how, word = match[1] or match[2], match[4] or "", match[5] or ""
        whole = re.fullmatch(r'"([^"\'\\$`\s]+)"', word)  # in quotes that change nothing
        word = whole[1] if whole else word
        held = self._held(name)
        if not how:
            return self._mark(piece, undefined=True) if held is None else held
        defined = self._defined(held or "")
        given = held is not None and (how[0] != ":" or defined != "")
        unsure = how[0] == ":" and defined and not _MARK.sub("", defined)  # perhaps empty
        if unsure or (given is (how[-1] == "+") and re.search(r"[\"'\\~]", word)):
            self._scan(piece)
            return self._mark(piece)
        if given is not (how[-1] == "+"):
            return held or "" if given else ""
        if how[-1] == "?":
            self.exits_at = _short(piece)
            raise _Exit
        value = self._text(word, quoted=True)
        if how[-1] == "=":
            self._set(name, value)
        return value

    def _scan(self, text: str) -> None:
        """Make unknown what the expansions in a text that is not evaluated could set."""
        own = not text.startswith("$(") or text.startswith("$((")  # not of a subshell
        if own and (_SETTING.search(text) or text.startswith("{")):
            self._forget(text)

    def _own_folder(self, text: str) -> str:
        """Return the output of ``dirname`` of the script; else nothing."""
        if not _OWN_FOLDER.fullmatch(text) or is_unknown(self.state.get("PWD", _ONE)):
            return ""
        folder = os.path.dirname(self.state["0"]) or "."
        return os.path.normpath(f"{self.state['PWD']}/{folder}") if "pwd" in text else folder


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
