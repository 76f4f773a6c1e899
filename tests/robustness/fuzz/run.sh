#!/bin/sh
# Coverage-guided fuzzing of every target: run.sh [SECONDS each] [TARGET …]. Needs atheris
# (requirements/fuzz.txt). For the target native the core is rebuilt with the address and
# undefined-behaviour sanitizers and with edge counters that libFuzzer reads; the others, which call
# kernels too, run with the one of the environment.
set -eu
cd "$(dirname "$0")/../../.."
BIN=$(cd "${BIN:-.venv/bin}" && pwd)
CXX=${CXX:-g++}
seconds=${1:-60}
[ $# -gt 0 ] && shift
names="from robustness.fuzz.__main__ import TARGETS; print(*TARGETS)"
targets=${*:-$(PYTHONPATH=tests "$BIN/python" -c "$names")}
work=${FUZZ_DIR:-$(mktemp -d)}
mkdir -p "$work"
fuzz=$(pwd)/tests/robustness/fuzz

"$CXX" -std=c++17 -O2 -fPIC -c "$fuzz/trace.cpp" -o "$work/trace.o"
flags="-g -O1 -fsanitize=address,undefined -fno-sanitize-recover=all -fsanitize-coverage=trace-pc"
MEGAINDEX_DEV=1 MEGAINDEX_CXXFLAGS="$flags" \
    MEGAINDEX_LDFLAGS="-fsanitize=address,undefined -Wl,-Bsymbolic $work/trace.o" \
    "$BIN/python" setup.py -q build --build-base "$work/tmp" --build-lib "$work/lib" 2>/dev/null

cd "$work"
for target in $targets; do
    log="$work/$target.log"
    if [ "$target" = native ]; then
        # a leak is no crash: CPython keeps memory until the end on purpose
        FUZZ_SECONDS_A_CALL=0.05 PYTHONPATH="$work/lib${PYTHONPATH:+:$PYTHONPATH}" \
            LD_PRELOAD="$("$CXX" -print-file-name=libasan.so) $("$CXX" -print-file-name=libstdc++.so)" \
            ASAN_OPTIONS=detect_leaks=0,allocator_may_return_null=1,max_allocation_size_mb=256 \
            "$BIN/python" "$fuzz" "$target" --seconds "$seconds" >"$log" 2>&1 && status=0 || status=$?
    else
        "$BIN/python" "$fuzz" "$target" --seconds "$seconds" >"$log" 2>&1 && status=0 || status=$?
    fi
    count=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
    edges=$(sed -n 's/.* cov: \([0-9]*\) .*/\1/p' "$log" | tail -1)
    echo "fuzz $target: ${count:-?} executions, ${edges:-?} edges, exit status $status"
    if [ "$status" != 0 ]; then tail -n 40 "$log"; exit "$status"; fi
done
