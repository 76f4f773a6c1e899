"""Settings of the site that `make docs` builds: Sphinx, MyST for the pages, autodoc for the API.

The pages are plain Markdown, as a git host shows it. What only the site has is made here: the
navigation, a page for each module that users import from, and one of CONTRIBUTING.md.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

import numpy.typing
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.ext.autodoc.mock import mock
from sphinx.util import logging

DOCS = Path(__file__).parent
GENERATED = DOCS / "generated"  # git ignores it
OUTSIDE = [  # pages of the site that are not in docs/
    name for name in ("CONTRIBUTING", "CHANGELOG") if (DOCS.parent / f"{name}.md").exists()
]


# Signatures show these names, not the unions and parameters that they stand for.
class ArrayLike:
    __module__ = "numpy.typing"


class NDArray(Generic[TypeVar("Scalar")]):
    __module__ = "numpy.typing"


numpy.typing.ArrayLike, numpy.typing.NDArray = ArrayLike, NDArray

NAVIGATION = {
    "Start": ["quickstart", "cookbook", "examples", "demonstration", "concepts"],
    "Before a run": [
        *("planning", "orders", "packing", "recipes", "subsets"),
        *("Tokenizing <tokenize>", "Corpora <corpora>", "objects", "scale"),
    ],
    "During a run": [
        *("reading", "rows", "balance", "keys", "changing-runs", "removal", "Tracing <trace>"),
    ],
    "After a run": ["Auditing <audit>", "lock", "record", "export"],
    "Trainers": ["Megatron <megatron>", "neox", "trainers"],
    "Coming from": [
        *("LLM-Foundry, OLMo-core <llm-foundry>", "Nanotron <nanotron>", "MaxText <maxtext>"),
        "PaddleNLP <paddlenlp>",
    ],
    "Reference": ["Commands and files <reference>"],
    "For developers": [
        *("stability", "internals", "lock-format", "matrix"),
        *("compatibility", "reliability", "benchmarks"),
        *(f"{name.title()} <generated/{name.lower()}>" for name in OUTSIDE),
    ],
}
_SUFFIXES = (
    *("", ".plan", ".recipe", ".loader", ".corpus", ".audit", ".lock"),
    *(".keys", ".helpers", ".adapters"),
)
_ADAPTERS = (".adapters.megatron", ".adapters.neox", ".adapters.grain")
_TRAINERS = (".adapters.huggingface", ".adapters.lightning", ".adapters.torchtitan")
_TRAINERS += (".adapters.automodel",)
with mock(["accelerate", "lightning", "torchtitan", "transformers"]):  # as if installed
    MODULES = [
        importlib.import_module(f"megaindex{suffix}")
        for suffix in (*_SUFFIXES, *_ADAPTERS, *_TRAINERS)
    ]
NAVIGATION["Python API"] = [f"generated/{module.__name__}" for module in MODULES]

project = "megaindex"
version = release = MODULES[0].__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4  # as git hosts make them
html_theme = "furo"
html_title = f"megaindex {version}"
html_static_path = ["site.css", "site.js"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_copy_source = html_show_sphinx = False
autodoc_default_options = {
    "members": True,
    "undoc-members": True,
    "inherited-members": "object, BaseException, OSError, Protocol, Sequence, Dataset, tuple",
}
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"

HOMES = {  # of each public name, the first of MODULES that has it
    name: module for module in reversed(MODULES) for name in module.__all__
}
_FIELDS = re.compile(r"(?m)^Attributes:\n(?:    .*\n?)+")  # shown beside each field, not here
_NAME = re.compile(r"(?s)``.+?``|(?<!:)`([^`]+)`")
_PICTURE = re.compile(
    r'<picture>\s*<source [^>]*srcset="(?P<dark>[^"]+)">'
    r'\s*<img alt="(?P<alt>[^"]+)" src="(?P<light>[^"]+)">\s*</picture>'
)
_IMAGE = "```{{image}} {}\n:alt: {}\n:class: only-{}\n```\n"


def setup(app: Sphinx) -> None:
    app.connect("builder-inited", write_pages)
    app.connect("source-read", adapt_page)
    app.connect("autodoc-process-docstring", adapt_docstring, priority=400)  # before napoleon
    app.connect("doctree-read", mark_outputs)


def mark_outputs(_app: Sphinx, doctree: nodes.document) -> None:
    """Leave outputs of commands, which are drawn as boxes and tables, out of the search."""
    for block in doctree.findall(nodes.literal_block):
        if block.get("language") == "console":
            block["classes"].append("no-search")


def write_pages(_app: Sphinx) -> None:
    """Write the pages that only the site has."""
    GENERATED.mkdir(exist_ok=True)
    pages = {f"{module.__name__}.rst": _api_page(module) for module in MODULES}
    for name in OUTSIDE:
        text = (DOCS.parent / f"{name}.md").read_text()
        pages[f"{name.lower()}.md"] = text.replace("](docs/", "](../")
    for name, text in pages.items():
        page = GENERATED / name
        if not page.exists() or page.read_text() != text:
            page.write_text(text)


def _api_page(module: ModuleType) -> str:
    """Return the page of a module; a name that an earlier page documents is a link to it."""
    documented, links = [], []
    for name in module.__all__:
        home = HOMES[name]
        if module.__name__.endswith(".megatron") and name[0].isupper():
            continue  # Megatron's class: the module's docstring describes it
        if home is not module and getattr(module, name) is getattr(home, name):
            links.append(f":py:obj:`{name} <{home.__name__}.{name}>`")
        else:
            documented.append(name)
    module.__all__ = documented  # which is all that autodoc sees of it
    title = module.__name__
    page = f"{title}\n{'=' * len(title)}\n\n.. automodule:: {title}\n"
    return page + (f"\nAlso here: {', '.join(links)}.\n" if links else "")


def adapt_page(_app: Sphinx, page: str, source: list[str]) -> None:
    """Add the navigation to the index, and point to the site's pages and pictures."""
    text = source[0].replace("](../README.md", "](index.md")
    for name in OUTSIDE:
        text = text.replace(f"](../{name}.md", f"](generated/{name.lower()}.md")
    source[0] = _PICTURE.sub(
        lambda match: "".join(
            _IMAGE.format(match[kind], match["alt"], kind) for kind in ("light", "dark")
        ),
        text,
    )
    if page == "index":
        for caption, pages in NAVIGATION.items():
            lines = [f"```{{toctree}}\n:hidden:\n:caption: {caption}\n", *pages, "```\n"]
            source[0] += "\n" + "\n".join(lines)


