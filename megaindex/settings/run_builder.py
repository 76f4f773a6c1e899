"""The run that settings describe: derived sizes, and checks for contradictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple

from megaindex.arithmetic import global_batch_size
from megaindex.errors import InvalidArgument
from megaindex.index.frameworks import parse_split
from megaindex.index.order_settings import Order, make_order
from megaindex.settings.batch_schedule import BatchSchedule, parse_count, parse_schedule, ramp_up
from megaindex.settings.megatron_versions import Version, version_of
from megaindex.settings.run_settings import (
    TAILS,
    Data,
    Evaluation,
    RunSettings,
    Target,
    of_megatron_alone,
)
from megaindex.settings.settings import ORDER_FIELDS, TARGETS, Settings, flag_of
from megaindex.settings.sources import parse_blend, parse_tokens, read_histograms
from megaindex.validation import (
    DEFAULT_SEED,
    check_buffer,
    check_choice,
    check_epochs,
    check_number,
    read_number,
)


class BatchSizes(NamedTuple):
    """The global batch size and its factors; None for unknown factors."""

    global_batch: int
    micro_batch: int | None
    data_parallel: int | None
    accumulation: int | None


def batch_sizes(settings: Settings) -> BatchSizes:
    """Return the sizes, completed by micro batch x data-parallel size x accumulation = global."""
    micro = settings.micro_batch_size
    parallel = _data_parallel(settings)
    steps = settings.gradient_accumulation_steps
    wanted = settings.global_batch_size
    if settings.batch_schedule is not None:
        if steps is not None or wanted is not None:
            raise InvalidArgument(
                "--batch-schedule sets the global batch size; remove --global-batch-size and "
                "--gradient-accumulation-steps"
            )
        return BatchSizes(1, micro, parallel, None)
    if wanted is None:
        return _product(micro, parallel, steps)
    if parallel is None and micro and steps and wanted % (micro * steps) == 0:
        parallel = wanted // (micro * steps)
    if micro is None and parallel is not None and settings.order == "neox":
        rows = parallel * (steps or 1)
        if wanted < rows:
            raise InvalidArgument(
                f"--global-batch-size {wanted} is less than {_parallel_text(settings, parallel)} x "
                f"--gradient-accumulation-steps {steps or 1} = {rows}, and GPT-NeoX ends at a "
                "micro batch of no sample; raise it, or lower one of them"
            )
        micro = wanted // rows  # as GPT-NeoX derives it
    if micro is not None and parallel is not None and steps is None:
        steps, rest = divmod(wanted, micro * parallel)
        if rest:
            raise InvalidArgument(
                f"--global-batch-size {wanted} is not a multiple of --micro-batch-size {micro} x "
                f"{_parallel_text(settings, parallel)} = {micro * parallel}; change one of them"
            )
    if micro is not None and parallel is not None and steps is not None:
        product = global_batch_size(micro, parallel, steps)
        if product != wanted:
            raise InvalidArgument(
                f"--global-batch-size {wanted} is not --micro-batch-size {micro} x "
                f"{_parallel_text(settings, parallel)} x --gradient-accumulation-steps {steps} = "
                f"{product}; change one of them"
            )
    return BatchSizes(wanted, micro, parallel, steps)


def _product(micro: int | None, parallel: int | None, steps: int | None) -> BatchSizes:
    if micro is None:
        raise InvalidArgument(
            "the batch size is missing: give --global-batch-size, or --micro-batch-size and "
            "--data-parallel-size"
        )
    if parallel is None:
        raise InvalidArgument(
            "the number of GPUs is missing: give --world-size, --data-parallel-size or "
            "--global-batch-size"
        )
    steps = 1 if steps is None else steps
    return BatchSizes(global_batch_size(micro, parallel, steps), micro, parallel, steps)


def _data_parallel(settings: Settings) -> int | None:
    """Return the data-parallel size, given or from world size and model-parallel sizes."""
    model = (
        (settings.tensor_model_parallel_size or 1)
        * (settings.pipeline_model_parallel_size or 1)
        * (settings.context_parallel_size or 1)
    )
    world, given = settings.world_size, settings.data_parallel_size
    if world is None:
        return given
    if world % model:
        raise InvalidArgument(
            f"--world-size {world} is not a multiple of tensor x pipeline x context parallel "
            f"size {model}; change one of them"
        )
    if given is not None and given != world // model:
        raise InvalidArgument(
            f"--data-parallel-size {given} contradicts --world-size {world} / {model} = "
            f"{world // model}; remove one of them"
        )
    return world // model


def _parallel_text(settings: Settings, parallel: int) -> str:
    """Return the data-parallel size as given, or with its derivation from the world size."""
    if settings.data_parallel_size is not None:
        return f"--data-parallel-size {parallel}"
    model = (settings.world_size or 1) // parallel
    return f"data-parallel size {parallel} (--world-size {settings.world_size} / {model})"


def resolve(settings: Settings) -> RunSettings:
    """Return the run that settings describe, with sizes and defaults of its framework filled in.

    Args:
        settings: those of `read_neox`, `read_megatron` or the command line.

    Raises:
        InvalidArgument: a setting is missing, malformed, or contradicts another.
    """
    if settings.seq_length is None:
        raise InvalidArgument("--seq-length is missing: tokens per sample, such as 2048")
    order = _order(settings)
    if settings.split is not None:
        parse_split(settings.split, order.name, "--split")
    sizes = batch_sizes(settings)
    version = _version(settings)
    ramps = order.name == "megatron-legacy" if version is None else version.ramps
    if ramps and settings.rampup_batch_size is not None and settings.train_iters is not None:
        name = "Megatron-LM" if version is not None else "Megatron-DeepSpeed"
        raise InvalidArgument(
            f"--rampup-batch-size needs --train-samples: {name} stops with an AssertionError; "
            "give --train-samples in place of --train-iters"
        )
    notes, ignored = _ramp_notes(settings, version)
    schedule = batch_schedule(settings, sizes.global_batch, version)
    consumed = parse_count(settings.consumed_samples or "0", "--consumed-samples")
    return RunSettings(
        order=order,
        sequence_length=settings.seq_length,
        data=_narrowed(_named(_data(settings), settings.shuffle_names), settings),
        batch=schedule,
        target=_target(settings, schedule, consumed),
        exact=settings.exact or False,
        variance_buffer=parse_buffer(settings.variance_buffer),
        surplus=_surplus(settings.mid_level_dataset_surplus),
        tail=check_choice("--tail", settings.tail or "drop", TAILS),
        seed=DEFAULT_SEED if settings.seed is None else settings.seed,
        evaluation=_evaluation(settings, sizes),
        version=version,
        dataloader=_dataloader(settings),
        data_parallel_size=sizes.data_parallel,
        micro_batch_size=sizes.micro_batch,
        gradient_accumulation_steps=sizes.accumulation,
        consumed_samples=consumed,
        phases=_phases(settings, schedule, consumed),
        skip=settings.skip or (),
        iterations_to_skip=settings.iterations_to_skip or (),
        coverage=check_choice(
            "--coverage", settings.coverage or "auto", ("auto", "exact", "expected", "none")
        ),
        blend_counts=check_choice(
            "--blend-counts", settings.blend_counts or "auto", ("auto", "exact", "bounds")
        ),
        notes=settings.notes + _unused(settings) + notes,
        ignored=settings.ignored + ignored,
    )


def _version(settings: Settings) -> Version | None:
    if (settings.order or "megatron") == "megatron":
        return version_of(settings)
    if settings.framework_version is not None:
        raise of_megatron_alone("--framework-version", settings.order, "remove one of them")
    return None


def _ramp_notes(
    settings: Settings, version: Version | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return warnings about a ramp-up, and its flag where the release ignores it."""
    if version is None or settings.rampup_batch_size is None:
        return (), ()
    if not version.ramps:
        text = f"{version.framework} ignores --rampup-batch-size: the batch is constant"
        return (text,), ("--rampup-batch-size",)
    if settings.framework_version is not None:
        return (), ()
    text = (
        f"--rampup-batch-size: the plan assumes {version.framework}, which applies it; releases "
        "from megatron-core 0.18 on ignore it: pass --framework-version main for those"
    )
    return (text,), ()


