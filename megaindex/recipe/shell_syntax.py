"""Words, commands and compound commands of a shell script, as a tree. Nothing is expanded here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from megaindex.errors import InvalidArgument

Piece = tuple[str, str]
"""Text and the quote around it: a double or a single one, or none."""
Word = list[Piece]

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(\(?)")
_DEEPEST = 40  # compound commands within each other
_ENDS = frozenset(";&|()\n")
_RESERVED = frozenset(["then", "elif", "else", "fi", "do", "done", "esac", "}"])
_REDIRECTION = re.compile(r"(?:\d*|&)(?:>>?|<>?)(?:\||&(?:\d+-?|-))?")


@dataclass
class Simple:
    """A command; an array is ``A=(``, its items and ``)``."""

    words: list[Word]
    documents: list[str] = field(default_factory=list)
    """Texts of its here-documents."""


@dataclass
class If:
    """Conditions with their bodies in turn; that of else has none."""

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
class Group:
    body: Block


Node = Simple | If | Case | Loop | Function | Group
Block = list[tuple[str, Node]]
"""Commands, each with the operator before it: ``&&``, ``||``, ``|`` or ``;``."""


def parse(text: str) -> Block:
    """Return the commands of a script.

    Raises:
        InvalidArgument: compound commands lie too deep in each other.
    """
    return _Parser(list(_tokens(text.replace("\\\n", " ")))).block(())


def bare(word: Word) -> str:
    """Return the text of the unquoted beginning of a word."""
    return word[0][0] if word and word[0][1] == "" else ""


class _Parser:
    """A parser that takes what it does not know for plain words."""

    def __init__(self, tokens: list[Word | str]) -> None:
        self._tokens = tokens
        self._at = 0
        self._depth = 0

    def _next(self) -> Word | str | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _take(self) -> Word | str:
        self._at += 1
        return self._tokens[self._at - 1]

    def _skip(self, *texts: str) -> bool:
        """Take the next token if it is one of these operators or reserved words."""
        token = self._next()
        if token is None or (token if isinstance(token, str) else _whole(token)) not in texts:
            return False
        self._at += 1
        return True

    def block(self, stops: tuple[str, ...]) -> Block:
        """Commands up to one of the words or operators in ``stops``, which is taken too."""
        self._depth += 1
        if self._depth > _DEEPEST:
            raise InvalidArgument(
                f"the script has commands more than {_DEEPEST} deep in each other; simplify it"
            )
        commands: Block = []
        operator = ";"
        while (token := self._next()) is not None and not self._skip(*stops):
            if isinstance(token, str) and token != "(":
                operator = token if token in ("&&", "||", "|") else ";"
                self._at += 1
                continue
            if _whole(token) in _RESERVED:  # without its beginning
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

    def _group(self) -> Group:
        brace = self._tokens[self._at - 1] != "("
        return Group(self.block(("}",) if brace else (")",)))

    def _while(self) -> Loop:
        until = self._tokens[self._at - 1] == [("until", "")]
        condition = self.block(("do",))
        return Loop(condition, until, "", [], self.block(("done",)))

    def _if(self) -> If:
        branches: list[tuple[Block | None, Block]] = []
        condition: Block | None = self.block(("then",))
        while True:
            body = self.block(("elif", "else", "fi"))
            branches.append((condition, body))
            last = self._tokens[self._at - 1]
            if last == [("elif", "")]:
                condition = self.block(("then",))
            elif last == [("else", "")] and condition is not None:
                condition = None
            else:
                return If(branches)

    def _case(self) -> Case:
        token = self._take() if self._next() is not None else ""
        subject = [("", "")] if isinstance(token, str) else token
        while self._skip("in", "\n"):
            pass
        branches = []
        while self._next() is not None and not self._skip("esac"):
            patterns: list[Word] = []
            while self._next() is not None and not self._skip(")"):
                token = self._take()
                if not isinstance(token, str):
                    patterns.append(token)
            stops = (";;", "esac")
            branches.append((patterns, self.block(stops)))
            if self._tokens[self._at - 1] == [("esac", "")]:
                break
            while self._skip("\n"):
                pass
        return Case(subject, branches)

    def _for(self) -> Loop:
        words: list[Word] = []
        while self._next() is not None and not self._skip("do"):
            token = self._take()
            if not isinstance(token, str):
                words.append(token)
        variable = bare(words[0]) if words else ""
        return Loop(None, False, variable, words[2:], self.block(("done",)))

    def _simple(self) -> Node:
        words: list[Word] = []
        documents: list[str] = []
        closing = ""
        while (token := self._next()) is not None:
            if isinstance(token, str):
                if token.startswith("<<"):
                    documents.append(token[2:])
                elif not closing and token == "(" and len(words) == 1:
                    return self._function(words[0])
                elif not closing or (closing == ")" and token == ")"):
                    if not closing:
                        break
                    words.append([(")", "")])
                    closing = ""
                elif closing == "]]" and token != "\n":
                    words.append([(token, "")])
                self._at += 1
                continue
            words.append(self._word())
            if _whole(token) == "[[" and len(words) == 1:
                closing = "]]"
            elif closing == "]]" and _whole(token) == "]]":
                closing = ""
            elif not closing and _is_array(token):
                closing = ")"
        return Simple(words, documents)

    def _word(self) -> Word:
        token = self._take()
        assert not isinstance(token, str)
        return token

    def _function(self, name: Word) -> Node:
        while self._skip("(", ")", "\n"):
            pass
        if self._next() is None:
            return Simple([name])
        return Function(bare(name), self._command())


def _whole(token: Word | str) -> str:
    """The text of a word of one unquoted piece."""
    if isinstance(token, str):
        return ""
    return token[0][0] if len(token) == 1 and token[0][1] == "" else ""


def _is_array(word: Word) -> bool:
    match = ASSIGNMENT.fullmatch(_whole(word))
    return match is not None and match[3] == "("


def _tokens(text: str) -> Iterator[Word | str]:
    """Words, and the operators between them; a here-document is its text after ``<<``."""
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
        if match := re.compile(r"<<-?\s*(['\"\\]?)(\w+)\1").match(text, at):
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
    """The words of a text, from any place on."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._balanced = True
        """False once a bracket is found that nothing closes: then none is looked for."""

    def scan(self, at: int) -> tuple[Word, int]:
        """One word from ``at`` on, and where it ends."""
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
        """The text between quotes, and where it ends; escapes are undone."""
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
        """End of ``$(…)``, ``${…}`` or ``` `…` ``` that begins at ``at``; else ``at + 1``."""
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
