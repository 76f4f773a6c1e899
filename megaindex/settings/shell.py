"""Launch scripts in Bash: the commands that they certainly start, without running anything.

Evaluated are assignments, arrays, common expansions, `source`, `eval`, lists, and `if` on known
values; what an unknown condition decides is unknown. Loops, functions and the like are refused. A
mark, one character in place of an unknown value, stands for the construct and its line.
"""

from __future__ import annotations

import ast
import operator
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

from megaindex.errors import InvalidArgument
from megaindex.settings.yaml_sections import read_text

# characters of private use: marks of one word and of any number of words; end of a word; no text
_ONE, _MANY, _SPLIT, _KEEP = "\U000f0000", "\U00100000", "\U0010fff0", "\U0010fff1"
_MARK = re.compile("[\U000f0000-\U0010ffef]")
_MOST_READ, _MOST_EXPANDED, _MOST_UNKNOWN = 1 << 18, 1 << 22, 10_000
_INTEGER = re.compile(r"-?(?:0|[1-9]\d{0,17})", re.A)
_NAME = re.compile(r"[A-Za-z_]\w*", re.A)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=", re.A)
_END = " \t\n;&|()<>"  # of a word
_BLANK, _SPACE = re.compile(r"(?:[ \t]|\\\n|#.*)+"), re.compile(r"(?:\s|\\\n|#.*)+")
_AND_OR = re.compile(r"(?:&&|\|\|)(?:\s|\\\n|#.*)*")
_PIPE = re.compile(r"\|(?!\|)&?(?:\s|\\\n|#.*)*")
_BACKGROUND, _PREFIX = re.compile(r"&(?![&>])"), re.compile(r"![ \t]+")
_REDIRECTION = re.compile(r"(?:\d+|&)?(?:<<<|<>|[<>]&|>>|>\||[<>](?![<(]))[ \t]*")
_COMPOUND = re.compile(r"(?:if|\{)(?=[\s;&|()<>])|\((?!\()|\[\[(?=\s)")
_LITERAL = re.compile(r"\\(.)|'([^']*)'|\$'(?:[^'\\]|\\.)*'|`(?:[^`\\]|\\.)*`", re.S)
_PARAMETER = re.compile(
    r"\$(?:([A-Za-z_]\w*|[\d@*#?!$-])|\{(#?)(\w+|[@*])(\[[@*]\])?"
    r"(:?[-=+?]|%%?|##?|[/^,]|(?:\[\d+\]|:\d+(?::\d+)?)?(?=\})))", re.A
)  # fmt: skip
_DOCUMENT = re.compile(  # after which only redirections are read past
    r"<<(-)?[ \t]*(['\"]?)(\w+)\2((?:[ \t]*[12&]?>>?[ \t]*[\w./$-]+)*[ \t]*)\n"
    r"(?P<body>(?:.*\n)*?)(?(1)\t*)\3(?=\n|$)"
)
_JOINS = re.compile(r"[()<>;&|\n]+")
_ALL = re.compile(r"\$@|\$\{(@|\w+\[@\])\}", re.A)
_IN_SUM = re.compile(r"\$(?:([A-Za-z_]\w*|[\d#])|\{(\w+)\})", re.A)
_SUM = re.compile(r"\$\(\((?:[^()'\"`\\]|\([^()'\"`\\]*\))*\)\)")
_GLOB, _BRACE = re.compile(r"[*?]|\[.*\]"), re.compile(r"\{.*(,|\.\.).*\}|(^|[:=])~", re.S)
_OF_BASH = re.compile(  # has a value that only Bash knows
    r"S?RANDOM|SECONDS|LINENO|EPOCH(SECONDS|REALTIME)|HOSTNAME|(HOST|MACH|OS)TYPE|E?UID|PPID|"
    r"BASH\w*|SHELLOPTS|FUNCNAME|SHLVL|PIPESTATUS|GROUPS|OLDPWD|DIRSTACK|OPT(IND|ARG)|COLUMNS|"
    r"LINES|REPLY|MAPFILE|[_?!$-]"
)
_NUMBER = re.compile(r"\$(S?RANDOM|(EPOCH)?SECONDS|LINENO|E?UID|PPID|SHLVL)")
_OWN_FOLDER = re.compile(r"\$\((cd\$\()?dirname\$(0|BASH_SOURCE)\)((>/dev/null(2>&1)?)?&&pwd\))?")
_PWD = re.compile(r"\$\(\s*pwd\s*\)|`\s*pwd\s*`")
_KEYWORD = re.compile(
    r"for|select|while|until|case|function|then|elif|else|fi|do|done|esac|in|coproc|time|[{}]|"
    r"[A-Za-z_]\w*\[.*",
    re.A | re.S,
)
_HARMLESS = frozenset(  # commands that set nothing and start nothing
    ["echo", "exit", "export", "mkdir", "cd", "shift", "true", "false", ":", "[", "test", "ls",
     "cat", "cp", "mv", "rm", "ln", "touch", "chmod", "date", "sleep", "wget", "pip"]
)  # fmt: skip
_REFUSED = re.compile(  # commands that set names, or change what others mean
    r"(let|read|return|mapfile|readarray|getopts|builtin|command(?! -[vV])|wait(?= -)|pushd|popd|"
    r"declare|typeset|local|readonly|shopt|alias|unalias|enable|hash|bind|"
    r"printf(?= [-\U000f0000-\U0010ffef])|(\[|test) (.* )?-v|trap .*\b(?i:DEBUG|ERR|RETURN)|"
    r"set(?! --( |$)|( [-+][euvxo]+| errexit| nounset| pipefail| xtrace)*$))(\s|$)", re.S
)  # fmt: skip
_LOADING = re.compile(r"(source|\.|module|ml|conda|mamba|micromamba|spack|deactivate)(\s|$)")
_ODD = re.compile(  # also a line that goes on within a word, and ``{name}>``, which sets a name
    r"\r|\bIFS\b|\b(POSIXLY_CORRECT|GLOBIGNORE|E?UID|PPID|SHELLOPTS|BASH\w*)\+?=|"
    r"(?<![\s\\])\\\n(?=\S)|\{\w+\}[<>]"
)
_SUMS: dict[type[ast.AST], Any] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.floordiv, ast.Mod: operator.mod,
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


