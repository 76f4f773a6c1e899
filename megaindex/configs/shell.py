"""Expansion of launch scripts in a subset of Bash.

The subset: assignments, arrays, quotes, here-documents, ``if``, ``case``, loops over words and
parameters, functions, ``source``, ``bash -c``, ``$VAR``, ``${VAR:-default}``, ``${ARRAY[@]}`` and
``$((A * B))``. No program is run and nothing is written. Other expansions stay as written, so that
errors can name the undefined variable. Of a condition with an unknown result, such as a test for a
file, all branches are evaluated, except that a branch that exits is not taken; variables that the
branches set differently become unknown.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import fnmatch
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megaindex.errors import InvalidArgument

Piece = tuple[str, str]
"""Text and the quote around it: a double or a single one, or none."""
Word = list[Piece]

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(\(?)")
_MAX_NESTING = 40  # compound commands within each other
_ENDS = frozenset(";&|()\n")
_RESERVED = frozenset(["then", "elif", "else", "fi", "do", "done", "esac", "}"])
_DOCUMENT = re.compile(r"<<-?\s*(['\"\\]?)(\w+)\1")
_REDIRECTION = re.compile(r"(?:\d*|&)(?:>>?|<>?)(?:\||&(?:\d+-?|-))?")


@dataclass
class Simple:
    """A command; an array is ``A=(``, its items and ``)``."""

    words: list[Word]
    documents: list[str] = field(default_factory=list)
    """Texts of its here-documents."""


@dataclass
class If:
    """Conditions with their bodies; the condition of ``else`` is None."""

    branches: list[tuple[Block | None, Block]]


@dataclass
class Case:
    subject: Word
    branches: list[tuple[list[Word], Block]]


@dataclass
class Loop:
    """``while`` and ``until`` have a condition, ``for`` a variable and words."""

    condition: Block | None
    until: bool
    variable: str
    words: list[Word]
    body: Block


@dataclass
class Function:
    name: str
    body: Node


@dataclass
class CommandGroup:
    body: Block


Node = Simple | If | Case | Loop | Function | CommandGroup
Block = list[tuple[str, Node]]
"""Commands, each with the operator before it: ``&&``, ``||``, ``|`` or ``;``."""


def parse(text: str) -> Block:
    """Return the commands of a script."""
    return _Parser(list(_tokens(text.replace("\\\n", " ")))).block(())


def bare(word: Word) -> str:
    """Return the text of the unquoted beginning of a word."""
    return word[0][0] if word and word[0][1] == "" else ""


class _Parser:
    """Parser of tokens; unknown constructs become plain words."""

    def __init__(self, tokens: list[Word | str]) -> None:
        self._tokens = tokens
        self._at = 0
        self._depth = 0
        self._skipped = ""

    def _next(self) -> Word | str | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _skip(self, *texts: str) -> bool:
        """Take the next token if it is one of these operators or reserved words."""
        token = self._next()
        text = token if token is None or isinstance(token, str) else _whole(token)
        if text is not None and text not in texts:
            return False
        self._skipped = text or ""  # empty at the end
        self._at += text is not None
        return text is not None

    def _words(self, stop: str) -> list[Word]:
        """Return the words before a word or operator ``stop``, and take that token."""
        words: list[Word] = []
        while not self._skip(stop) and (token := self._next()) is not None:
            if not isinstance(token, str):
                words.append(token)
            self._at += 1
        return words

    def block(self, stops: tuple[str, ...]) -> Block:
        """Return the commands before a word or operator of ``stops``, and take that token."""
        self._depth += 1
        if self._depth > _MAX_NESTING:
            raise InvalidArgument(
                f"the script nests commands more than {_MAX_NESTING} deep; simplify it"
            )
        commands: Block = []
        operator = ";"
        while not self._skip(*stops) and (token := self._next()) is not None:
            if isinstance(token, str) and token != "(":
                operator = token if token in ("&&", "||", "|") else ";"
                self._at += 1
                continue
            if _whole(token) in _RESERVED:  # the end of a command that did not begin
                self._at += 1
                continue
            commands.append((operator, self._command()))
            operator = ";"
        self._depth -= 1
        return commands

    def _command(self) -> Node:
        for words, read in (
            (("if",), self._if),
            (("case",), self._case),
            (("while", "until"), self._while),
            (("for", "select"), self._for),
            (("{", "("), self._group),
        ):
            if self._skip(*words):
                return read()
        self._skip("function")
        return self._simple()

    def _group(self) -> CommandGroup:
        return CommandGroup(self.block((")",) if self._skipped == "(" else ("}",)))

    def _while(self) -> Loop:
        until = self._skipped == "until"
        condition = self.block(("do",))
        return Loop(condition, until, "", [], self.block(("done",)))

    def _if(self) -> If:
        branches: list[tuple[Block | None, Block]] = []
        condition: Block | None = self.block(("then",))
        while True:
            body = self.block(("elif", "else", "fi"))
            branches.append((condition, body))
            if self._skipped == "elif":
                condition = self.block(("then",))
            elif self._skipped == "else" and condition is not None:
                condition = None
            else:
                return If(branches)

    def _case(self) -> Case:
        subject = next(iter(self._words("in")), [("", "")])
        while self._skip("in", "\n"):
            pass
        branches = []
        while self._next() is not None and not self._skip("esac"):
            branches.append((self._words(")"), self.block((";;", "esac"))))
            if self._skipped == "esac":
                break
            while self._skip("\n"):
                pass
        return Case(subject, branches)

    def _for(self) -> Loop:
        words = self._words("do")
        variable = bare(words[0]) if words else ""
        return Loop(None, False, variable, words[2:], self.block(("done",)))

    def _simple(self) -> Node:
        words: list[Word] = []
        documents: list[str] = []
        closing = ""
        while (token := self._next()) is not None:
            if not isinstance(token, str):
                words.append(token)
                if _whole(token) == "[[" and len(words) == 1:
                    closing = "]]"
                elif closing == "]]" and _whole(token) == "]]":
                    closing = ""
                elif not closing and _is_array(token):
                    closing = ")"
            elif token.startswith("<<"):
                documents.append(token[2:])
            elif not closing:
                if token == "(" and len(words) == 1:
                    return self._function(words[0])
                break
            elif closing == token == ")":
                words.append([(")", "")])
                closing = ""
            elif closing == "]]" and token != "\n":
                words.append([(token, "")])
            self._at += 1
        return Simple(words, documents)

    def _function(self, name: Word) -> Node:
        while self._skip("(", ")", "\n"):
            pass
        if self._next() is None:
            return Simple([name])
        return Function(bare(name), self._command())


def _whole(token: Word | str) -> str:
    """Return the text of a word of one unquoted piece, else an empty string."""
    if isinstance(token, str):
        return ""
    return token[0][0] if len(token) == 1 and token[0][1] == "" else ""


def _is_array(word: Word) -> bool:
    match = ASSIGNMENT.fullmatch(_whole(word))
    return match is not None and match[3] == "("


def _tokens(text: str) -> Iterator[Word | str]:
    """Yield words and operators; a here-document is its text after ``<<``."""
    words = _Words(text)
    at, begun = 0, True
    pending: list[str] = []
    redirected = False
    while at < len(text):
        char = text[at]
        if char in " \t\r":
            at += 1
            continue
        if char == "#":
            end = text.find("\n", at)
            at = len(text) if end < 0 else end
            continue
        if char == "\n" and pending:
            at, documents = _documents(text, at + 1, pending)
            pending = []
            yield from documents
            yield "\n"
            begun = True
            continue
        if match := _DOCUMENT.match(text, at):
            pending.append(match[2])
            at = match.end()
            continue
        if match := _REDIRECTION.match(text, at):
            redirected = not match[0][-1:].isdigit() and not match[0].endswith("-")
            at = match.end()
            continue
        if begun and text.startswith("((", at) and (end := text.find("))", at)) > 0:
            yield [(text[at : end + 2], "")]
            at, begun = end + 2, False
            continue
        if char in _ENDS:
            width = 2 if text[at : at + 2] in ("&&", "||", ";;") else 1
            yield text[at : at + width]
            at, begun = at + width, True
            continue
        word, at = words.scan(at)
        if not redirected:
            yield word
            begun = False
        redirected = False


def _documents(text: str, at: int, names: list[str]) -> tuple[int, list[str]]:
    found = []
    for name in names:
        lines = []
        while at < len(text):
            end = text.find("\n", at)
            end = len(text) if end < 0 else end
            line, at = text[at:end], end + 1
            if line.strip() == name:
                break
            lines.append(line)
        found.append("<<" + "\n".join(lines))
    return min(at, len(text)), found


class _Words:
    """Scanner of the words of a text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._balanced = True  # False after an unclosed bracket, to bound the search

    def scan(self, at: int) -> tuple[Word, int]:
        """Return the word at ``at``, and the position after it."""
        text = self._text
        word: Word = []
        plain = ""
        while at < len(text) and text[at] not in " \t\r" and text[at] not in _ENDS:
            char = text[at]
            if char in "'\"":
                word += [(plain, "")] if plain else []
                plain = ""
                inner, at = self._quoted(at)
                word.append((inner, char))
            elif char == "\\":
                plain += text[at + 1 : at + 2]
                at += 2
            elif char in "$`" and (end := self._substitution(at)) > at + 1:
                plain += text[at:end]
                at = end
            elif char in "<>" and plain:
                break
            else:
                plain += char
                at += 1
                if (
                    char == "="
                    and text[at : at + 1] == "("
                    and not word
                    and ASSIGNMENT.match(plain)
                ):
                    return [(plain + "(", "")], at + 1
        return [*word, *([(plain, "")] if plain else [])] or [("", '"')], at

    def _quoted(self, at: int) -> tuple[str, int]:
        """Return the text between quotes, without escapes, and the position after it."""
        text = self._text
        quote, at, inner = text[at], at + 1, ""
        while at < len(text) and text[at] != quote:
            if quote == '"' and text[at] == "\\" and text[at + 1 : at + 2] in tuple('"\\$`'):
                inner += text[at + 1]
                at += 2
            elif quote == '"' and text[at] in "$`" and (end := self._substitution(at)) > at + 1:
                inner += text[at:end]
                at = end
            else:
                inner += text[at]
                at += 1
        return inner, at + 1

    def _substitution(self, at: int) -> int:
        """Return the end of ``$(…)``, ``${…}`` or ``` `…` ``` at ``at``; else ``at + 1``."""
        text = self._text
        if text[at] == "`":
            end = text.find("`", at + 1)
            return at + 1 if end < 0 else end + 1
        pair = {"(": ")", "{": "}"}.get(text[at + 1 : at + 2])
        if pair is None or not self._balanced:
            return at + 1
        depth, end = 0, at + 1
        while end < len(text):
            depth += (text[end] == text[at + 1]) - (text[end] == pair)
            end += 1
            if depth == 0:
                return end
        self._balanced = False
        return at + 1