def _dataloader(settings: Settings) -> Any:
    kind = settings.dataloader_type or "single"
    if kind != "single" and (settings.order or "megatron") != "megatron":
        raise of_megatron_alone("--dataloader-type", settings.order)
    if kind == "external":
        raise InvalidArgument(
            "--dataloader-type external is not planned: the training program has its own loader"
        )
    return check_choice("--dataloader-type", kind, ("single", "cyclic"))


def _unused(settings: Settings) -> tuple[str, ...]:
    given = [name for name in ("length_histogram", "tokens_per_epoch") if getattr(settings, name)]
    if not given or settings.split is None:
        return ()
    return (
        f"{flag_of(given[0])} counts training tokens: split {settings.split} divides documents and "
        "is not applied; give --data-path to plan validation and test",
    )


def _data(settings: Settings) -> Data:
    per_split = {
        name: getattr(settings, f"{name}_data_path") or () for name in ("train", "valid", "test")
    }
    given = [
        flag
        for flag, value in (
            ("--data-path", settings.data_path),
            ("--length-histogram", settings.length_histogram),
            # which a histogram may have besides, to be compared with it
            ("--tokens-per-epoch", settings.tokens_per_epoch and not settings.length_histogram),
            ("--train-data-path", any(per_split.values())),
        )
        if value
    ]
    if len(given) != 1:
        found = " and ".join(given) if given else "none"
        raise InvalidArgument(
            "give the data once: --data-path, --train-data-path (with --valid-data-path, "
            "--test-data-path), --tokens-per-epoch or --length-histogram; found "
            f"{found}"
        )
    if given == ["--train-data-path"]:
        for flag, value, remedy in (
            ("--weights", settings.weights, "write the weights before the paths"),
            ("--split", settings.split if settings.order != "neox" else None, "remove one of them"),
        ):
            if value is not None:
                raise InvalidArgument(f"{flag} and --train-data-path exclude each other; {remedy}")
        splits: dict[str, Any] = {
            name: parse_blend(paths, None, f"--{name}-data-path")
            for name, paths in per_split.items()
        }
        data = Data(**splits, apart=True, documents_alpha=settings.documents_alpha)
        return _labelled(data, settings.labels or {})
    weights, tokens = settings.weights, settings.tokens_per_epoch
    if settings.length_histogram:
        return Data(train=read_histograms(settings.length_histogram, weights, tokens))
    if tokens:
        return Data(train=parse_tokens(tokens, weights))
    sources = parse_blend(settings.data_path or (), weights, "--data-path")
    return Data(train=sources, split=settings.split)


