"""What the examples of docs/corpora.md need: run before them."""

import shutil

import numpy as np
import pyarrow
import pyarrow.parquet
from support.mds_writing import write_mds
from support.worked_pages import ROOT

from megaindex import IndexedDatasetWriter

rng = np.random.default_rng(0)
documents = [rng.integers(0, 50_000, n) for n in rng.integers(50, 400, 300)]
for name, dtype, part in (
    ("shard-0", "uint16", slice(0, 100)),
    ("shard-1", "uint16", slice(100, 250)),
    ("shard-2", "int32", slice(250, 300)),
):
    with IndexedDatasetWriter(name, dtype=dtype) as writer:
        for tokens in documents[part]:
            writer.add_document(tokens)
tokens, ends = np.concatenate(documents), np.cumsum([d.size for d in documents])
tokens.astype("<u4").tofile("00000_tokens.ds")
ends.astype("<u8").tofile("00000_tokens.ds.index")
tokens[ends - 1] = 0
tokens.astype("<u4").tofile("tokens.raw")
np.save("tokens.npy", tokens.astype("int32"))
np.save("ends.npy", ends)
golden = ROOT / "tests/golden/token_files"
for file in golden.glob("tntidx_int32*"):
    shutil.copy(file, file.name)
write_mds("mds", {"tokens": "ndarray:int64"}, [{"tokens": d} for d in documents[:50]])
table = pyarrow.table({"input_ids": [d.tolist() for d in documents]})
pyarrow.parquet.write_table(table, "part-0.parquet")
