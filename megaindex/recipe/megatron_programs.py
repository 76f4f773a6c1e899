"""Programs and arguments of Megatron-LM that are not planned, and why."""

from __future__ import annotations

_OTHER_SAMPLES = "its samples are not the GPT samples of --seq-length tokens; plan a GPT run"
_NO_INDEX = "it reads no .bin and .idx pair as pretrain_gpt.py does"
_IMAGES = "its samples are images and conversations of a loader of its own"
_NO_TRAINING = "it trains nothing"

# End of a program's path, and why it is not planned; empty: it builds GPT datasets.
PROGRAMS = {
    "pretrain_gpt.py": "",
    "pretrain_hybrid.py": "",
    "pretrain_mamba.py": "",
    "pretrain_bert.py": _OTHER_SAMPLES,
    "pretrain_t5.py": _OTHER_SAMPLES,
    "pretrain_ict.py": _OTHER_SAMPLES,
    "pretrain_retro.py": _OTHER_SAMPLES,
    "pretrain_vlm.py": _IMAGES,
    "multimodal/train.py": _IMAGES,
    "mimo/train.py": _IMAGES,
    "mimo/pretrain_mimo": _IMAGES,
    "train_rl.py": "reinforcement learning builds no datasets",
    "modelopt/finetune.py": _NO_INDEX,
    "convert_model.py": _NO_TRAINING,
    "modelopt/offline_feature_extract.py": _NO_INDEX,
    "modelopt/generate.py": _NO_TRAINING,
    "modelopt/mmlu.py": _NO_TRAINING,
    "modelopt/prune.py": _NO_TRAINING,
    "modelopt/quantize.py": _NO_TRAINING,
    "modelopt/validate.py": _NO_TRAINING,
    "modelopt/export.py": _NO_TRAINING,
    "detxoify_lm/finetune_gpt.py": "it mixes two corpora by a rule of its own",
    "detxoify_lm/generate_samples_gpt.py": _NO_TRAINING,
    "msdp/main.py": "it evaluates prompts",
    "tools/run_text_generation_server.py": _NO_TRAINING,
    "tools/run_hybrid_text_generation_server.py": _NO_TRAINING,
    "tools/run_inference_performance_test.py": _NO_TRAINING,
    "multimodal/run_text_generation.py": _NO_TRAINING,
    "inference/launch_inference_server": _NO_TRAINING,
    "inference/offline_inference": _NO_TRAINING,
    "tools/checkpoint/checkpoint_inspector.py": _NO_TRAINING,
}

_DATA = ("data_path", "tokens_per_epoch")
_PARALLEL = ("data_parallel_size", "world_size")

# Argument: why it is not planned, and the planner's settings that make up for it.
REFUSED: dict[str, tuple[str, tuple[str, ...]]] = {
    "--mock-data": (
        "the samples are generated; pass --data-path, or --tokens-per-epoch, to plan the same run "
        "on data",
        _DATA,
    ),
    "--sft": ("supervised finetuning packs whole conversations of a JSON file", ()),
    "--finetune-hf-dataset": ("it names a data set that is tokenized in the run", ()),
    "--perform-rl-step": ("reinforcement learning builds no datasets", ()),
    "--yaml-cfg": ("the arguments are in a file; give them as arguments", ()),
    "--batch-size": ("Megatron-LM refuses it; give --micro-batch-size", ("micro_batch_size",)),
    "--model-parallel-size": (
        "Megatron-LM refuses it; give --tensor-model-parallel-size",
        ("tensor_model_parallel_size",),
    ),
    "--tensor-parallel-num-weight-shards": (
        "it takes ranks from data parallelism; pass --data-parallel-size",
        _PARALLEL,
    ),
}

# Arguments that concern data and leave what is built and read as it is.
IGNORED = frozenset(
    {
        "--allow-ambiguous-pad-tokens",
        "--data-cache-path",
        "--dataloader-defer-npy-index-mmap",
        "--dataloader-fast-cache-load",
        "--dataloader-inter-document-masking",
        "--decoder-seq-length",
        "--decrease-batch-size-if-needed",
        "--eod-mask-loss",
        "--exit-duration-in-mins",
        "--exit-interval",
        "--fim-data",
        "--fim-eod-token",
        "--fim-fragment-rate",
        "--fim-middle-token",
        "--fim-no-prefix",
        "--fim-pad-token",
        "--fim-prefix-token",
        "--fim-rate",
        "--fim-split-sample",
        "--fim-spm-rate",
        "--fim-suffix-token",
        "--hybrid-context-parallel",
        "--iterations-to-skip",
        "--no-create-attention-mask-in-dataloader",
        "--no-data-sharding",
        "--no-mmap-bin-files",
        "--num-dataset-builder-threads",
        "--num-workers",
        "--object-storage-cache-path",
        "--per-dataset-sequences-path",
        "--reset-attention-mask",
        "--reset-position-ids",
        "--sample-rate",
        "--use-checkpoint-args",
        "--validation-set-names",
    }
)

NOTES = {
    "--fim-data": "rearranges the tokens within samples: the plan counts those before that",
    "--iterations-to-skip": "names iterations that read their samples and do not train on them",
    "--exit-interval": "may end the run before the plan does",
    "--use-checkpoint-args": "takes arguments from a checkpoint, which the plan does not read",
}
