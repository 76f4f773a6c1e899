"""Tokens of launch scripts in Bash, and how they nest."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_MOST_NESTED = 40
_BLANK = re.compile(r"(?:[ \t]|\\\n)+|#[^\n]*")
_OPERATOR = re.compile(r"&&|\|\||;;&?|;&|\|&?|[;()\n]|&(?!>)")
_REDIRECT = re.compile(r"(?:\d+|\{\w+\}|&)?(?:<<<|<<-?|<>|[<>]&|>>|>\||[<>](?!\())[ \t]*", re.A)
_TEST = re.compile(r"\[\[\s.*?\s\]\](?=[\s;&|)]|$)", re.S)
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^]\s]*\])?(\+?)=", re.A)
PARAMETER = re.compile(
    r"\$(?:([A-Za-z_]\w*|[0-9@*#?!$-])|\{(\w+|[@*#])(\[[@*]\])?(?:(:?[-=+?])(.*))?\})", re.A | re.S
)
_QUOTED = re.compile(r"\$'(?:[^'\\]|\\.)*'|'[^']*'|\\.", re.S)
_OPENS = {"if": "fi", "case": "esac", "{": "}", "(": ")", "for": "done", "while": "done",
          "until": "done", "select": "done"}  # fmt: skip
KEYWORDS = frozenset(
    ["then", "elif", "else", "do", "!", "time", "function", *_OPENS, *_OPENS.values()]
)


@dataclass
class Token:
    """A word, redirection, ``[[ … ]]`` or ``((…))``, or an operator, which is its own kind."""

    kind: str
    text: str = ""
    line: int = 0
    document: str | None = None
    depth: int = 0
    keyword: bool = False
    begins: bool = False  # a command

    @property
    def assigns(self) -> bool:
        return self.kind == "word" and bool(ASSIGNMENT.match(self.text))


def piece_end(text: str, at: int, quoted: bool = False, depth: int = 0) -> int:
    """Return the end of a piece of a word: a character, a quotation or an expansion."""
    if text[at] not in "$`\"'\\<>" or (quoted and text[at] == "\\"):
        return at + 1 + (text[at] == "\\")
    plain = None if text.startswith("${", at) else PARAMETER.match(text, at)
    if match := plain or (None if quoted else _QUOTED.match(text, at)):
        return match.end()
    closes = {"$(": ")", "${": "}", "$[": "]", "`": "`"}
    closes |= {} if quoted else {"<(": ")", ">(": ")", '$"': '"', '"': '"'}
    sign = next((sign for sign in closes if text.startswith(sign, at)), "")
    end = _close(text, at + len(sign), closes[sign], depth + 1) if sign else at + 1
    if sign == "$(" and text[at + 2] != "(" and re.search(r"\bcase\b|<<", text[at:end]):
        raise ValueError("$() with case or <<")
    return end


def _close(text: str, at: int, close: str, depth: int = 0) -> int:
    """Return the place after ``close``, past quotations and expansions."""
    while text[at] != close:
        if depth > _MOST_NESTED or (close == "}" and text[at] == "'"):
            raise ValueError("expansions that are not read")
        if close == "`":
            at += 1 + (text[at] == "\\")
        elif close == ")" and text[at] == "#" and text[at - 1].isspace():
            at = text.index("\n", at)
        elif close + text[at] == ")(":
            at = _close(text, at + 1, ")", depth + 1)
        else:
            at = piece_end(text, at, close == '"', depth)
    return at + 1


def _word(text: str, begin: int) -> int:
    """Return the end of a word."""
    at = begin
    while at < len(text) and (text[at] not in " \t\n;&|()<>" or text[at : at + 2] in ("<(", ">(")):
        at = piece_end(text, at)
        if text[at : at + 1] == "(" and ASSIGNMENT.fullmatch(text, begin, at):
            at = _close(text, at + 1, ")")
    if at == begin:
        raise ValueError(f"{text[at : at + 9]!r}")
    return at


def read_tokens(text: str) -> list[Token]:
    """Return the tokens of a script."""
    tokens, pending, at, line = list[Token](), list[Token](), 0, 1
    while at < len(text):
        begin, kind = at, "word"
        if match := _BLANK.match(text, at):
            at, kind = match.end(), ""
        elif match := _REDIRECT.match(text, at):
            at, kind = _word(text, match.end()), "<"
        elif text.startswith("((", at) and text.startswith("))", _close(text, at + 2, ")") - 1):
            at, kind = _close(text, at + 2, ")") + 1, "sum"
        elif match := _TEST.match(text, at) or _OPERATOR.match(text, at):
            at, kind = match.end(), match[0] if match[0][0] != "[" else "test"
        else:
            at = _word(text, at)
        token = Token(kind, text[begin:at], line)
        pending += [token] if re.match(r"\d*<<(?!<)", token.text) and kind == "<" else []
        while kind == "\n" and pending:
            at = _document(text, at, pending.pop(0))
        joins = [one.kind for one in tokens[-2:]]
        follows = joins == ["(", ")"] or {"&&", "||", "|", "|&"} & {*joins[1:]}
        tokens += [token] if kind and not (kind == "\n" and follows) else []
        line += text.count("\n", begin, at)
    _nest(tokens)
    return tokens


def _document(text: str, at: int, token: Token) -> int:
    """Add the here-document to a redirection; return the place after it."""
    sign, name = re.findall(r"<<(-?)\s*(.*)", token.text, re.S)[0]
    rows, plain = [], re.sub(r"[\"'\\]", "", name)
    while at < len(text):
        end = text.find("\n", at) + 1 or len(text)
        row, at = text[at:end].lstrip("\t" if sign else ""), end
        if row.rstrip("\n") == plain:
            break
        rows.append(row)
    token.document = "".join(rows) if name == plain else "'" + "".join(rows)
    token.text += "\n" + "".join(rows)
    return at


def _nest(tokens: list[Token]) -> None:
    """Set the depth of tokens, and which of them are keywords or begin commands."""
    stack, begins = list[str](), True
    for token in tokens:
        token.depth = len(stack)
        word = token.text if token.kind in ("word", "(", ")") else ""
        token.keyword = word == "(" or (begins and word in _OPENS)
        if token.keyword:
            stack.append(_OPENS[word])
            begins = word not in ("for", "case", "select")
        elif stack and word == stack[-1] and (begins or word == ")"):
            stack.pop()
            token.depth, token.keyword, begins = len(stack), True, True
        elif begins and word in ("then", "elif", "else", "do", "!", "time"):
            token.depth, token.keyword = token.depth - (word not in ("!", "time")), True
        elif token.kind != "<":
            token.begins = begins
            begins = (begins and token.assigns) or token.kind not in ("word", "test", "sum")


def split(tokens: list[Token], *signs: str) -> Iterator[tuple[int, list[Token], str]]:
    """Yield the place of each part between operators, the part, and the operator after it."""
    begin = 0
    for place, token in enumerate([*tokens, Token(signs[0], depth=-1)]):
        if token.kind in signs and token.depth in (-1, tokens[0].depth):
            yield begin, tokens[begin:place], token.kind
            begin = place + 1


def groups(tokens: list[Token]) -> Iterator[list[Token]]:
    """Yield the words of each command, with its here-documents."""
    group = list[Token]()
    for token in [*tokens, Token("\n")]:
        if token.keyword or token.kind not in ("word", "<"):
            yield from [group] if group else []
            group = []
        elif token.document if token.kind == "<" else group or (token.begins and not token.assigns):
            group.append(token)
