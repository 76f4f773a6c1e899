"""Launch scripts in Bash: the commands that they certainly start, without running anything.

Assignments, `source`, functions, and lists, conditions and loops on known words are evaluated. All
else makes every name unknown that its text mentions, other than to expand it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple

from megaindex.configs.shell_tokens import KEYWORDS, MOST_NESTED, Token, groups, read_tokens, split
from megaindex.configs.shell_words import NAME, Words, is_several, is_unknown, short, test_words
from megaindex.configs.yaml_sections import read_text
from megaindex.errors import InvalidArgument

_MOST_STEPS = 10_000  # commands
_HARMLESS = re.compile(r"\d*>&[12]|[12&]?>\s*/dev/null|<<.*", re.S)  # redirections that succeed
_LEAVING = re.compile(r"\b(break|continue|return|source|eval)\b|(^|\s)\.\s")
_SETTING = frozenset(
    ("declare", "typeset", "local", "readonly", "read", "mapfile", "readarray", "getopts", "let",
     "unset", "wait", "coproc", "break", "continue", "return", "cd", "pushd", "popd", "command",
     "builtin")
)  # fmt: skip
_CHANGING = re.compile(r"(shopt|alias|unalias|enable|readonly)\b|trap .*\b(DEBUG|ERR|RETURN)\b|"
                       r"(declare|typeset|local)\b.*\s-\w*[niluAr]", re.S)  # fmt: skip
_ANY = frozenset(
    ("eval", "source", ".", "conda", "mamba", "micromamba", "module", "ml", "spack", "deactivate")
)  # they can set every name
_OPTIONS = re.compile(r"set( --( |$)|( [-+][euvxo]+| errexit| nounset| pipefail| xtrace)*$)")
_LAUNCHERS = re.compile(r"(.*/)?(\w*run|python[\d.]*|sbatch|mpiexec|deepspeed|accelerate|bash|sh|"
                        r"exec|env|nohup|command|time|timeout|numactl|xargs|p?d?ssh?)")  # fmt: skip


class Command(NamedTuple):
    """A program that is started: its words, the variables, and conditions that it depends on."""

    words: list[str]
    variables: Mapping[str, Any]
    assumed: tuple[str, ...]


class _Exit(Exception):
    """End of the script, or of a subshell."""


class Script(Words):
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
        super().__init__(environment, arguments, path)
        self.commands = list[Command]()
        self.perhaps: list[tuple[str, list[str]]] = []  # where, and words as written
        self.exits_at, self._condition, self._assumed = "", "", list[str]()
        self._steps, self._nested = _MOST_STEPS, 0
        with suppress(_Exit):
            self._run(text)

    # lists, conditions and loops: each method returns the success, None if it is unknown

    def _run(self, text: str) -> bool | None:
        held, self._nested, self._room = self._line, self._nested + 1, self._room - len(text)
        if len(text) > 1 << 18 or "\r" in text or self._nested > MOST_NESTED or is_unknown(text):
            self.refuse("carriage returns" if "\r" in text else "a text of that size or depth")
        try:
            return self._list(read_tokens(text))
        except InvalidArgument:
            raise
        except (ValueError, IndexError, RecursionError) as error:
            raise InvalidArgument(f"line {self._line}: syntax that is not read: {error}") from None
        finally:
            self._nested, self._line = self._nested - 1, held

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
                self._forget(tokens[place:], tokens)
                return None
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
        held, nested = dict(self.state), self._nested
        with suppress(_Exit):
            self._list(tokens)
        self.state, self._nested, self.exits_at = held, nested, ""
        return None

    def _command(self, tokens: list[Token]) -> bool | None:
        self._line, self._steps = tokens[0].line, self._steps - 1
        if self._steps < 0:
            self.refuse(f"more than {_MOST_STEPS} commands")
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
        if kind in ("iffi", "fordone"):
            return (self._if if kind == "iffi" else self._for)(tokens)
        if kind == "test" and len(tokens) == 1:
            self._condition = texts[0]
            return self._test([self._text(one.text, empty=True) for one in test_words(texts[0])])
        if tokens[0].keyword or kind not in ("word", "<"):
            return self._forget(tokens)
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
                    return self._forget(tokens[end:], tokens)
        return True

    def _for(self, tokens: list[Token]) -> bool | None:
        begin = next((n for n, t in enumerate(tokens) if t.keyword and t.text == "do"), 0)
        name, *words = [one.text for one in tokens[1:begin] if one.kind == "word"] or [""]
        items = [item for word in words[1:] for item in self._fields(word)]
        leaves = _LEAVING.search(" ".join(one.text for one in tokens))
        if leaves or words[:1] != ["in"] or is_several("".join(items)):
            return self._forget(tokens)
        for item in items:
            self._assign(name, item)
            self._list(tokens[begin + 1 : -1])
        return None

    def _call(self, name: str, words: list[str], tokens: list[Token]) -> bool | None:
        body, held = self.state[name], self.state["@"]
        if body is None or self._nested > MOST_NESTED:
            self.refuse(name)
        if not body or _LEAVING.search(" ".join(one.text for one in body)):
            return self._forget(tokens)
        self.state["@"], self._nested = words, self._nested + 1
        self._list(body)
        self.state["@"], self._nested = held, self._nested - 1
        return None

    # what is perhaps run

    def _forget(self, tokens: list[Token], within: Sequence[Token] = ()) -> bool | None:
        """Make unknown what these commands could set."""
        why = " ".join(one.text for one in within or tokens)
        where, parts, seen = f"line {self._line}: `{short(why)}`", [tokens], set[str]()
        for part in parts:
            text = " ".join(one.text for one in part)
            self._forget_names(text, why)
            for key in [key for key in self.state if key.endswith("()") and key not in seen]:
                if re.search(rf"(?<![\w-]){re.escape(key[:-2])}(?![\w-])", text):
                    seen.add(key)
                    parts.append(self.state[key] or self.refuse(key))
            for group in groups(part):
                self._perhaps(group, where, why)
            defined = re.findall(r"(\S+) \( \)", text)
            self.state |= {f"{name}()": None for name in defined}
            if any(one.kind == "sum" and "$" in one.text and "=" in one.text for one in part):
                self._forget_all(why)
        return None

    def _perhaps(self, group: list[Token], where: str, why: str) -> None:
        """Make unknown what a command could do besides setting names that it mentions."""
        words = [one.text for one in group if one.kind == "word"]
        name = re.sub(r"[\"'\\]", "", words[0])
        if name[:1] == "-":  # a pattern of `case`
            return
        self._check(words)
        given = [word.partition("=")[0] for word in words]
        indirect = _SETTING & set(words) and any("$" in one or "`" in one for one in given[1:])
        if "$" in name or "`" in name or indirect or _ANY & {name, *words}:
            self._forget_all(why)
        if name in ("shift", "set"):
            self.state["@"] = self._mark(why)
        if name in ("cd", "pushd", "popd"):
            self.state["PWD"] = self._mark(why)
        if {"exit", "exec"} & set(words):
            self._assumed.append(where)
        text = " ".join(words + [one.document or "" for one in group])
        options = name != "echo" and any(one.startswith("--") for one in words)
        if "$" in name or options or name == "eval" or _LAUNCHERS.fullmatch(name):
            inner = name == "eval" or {"-c", "-lc"} & set(words)
            self.perhaps.append((where, text.split()[bool(inner) :]))

    def _check(self, words: Sequence[str]) -> None:
        """Refuse a command that changes the meaning of others."""
        text = " ".join(words)
        if _CHANGING.match(text) or (words[0] == "set" and not _OPTIONS.match(text)):
            self.refuse(text)

    # simple commands

    def _simple(self, tokens: list[Token]) -> bool | None:
        if (
            any(one.kind not in ("word", "<", "test") for one in tokens)
            or tokens[0].text in KEYWORDS
        ):
            raise ValueError(f"{tokens[0].text!r}")
        redirected = [one.text for one in tokens if one.kind == "<"]
        for text in redirected:
            self._scan(text)
        rest = [one for one in tokens if one.kind != "<"]
        count = next((n for n, one in enumerate(rest) if not one.assigns), len(rest))
        words = [word for one in rest[count:] for word in self._words_of(one)]
        while words and not self._defined(words[0]):
            del words[0]
        if not words:
            return self._assignments(rest[:count])
        held = dict(self.state)
        self._assignments(rest[:count])
        given, self.state = self.state, held
        for one in rest[:count]:
            self._scan(one.text)
        status = self._started(words, tokens, given)
        return status if all(_HARMLESS.fullmatch(text) for text in redirected) else None

    def _words_of(self, token: Token) -> list[str]:
        if token.text in ("[", "[[", "]", "]]") or token.kind == "test":
            return [token.text]
        array = token.assigns and token.text.endswith(")") and "=(" in token.text
        return [token.text] if array else self._fields(token.text)

    def _started(
        self, words: list[str], tokens: list[Token], given: Mapping[str, Any]
    ) -> bool | None:
        name, rest = words[0], words[1:]
        self._check(words)
        if f"{name}()" in self.state:
            return self._call(f"{name}()", rest, tokens)
        if name in ("true", ":", "false", "echo") or (name == "printf" and rest[:1] != ["-v"]):
            return name != "false"
        if name in ("[", "test"):
            return self._bracket(tokens)
        if name in ("source", "."):
            return self._source(rest, tokens)
        if name in ("shift", "set", "export"):
            return self._export(tokens) if name == "export" else self._set(name, rest)
        return self._program(words, tokens, given)

    def _program(
        self, words: list[str], tokens: list[Token], given: Mapping[str, Any]
    ) -> bool | None:
        name = words[0]
        if name == "exit":
            self.exits_at = short(self._condition) or "exit"
            raise _Exit
        self._condition = " ".join(one.text for one in tokens)
        if name in _SETTING | _ANY or name == "printf":
            return self._forget(tokens)
        nested = {"-c", "-lc", "--wrap"} & {*words} or any(one.document for one in tokens)
        if nested and _LAUNCHERS.fullmatch(name):
            text = " ".join([*words, *(one.document or "" for one in tokens)])
            self.perhaps.append((f"line {self._line}: `{short(text)}`", text.split()[1:]))
        self.commands.append(Command(words, given, tuple(dict.fromkeys(self._assumed))))
        if name == "exec":
            raise _Exit
        if is_unknown(name):
            self._forget_all(self._condition)
        return None

    def _set(self, name: str, rest: list[str]) -> bool | None:
        """Evaluate ``shift`` and ``set --``."""
        held, count = self.state["@"], rest[0] if rest else "1"
        if name == "set":
            self.state["@"] = rest[1:] if rest[:1] == ["--"] else held
            return True
        if isinstance(held, str) or not count.isdecimal() or is_several("".join(held)):
            self.state["@"] = self._mark("shift")
            return None
        self.state["@"] = held[int(count) :] if int(count) <= len(held) else held
        return int(count) <= len(held)

    def _export(self, tokens: list[Token]) -> bool | None:
        given, text = [one for one in tokens if one.assigns], " ".join(t.text for t in tokens)
        names = [one.text for one in tokens[1:] if one.kind != "<" and not one.assigns]
        odd = re.search(r"(?<!\$)\{", text) or (len(given) > 1 and "$" in text)
        return self._forget(tokens) if odd or not all(map(NAME.fullmatch, names)) else (
            self._assignments(given))  # fmt: skip

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
            return self._forget(tokens)
        held, self.state["BASH_SOURCE"] = self.state.get("BASH_SOURCE"), rest[0]
        if _LEAVING.search(text):
            return self._forget([Token("word", text, self._line)])
        status = self._run(text)
        self.state["BASH_SOURCE"] = held
        return status

    def _bracket(self, tokens: list[Token]) -> bool | None:
        texts = [one.text for one in tokens if one.kind == "word" and not one.assigns]
        self._condition = " ".join(texts)
        inner = texts[1:-1] if texts[0] == "[" and texts[-1] == "]" else texts[1:]
        return self._test([word for one in inner for word in self._fields(one, empty=True)])
