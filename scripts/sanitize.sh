#!/usr/bin/env bash
# Runs the C++ tests under ThreadSanitizer and under AddressSanitizer + UndefinedBehaviorSanitizer, then the Python tests with an
# extension built with the latter. Python tests of threads also run with an extension built with ThreadSanitizer: the pool, the
# reaper's thread and worker threads share memory. Usage: sanitize.sh PYTHON
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
PATH="$(dirname "$python"):$PATH"

# ThreadSanitizer cannot map its shadow memory if the kernel randomises addresses widely.
fixed_addresses=()
if setarch "$(uname -m)" -R true 2>/dev/null; then fixed_addresses=(setarch "$(uname -m)" -R); fi

for kind in thread address,undefined; do
    echo "== C++ tests, -fsanitize=$kind"
    folder=build/native-${kind//,/-}
    cmake -S . -B "$folder" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DSTEPMILL_NATIVE_TESTS=ON -DSTEPMILL_WERROR=ON \
        -DSTEPMILL_SANITIZE="$kind" >"$folder.log" 2>&1 || { cat "$folder.log"; exit 1; }
    cmake --build "$folder"
    TSAN_OPTIONS=halt_on_error=1 UBSAN_OPTIONS=print_stacktrace=1 \
        "${fixed_addresses[@]}" ctest --test-dir "$folder" --output-on-failure
done

echo "== Python tests, extension with -fsanitize=address,undefined"
side=$("$python" scripts/side_env.py .venvs/asan)
"$side" -m pip install -q --no-deps --no-build-isolation --force-reinstall \
    -Cbuild-dir=build/asan -Ccmake.build-type=RelWithDebInfo -Ccmake.define.STEPMILL_SANITIZE=address,undefined \
    -Ccmake.define.STEPMILL_WERROR=ON .
# The runtimes must be loaded first, and libstdc++ too; otherwise the sanitizer does not see exceptions.
preload=$(for library in libasan.so libubsan.so libstdc++.so; do g++ -print-file-name="$library"; done | paste -sd:)
folders=()
for folder in tests/unit tests/contract; do [ -d "$folder" ] && folders+=("$folder"); done
# CPython leaks objects at exit by design. PYTHONMALLOC lets the sanitizer see every object separately.
LD_PRELOAD=$preload PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 UBSAN_OPTIONS=print_stacktrace=1 \
    "$side" -m pytest -n 2 --dist worksteal -m "not soak and not torch" --timeout 600 "${folders[@]}"

echo "== Python tests of threads, extension with -fsanitize=thread"
side=$("$python" scripts/side_env.py .venvs/tsan)
"$side" -m pip install -q --no-deps --no-build-isolation --force-reinstall \
    -Cbuild-dir=build/tsan -Ccmake.build-type=RelWithDebInfo -Ccmake.define.STEPMILL_SANITIZE=thread .
preload=$(for library in libtsan.so libstdc++.so; do g++ -print-file-name="$library"; done | paste -sd:)
# Python is not instrumented; the sanitizer sees the GIL through the locks of the C library. It ends a process that forks while
# it has threads, so contexts that fork are left out.
reports=$(mktemp -d)
LD_PRELOAD=$preload TSAN_OPTIONS="die_after_fork=0 report_signal_unsafe=0 log_path=$reports/race" \
    "${fixed_addresses[@]}" "$side" -m pytest -m "not soak" -k "not fork" --timeout 600 \
    tests/contract/test_pool_sync.py tests/contract/test_pool_async.py tests/crash/test_deadlines.py tests/crash/test_recovery_truncate.py
if grep -l "data race" "$reports"/* 2>/dev/null; then
    cat "$reports"/*
    exit 1
fi
rm -r "$reports"
