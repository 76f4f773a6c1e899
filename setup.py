"""Build of megaindex with its native core, which is optional: without it Numba runs the kernels.

The reason why a core was not built is written beside the kernels, and ``megaindex --version``
prints it, since pip shows no output of a build that succeeds.

MEGAINDEX_NO_NATIVE=1   leave the native core out
MEGAINDEX_DEV=1         make compiler warnings errors, and fail the install if the core does not
                        compile
MEGAINDEX_BUILD_JOBS=N  number of compiler processes; the number of CPUs by default
MEGAINDEX_CXXFLAGS, MEGAINDEX_LDFLAGS  further flags
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
_KEPT = 4000  # last characters of the compiler's output

dev = os.environ.get("MEGAINDEX_DEV") == "1"
ext_modules = []
cmdclass = {}
if os.environ.get("MEGAINDEX_NO_NATIVE") == "1":

    class BuildWithout(build_py):
        """Command that copies the package and writes that the core was left out."""

        def run(self):
            super().run()
            top = "." if self.editable_mode else self.build_lib
            note = Path(top, KERNELS, REASON)
            note.write_text("left out, as MEGAINDEX_NO_NATIVE=1 asked for\n", encoding="utf-8")

    cmdclass = {"build_py": BuildWithout}
else:
    import pybind11
    from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext

    class BuildCore(build_ext):
        """Command that builds the core, or writes a file with the reason why it was not built."""

        def build_extension(self, ext):
            note = Path(self.get_ext_fullpath(ext.name)).with_name(REASON)
            note.unlink(missing_ok=True)  # of an earlier build
            with tempfile.TemporaryFile() as output:
                try:
                    with _output_to(output), ParallelCompile("MEGAINDEX_BUILD_JOBS"):
                        super().build_extension(ext)
                except Exception as error:
                    output.seek(0)
                    text = output.read().decode(errors="replace").strip()
                    note.parent.mkdir(parents=True, exist_ok=True)
                    note.write_text(f"{_summary(error)}\n{text[-_KEPT:]}\n", encoding="utf-8")
                    raise
                finally:
                    output.seek(0)
                    sys.stderr.write(output.read().decode(errors="replace"))

        def copy_extensions_to_source(self):
            """Copy the core of an editable install, or the reason, from the build folder."""
            super().copy_extensions_to_source()
            note, source = Path(self.build_lib, KERNELS, REASON), KERNELS / REASON
            source.unlink(missing_ok=True)
            if note.exists():
                source.write_bytes(note.read_bytes())

    def _summary(error):
        """Return one line, without the flags of the command that failed."""
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
        """Redirect stdout and stderr, those of child processes too, into a file."""
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

    # -isystem keeps pybind11's own warnings out
    dev_flags = ["-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror"]
    dev_flags += ["-isystem", pybind11.get_include()]
    core = Pybind11Extension(
        "megaindex.kernels._native",
        ["csrc/building.cpp", "csrc/reading.cpp"],
        include_dirs=["csrc"],
        depends=sorted(map(str, Path("csrc").glob("*/*.[ch]pp"))),
        cxx_std=17,
        extra_compile_args=[
            "-O3",
            # blends compare doubles: a fused multiply-add would round otherwise and move samples
            "-ffp-contract=off",
            "-fno-math-errno",
            *(dev_flags if dev else []),
            *os.environ.get("MEGAINDEX_CXXFLAGS", "").split(),
        ],
        extra_link_args=["-pthread", *os.environ.get("MEGAINDEX_LDFLAGS", "").split()],
    )
    # setuptools reports an optional extension that fails and continues without it
    core.optional = not dev
    ext_modules = [core]
    cmdclass = {"build_ext": BuildCore}

setup(ext_modules=ext_modules, cmdclass=cmdclass)