def adapt_docstring(
    _app: Sphinx, what: str, name: str, value: Any, _options: Any, lines: list[str]
) -> None:
    """Make links of public names and blocks of indented code, and give fields the texts of their
    class; warn where nothing is written."""
    if what == "class":
        lines[:] = _FIELDS.sub("", "\n".join(lines)).split("\n")
    elif what == "attribute" and not any(lines):
        lines[:] = [_field_text(name)]
    made = inspect.isclass(value) and "".join(lines).startswith(f"{value.__name__}(")  # dataclass
    if what != "attribute" and (made or not any(lines)):
        logging.getLogger(__name__).warning("%s has no docstring", name)
    text = _NAME.sub(partial(_link, name), "\n".join(lines))
    if what == "module":
        text = re.sub(r"(?<=\S)\n\n(?=    )", "\n\n::\n\n", text)
    if what in ("attribute", "property"):
        text = f"..\n\n{text}"  # else napoleon takes the text before a colon for the type
    lines[:] = text.split("\n")


def _field_text(name: str) -> str:
    """Return the text of a field in the section Attributes of its class, without the type."""
    owner, _, field = name.rpartition(".")
    docstring = inspect.getdoc(pkgutil.resolve_name(owner)) or ""
    section = _FIELDS.search(docstring)
    entry = section and re.search(
        rf"(?m)^    {field}(?: \((.*)\))?: (.*(?:\n {{8}}.*)*)", section[0]
    )
    if not entry:
        return ""
    text = " ".join(entry[2].split())
    return f"{entry[1]}: {text}" if entry[1] else text[:1].upper() + text[1:]


def _link(owner: str, match: re.Match[str]) -> str:
    """Return a public name in backticks as a link, other text in backticks as code."""
    text = match[1]
    if text is None:
        return match[0]
    name = text.rpartition(".")[2]
    own = [m for m in MODULES if f"{owner}.".startswith(f"{m.__name__}.") and name in m.__all__]
    module = max(own, key=lambda m: len(m.__name__), default=HOMES.get(name))
    if module and text in (name, f"{module.__name__}.{name}"):
        return f":py:obj:`{text} <{module.__name__}.{name}>`"
    if text in {module.__name__ for module in MODULES}:
        return f":py:mod:`{text}`"
    return f"``{text}``"