def is_unknown(text: str) -> bool:
    return max(text, default="") >= _ONE


def is_several(text: str) -> bool:
    """Return True if a word may be any number of words."""
    return max(text, default="") >= _MANY


class Script:
    """A script: the `commands` that it starts, and where it `exits_at` before its end, if it does.

    Args:
        environment: variables besides those that it sets.
        arguments: its positional parameters; `path` is its ``$0``.

    Raises:
        InvalidArgument: it has a construct after which nothing is certain.
    """

    def __init__(
        self, text: str, environment: Mapping[str, str], arguments: Sequence[str] = (),
        path: str = "bash",
    ) -> None:  # fmt: skip
        self.commands, self._unknowns = list[Command](), list[Unknown]()
        self.exits_at, self._assumed, self._room = "", list[str](), _MOST_EXPANDED
        self._text, self._at, self._taken = "", 0, ""
        self._mode: bool | None = True  # commands are run, or passed; None: `_why` decides
        self._why, self._ended = "", False
        self._options: set[str] = set()  # e and u of `set`
        self._decides = False  # the status of a condition, which ends no script
        self._exported = {*environment}
        # variables, parameters "@"; "" stands for all others
        self.state: dict[str, Any] = {**environment, "@": list(arguments), "0": path}
        said, here = environment.get("PWD", ""), os.getcwd()
        self.state["PWD"] = said if said[:1] == "/" and os.path.realpath(said) == here else here
        if is_unknown("".join([text, *arguments, *environment.values()])):
            self._refuse("a variable or parameter with such characters")
        self._run(text)
        self.exits_at *= self._ended

    # unknown values

    def _of(self, mark: str) -> Unknown:
        return self._unknowns[ord(mark) & 0xFFFF]

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
        return _MARK.sub(lambda match: chr(ord(_MANY) | ord(match[0]) & 0xFFFF), text)

    def _line(self) -> str:
        return f"line {self._text.count(chr(10), 0, self._at) + 1}"

    def _short(self, text: str) -> str:
        return self.written(text).strip().partition("\n")[0][:60]

    def _refuse(self, text: str) -> NoReturn:
        raise InvalidArgument(f"{self._line()}: `{self._short(text)}` is not evaluated")

    def _mark(self, text: str, *, undefined: bool = False) -> str:
        found = Unknown(self._short(text), self._line(), undefined)
        if found not in self._unknowns[-50:]:
            self._unknowns.append(found)
        if len(self._unknowns) > _MOST_UNKNOWN:
            self._refuse("that many unknown words")
        return chr(ord(_ONE) + self._unknowns.index(found))

    def _forget(self, why: str, *names: str) -> None:
        """Make names unknown, by default all."""
        mark = self._mark(why)
        self.state = self.state if names else {"@": mark, "0": self.state["0"]}
        self.state |= dict.fromkeys(names or [""], mark)

    # each of these methods returns the success of commands, None if it is unknown

    def _run(self, text: str) -> bool | None:
        held, self._text, self._at = (self._text, self._at), text, 0
        self._spend(8 * len(text))  # it is read one character at a time
        if len(text) > _MOST_READ:
            self._refuse("a text of that size")
        if odd := _ODD.search(text):
            self._at = odd.start()
            self._refuse(repr(odd[0]))
        try:
            status = self._list("")
        except RecursionError:
            self._refuse("commands that nest so deeply")
        self._text, self._at = held
        return status

    def _spend(self, length: int) -> None:
        self._room -= 100 + length
        if self._room < 0:
            self._refuse("an expansion of that length")

    @property
    def _runs(self) -> bool | None:
        return False if self._ended else self._mode

    def _next(self, pattern: re.Pattern[str]) -> str:
        """Pass a pattern, if it is next; return its text."""
        match = pattern.match(self._text, self._at)
        self._at = match.end() if match else self._at
        return match[0] if match else ""

    def _char(self) -> str:
        """Return the next character, with a substituted process as ``$``."""
        char = self._text[self._at : self._at + 1]
        return "$" if self._text[self._at : self._at + 2] in ("<(", ">(") else char

    def _takes(self, *ends: str) -> bool:
        """Pass one of these words, and keep it."""
        for end in ends:
            after = self._text[self._at + len(end) : self._at + len(end) + 1]
            closes = end == ")" or (after in _END if end else not after)
            if self._text.startswith(end, self._at) and closes:
                self._at, self._taken = self._at + len(end), end
                return True
        return False

    def _list(self, *ends: str) -> bool | None:
        """Evaluate commands up to one of these words, and pass it."""
        status: bool | None = True
        self._next(_SPACE)
        start = self._at
        while not self._takes(*ends):
            begin, held = self._at, (dict(self.state), self._ended)
            status = self._and_or()
            if self._next(_BACKGROUND):
                self.state, self._ended = held
            elif self._char() not in "\n;)" or self._at == begin:
                self._refuse(self._text[begin:])
            self._at += self._char() == ";"
            self._next(_SPACE)
        if self._at == start + len(self._taken) and self._taken not in ("", ")"):
            self._refuse(self._text[start:])
        return status

    def _after(self, status: bool | None, begin: int) -> None:
        """Run what follows on a status of commands that began at a place."""
        if self._mode and not status:
            self._mode, self._why = status, self._text[begin : begin + 99].partition("\n")[0]

    def _and_or(self) -> bool | None:
        begin, held, status = self._at, (self._mode, self._why), self._pipeline()
        is_last = not self._text.startswith("!", begin)  # a status that counts for `set -e`
        while sign := self._next(_AND_OR):
            self._after(status if status is None else status is (sign[0] == "&"), begin)
            is_last, at = self._mode is True, self._at
            found = self._pipeline()
            is_last = is_last and not self._text.startswith("!", at)
            status = status if self._mode is False else found if self._mode else None
            self._mode, self._why = held
        if is_last and not self._decides:
            self._check_failure(status, begin)
        return status

    def _check_failure(self, status: bool | None, begin: int) -> None:
        """Refuse a known failure under `set -e`: within groups Bash may go on."""
        if self._runs and status is False and "e" in self._options:
            self._refuse(f"set -e, and the failure of {self._text[begin:]}")

    def _exit(self, where: str = "") -> None:
        """End the script here, if commands are run."""
        if self._runs:
            self.exits_at, self._ended = where or self._line(), True

    def _pipeline(self) -> bool | None:
        begin, held, ended, prefix = self._at, self.state, self._ended, self._next(_PREFIX)
        self._spend(len(held))
        self.state = dict(held)
        status = self._command()
        if not self._next(_PIPE):
            return status if status is None else status is (prefix[:1] != "!")
        more = "|"
        while more:  # each command has a subshell
            self.state, self._ended = dict(held), ended
            status = self._command() is not False and status
            more = self._next(_PIPE)
        self.state, self._ended = held, ended
        self._check_failure(status, begin)
        return None

    def _command(self) -> bool | None:
        begin, held, ended = self._at, dict(self.state), self._ended
        kind, mode, status = self._next(_COMPOUND), (self._mode, self._why), None
        if not kind:
            return self._simple()
        if kind == "[[":
            status = self._test()
        elif kind == "if":
            self._if(begin)
        else:
            status = self._list("}" if kind == "{" else ")")
        if kind == "(":
            self.state, self._ended, status = held, ended, status and None
        self._mode, self._why = mode
        self._next(_BLANK)
        while self._next(_REDIRECTION):
            self._word()
            self._next(_BLANK)
            status = None
        return status

    def _if(self, begin: int) -> None:
        rest, self._taken = (self._mode, self._why), "elif"
        while self._taken == "elif":
            self._mode, self._why = rest
            held, self._decides = self._decides, True
            holds = self._list("then")
            self._decides = held
            self._after(holds, begin)
            self._list("elif", "else", "fi")
            self._mode, self._why = rest
            self._after(holds if holds is None else not holds, begin)
            rest = self._mode, self._why
        if self._taken == "else":
            self._list("fi")

    # simple commands

    def _simple(self) -> bool | None:
        begin, before, redirected, runs = self._at, dict(self.state), False, self._runs
        raws, words, variables = list[str](), list[str](), self.state
        while True:
            self._next(_BLANK)
            start, match = self._at, _ASSIGNMENT.match(self._text, self._at)
            if document := self._next(_DOCUMENT) or self._next(_REDIRECTION):
                if re.search(r"\$\(\(|\$\{\w*\W*[=!]|\\\n", document):
                    self._refuse(self._text[begin:])
                redirected = "\n" in document or self._word() is not None
            elif match and raws[:1] in ([], ["export"]):
                self._assign(match)
                self._exported |= {match[1]} if raws and self._runs is not False else set()
                self._check_export(raws, self._text[start : self._at])
            elif self._char() in _END:
                break
            else:
                if not raws:  # assignments before a command are its own, what they set is not
                    variables, self.state = self.state, before
                    if variables.get("") != before.get("") or self._runs is not runs:
                        self._refuse(self._text[begin:start])
                words += self._words()
                raws.append(re.sub(r"[\"'\\]", "", self._text[start : self._at]))
        text = self._text[begin : self._at]
        if not raws:
            return None if redirected or re.search(r"\$\((?!\()|`", text) else True
        # variables of its own are those of what it reads
        lends = raws[0] in ("eval", "source", ".") and variables != before
        if _KEYWORD.fullmatch(raws[0]) or self._char() == "(" or lends:
            self._refuse(self._text[begin:])
        if self._runs is None:
            words = self._harmless([raw for raw in raws if raw != "="])
        while words and is_unknown(words[0]) and not self._defined(words[0]):
            del words[0]
        status = self._start(words, variables) if words and self._runs is not False else True
        return None if redirected or self._runs is None else status

    def _check_export(self, raws: list[str], text: str) -> None:
        """Refuse assignments of `export` that are not made one after the other."""
        odd = (raws[1:] and re.search(r"[$`]", text)) or re.search(r"(?<!\$)\{", text)
        if raws and odd:
            self._refuse(f"export {text}")
        raws += ["="] * len(raws[:1])

    def _harmless(self, words: list[str]) -> list[str]:
        """Return a command that is perhaps run; refuse one that could start others."""
        if words[0] not in _HARMLESS and not _LOADING.match(" ".join(words)):
            self._refuse(self._why)
        if words[0] == "exit":
            self._assumed.append(f"{self._line()}: `{self._short(self._why)}`")
        return words

    def _start(self, words: list[str], variables: Mapping[str, Any]) -> bool | None:
        name, text, given = words[0], " ".join(words), self.state["@"]
        if (found := self._sourced(words)) is not None:
            return self._run(found)
        if _REFUSED.match(text) or name in ("", "eval"):
            self._refuse(text)
        if name in ("cd", "shift"):
            self._forget(self._why or text, "PWD" if name == "cd" else "@")
        if self._runs and words == ["shift"] and given and not is_unknown("".join(given)):
            self.state["@"] = given[1:]
        named = name in ("unset", "export") and all(map(_NAME.fullmatch, words[1:]))
        if name == "unset" and named:
            self.state |= dict.fromkeys(words[1:])
        elif words[:2] == ["set", "--"]:
            self.state["@"] = words[2:]
        elif (
            (name in ("unset", "export") and not named) or is_unknown(name) or _LOADING.match(text)
        ):
            self._forget(self._why or text)
        self._exported |= {*words[1:]} if name == "export" else set()
        if name == "set" and words[1:2] != ["--"]:  # what `set +e` ends is still heeded
            letters = {"errexit": "e", "nounset": "u"}
            self._options |= {*"".join(letters.get(w, w * (w[:1] == "-")) for w in words[1:])}
        if name in ("true", ":", "echo", "false", "set", "export"):
            return name != "false"
        if name in ("[", "test"):
            return self._compare(words[1:-1] if name == "[" else words[1:])
        if self._runs:
            self._start_program(words, variables)
        return None

    def _start_program(self, words: list[str], variables: Mapping[str, Any]) -> None:
        if words[0] == "exit":
            self._exit()
        elif words[-3:-1] == ["bash", "-c"] and self._is_known(words[-1]):
            self._run_in_bash(words[-1])
        else:
            self.commands.append(Command(words, variables, tuple(dict.fromkeys(self._assumed))))
            self._ended = words[0] == "exec" and len(words) > 1

    def _is_known(self, text: str) -> bool:
        """Return True for a text that lacks at most names without a value."""
        unknown = self.unknown_in(text)
        return unknown is None or unknown.undefined

    def _run_in_bash(self, text: str) -> None:
        """Run a text in another Bash, which has the exported variables."""
        held = self.state, self._ended, self._options
        kept = self._exported | {"", "PWD"}
        given = {name: one for name, one in self.state.items() if name in kept}
        self.state, self._options = {**given, "@": [], "0": "bash"}, set()
        self._run(text)
        self.state, self._ended, self._options = held

    def _sourced(self, words: list[str]) -> str | None:
        """Return the text that is evaluated in place of a command; None if it is not certain."""
        unknown, path = self.unknown_in("".join(words)), "".join(words[1:])
        if words[0] == "eval" and self._is_known("".join(words)):
            return " ".join(words[1:])
        moved = path[:1] != "/" and is_unknown(self._held("PWD") or "")
        if words[0] in ("source", ".") and len(words) == 2 and "/" in path and self._runs:
            with suppress(OSError, ValueError):
                text = "return" if unknown or moved else read_text(path, "source")
                if not re.search(r"\b(return|BASH_SOURCE|source)\b|(^|\s)\.\s", text):
                    return text
        return None

    def _assign(self, match: re.Match[str]) -> None:
        """Evaluate an assignment."""
        name, begin, self._at = match[1], self._at, match.end()
        items = self._array(begin) if self._char() == "(" else None
        value = "" if items is not None else self._plain_word()
        held = self.state.get(name, self.state.get(""))
        if self._runs is None:
            self._forget(self._why, name)
        elif self._runs and items is not None:
            before = [self._several(held)] if isinstance(held, str) else held or []
            self.state[name] = [*before, *items] if match[2] else items
        elif self._runs:
            self._set(name, (self._held(name) or "") * bool(match[2]) + value)

    def _array(self, begin: int) -> list[str]:
        items, self._at = list[str](), self._at + 1
        self._next(_SPACE)
        while not self._takes(")"):
            if self._char() in "[;&|(<>":
                self._refuse(self._text[begin:])
            items += self._words()
            self._next(_SPACE)
        if self._char() not in _END:
            self._refuse(self._text[begin:])
        return items

    def _set(self, name: str, value: str) -> None:
        """Set a variable, of an array the first element."""
        held = self.state.get(name, self.state.get(""))
        if name == "PWD" and value != held:  # which `pwd` does not heed
            value = self._mark(f"{name}={value}")
        if isinstance(held, list) and is_several("".join(held[:1])):
            held = held[0]
        if isinstance(held, str) and is_unknown(held):  # it may be an array
            held = [held, self._several(self._mark(name))]
        self.state[name] = [value, *held[1:]] if isinstance(held, list) and held[1:] else value

    # tests and sums

    def _test(self) -> bool | None:
        """Return the result of ``[[ … ]]``."""
        begin, values, odd, ended = self._at, list[str](), False, self._ended
        self._next(_BLANK)
        while not self._takes("]]"):
            start = self._at
            if self._next(_JOINS):
                odd = True
            else:
                values.append(self._defined(self._plain_word()))
                same = values[-1] == self._text[start : self._at]
                operates = not same and values[-1][:1] in ("-", "!", "=")
                odd = odd or operates or bool(re.search(r"[*?\[\\(]", values[-1]))
            self._next(_BLANK)
        if odd and self._ended and not ended:  # perhaps, where `&&` passes a word
            self._refuse(f"[[{self._text[begin:]}")
        status = None if odd or not self._runs else self._compare(values)
        text = self._text[begin : self._at]
        counts = self._runs is not False and re.search(r"\s-(eq|ne|[lg][te]|v)\s", text)
        if status is None and counts:
            self._forget(self._why or f"[[{text}")  # it evaluates values, which may assign
        return status

    def _compare(self, words: Sequence[str]) -> bool | None:
        """Return the result of ``test`` with these words."""
        defined = [self._defined(word) for word in words]
        words = [d for d, word in zip(defined, words, strict=True) if d or not is_several(word)]
        if any(is_unknown(word) for word in words):
            return None
        binary = {"=", "==", "!=", *_COMPARED} & {*words}
        errs = len(words) == 2 and binary and not re.fullmatch(r"-\w", words[0])  # one is missing
        if errs or len(words) == 1 or (len(words) == 2 and words[0] in ("-n", "-z")):
            return not errs and (words[-1] == "") is (len(words) == 2 and words[0] == "-z")
        if len(words) == 3 and words[1] in ("=", "==", "!="):
            return (words[0] == words[2]) is (words[1] != "!=")
        if words[:1] == ["!"] and len(words) in (3, 4) and words[1] not in _COMPARED:
            status = self._compare(words[1:])
            return None if status is None else not status
        if len(words) == 3 and words[1] in _COMPARED and all(map(_INTEGER.fullmatch, words[::2])):
            return bool(_COMPARED[words[1]](int(words[0]), int(words[2])))
        return None

    def _sum(self, piece: str) -> str:
        """Return the value of ``$((…))`` of integers; that of others may assign."""
        text = _IN_SUM.sub(lambda m: self._defined(self._held(m[1] or m[2]) or ""), piece[3:-2])
        names = {name: self._defined(self._held(name) or "") or "0" for name in _NAME.findall(text)}
        shape = _MARK.sub("1", text)
        plain = re.fullmatch(r"(?!.*(\+\+|--|//|\*\*))[\w\s+*/%()-]{1,400}", shape, re.A | re.S)
        undefined = "u" in self._options and any(self._held(name) is None for name in names)
        integers = all(_INTEGER.fullmatch(_MARK.sub("1", value)) for value in names.values())
        marks = _MARK.findall("".join([text, *names.values()]))
        divides = re.search(r"[/%](?!\s*[1-9])", text)
        certain = plain and integers and self._runs and not (undefined or (marks and divides))
        if certain and not marks:
            with suppress(SyntaxError, ValueError, ArithmeticError, LookupError, AttributeError):
                text = _NAME.sub(lambda match: f"({names[match[0]]})", text)
                return str(_integer(ast.parse(f"({text})", mode="eval").body))
        if self._runs and not marks:
            self._refuse(piece)  # it may be an error, after which a line is not run to its end
        numbers = all(_NUMBER.fullmatch(self._of(mark).text) for mark in marks)
        if self._runs is not False and not (certain and numbers):
            self._forget(self._why or piece)
        return self._mark(piece)

    # words

    def _words(self) -> list[str]:
        """Read a word; return the words that it becomes."""
        return [one.replace(_KEEP, "") for one in self._word().split(_SPLIT) if one]

    def _plain_word(self, ends: str = _END, *, quoted: bool = False) -> str:
        """Read a word that is not split."""
        text = self._word(ends, quoted=quoted, splits=False).replace(_KEEP, "")
        return _MARK.sub(lambda match: chr(ord(_ONE) + (ord(match[0]) & 0xFFFF)), text)

    def _word(self, ends: str = _END, *, quoted: bool = False, splits: bool = True) -> str:
        found, plain, begin = list[str](), "", self._at
        while (char := self._char()) not in ends:
            start = self._at
            if char == '"' and not quoted:
                self._at += 1
                inner, self._at = self._word('"', quoted=True, splits=splits), self._at + 1
                if not inner and _ALL.search(self._text, start, self._at):
                    alone = _ALL.fullmatch(self._text, start + 1, self._at - 1)
                    inner = inner if alone else self._mark(self._text[start : self._at])
                else:
                    inner = _KEEP + inner
                found.append(inner)
            elif char in "$`":
                found.append(self._expanded(quoted, splits))
            elif char == "\\" or (char == "'" and not quoted):
                piece = self._next(_LITERAL) or self._refuse(self._text[start:])
                kept = quoted and piece[1] not in '$`"\\\n'
                text = piece[1:-1] if char == "'" else piece[not kept :]
                found.append("" if piece == "\\\n" else _KEEP + text)
            else:
                self._at += 1
                found.append(char)
                plain += char
        if self._at == begin == len(self._text) or (ends != _END and not self._char()):
            self._refuse(self._text[begin:])
        patterns = not quoted and (_BRACE.search(plain) or _GLOB.search(plain))
        if self._runs and patterns and (splits or "~" in plain):
            mark = self._mark(self._text[begin : self._at])
            return self._several(mark) if splits else mark
        return "".join(found)

    def _expanded(self, quoted: bool, splits: bool) -> str:
        """Read an expansion; return what it becomes within a word."""
        begin = self._at
        value: str | list[str] = ""
        if piece := self._next(_SUM):
            value = self._sum(piece)
        elif self._text[begin : begin + 2] in ("$(", "<(", ">("):
            held, self._mode, self._at = self._mode, False, begin + 2
            self._list(")")
            self._mode, piece = held, self._text[begin : self._at]
            value = self._folder(piece) or self._mark(piece)
        elif match := _PARAMETER.match(self._text, begin):
            self._at = match.end()
            value, piece = self._parameter(match), self._text[begin : self._at]
        elif (not quoted or self._char() == "`") and (piece := self._next(_LITERAL)):
            value = self._folder(piece) or self._mark(piece)
        elif re.match(r"\$[({\[\"]", self._text[begin : begin + 2]):
            self._refuse(self._text[begin:])
        else:
            self._at += 1
            return self._text[begin]
        if not self._runs:
            return ""
        items = [value] if isinstance(value, str) else value
        self._spend(sum(100 + len(one) for one in items))
        if splits and not quoted:
            glob = re.search(r"[*?\[]", " ".join(items))
            items = [self._mark(piece)] if glob else items
            return _SPLIT.join(re.sub(r"[ \t\n]+", _SPLIT, self._several(one)) for one in items)
        if splits and isinstance(value, list) and "*" not in piece:
            return _SPLIT.join(_KEEP + one for one in items)
        return " ".join(items)

    def _parameter(self, match: re.Match[str]) -> str | list[str]:
        """Return the value of an expansion of which the beginning is passed."""
        name, how = match[1] or match[3], match[5] or ""
        held = self._elements(name) if match[4] or name in "@*" else self._held(name)
        text = " ".join(held) if isinstance(held, list) else self._defined(held or "")
        given = held is not None and (how[:1] != ":" or text != "")
        needs = given is (how[-1:] == "+") or how[:1] in ("%", "#")
        raw, word = self._operand(needs) if match[1] is None else ("", "")
        odd = how[-1:] == "=" or (how[-1:] == "?" and self._runs is None)
        if odd and self._runs is not False:
            self._refuse(self._why or self._text[match.start() : self._at])
        if held is None and not how and name not in ("@", "*", "#") and "u" in self._options:
            self._exit(self._short(self._text[match.start() : self._at]))
        mark = self._mark(self._text[match.start() : self._at], undefined=not how and held is None)
        if not self._runs or (held is None and not how and not match[2]):
            return mark
        if match[2]:
            sized = not how and (not is_several(text) if isinstance(held, list) else text.isascii())
            return str(len(held if isinstance(held, list) else text)) if sized else mark
        if not how or isinstance(held, list):
            return [self._several(mark)] if how else held or ""
        held = held or ""
        if how[0] in "%#":
            plain = re.fullmatch(r"[\w./:,=@ -]*\*?[\w./:,=@ -]*", raw, re.A)
            return _trimmed(held, how, raw) if plain and not is_unknown(held) else mark
        unsure = text and not _MARK.sub("", text)  # whether it has a value, or an empty one
        if unsure and (how[-1] == "?" or re.search(r"\$\(\(|\$\{\w+:?[=?]", raw)):
            self._refuse(self._text[match.start() : self._at])
        if how[-1] not in "-?+" or unsure:
            return mark
        if needs and how[-1] == "?":
            self._exit(self._short(self._text[match.start() : self._at]))
        return word if needs else held * (how[-1] != "+")

    def _operand(self, needs: bool) -> tuple[str, str]:
        """Read an operand to its brace; return it as written, and its value if that is needed."""
        begin, mode = self._at, self._mode
        self._mode = mode if needs or not mode else False
        word = self._plain_word("}", quoted=True)
        raw, self._mode, self._at = self._text[begin : self._at], mode, self._at + 1
        if whole := re.fullmatch(r'"([^"\'\\$`\s]*)"', raw):
            return whole[1], _KEEP + whole[1]
        if re.search(r"[\"'\\~]", raw):
            self._refuse(raw)
        return raw, word

    def _held(self, name: str) -> str | None:
        """Return the value of a name, of an array the first element; None if it has none."""
        if _OF_BASH.fullmatch(name):
            return self._mark(f"${name}")
        if name == "0" or not (name == "#" or name.isdecimal()):
            held = self.state.get(name, self.state.get(""))
            if isinstance(held, list):  # in which names without a value are no elements
                return next(
                    (one for one in held if self._defined(one) or not is_several(one)), None
                )
            return held
        given = self.state["@"]
        if isinstance(given, str) or is_several("".join(given)) or name[:-1].startswith("0"):
            return self._mark(f"${name}")
        if name == "#":
            return str(len(given))
        return given[int(name) - 1] if int(name[:9]) <= len(given) else None

    def _elements(self, name: str) -> list[str]:
        held = self.state.get("@" if name == "*" else name, self.state.get(""))
        return [self._several(held)] if isinstance(held, str) else held or []

    def _folder(self, piece: str) -> str:
        """Return the output of ``pwd``, or of ``dirname`` of the script; else nothing."""
        plain, held = re.sub(r"[\"\s{}]|\[0\]", "", piece), self.state.get("PWD")
        here = held if isinstance(held, str) else _ONE
        if _PWD.fullmatch(piece) and os.path.normpath(here) == here:  # as Bash prints it
            return "" if is_unknown(here) else here
        if not _OWN_FOLDER.fullmatch(plain) or is_unknown(here):
            return ""
        folder = os.path.dirname(self.state["0"]) or "."
        return os.path.normpath(f"{here}/{folder}") if "pwd" in plain else folder


def _trimmed(value: str, how: str, pattern: str) -> str:
    """Return ``${X%PATTERN}``, or with ``%%``, ``#``, ``##``."""
    few = "?" * (how in ("#", "%%"))
    text = re.escape(pattern).replace(r"\*", f".*{few}")
    match = re.fullmatch(f"(.*{few}){text}" if how[0] == "%" else f"{text}(.*)", value, re.S)
    return match[1] if match else value


def _integer(node: Any) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp):
        return _integer(node.operand) * (-1 if isinstance(node.op, ast.USub) else 1)
    left, right = _integer(node.left), _integer(node.right)
    if isinstance(node.op, ast.Div | ast.Mod) and min(left, right) < 0:
        raise ValueError("Bash rounds to zero")
    value: int = _SUMS[type(node.op)](left, right)
    if abs(value) >= 2**63:
        raise ValueError("Bash has 64 bits")
    return value
