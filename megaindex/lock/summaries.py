"""Descriptions of a lock's data for others: Croissant, and the EU's summary of training content.

They follow from the lock alone. What it does not say is left out, or named as open.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megaindex.lock.lock_file import Lock, LockedSource
from megaindex.lock.publication import FACTS
from megaindex.markup import markdown_table

_TERMS = (
    "citeAs", "column", "equivalentProperty", "extract", "field", "fileObject", "fileProperty",
    "fileSet", "format", "includes", "isLiveDataset", "jsonPath", "key", "md5", "parentField",
    "path", "recordSet", "references", "regex", "repeated", "replace", "samplingRate", "separator",
    "source", "subField", "transform",
)  # fmt: skip
_CONTEXT = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "sc": "https://schema.org/",
    "cr": "http://mlcommons.org/croissant/",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "dct": "http://purl.org/dc/terms/",
    "conformsTo": "dct:conformsTo",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "examples": {"@id": "cr:examples", "@type": "@json"},
    **{term: f"cr:{term}" for term in _TERMS},
}
_BYTES = "application/octet-stream"


def about_source(lock: Lock, row: int) -> Mapping[str, str]:
    """Return the facts about the source of a row; empty if none were given."""
    about = lock.content["about"]
    return (about and about["sources"][row]) or {}


def croissant(lock: Lock) -> tuple[dict[str, Any], list[str]]:
    """Return the data of a lock as Croissant 1.0 in JSON-LD, and what keeps it from being fixed.

    Without SHA-256 and addresses of all files the data set is described as a live one, whose files
    are not pinned.
    """
    about = (lock.content["about"] or {"run": {}})["run"]
    lacking = []
    if lock.content["hash"] != "sha256":
        lacking.append("SHA-256 of the files; lock the run with --sha256")
    if unplaced := [source.path for source in lock.sources if source.url is None]:
        more = f" and of {len(unplaced) - 1} others" * (len(unplaced) > 1)
        lacking.append(f"the address of {unplaced[0]}{more}; give url with --about")
    found = {
        "@context": _CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": "http://mlcommons.org/croissant/1.0",
        "name": about.get("title", f"run-{lock.identity}"),
        "description": f"Files that the run of identity {lock.identity} reads, also to evaluate, "
        "as Megatron-format pairs of .bin and .idx.",
        "citeAs": f"run of identity {lock.identity}",
        **_named(about),
        **({"isLiveDataset": True} if lacking else {}),
        "distribution": [
            each for row, source in enumerate(lock.sources) for each in _files(lock, row, source)
        ],
    }
    return found, lacking


def _named(about: Mapping[str, str]) -> dict[str, str]:
    """Return licence, version and address under the names of schema.org."""
    names = {"licence": "license", "version": "version", "address": "url"}
    return {ours: about[theirs] for theirs, ours in names.items() if theirs in about}


def _files(lock: Lock, row: int, source: LockedSource) -> Iterator[dict[str, Any]]:
    about, name = about_source(lock, row), lock.content["sources"]["rows"][row][0]
    is_whole = lock.content["hash"] == "sha256"
    hashes = {"idx": source.idx, "bin": lock.content["tokens"]["hashes"][row]} if is_whole else {}
    title = about.get("title", name.rpartition("/")[2])
    for suffix in ("bin", "idx"):
        yield {
            "@type": "cr:FileObject",
            "@id": f"{row}.{suffix}",
            "name": f"{title}.{suffix}",
            "description": f"{source.tokens} tokens of {source.token_type} in {source.sequences} "
            "sequences",
            **_named(about),
            **({"contentSize": f"{source.bin_bytes} B"} if suffix == "bin" else {}),
            "contentUrl": f"{name if source.url is None else source.url}.{suffix}",
            "encodingFormat": _BYTES,
            **({"sha256": hashes[suffix]} if is_whole else {}),
        }


_RANGES = ((10**9 - 1, "Less than 1 billion tokens"), (10**13, "1 billion to 10 trillion tokens"))
_MORE = "More than 10 trillion tokens"
_SIZE, _SOURCES = "Training data size", "The sources"
_SUMMARY = {
    "1. General information": {
        "1.1 Provider identification": ("Provider name and contact details",
                                        "Authorised representative name and contact details"),
        "1.2 Model identification": ("Versioned model names", "Model dependencies",
                                     "Date of placement on the Union market"),
        "1.3 Modalities, overall training data size and other characteristics": (
            "Modalities", _SIZE, "Types of content",
            "Latest date of data acquisition or collection", "Linguistic characteristics",
            "Other relevant characteristics"),
    },
    "2. List of data sources": {
        _SOURCES: (),
        "2.1 Publicly available datasets": ("Which of the sources they are, and their modalities",),
        "2.2 Private non-publicly available datasets obtained from third parties": (
            "2.2.1 Datasets commercially licensed by rightsholders or their representatives",
            "2.2.2 Private datasets obtained from other third parties"),
        "2.3 Data crawled and scraped from online sources": (
            "Which of the sources they are", "Crawlers, their purposes and behaviour",
            "Period of collection", "Types of content and of online sources",
            "Most relevant domain names"),
        "2.4 User data": ("Which of the sources they are, and from which services",),
        "2.5 Synthetic data": ("Which of the sources they are, and of which models",),
        "2.6 Other sources of data": ("Which of the sources they are",),
    },
    "3. Data processing aspects": {
        "3.1 Respect of reservation of rights from text and data mining exception or limitation": (
            "Signatory of the Code of Practice", "Measures"),
        "3.2 Removal of illegal content": ("Measures",),
        "3.3 Other information (optional)": ("Other relevant information",),
    },
}  # fmt: skip
"""Sections of the template of 24 July 2025, and the answers that each wants."""


def eu_summary(lock: Lock) -> str:
    """Return the EU's public summary of training content, in Markdown, as far as a lock answers it.

    Sizes are those of the files of the sources of training, each pair once.
    """
    rows = list(dict.fromkeys(lock.content["subsets"]["train"]["sources"]))
    tokens = sum(lock.sources[row].tokens for row in rows)
    size = next((text for most, text in _RANGES if tokens <= most), _MORE)
    answers = {_SIZE: f"{size}, if all tokens are text: {tokens:,} in {len(rows):,} sources"}
    parts = [
        "# Public summary of training content",
        "By the template of 24 July 2025 for Article 53(1)(d) of Regulation (EU) 2024/1689. Sizes "
        "are those of whole files, also where a subset of them is read or documents are skipped. "
        f"What is open does not follow from the lock. Identity of the run: `{lock.identity}`.",
    ]
    for section, fields in _SUMMARY.items():
        parts.append(f"## {section}")
        for heading, names in fields.items():
            lines = [f"- {name}: {answers.get(name, '**open**')}" for name in names]
            text = "\n".join(lines) if names else _sources_table(lock, rows, tokens)
            parts += [f"### {heading}", text]
    return "\n\n".join(parts) + "\n"


def _sources_table(lock: Lock, rows: list[int], tokens: int) -> str:
    table = [("source", *FACTS, "tokens", "share of tokens")]
    for row in rows:
        about, count = about_source(lock, row), lock.sources[row].tokens
        name = lock.content["sources"]["rows"][row][0]
        share = f"{100 * count / max(1, tokens):.2f} %"
        table.append((name, *(about.get(each, "open") for each in FACTS), f"{count:,}", share))
    return markdown_table(table)
