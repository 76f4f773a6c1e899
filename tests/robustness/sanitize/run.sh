#!/bin/sh
# The native core under the address and undefined-behaviour sanitizers, and under the one of threads:
# first its headers driven from C++, then its Python binding through the kernel tests (numpy only: no
# torch, no peer). Both without AVX2 too, as other processors run them.
set -eu
cd "$(dirname "$0")/../../.."
BIN=${BIN:-.venv/bin}
CXX=${CXX:-g++}
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
flags="-g -O1 -fsanitize=address,undefined -fno-sanitize-recover=all"

for without in "" -DMEGAINDEX_WITHOUT_AVX2; do
    echo "sanitize: headers $without"
    $CXX -std=c++17 $flags $without -ffp-contract=off -Wall -Wextra -Icsrc \
        tests/robustness/sanitize/driver.cpp -o "$build/driver" -pthread
    "$build/driver"
done

echo "sanitize: the kernels that processors without AVX2 run, without sanitizers"
MEGAINDEX_DEV=1 MEGAINDEX_CXXFLAGS="-O1 -DMEGAINDEX_WITHOUT_AVX2" \
    "$BIN/python" setup.py -q build --build-base "$build/scalar-tmp" --build-lib "$build/scalar-lib" \
    2>/dev/null
PYTHONPATH="$build/scalar-lib" \
    "$BIN/pytest" tests/kernels -q -p no:cacheprovider -k "native or not (numba or reference)"

echo "sanitize: data races between the threads of one kernel"
$CXX -std=c++17 -g -O1 -fsanitize=thread -ffp-contract=off -Icsrc tests/robustness/sanitize/driver.cpp \
    -o "$build/races" -pthread
"$build/races"

echo "sanitize: binding"
MEGAINDEX_DEV=1 MEGAINDEX_CXXFLAGS="$flags" MEGAINDEX_LDFLAGS="-fsanitize=address,undefined" \
    "$BIN/python" setup.py -q build --build-base "$build/tmp" --build-lib "$build/lib" 2>/dev/null
# leaks are not looked for: CPython keeps memory until the end on purpose
MEGAINDEX_SANITIZE=1 MEGAINDEX_TEST_EXAMPLES=${MEGAINDEX_TEST_EXAMPLES:-20} \
    PYTHONPATH="$build/lib" \
    LD_PRELOAD="$($CXX -print-file-name=libasan.so) $($CXX -print-file-name=libstdc++.so)" \
    ASAN_OPTIONS=detect_leaks=0 \
    "$BIN/pytest" tests/kernels tests/robustness/sanitize -q -p no:cacheprovider -k "not numba"

echo "sanitize: data races between the threads of the binding"
MEGAINDEX_DEV=1 MEGAINDEX_CXXFLAGS="-g -O1 -fsanitize=thread" MEGAINDEX_LDFLAGS="-fsanitize=thread" \
    "$BIN/python" setup.py -q build --build-base "$build/races-tmp" --build-lib "$build/races-lib" \
    2>/dev/null
# without random addresses, which this sanitizer does not know in recent kernels
MEGAINDEX_SANITIZE=1 MEGAINDEX_TEST_EXAMPLES=${MEGAINDEX_TEST_EXAMPLES:-20} \
    PYTHONPATH="$build/races-lib" OPENBLAS_NUM_THREADS=1 \
    LD_PRELOAD="$($CXX -print-file-name=libtsan.so) $($CXX -print-file-name=libstdc++.so)" \
    setarch -R "$BIN/pytest" tests/robustness/sanitize tests/kernels/test_bijection.py \
    tests/kernels/test_gather.py tests/kernels/test_pieces.py tests/kernels/test_samples.py \
    tests/kernels/test_shuffle.py tests/kernels/test_thread_limit.py -q -p no:cacheprovider \
    -k "sanitize or native and not numba"
