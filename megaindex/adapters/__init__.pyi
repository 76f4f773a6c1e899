from megaindex.adapters.reports import ServedDataset as ServedDataset
from megaindex.adapters.reports import Status as Status
from megaindex.adapters.reports import status as status
from megaindex.adapters.run_loader import RunLoader as RunLoader
