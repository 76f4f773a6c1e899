"""Benchmarks against megatron-core: check the answer, then time both sides in one run."""
