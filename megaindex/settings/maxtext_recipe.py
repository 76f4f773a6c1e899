"""MaxText configurations as recipes of one stage."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from megaindex.errors import InvalidArgument
from megaindex.settings.batch_schedule import BatchSchedule
from megaindex.settings.maxtext_yaml import (
    DataFiles,
    MaxTextConfig,
    all_weights_are_0,
    read_maxtext_config,
)
from megaindex.settings.recipe import Recipe, RecipeEvaluation, RecipeSource, RecipeStage, Stream
from megaindex.settings.run_settings import Target

_TERMS = {
    "max_epochs": "num_epoch",
    "sequence_length": "max_target_length",
    "long_documents truncate": "use_truncation: true",
    "long_documents split": "use_truncation: false",
}


def read_maxtext(words: Sequence[str], devices: int | None) -> Recipe | None:
    """Return the run that a MaxText configuration describes, or None if it is of Megatron's order.

    ``grain_file_type: mmap`` names the prefixes of .bin/.idx pairs. Of ArrayRecord files, the part
    of the pattern before the first wildcard is the prefix: of ``data/web-*.array_record`` the pair
    ``data/web``. A source is drawn up to ``num_epoch`` times, and the run ends where one is
    exhausted. Rows are made as grain_packing_type says: ``first_fit`` and ``best_fit`` pack whole
    documents (order packed), ``concat_then_split`` and mmap cut the concatenated documents; with
    ``packing: false`` each document is a row.

    Args:
        words: YAML files, then ``key=value`` words as on MaxText's command line.
        devices: number of devices, which the files do not hold.

    Returns:
        The recipe; None for ``grain_file_type: mmap_npy``, whose samples are those of Megatron-LM.

    Raises:
        MissingFile, StorageError: a file cannot be read.
        InvalidArgument: a setting is missing or wrong, or has no counterpart here.
    """
    config = read_maxtext_config(words, devices)
    if config.is_megatron:
        return None
    files = config.files("grain_train_files")
    epochs = config.count("num_epoch")
    weights = [Fraction(1) if each.weight is None else each.weight for each in files]
    drawn = [(each, weight) for each, weight in zip(files, weights, strict=True) if weight > 0]
    if not drawn:
        raise all_weights_are_0(config)
    return Recipe(
        sequence_length=config.count("max_target_length"),
        batch=BatchSchedule.constant(config.batch),
        sources=tuple(_source(config, each, max_epochs=Fraction(epochs)) for each, _ in drawn),
        stages=(
            RecipeStage(
                name="train",
                streams=tuple(
                    Stream(source=each.name, proportion=weight) for each, weight in drawn
                ),
                length=Target(kind="iterations", value=Fraction(config.steps)),
            ),
        ),
        seed=config.number("data_shuffle_seed"),
        exhaustion="stop",
        terms=_TERMS,
        evaluation=_evaluation(config),
        micro_batch_size=config.micro_batch_size,
        data_parallel_size=None if config.micro_batch_size is None else config.devices,
        gradient_accumulation_steps=config.accumulation,
    )


def _source(
    config: MaxTextConfig, files: DataFiles, max_epochs: Fraction | None = None
) -> RecipeSource:
    values = config.values
    made: dict[str, Any] = {}
    if values.text("grain_file_type") == "mmap":
        pass
    elif not values.flag("packing"):
        made = {"kind": "finetuning", "packed": False}
    elif values.text("grain_packing_type") != "concat_then_split":
        most = config.number("max_segments_per_seq")
        made = {"order": "packed", "max_documents": most if most > 0 else None}
    if made:
        cut = values.flag("use_truncation")
        made["long_documents"] = "truncate" if cut else "split"
    return RecipeSource(name=files.name, path=files.prefix, max_epochs=max_epochs, **made)


def _evaluation(config: MaxTextConfig) -> RecipeEvaluation | None:
    interval, batches = config.number("eval_interval"), config.number("eval_steps")
    if interval < 1:
        return None
    if config.number("eval_start_step"):
        raise config.values.error("eval_start_step", "0: a recipe evaluates from the start on")
    files = config.files("grain_eval_files")
    if len(files) != 1:
        raise InvalidArgument(
            f"{config.values.called('grain_eval_files')}: a recipe evaluates on one source, got "
            f"{len(files)}; keep one"
        )
    return RecipeEvaluation(
        source=_source(config, DataFiles(name="validation", prefix=files[0].prefix, weight=None)),
        interval=interval,
        iterations=batches if batches > 0 else None,
        batch_size=config.eval_batch,
    )
