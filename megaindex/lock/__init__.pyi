from megaindex.lock.check import verify_lock as verify_lock
from megaindex.lock.lock_file import Lock as Lock
from megaindex.lock.lock_file import LockedSource as LockedSource
from megaindex.lock.lock_file import read_lock as read_lock
from megaindex.lock.make import make_lock as make_lock
from megaindex.lock.opening import open_run as open_run
