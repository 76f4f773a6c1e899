"""Builds the native core, which is optional: without a compiler megaindex runs on Numba.

MEGAINDEX_NO_NATIVE=1  leave the native core out
MEGAINDEX_DEV=1        warnings are errors, and a core that does not compile fails the install
"""

import os
from pathlib import Path

from setuptools import setup

dev = os.environ.get("MEGAINDEX_DEV") == "1"
ext_modules = []
cmdclass = {}
if os.environ.get("MEGAINDEX_NO_NATIVE") != "1":
    import pybind11
    from pybind11.setup_helpers import Pybind11Extension, build_ext

    # as system headers, pybind11's own warnings stay out of ours
    dev_flags = ["-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror"]
    dev_flags += ["-isystem", pybind11.get_include()]
    core = Pybind11Extension(
        "megaindex.kernels._native",
        ["csrc/bindings.cpp"],
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
    cmdclass = {"build_ext": build_ext}

setup(ext_modules=ext_modules, cmdclass=cmdclass)