def _named(data: Data, names: Sequence[str] | None) -> Data:
    """Return the data with the names by which the sources of training are shuffled."""
    if names is None:
        return data
    if len(names) != len(data.train):
        raise InvalidArgument(
            f"--shuffle-names has {len(names)} names for {len(data.train)} sources; give one for "
            'each, "" for its fingerprint'
        )
    pairs = zip(data.train, names, strict=True)
    return replace(data, train=tuple(replace(s, shuffle_name=name) for s, name in pairs))


def _narrowed(data: Data, settings: Settings) -> Data:
    """Return the data with the subset that training reads of each source."""
    chosen: dict[str, Any] = {
        "subset": settings.document_subset,
        "held_out": settings.held_out,
        "subset_seed": settings.subset_seed,
    }
    given = {name: value for name, value in chosen.items() if value is not None}
    return replace(data, train=tuple(replace(source, **given) for source in data.train))


def _labelled(data: Data, labels: Mapping[str, tuple[str, ...]]) -> Data:
    """Return the data with the labels of each source."""
    changes: dict[str, Any] = {}
    for split, paths in labels.items():
        sources = zip(getattr(data, split), paths, strict=True)
        changes[split] = tuple(replace(source, labels=path) for source, path in sources)
    return replace(data, **changes)


def batch_schedule(settings: Settings, final: int, version: Version | None = None) -> BatchSchedule:
    """Return the batch schedule of settings; ``final`` is the last global batch size."""
    if settings.batch_schedule is not None and settings.rampup_batch_size is not None:
        raise InvalidArgument(
            "--batch-schedule and --rampup-batch-size exclude each other; give one"
        )
    if settings.batch_schedule is not None:
        assert settings.seq_length is not None
        return parse_schedule(settings.batch_schedule, settings.seq_length, "--batch-schedule")
    if settings.rampup_batch_size is not None and (version is None or version.ramps):
        if len(settings.rampup_batch_size) != 3:
            raise InvalidArgument(
                "--rampup-batch-size takes three numbers, START INCREMENT SAMPLES, got "
                f"{settings.rampup_batch_size}"
            )
        return ramp_up(*settings.rampup_batch_size, final=final, setting="--rampup-batch-size")
    return BatchSchedule.constant(final)


def _target(settings: Settings, schedule: BatchSchedule, consumed: int) -> Target:
    given = [name for name in TARGETS if getattr(settings, name) is not None]
    flags = [flag_of(name) for name in given]
    if len(given) != 1:
        found = " and ".join(flags) if flags else "none"
        raise InvalidArgument(
            "give exactly one of --epochs, --train-iters, --train-samples and --train-tokens; "
            f"found {found}"
        )
    name, flag = given[0], flags[0]
    value = getattr(settings, name)
    if name != "epochs":
        count = parse_count(str(value), flag)
        if settings.of_framework and name in ("train_iters", "train_epochs"):
            made = _iterations_made(schedule, consumed)
            count -= made if name == "train_iters" else 0
            if count < 0:
                raise InvalidArgument(
                    f"--consumed-samples {consumed} are {made} iterations, and the run ends after "
                    f"{flag} {value}; give fewer samples, or more iterations"
                )
        return Target(kind=TARGETS[name], value=Fraction(count))
    parts = tuple(check_epochs(flag, part) for part in str(value).split(","))
    per_source = parts if len(parts) > 1 else ()
    return Target(kind="epochs", value=max(parts), per_source=per_source)


