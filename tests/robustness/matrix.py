"""The adapter's tests against every release of megatron-core on PyPI: ``make matrix``.

Each release is installed without its dependencies into a folder of its own, which comes before the
environment's on PYTHONPATH. A path in place of a release is a checkout of Megatron-LM whose helpers
are compiled. Prints a table; exits with 1 where a release that is served fails, or one that is not
is accepted.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
REFUSED = ("0.8.0", "0.9.0", "0.10.0", "0.11.0")
SERVED = (
    "0.12.0", "0.12.1", "0.12.2", "0.12.3", "0.13.0", "0.13.1", "0.14.0", "0.15.0", "0.15.1",
    "0.15.2", "0.15.3", "0.16.0", "0.16.1",
)  # fmt: skip
TESTS = ("test_megatron*.py", "test_policies.py", "test_reports.py")
INSTALL = """
import megaindex.adapters.megatron as adapter
from megaindex.errors import InvalidArgument
try:
    adapter.install()
except InvalidArgument as error:
    print(error)
"""


def main(folder: Path, versions: list[str]) -> int:
    """Test each of ``versions``, or all, with what is installed into ``folder``."""
    rows, failed = [], False
    for version in versions or [*REFUSED, *SERVED]:
        fine, outcome = _try(folder / version, version)
        failed |= not fine
        rows.append(f"| {version} | {outcome} |")
        print(rows[-1], flush=True)
    print("\n| megatron-core | tests of the adapter |\n|---|---|", *rows, sep="\n")
    return int(failed)


def _try(target: Path, version: str) -> tuple[bool, str]:
    if not (target / "megatron").is_dir():
        package = f"megatron-core=={version}"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--target", str(target), package], check=True)
    path = [str(target), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    if version in REFUSED:
        code = [sys.executable, "-W", "ignore", "-c", INSTALL]
        result = subprocess.run(code, env=environment, capture_output=True, text=True, check=False)
        refused = f"megatron-core {version} is not served" in result.stdout
        return refused, "refused by `install()`" if refused else "accepted"
    files = [str(path) for name in TESTS for path in sorted((ROOT / "tests/adapters").glob(name))]
    tests = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-m", "not slow", *files]
    result = subprocess.run(
        tests, env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    if result.returncode:
        print(result.stdout, result.stderr, file=sys.stderr)
    found = re.findall(r"\d+ (?:passed|failed|skipped|errors?)", result.stdout.splitlines()[-1])
    return result.returncode == 0, ", ".join(found) or "did not run"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
