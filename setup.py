"""Builds the native core, which is optional: without a compiler megaindex runs on Numba.

Why a core was not built is kept beside the kernels: pip shows nothing of a build that succeeds, and
``megaindex --version`` says it.

MEGAINDEX_NO_NATIVE=1  leave the native core out
MEGAINDEX_DEV=1        warnings are errors, and a core that does not compile fails the install
"""

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

KERNELS = Path("megaindex", "kernels")
REASON = "no_native.txt"  # read by megaindex.kernels
_KEPT = 4000  # characters at the end of what the compiler said

dev = os.environ.get("MEGAINDEX_DEV") == "1"
ext_modules = []
cmdclass = {}
if os.environ.get("MEGAINDEX_NO_NATIVE") == "1":

    class BuildWithout(build_py):
        """Copies the package, and notes that the core was left out."""

        def run(self):
            super().run()
            top = "." if self.editable_mode else self.build_lib
            note = Path(top, KERNELS, REASON)
            note.write_text("left out, as MEGAINDEX_NO_NATIVE=1 asked for\n", encoding="utf-8")

    cmdclass = {"build_py": BuildWithout}
else:
    import pybind11
    from pybind11.setup_helpers import Pybind11Extension, build_ext

    class BuildCore(build_ext):
        """Builds the core, or notes why it cannot be built."""

        def build_extension(self, ext):
            note = Path(self.get_ext_fullpath(ext.name)).with_name(REASON)
            note.unlink(missing_ok=True)  # of an earlier build
            with tempfile.TemporaryFile() as said:
                try:
                    with _output_to(said):
                        super().build_extension(ext)
                except Exception as error:
                    said.seek(0)
                    text = said.read().decode(errors="replace").strip()
                    note.parent.mkdir(parents=True, exist_ok=True)
                    note.write_text(f"{_summary(error)}\n{text[-_KEPT:]}\n", encoding="utf-8")
                    raise
                finally:
                    said.seek(0)
                    sys.stderr.write(said.read().decode(errors="replace"))

        def copy_extensions_to_source(self):
            """Of an editable install: what was built lies elsewhere until here."""
            super().copy_extensions_to_source()
            note, source = Path(self.build_lib, KERNELS, REASON), KERNELS / REASON
            source.unlink(missing_ok=True)
            if note.exists():
                source.write_bytes(note.read_bytes())

    def _summary(error):
        """A line; the error may repeat the command with all its flags."""
        first = error
        while not isinstance(first, subprocess.CalledProcessError):
            first = first.__cause__ or first.__context__
            if first is None:
                return " ".join(str(error).split())
        code = first.returncode
        how = f"with exit code {code}" if code >= 0 else f"by signal {-code}"
        return f"command {first.cmd[0]!r} failed {how}"

    @contextlib.contextmanager
    def _output_to(file):
        """Lets the compiler, another process, write into a file."""
        sys.stdout.flush()
        sys.stderr.flush()
        kept = [os.dup(1), os.dup(2)]
        try:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, descriptor in enumerate(kept, start=1):
                os.dup2(descriptor, number)
                os.close(descriptor)

    # as system headers, pybind11's own warnings stay out of ours
    dev_flags = ["-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror"]
    dev_flags += ["-isystem", pybind11.get_include()]
    core = Pybind11Extension(
        "megaindex.kernels._native",
        ["csrc/bindings.cpp", "csrc/python/register_mapped_files.cpp"],
        include_dirs=["csrc"],
        depends=sorted(map(str, Path("csrc/megaindex").glob("*.hpp"))),
        cxx_std=17,
        extra_compile_args=[
            "-O3",
            # doubles decide which dataset comes next: a fused multiply-add would move samples
            "-ffp-contract=off",
            "-fno-math-errno",
            *(dev_flags if dev else []),
            *os.environ.get("MEGAINDEX_CXXFLAGS", "").split(),
        ],
        extra_link_args=["-pthread", *os.environ.get("MEGAINDEX_LDFLAGS", "").split()],
    )
    # setuptools reports a failed optional extension and goes on without it
    core.optional = not dev
    ext_modules = [core]
    cmdclass = {"build_ext": BuildCore}

setup(ext_modules=ext_modules, cmdclass=cmdclass)
