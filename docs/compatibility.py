"""The cases in which megaindex deliberately differs from a framework, as data.

``python docs/compatibility.py`` prints docs/compatibility.md; a test keeps the file equal.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from megaindex.index.frameworks import FRAMEWORK_RULES, FrameworkRules


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """One case in which megaindex deliberately differs."""

    case: str
    framework: str
    theirs: str
    ours: str
    test: str
    """The test that shows it."""
    issue: str = ""
    """The issue in which it was reported, if any."""


_CORE = "megatron-core 0.16.1"
_NOT_SHOWN = ("order", "blend_size", "weight_sum", "width_rule", "weight_alone")
"""Rules without a meaning outside of the code that follows them."""

DEVIATIONS = (
    Deviation(
        case="sample count with drop_last_partial_sequence=False",
        framework=_CORE,
        theirs="counted in float32: wrong from 2^24 tokens on",
        ours="counted in integers",
        test="tests/kernels/test_samples.py",
    ),
    Deviation(
        case="last partial sample where the last documents are empty",
        framework=_CORE,
        theirs="the last row has offset -1, and the Python wrapper fails an assertion",
        ours="the last row names the last token",
        test="tests/kernels/test_samples.py",
    ),
    Deviation(
        case="outputs of another dtype given to build_blending_indices",
        framework=f"{_CORE}, GPT-NeoX",
        theirs="pybind11 fills a converted copy, and what is written is lost",
        ours="InvalidArgument",
        test="tests/test_helpers.py",
    ),
    Deviation(
        case="lengths or ids that do not fit int32, or are not integers",
        framework=f"{_CORE}, GPT-NeoX",
        theirs="converted without a check",
        ours="InvalidArgument",
        test="tests/test_helpers.py",
    ),
    Deviation(
        case="num_epochs * tokens_per_epoch above what the documents hold",
        framework=f"{_CORE}, GPT-NeoX",
        theirs="reads past document_index, or repeats the last row",
        ours="InvalidArgument",
        test="tests/kernels/test_samples.py",
    ),
    Deviation(
        case="a dataset of size 0 in build_exhaustive_blending_indices",
        framework=_CORE,
        theirs="drawn; writes go past the end of the arrays",
        ours="never drawn",
        test="tests/test_helpers.py",
    ),
    Deviation(
        case="weights that are negative, infinite or not a number",
        framework=f"{_CORE}, GPT-NeoX",
        theirs="drawn or not, by how they compare",
        ours="InvalidArgument",
        test="tests/test_helpers.py",
    ),
    Deviation(
        case="more datasets than the dtype of dataset_index holds",
        framework="GPT-NeoX",
        theirs="from 256 datasets on the number wraps",
        ours="InvalidArgument",
        test="tests/test_helpers.py",
    ),
    Deviation(
        case="build_mapping with max_seq_length 1 and short sequences",
        framework=f"{_CORE}, GPT-NeoX",
        theirs="divides by zero and ends the process",
        ours="InvalidArgument",
        test="tests/kernels/test_mapping.py",
    ),
    Deviation(
        case="build_mapping where no document takes part",
        framework=f"{_CORE}, GPT-NeoX",
        theirs="walks all num_epochs, which Megatron sets to 2^31 - 2",
        ours="an empty mapping at once",
        test="tests/kernels/test_mapping.py",
    ),
    Deviation(
        case="more than 2^31 - 1 entries of document_index",
        framework="PaddleNLP",
        theirs="sample_index is int32 whatever it holds, and wraps",
        ours="int64, as in Megatron",
        test="tests/index/test_frameworks.py",
    ),
    Deviation(
        case="sample numbers beyond the index",
        framework="GPT-NeoX",
        theirs="the blend serves index modulo length, with a printed warning",
        ours="OutOfRange",
        test="tests/index/test_megatron_order.py",
    ),
    Deviation(
        case="pack_impl unpacked and pack_until_overflow with a split",
        framework="GPT-NeoX",
        theirs="validation and test are served the first documents of the training part",
        ours="each part its own documents",
        test="tests/index/test_packing.py",
    ),
    Deviation(
        case="pack_until_overflow where the last document of a pass is left out",
        framework="GPT-NeoX",
        theirs="IndexError while the index is built",
        ours="the next pass begins",
        test="tests/index/test_packing.py",
    ),
    Deviation(
        case="unpacked and pack_until_overflow where every document is left out",
        framework="GPT-NeoX",
        theirs="loops without end, or IndexError",
        ours="InvalidArgument",
        test="tests/index/test_packing.py",
    ),
    Deviation(
        case="unpacked without a label file",
        framework="GPT-NeoX",
        theirs="AttributeError",
        ours="every document that is not empty is a sample",
        test="tests/index/test_packing.py",
    ),
    Deviation(
        case="the last sample of pack_until_overflow",
        framework="GPT-NeoX",
        theirs="sample 0 in its place, or, where it is sample 0, a RecursionError",
        ours="the document it began with",
        test="tests/loader/test_neox_dataset.py",
    ),
    Deviation(
        case="the token after a sample of whole documents",
        framework="GPT-NeoX",
        theirs="where there is room, the first token of the next sample's document, trained on "
        "unless its label is masked",
        ours="the same; nothing with next_token=False, or where the next document is empty",
        test="tests/loader/test_neox_dataset.py",
    ),
    Deviation(
        case="label files of an unsigned dtype",
        framework="GPT-NeoX",
        theirs="OverflowError (NumPy 2) where a sample is padded with -100",
        ours="padded with -100",
        test="tests/loader/test_neox_dataset.py",
    ),
    Deviation(
        case="the end of an epoch of the cyclic sampler without data_sharding",
        framework="Megatron-LM",
        theirs="ranks can have different numbers of micro batches, so samples are served again "
        "beside the next epoch, and a resumed run reads others",
        ours="every rank has the same number, as in a run of Megatron's that is resumed there",
        test="tests/loader/test_samplers.py",
    ),
    Deviation(
        case="full validation where the ranks do not divide the samples",
        framework="Megatron-LM",
        theirs="core 0.16.1 drops the last partial round; later, a rank that is short scores its "
        "first sample twice",
        ours="EvaluationSampler: each sample once, short ranks padded without loss",
        test="tests/loader/test_evaluation.py",
    ),
    Deviation(
        case="a sample that only fills up a batch (index None)",
        framework=_CORE,
        theirs="reads sample 0 and zeroes its loss mask",
        ours="reads nothing: tokens, labels and loss mask are 0",
        test="tests/loader/test_batch.py",
    ),
    Deviation(
        case="megatron.data under megaindex.adapters.neox: a missing pair",
        framework="GPT-NeoX",
        theirs="AttributeError of None; a run without the labels or rewards that were named",
        ours="MissingFile",
        test="tests/adapters/test_neox.py",
    ),
    Deviation(
        case="… a part of less than one sample, of which none is requested",
        framework="GPT-NeoX",
        theirs="ValueError: __len__() should return >= 0",
        ours="empty",
        test="tests/adapters/test_neox.py",
    ),
    Deviation(
        case="… more than 254 datasets",
        framework="GPT-NeoX",
        theirs="AssertionError",
        ours="served; dataset_index is int16",
        test="tests/adapters/test_neox.py",
    ),
    Deviation(
        case="… training or validation data of less than one batch",
        framework="GPT-NeoX",
        theirs="ZeroDivisionError",
        ours="InvalidArgument",
        test="tests/adapters/test_neox.py",
    ),
    Deviation(
        case="… datasets of the old formats lazy and cached, data_impl infer",
        framework="GPT-NeoX",
        theirs="infer and lazy open nothing; cached ends in AttributeError",
        ours="read and indexed like mmap",
        test="tests/adapters/test_neox_files.py",
    ),
    Deviation(
        case="… get() with a length beyond its sequence",
        framework="GPT-NeoX",
        theirs="the tokens that follow in the file",
        ours="OutOfRange",
        test="tests/adapters/test_neox_files.py",
    ),
    Deviation(
        case="cached index arrays",
        framework=f"{_CORE}, GPT-NeoX",
        theirs="found by path and settings, also after the corpus was rewritten; loaded with "
        "pickle allowed",
        ours="keyed by content and every parameter, verified",
        test="tests/cache/test_cache.py",
    ),
    Deviation(
        case="a damaged .idx: truncated, over-long, pointers outside the .bin, negative lengths",
        framework=f"{_CORE}, GPT-NeoX",
        theirs="read without a check; views are invalid once the dataset is deleted",
        ours="FormatError naming file, rule and value",
        test="tests/format/",
    ),
    Deviation(
        case="a blend that draws more of a source than was built",
        framework=_CORE,
        theirs="IndexError",
        ours="under the adapter as much of the source is built as is drawn",
        test="tests/adapters/test_megatron_cache.py",
        issue="NVIDIA/Megatron-LM#705",
    ),
    Deviation(
        case="a part of a split without tokens",
        framework=_CORE,
        theirs="an endless loop, or reads outside of its arrays",
        ours="under the adapter InvalidArgument, else no sample",
        test="tests/adapters/test_megatron_cache.py",
        issue="NVIDIA/Megatron-LM#957",
    ),
    Deviation(
        case="the loss mask after a padded sample, where masks and position ids are not reset",
        framework="megatron-core 0.13 to 0.16.1",
        theirs="later samples have no loss at its padding if it was the first read, up to 0.15 "
        "after any padded one",
        ours="each sample has its own",
        test="tests/adapters/test_megatron_cases.py",
        issue="NVIDIA/Megatron-LM#1711, #6981",
    ),
    Deviation(
        case="a corpus that changed under index arrays which Megatron cached",
        framework=_CORE,
        theirs="served with the old arrays",
        ours="under the adapter FormatError; arrays that megaindex built are rebuilt",
        test="tests/adapters/test_megatron_cache.py",
    ),
    Deviation(
        case="IndexedDataset.get beyond the end of its sequence",
        framework=_CORE,
        theirs="returns the tokens of the next one",
        ours="OutOfRange",
        test="tests/adapters/test_megatron_cases.py",
    ),
    Deviation(
        case="a blend built without a process group",
        framework="megatron-core 0.13 to 0.16.1",
        theirs="asks torch.distributed for a rank and fails",
        ours="built",
        test="tests/adapters/test_megatron_ranks.py",
    ),
    Deviation(
        case="IndexedDatasetBuilder.add_document of a multimodal dataset without modes",
        framework="megatron-core 0.13 to 0.16.1",
        theirs="TypeError",
        ours="mode 0 for each sequence, as documented",
        test="tests/adapters/test_megatron_cases.py",
    ),
    Deviation(
        case="pointers of a dataset merged from others",
        framework="megatron-core 0.13, 0.14",
        theirs="added in int32: wrong from 2 GiB on",
        ours="added in int64",
        test="tests/adapters/test_megatron_cases.py",
        issue="NVIDIA/Megatron-LM#1672",
    ),
)


def compatibility_page() -> str:
    """Return the text of docs/compatibility.md."""
    lines = [
        "# Compatibility",
        "",
        "Generated by `python docs/compatibility.py` from the data the code runs on. "
        "[Megatron](megatron.md#versions) lists the releases of megatron-core that the adapter was "
        "run with, [Exporting an order](export.md#checks) the readers that serve other orders.",
        "",
        "## Differences between the frameworks",
        "",
        *_dialect_table(),
        "",
        "`request` is the number of samples requested of a source of weight w for N samples under "
        "buffer B: megatron ⌈⌈N·w⌉·B⌉, neox ⌈N·w·B⌉, paddlenlp ⌈N·w·B⌉ + 20 with two or more "
        "sources, exact what the blend draws.",
        "",
        "## Where megaindex deliberately gives another answer",
        "",
        "On every other input the arrays are equal bit for bit, dtype included. "
        "docs/compatibility.py names the test that shows each case. [Exact mode]"
        "(neox.md#exact-mode) of the adapter for GPT-NeoX changes more.",
    ]
    for framework in dict.fromkeys(case.framework for case in DEVIATIONS):
        lines += [
            "",
            f"### {framework}",
            "",
            "| case | the framework | megaindex |",
            "|---|---|---|",
        ]
        for case in DEVIATIONS:
            if case.framework == framework:
                issue = f" ({case.issue})" if case.issue else ""
                lines.append(f"| {case.case}{issue} | {case.theirs} | {case.ours} |")
    return "\n".join(lines) + "\n"


def _dialect_table() -> list[str]:
    """Return a table with a column for each of the frameworks, orders of equal rules in one."""
    columns: dict[tuple[str, ...], list[str]] = {}
    names = [field.name for field in fields(FrameworkRules) if field.name not in _NOT_SHOWN]
    for row in FRAMEWORK_RULES.values():
        rules = tuple(str(getattr(row, name)) for name in names)
        columns.setdefault(rules, []).append(f"`{row.order}`")
    table = [
        "| | " + " | ".join(map(", ".join, columns.values())) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for name, values in zip(names, zip(*columns, strict=True), strict=True):
        if len(set(values)) > 1:
            table.append(f"| {name} | {' | '.join(values)} |")
    return table


if __name__ == "__main__":
    print(compatibility_page(), end="")
