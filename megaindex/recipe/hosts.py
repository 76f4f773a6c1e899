"""GPUs of a cluster, from DeepSpeed's host file."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from megaindex.errors import InvalidArgument, StorageError

_HOST = re.compile(r"^(?P<host>\S+)\s+slots=(?P<slots>\d{1,9})\s*(#.*)?$")


def gpus_of_hosts(config: Mapping[str, Any]) -> int | None:
    """GPUs that a NeoX configuration names, or None where only the cluster itself knows.

    ``num_nodes`` takes the first hosts, ``num_gpus`` overrides their slots; ``include`` and
    ``exclude`` name single devices and are left to ``--world-size``.
    """
    path = config.get("hostfile") or os.environ.get("DLTS_HOSTFILE")
    if not path or config.get("include") or config.get("exclude"):
        return None
    if not isinstance(path, str):
        raise InvalidArgument(f"hostfile must be a path, got a {type(path).__name__}")
    if not os.path.isfile(path):
        return None
    slots = _slots(path)
    nodes = config.get("num_nodes")
    if isinstance(nodes, int) and nodes > 0:
        slots = slots[:nodes]
    gpus = config.get("num_gpus")
    total = gpus * len(slots) if isinstance(gpus, int) and gpus > 0 else sum(slots)
    return total or None


def _slots(path: str) -> list[int]:
    try:
        with open(path, encoding="utf-8") as file:
            hosts = [_HOST.match(line.strip()) for line in file]
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"hostfile: {path} cannot be read: {error}") from None
    return [int(host["slots"]) for host in hosts if host]
