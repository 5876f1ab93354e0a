#!/usr/bin/env bash
# Build cuckpt with sanitizers and run the tests on that build.
#
#   tests/sanitized.sh address,undefined [pytest arguments]
#   tests/sanitized.sh thread [pytest arguments]
#
# Needs what '.[test]' installs, in the active environment.
set -euo pipefail
cd "$(dirname "$0")/.."
kind=$1
shift
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# In a copy: objects of an earlier build are not built again for other flags.
cp -r LICENSE README.md pyproject.toml setup.py cuckpt "$work"
# Without the free list, so that a freed struct is really freed.
CFLAGS="-fsanitize=$kind -fno-sanitize-recover=all -fno-omit-frame-pointer -O1 -g"
export CFLAGS="$CFLAGS -DCYTHON_USE_FREELISTS=0"
python -m pip install -q --no-build-isolation --no-deps --target "$work/site" "$work"
unset CFLAGS
# The interpreter is not instrumented: the runtime library comes first, leaks of
# the interpreter are not reported, and its allocator does not hide errors. Left
# out: tests that compare memory use or run many processes, such as run a compiler or
# the command line, and Numba, whose compiler is large.
case $kind in
    *address*) runtime=libasan.so ;;
    *thread*) runtime=libtsan.so ;;
esac
many=tests/test_simulator_processes.py
many+=::test_two_hundred_targets_suspend_and_resume_and_leave_nothing
LD_PRELOAD="$(gcc -print-file-name=$runtime) $(gcc -print-file-name=libstdc++.so.6)" \
ASAN_OPTIONS=detect_leaks=0 \
TSAN_OPTIONS=halt_on_error=1 \
PYTHONMALLOC=malloc PYTHONPATH="$work/site" \
    python -P -m pytest --ignore tests/test_cython.py --ignore tests/test_examples.py \
    --ignore tests/test_simulator_threads.py --ignore tests/test_simulator_numba.py \
    --ignore tests/test_jobs.py \
    --ignore tests/test_cli_contract.py --ignore tests/test_cli_shim.py \
    --deselect tests/test_lifetime.py::test_nothing_leaks \
    --deselect "$many" \
    --deselect "tests/test_simulator_command.py::test_scenarios_of_the_real_driver_pass[13.0-command-line]" \
    --deselect tests/test_lifetime.py::test_memory_is_the_same_after_many_calls "$@"
