from megaindex.adapters.megatron.patches import BlendedDataset as BlendedDataset
from megaindex.adapters.megatron.patches import (
    BlendedMegatronDatasetBuilder as BlendedMegatronDatasetBuilder,
)
from megaindex.adapters.megatron.patches import GPTDataset as GPTDataset
from megaindex.adapters.megatron.patches import IndexedDataset as IndexedDataset
from megaindex.adapters.megatron.patches import IndexedDatasetBuilder as IndexedDatasetBuilder
from megaindex.adapters.megatron.patches import install as install
from megaindex.adapters.megatron.patches import is_installed as is_installed
from megaindex.adapters.megatron.patches import rows as rows
from megaindex.adapters.megatron.patches import uninstall as uninstall
