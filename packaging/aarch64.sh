#!/bin/sh
# The headers of the native core on aarch64, under user-mode emulation: the driver of
# tests/robustness/sanitize checks each kernel against an obvious loop, and the digest of the
# kernels' outputs must be the one of x86-64. Both are compiled with zig, whose C++ library is the
# same for both.
#
# Needs qemu-aarch64-static (Debian: qemu-user-static), or the path of one in QEMU. zig is installed
# into a temporary environment from the package index.
set -eu
cd "$(dirname "$0")/.."
BIN=${BIN:-.venv/bin}
QEMU=${QEMU:-qemu-aarch64-static}
command -v "$QEMU" > /dev/null || {
    echo "aarch64: $QEMU is not found: install qemu-user-static, or set QEMU" >&2
    exit 1
}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$BIN/python" -m venv "$work/zig"
"$work/zig/bin/pip" install --quiet --disable-pip-version-check ziglang

compile() {
    "$work/zig/bin/python" -m ziglang c++ -target "$1" -std=c++17 -O1 -ffp-contract=off \
        -fno-math-errno -Icsrc tests/robustness/sanitize/driver.cpp -o "$work/$1"
}
compile aarch64-linux-musl
compile x86_64-linux-musl
emulated=$("$QEMU" "$work/aarch64-linux-musl")
here=$("$work/x86_64-linux-musl")
echo "aarch64: $emulated"
echo "x86-64:  $here"
[ "$emulated" = "$here" ] || {
    echo "aarch64: the outputs of the kernels differ" >&2
    exit 1
}
