from megaindex.adapters.reports import Served as Served
from megaindex.adapters.reports import Status as Status
from megaindex.adapters.reports import status as status
