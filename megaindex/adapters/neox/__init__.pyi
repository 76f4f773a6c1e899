from megaindex.adapters.neox.patches import install as install
from megaindex.adapters.neox.patches import rows as rows
from megaindex.adapters.neox.patches import uninstall as uninstall