_PREFIXES = ("export", "local", "readonly", "declare", "typeset")
_MAX_CALL_DEPTH = 8
_NESTED = 16  # texts run by texts: bash -c, source, functions
_MOST_EXPANDED = 1 << 22  # characters of all expansions of a script, and
_COST = 100  # more for each of them
_MOST_STEPS = 10_000  # commands, repetitions in loops included
_LONGEST_SUM = 400  # characters; Python's parser has no limit on nesting
_EXPANSION = re.compile(
    rf"\$\(\((?P<sum>.{{0,{_LONGEST_SUM}}}?)\)\)(?!\))"
    r"|\$\{(?P<name>\w+|[@*#])(?P<all>\[(?:[@*]|\d{1,6})\])?"
    r"(?:(?P<colon>:?)(?P<how>[-=+])(?P<default>[^{}]*))?\}"
    r"|\$(?P<plain>[A-Za-z_]\w*|[0-9@*#])",
    re.S,
)
_OPERATORS: dict[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Lt: operator.lt,
    ast.Gt: operator.gt,
    ast.LtE: operator.le,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_COMPARISONS = {
    f"-{name}": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}


class _Exit(Exception):
    """End of the script."""


class _Return(Exception):
    """End of a function or a sourced file."""


class Script:
    """A script: its `commands` after expansion, and its `variables` at the end.

    Args:
        text: the script.
        environment: variables besides those that it sets.
        arguments: its positional parameters.
        folder: its directory, in which files that it sources are looked up.
    """

    def __init__(
        self,
        text: str,
        environment: Mapping[str, str],
        arguments: Sequence[str] = (),
        folder: str = "",
    ) -> None:
        self.variables: dict[str, str | list[str]] = dict(environment)
        self.commands: list[list[str]] = []
        self._folder = folder
        self._functions: dict[str, Node] = {}
        self.exits_at = ""
        """Last condition before an ``exit``; empty if the script runs to its end."""
        self._condition = ""
        self._room = _MOST_EXPANDED
        self._steps = _MOST_STEPS
        self._nested = 0
        self._set_parameters(arguments)
        with contextlib.suppress(_Exit):
            self._run_text(text)

    def _set_parameters(self, words: Sequence[str]) -> None:
        for name in [name for name in self.variables if name.isdecimal()]:
            del self.variables[name]
        self.variables.update({str(number): word for number, word in enumerate(words, 1)})
        self.variables.update({"@": list(words), "*": list(words), "#": str(len(words))})

    def _run_text(self, text: str) -> None:
        self._nested += 1
        if self._nested <= _NESTED:
            with contextlib.suppress(_Return):
                self._block(parse(text))
        self._nested -= 1

    def _block(self, block: Block) -> bool | None:
        """Evaluate commands; return the success of the last one, None if it is unknown."""
        status: bool | None = True
        for connector, node in block:
            if (connector == "&&" and status is False) or (connector == "||" and status):
                continue
            status = self._node(node)
        return status

    def _node(self, node: Node) -> bool | None:
        self._steps -= 1
        if self._steps < 0:
            raise InvalidArgument(
                f"the script runs more than {_MOST_STEPS} commands; give the arguments as a string"
            )
        if isinstance(node, Simple):
            return self._simple(node)
        if isinstance(node, CommandGroup):
            return self._block(node.body)
        if isinstance(node, Function):
            self._functions[node.name] = node.body
        elif isinstance(node, If):
            self._if(node)
        elif isinstance(node, Case):
            self._case(node)
        else:
            self._loop(node)
        return True

    def _if(self, node: If) -> None:
        for place, (condition, body) in enumerate(node.branches):
            holds = True if condition is None else self._block(condition)
            if holds:
                self._block(body)
                return
            if holds is None:
                others = [body for _, body in node.branches[place + 1 :]]
                if node.branches[-1][0] is not None:
                    others.append([])
                self._undecided([body, *others])
                return

    def _case(self, node: Case) -> None:
        subject = self._operand(node.subject)
        for patterns, body in node.branches:
            if any(fnmatch.fnmatchcase(subject, self._operand(word)) for word in patterns):
                self._block(body)
                return

    def _loop(self, node: Loop) -> None:
        if node.condition is None:
            for item in [field for word in node.words for field in self._fields(word)]:
                self.variables[node.variable] = item
                self._block(node.body)
            return
        while self._block(node.condition) is (not node.until):
            self._block(node.body)

    def _undecided(self, bodies: Sequence[Block]) -> None:
        """Evaluate each body; variables that they set differently become unknown."""
        before = copy.deepcopy(self.variables)
        outcomes = []
        for body in bodies:
            self.variables = copy.deepcopy(before)
            try:
                self._block(body)
            except (_Exit, _Return):
                self.exits_at = ""
                continue
            outcomes.append(self.variables)
        self.variables = outcomes[0] if outcomes else before
        for name in set().union(*outcomes):
            values = [outcome.get(name) for outcome in outcomes]
            if any(value != values[0] for value in values):
                self.variables[name] = f"$({name} differs)"

    def _simple(self, node: Simple) -> bool | None:
        words = node.words
        while words and bare(words[0]) in _PREFIXES:
            words = words[1:]
        assignments: list[tuple[str, str | list[str]]] = []
        while words and (match := ASSIGNMENT.match(bare(words[0]))):
            name, append, is_array = match.groups()
            if is_array:
                end = next((i for i, w in enumerate(words) if bare(w) == ")"), len(words))
                items = [field for word in words[1:end] for field in self._fields(word)]
                assignments.append((name, self._appended(name, append, items)))
                words = words[end + 1 :]
                continue
            (text, quote), *rest = words[0]
            value = " ".join(self._fields([(text[match.end() :], quote), *rest]))
            held = self.variables.get(name, "") if append else ""
            before = held if isinstance(held, str) else "".join(held[:1])  # A+=x on an array
            assignments.append((name, before + value))
            words = words[1:]
        first = bare(words[0]) if words else ""
        if first in ("[", "[[", "test", "!") or first.startswith("(("):
            return self._test(words)
        command = [field for word in words for field in self._fields(word)]
        if not command:
            self.variables.update(assignments)
            return True
        # `A=1 command` sets A for that command alone.
        return self._command(command, node.documents)

    def _command(self, command: list[str], documents: Sequence[str]) -> bool | None:
        name, *rest = command
        if name == "exit":
            self.exits_at = self._condition
            raise _Exit
        if name == "return":
            raise _Return
        if name in ("false", "true", ":"):
            return name != "false"
        if name == "shift":
            held = self.variables["@"]
            count = int(rest[0]) if rest and rest[0].isdecimal() else 1
            self._set_parameters(held[count:] if isinstance(held, list) else [])
            return True
        if name == "set" and "--" in rest:
            self._set_parameters(rest[rest.index("--") + 1 :])
        elif name == "unset":
            for variable in rest:
                self.variables.pop(variable, None)
        elif name in ("source", ".") and rest:
            self._source(rest[0])
        elif name == "eval":
            self._run_text(" ".join(rest))
        elif name in self._functions:
            self._call(self._functions[name], rest)
        else:
            self._program(command, documents)
        return True

    def _program(self, command: list[str], documents: Sequence[str]) -> None:
        """Record a program; evaluate the commands of ``bash -c``, sbatch and here-documents."""
        shell = next((i for i, w in enumerate(command) if w.split("/")[-1] in ("sh", "bash")), None)
        inner = command[shell:] if shell is not None else []
        text = next((i + 1 for i, w in enumerate(inner) if re.fullmatch(r"-\w*c", w)), len(inner))
        if text < len(inner):
            with contextlib.suppress(_Exit):
                self._run_text(inner[text])
            return
        if command[0] == "sbatch" and command[-1].endswith(".sh"):
            self._source(command[-1])
            return
        self.commands.append(command)
        if not command[0].startswith("python"):
            for document in documents:
                with contextlib.suppress(_Exit):
                    self._run_text(document)

    def _call(self, body: Node, words: Sequence[str]) -> None:
        held = self.variables["@"]
        self._nested += 1
        if self._nested <= _NESTED:
            self._set_parameters(words)
            with contextlib.suppress(_Return):
                self._node(body)
            self._set_parameters(held if isinstance(held, list) else [])
        self._nested -= 1

    def _source(self, path: str) -> None:
        """Evaluate a file in the script's directory; a missing file is ignored."""
        tail = re.split(r"[`$)}]+/", path)[-1] if is_unknown(path) else path
        beside = os.path.join(self._folder, tail)
        with (
            contextlib.suppress(OSError, ValueError),
            open(beside if os.path.isfile(beside) else tail, encoding="utf-8") as file,
        ):
            self._run_text(file.read())

    def _test(self, words: Sequence[Word]) -> bool | None:
        """Return the result of ``[ … ]``, ``[[ … ]]`` or ``(( … ))``; None if it is unknown."""
        self._condition = " ".join("".join(text for text, _ in word) for word in words)
        if bare(words[0]).startswith("(("):
            value = self._value_of_sum(bare(words[0])[2:-2], 0)
            return None if value is None else value != 0
        words = words[1:] if bare(words[0]) == "test" else words
        words = [word for word in words if bare(word) not in ("[", "[[", "]", "]]")]
        return self._either([self._operand(word) for word in words], [bare(word) for word in words])

    def _either(self, operands: Sequence[str], raw: Sequence[str]) -> bool | None:
        """Return the result of tests joined by or and and; ``raw`` are the unexpanded words."""
        for names, decides in ((("||", "-o"), True), (("&&", "-a"), False)):
            for place, text in enumerate(raw):
                if text in names and 0 < place < len(raw) - 1:
                    left = self._either(operands[:place], raw[:place])
                    right = self._either(operands[place + 1 :], raw[place + 1 :])
                    if decides in (left, right):
                        return decides
                    return None if None in (left, right) else not decides
        if raw and raw[0] == "!" and len(raw) > 1:
            outcome = self._either(operands[1:], raw[1:])
            return None if outcome is None else not outcome
        return self._one(operands, raw)

    def _one(self, operands: Sequence[str], raw: Sequence[str]) -> bool | None:
        if len(raw) == 2 and raw[0] == "-v":
            return operands[1] in self.variables
        if any(is_unknown(text) for text in operands):
            return None
        if raw and (raw[0] in ("-z", "-n") or len(raw) == 1):
            empty = "".join(operands[len(raw) > 1 :]) == ""
            return empty == (raw[0] == "-z" and len(raw) > 1)
        return self._compared(operands, raw) if len(raw) == 3 else None

    def _compared(self, operands: Sequence[str], raw: Sequence[str]) -> bool | None:
        left, how, right = operands
        if raw[1] in ("=", "==", "!="):
            return fnmatch.fnmatchcase(left, right) == (how != "!=")
        if raw[1] in _COMPARISONS:
            one, other = (self._value_of_sum(text or "0", 0) for text in (left, right))
            return None if one is None or other is None else bool(_COMPARISONS[how](one, other))
        return None

    def _operand(self, word: Word) -> str:
        """Return a word of a test as one text; unset variables are empty."""
        return "".join(
            text if quote == "'" else _EXPANSION.sub(_empty, self._expand(text))
            for text, quote in word
        )

    def _appended(self, name: str, append: str, items: list[str]) -> list[str]:
        held = self.variables.get(name, []) if append else []
        return [*([held] if isinstance(held, str) else held), *items]

    def _fields(self, word: Word) -> list[str]:
        """Return the words that a word expands to: unquoted expansions are split at blanks."""
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
        if match is None or not (match["all"] in ("[@]", "[*]") or "@" in text):
            return None
        held = self.variables.get(match["name"] or match["plain"] or "")
        if not isinstance(held, list) or self._room < 0:
            return None
        self._room -= _COST * len(held)
        return held if quote else [part for item in held for part in item.split()]

    def _expand(self, text: str, depth: int = 0) -> str:
        """Expand repeatedly, since a default may have variables; stop at the limits of the module.

        Without limits ``A=$B$B B=$C$C C=…`` would double with every line.
        """
        for _ in range(_MAX_CALL_DEPTH - depth):
            new = _EXPANSION.sub(lambda match: self._value(match, depth), text)
            if new == text:
                break
            text = new
        return text

    def _value(self, match: re.Match[str], depth: int) -> str:
        if self._room < 0:
            return match[0]
        if match["sum"] is None:
            new = self._variable(match)
        else:
            value = self._value_of_sum(match["sum"], depth)
            new = match[0] if value is None else str(int(value))
        self._room -= len(new) + _COST
        return new

    def _variable(self, match: re.Match[str]) -> str:
        name = match["name"] or match["plain"]
        held = self.variables.get(name)
        if isinstance(held, list):
            place = (match["all"] or "[0]")[1:-1]  # $A is the first element
            if place.isdecimal():
                return held[int(place)] if int(place) < len(held) else ""
            held = " ".join(held)
        is_set = bool(held) or (held is not None and not match["colon"])
        if match["how"] == "+":
            return match["default"].strip("\"'") if is_set else ""
        if is_set and held is not None:
            return held
        if match["how"] is None:
            return match[0]
        default = match["default"].strip("\"'")
        if match["how"] == "=":
            self.variables[name] = default
        return default

    def _value_of_sum(self, text: str, depth: int) -> int | None:
        """Return the value of an arithmetic expression; names need no dollar sign."""
        text = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\b\}?", r"${\1}", text)
        text = self._expand(text, depth + 1).strip()
        if len(text) > _LONGEST_SUM:
            return None
        try:
            return _integer(ast.parse(text, mode="eval").body)
        except (SyntaxError, ValueError, ZeroDivisionError):
            return None


def is_unknown(text: str) -> bool:
    """Return True if a word has an expansion of unknown value."""
    return "$" in text or "`" in text


def _empty(match: re.Match[str]) -> str:
    return match[0] if match["sum"] is not None else ""


def _integer(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_integer(node.left), _integer(node.right))
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _OPERATORS:
        return _OPERATORS[type(node.ops[0])](_integer(node.left), _integer(node.comparators[0]))
    raise ValueError(ast.dump(node))