def _iterations_made(schedule: BatchSchedule, consumed: int) -> int:
    """Return the iterations that consume these samples, at whose end a framework resumes."""
    made = schedule.iterations_within(consumed)
    if schedule.samples_after(made) != consumed:
        raise InvalidArgument(
            f"--consumed-samples {consumed} lie within an iteration, and a framework resumes "
            f"behind one: give {schedule.samples_after(made)} or {schedule.samples_after(made + 1)}"
        )
    return made


def parse_buffer(text: str | None) -> Any:
    """Return the number of ``--variance-buffer``, or "exact"."""
    return None if text is None else check_buffer("--variance-buffer", read_number(text))


def _surplus(text: str | None) -> float | None:
    if text is None:
        return None
    return check_number("--mid-level-dataset-surplus", read_number(text))


def _order(settings: Settings) -> Order:
    """Return the order object; `Settings.packing` is one already."""
    name, packing = settings.order or "megatron", settings.packing
    given = {setting: getattr(settings, field) for setting, field in ORDER_FIELDS.items()}
    if packing is None:
        return make_order(name, given, {s: flag_of(field) for s, field in ORDER_FIELDS.items()})
    if name != packing.name:
        raise InvalidArgument(
            f"pack_impl {packing.pack_impl} is a setting of GPT-NeoX; plan with --order "
            f"{packing.name}"
        )
    rule = given.pop("python_sum") or packing.python_sum
    for setting, value in given.items():
        if value is not None:
            raise InvalidArgument(
                f"{flag_of(ORDER_FIELDS[setting])} has no meaning for order {packing}; remove it"
            )
    return replace(packing, python_sum=rule)


def _evaluation(settings: Settings, sizes: BatchSizes) -> Evaluation:
    _check_evaluation_batch(settings, sizes)
    given: dict[str, Any] = {
        "interval": settings.eval_interval,
        "iterations": settings.eval_iters,
        "batch_size": settings.eval_global_batch_size,
        "micro_batch_size": settings.eval_micro_batch_size or sizes.micro_batch,
        "start": settings.start_eval_at_iter,
        "alone": settings.skip_train,
        "full": settings.full_validation,
        "multiple": settings.multiple_validation_sets,
    }
    return Evaluation(**{name: value for name, value in given.items() if value is not None})


def _check_evaluation_batch(settings: Settings, sizes: BatchSizes) -> None:
    micro = settings.eval_micro_batch_size or sizes.micro_batch
    size = settings.eval_global_batch_size
    if micro is None or sizes.data_parallel is None or (settings.order or "") == "neox":
        return
    if settings.eval_micro_batch_size is not None and size is None:
        size = sizes.global_batch
        if settings.batch_schedule is not None:  # one micro batch on every rank
            size = (sizes.micro_batch or micro) * sizes.data_parallel
    if size is not None and size % (micro * sizes.data_parallel):
        raise InvalidArgument(
            f"the evaluation batch of {size} samples must be a multiple of its micro batch {micro} "
            f"x data-parallel size {sizes.data_parallel} in Megatron-LM; change "
            "--eval-global-batch-size or --eval-micro-batch-size"
        )


def _phases(settings: Settings, schedule: BatchSchedule, consumed: int) -> tuple[int, ...]:
    phases = settings.phase_transition_iterations or ()
    if any(a >= b for a, b in zip((0, *phases), phases, strict=False)):
        raise InvalidArgument(
            f"--phase-transition-iterations must be positive and rising, got {list(phases)}"
        )
    if phases and not schedule.is_constant:
        raise InvalidArgument(
            "--phase-transition-iterations and a schedule of batch sizes: Megatron-LM counts the "
            "samples of a phase by one global batch size, so that a resumed run leaves out samples "
            "or repeats them; give --global-batch-size alone"
        )
    if phases and consumed % schedule.final:
        raise InvalidArgument(
            f"--consumed-samples must be a multiple of the global batch size {schedule.final} with "
            f"--phase-transition-iterations, which are counted in whole batches, got {consumed}"
        )
    return tuple(phases)
