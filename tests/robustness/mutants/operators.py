"""Mutations of Python and C++ text: each replaces a few bytes by others that change its meaning."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Edit:
    """Bytes [begin, end) of a file and the text that replaces them."""

    begin: int
    end: int
    new: str

    def applied_to(self, source: bytes) -> bytes:
        return source[: self.begin] + self.new.encode() + source[self.end :]


def edits_of(name: str, source: bytes) -> list[Edit]:
    """Return the mutations of a Python module or a C++ header, in order."""
    return python_edits(source) if name.endswith(".py") else cpp_edits(source)


def python_edits(source: bytes) -> list[Edit]:
    """Return the mutations of a Python module, in order."""
    finder = _Finder(source)
    finder.visit(ast.parse(source))
    return sorted(set(finder.edits))


_OPERATORS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"),
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "//"), ast.FloorDiv: ("//", "*"),
    ast.Div: ("/", "*"), ast.Mod: ("%", "//"), ast.LShift: ("<<", ">>"), ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"), ast.BitXor: ("^", "|"), ast.And: ("and", "or"), ast.Or: ("or", "and"),
}  # fmt: skip
_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any", "ceil": "floor", "sorted": "list"}
_UNTESTED_CALLS = re.compile(r"^(\w+\.)?(logger|warnings|console|progress|show|report)\b")
_TEXT_METHODS = {"__repr__", "__str__", "_repr_html_"}
# constants that decide how fast something is, not its result
_TUNING = re.compile(
    r"CHUNK|BUFFER|WORTH|AT_ONCE|PAUSE|SECONDS|PIECE|COPY|STRETCH|SLICE|FEW_DRAWS|SAMPLED|DELAY"
)


class _Finder(ast.NodeVisitor):
    """Collects edits; skips messages, annotations, decorators and log lines."""

    def __init__(self, source: bytes) -> None:
        self.edits: list[Edit] = []
        self._source = source
        lines = source.splitlines(keepends=True)
        self._starts = [0]
        for line in lines:
            self._starts.append(self._starts[-1] + len(line))

    def _begin(self, node: ast.expr | ast.stmt) -> int:
        return self._starts[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._starts[node.end_lineno - 1] + node.end_col_offset

    def _replace(self, node: ast.expr | ast.stmt, new: str) -> None:
        self.edits.append(Edit(self._begin(node), self._end(node), new))

    def _between(self, left: ast.expr, right: ast.expr, kind: type[ast.AST]) -> None:
        """Replace the operator between two operands."""
        if kind not in _OPERATORS:
            return
        old, new = _OPERATORS[kind]
        begin, end = self._end(left), self._begin(right)
        at = self._source[begin:end].find(old.encode())
        if at >= 0:
            self.edits.append(Edit(begin + at, begin + at + len(old), new))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name in _TEXT_METHODS:
            return
        for child in (*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body):
            self.visit(child)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        if "Protocol" in map(ast.unparse, node.bases):  # of which only the signatures are used
            return
        for child in node.body:
            self.visit(child)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        name = getattr(node.targets[0], "id", "")
        if name != "__all__" and not (name.isupper() and _TUNING.search(name)):
            self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_Assert(self, node: ast.Assert) -> None:
        pass

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg != "strict":  # of zip, an assertion
            self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        if ast.unparse(node) != "raise NotImplementedError":  # of a method that subclasses define
            self._replace(node, "pass")

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._replace(node, "pass")
        self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            if _UNTESTED_CALLS.match(ast.unparse(node.value.func)):
                return
            self._replace(node, "pass")
        if not isinstance(node.value, ast.Constant):  # a docstring
            self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if not isinstance(node.body[0], ast.Raise):  # which is removed by itself
            self._replace(node.test, "False")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, right, operator in zip(operands, operands[1:], node.ops, strict=False):
            self._between(left, right, type(operator))
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if not any(isinstance(side, ast.JoinedStr) or _is_text(side) for side in _sides(node)):
            self._between(node.left, node.right, type(node.op))
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self._between(node.values[0], node.values[1], type(node.op))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self.edits.append(Edit(self._begin(node), self._begin(node) + 4, ""))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._replace(node, str(not node.value))
        elif isinstance(node.value, int):
            self._replace(node, str(node.value + 1))

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func
        last = name.attr if isinstance(name, ast.Attribute) else getattr(name, "id", "")
        if last in _CALLS and not node.keywords:
            end = self._end(name)
            self.edits.append(Edit(end - len(last), end, _CALLS[last]))
        if last not in ("TypeVar", "NewType", "getLogger"):
            self.generic_visit(node)


def _sides(node: ast.BinOp) -> tuple[ast.expr, ast.expr]:
    return node.left, node.right


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


_CPP = [
    (r"(?<= )<(?= )", "<="), (r"(?<= )<=(?= )", "<"), (r"(?<= )>(?= )", ">="),
    (r"(?<= )>=(?= )", ">"), (r"(?<= )==(?= )", "!="), (r"(?<= )!=(?= )", "=="),
    (r"(?<= )&&(?= )", "||"), (r"(?<= )\|\|(?= )", "&&"), (r"(?<= )\+(?= )", "-"),
    (r"(?<=[\w)\]] )-(?= )", "+"), (r"(?<=[\w)\]] )\*(?= )", "+"), (r"(?<= )/(?= )", "*"),
    (r"(?<= )>>(?= )", "<<"), (r"(?<= )<<(?= )", ">>"), (r"(?<= )&(?= )", "|"),
    (r"\btrue\b", "false"), (r"\bfalse\b", "true"),
    (r"std::min\b", "std::max"), (r"std::max\b", "std::min"),
    (r"(?<=^)(?P<indent> +)(if \(.*\) )?(throw|break|continue)\b.*;$", ";"),
    (r"(?<=^)(?P<indent> +)if \(.*\) return\b.*;$", ";"),
    (r"(?<=^)(?P<indent> +)[\w.\[\]>-]+(\[.*\])? [-+*|&^]= .*;$", ";"),
    (r"(?<=^)(?P<indent> +)(?!return|using|static)[\w:.\->]+\([^{]*\);$", ";"),
]  # fmt: skip
_CPP_NUMBER = re.compile(r"(?<![\w.'\"])(\d+)(?![\w.x'])")
_CPP_SKIPPED = re.compile(r"\s*(#|//|template|static_assert|using|namespace|constexpr|asm)")


def cpp_edits(source: bytes) -> list[Edit]:
    """Return the mutations of a C++ header written in this project's style, line by line."""
    edits = set()
    begin = 0
    for line in source.decode().splitlines(keepends=True):
        code = re.sub(r'"(\\.|[^"\\])*"', lambda text: "_" * len(text[0]), line.rstrip("\n"))
        code = code.split("//")[0].rstrip()
        if not _CPP_SKIPPED.match(code):
            edits.update(_line_edits(code, line, begin))
        begin += len(line.encode())
    return sorted(edits)


def _line_edits(code: str, line: str, begin: int) -> Iterator[Edit]:
    def edit(first: int, last: int, new: str) -> Edit:
        return Edit(begin + len(line[:first].encode()), begin + len(line[:last].encode()), new)

    for pattern, new in _CPP:
        for found in re.finditer(pattern, code):
            first = found.end("indent") if "indent" in found.groupdict() else found.start()
            yield edit(first, found.end(), new)
    for found in _CPP_NUMBER.finditer(code):
        yield edit(found.start(), found.end(), str(int(found[0]) + 1))
