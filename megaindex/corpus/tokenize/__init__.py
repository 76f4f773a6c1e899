"""Tokenization of raw text: inputs are divided into parts, tokenized one by one, then merged.

inputs       input files: format, compression, size and times; settings of a run; texts of records
parts        division of inputs into tasks, each with a key of all that its result depends on
reading      lines and rows of a part
encode       the task: tokenize one part
work_folder  finished parts by key, and the lock of a run
run          run all tasks and merge the parts
"""
