#!/bin/sh
# The native core on aarch64, under user-mode emulation, against x86-64:
#
# 1. the driver of tests/robustness/sanitize checks each kernel of the headers against an obvious
#    loop, and the digest of the kernels' outputs must be the one of x86-64;
# 2. the wheel for aarch64 is built, and the tests of kernels run with it in Debian's Python of
#    aarch64: they compare its values and dtypes with the reference, which is NumPy and Python.
#    TESTS="tests/kernels tests/index" runs others. Tests of Numba and of the reference alone, and
#    those that start a process, which would not be emulated, are left out.
#
# Both are compiled with zig, from the package index. Debian's packages are unpacked, not installed;
# apt verifies them. All is in a temporary folder, or in WORK, which is kept.
#
# Needs qemu-aarch64-static (Debian: qemu-user-static), or the path of one in QEMU, apt-get, and
# Python 3.11 with its headers.
set -eu
cd "$(dirname "$0")/.."
BIN=${BIN:-.venv/bin}
QEMU=${QEMU:-qemu-aarch64-static}
TESTS=${TESTS:-tests/kernels}
PYTHON=3.11 # of Debian's release
RELEASE=bookworm
PACKAGES="python$PYTHON-minimal libpython$PYTHON-minimal libpython$PYTHON-stdlib
    libc6 libgcc-s1 libstdc++6 libcrypt1 libexpat1 zlib1g libffi8 libssl3 libbz2-1.0 liblzma5
    libsqlite3-0 libuuid1"
for needed in "$QEMU" apt-get dpkg-deb; do
    command -v "$needed" > /dev/null || {
        echo "aarch64: $needed is not found: use Debian or Ubuntu with qemu-user-static" >&2
        exit 1
    }
done
if [ -n "${WORK:-}" ]; then
    mkdir -p "$WORK"
    work=$(realpath "$WORK")
else
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
fi
[ -x "$work/zig/bin/python" ] || "$BIN/python" -m venv "$work/zig"
"$work/zig/bin/pip" install --quiet --disable-pip-version-check ziglang

compile() {
    target=$1
    shift
    "$work/zig/bin/python" -m ziglang c++ -target "$target" -std=c++17 -ffp-contract=off \
        -fno-math-errno -Icsrc "$@"
}

driver() {
    compile "$1" -O1 tests/robustness/sanitize/driver.cpp -o "$work/$1"
}
driver aarch64-linux-musl
driver x86_64-linux-musl
emulated=$("$QEMU" "$work/aarch64-linux-musl")
here=$("$work/x86_64-linux-musl")
echo "aarch64: $emulated"
echo "x86-64:  $here"
[ "$emulated" = "$here" ] || {
    echo "aarch64: the outputs of the kernels differ" >&2
    exit 1
}

apt() {
    apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o APT::Sandbox::User= \
        -o Dir::Etc::SourceList="$work/apt/sources.list" -o Dir::Etc::SourceParts=/dev/null \
        -o Dir::State="$work/apt" -o Dir::State::Status="$work/apt/status" \
        -o Dir::Cache="$work/apt/cache" "$@"
}
root=$work/root
if [ ! -x "$root/usr/bin/python$PYTHON" ]; then
    mkdir -p "$work/apt/lists/partial" "$work/apt/cache/archives/partial" "$work/debs" "$root"
    : > "$work/apt/status"
    signed=/usr/share/keyrings/debian-archive-keyring.gpg
    echo "deb [signed-by=$signed] http://deb.debian.org/debian $RELEASE main" \
        > "$work/apt/sources.list"
    apt update
    # shellcheck disable=SC2086
    (cd "$work/debs" && apt download $PACKAGES)
    for deb in "$work"/debs/*.deb; do
        dpkg-deb --extract "$deb" "$root"
    done
fi

site=$work/site
"$work/zig/bin/pip" install --quiet --disable-pip-version-check --upgrade --target "$site" \
    --python-version "$PYTHON" --implementation cp --only-binary :all: \
    --platform manylinux_2_28_aarch64 --platform manylinux_2_17_aarch64 \
    --platform manylinux2014_aarch64 "numpy>=1.26" "xxhash>=3.4" "rich>=13" "pyyaml>=6" \
    "pytest>=8" "hypothesis>=6.100"
rm -rf "$site/megaindex" "$work/checkout" "$work/wheels"
"$BIN/python" packaging/wheels.py --machine aarch64 --python $PYTHON --dest "$work/wheels"
"$work/zig/bin/python" -m zipfile -e "$work"/wheels/*.whl "$site"

mkdir "$work/checkout" # tests without the package beside them
cp -R tests docs pyproject.toml README.md CONTRIBUTING.md "$work/checkout"
python() {
    "$QEMU" -L "$root" -E \
        LD_LIBRARY_PATH="$root/usr/lib/aarch64-linux-gnu:$root/lib/aarch64-linux-gnu" \
        "$root/usr/bin/python$PYTHON" "$@"
}
cd "$work/checkout"
export PYTHONPATH="$site" PYTHONNOUSERSITE=1
python -c 'import megaindex, platform
assert (megaindex.backend(), platform.machine()) == ("native", "aarch64"), megaindex.backend()
assert megaindex.__file__.startswith("'"$site"'"), megaindex.__file__'
# these tests load Numba, or start a process
others="threads_do_not_change_a_row or lengths_looked_up_in_short_form or without_threads \
    or another_thread_writes"
# shellcheck disable=SC2086
python -m pytest -q --quick -p no:cacheprovider $TESTS \
    -k "(native or not (numba or reference)) and not ($others)"
