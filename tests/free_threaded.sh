#!/usr/bin/env bash
# Run the tests on a Python without a GIL, each in four threads at once.
#
#   tests/free_threaded.sh             builds such a Python from Debian's source
#   tests/free_threaded.sh PYTHON      uses this one
#   tests/free_threaded.sh --build DIR only builds it: DIR/bin/python3.13t
#
# The build takes three minutes, and wants apt, a C compiler, and the packages that
# Python is built with (.ci/run names them). All is done in a temporary folder.
# cuda.bindings has no wheels for it, so the comparisons with it are left out.
set -euo pipefail
python=
if [ "${1:-}" = --build ]; then
    prefix=$(realpath -m "$2")
else
    python=${1:+$(realpath -s "$(command -v "$1")")}
fi
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Build it in a folder.
build_python() {
    local prefix=$1
    local mirror
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' |
        grep -m 1 '/debian/\?$')
    local keys=/usr/share/keyrings/debian-archive-keyring.gpg
    echo "deb-src [signed-by=$keys] $mirror trixie main" >"$work/sources.list"
    mkdir -p "$work/apt/lists/partial" "$work/apt/cache/archives/partial"
    local apt=(
        apt-get -q -o "Dir::Etc::SourceList=$work/sources.list"
        -o Dir::Etc::SourceParts=/dev/null -o "Dir::State::Lists=$work/apt/lists"
        -o "Dir::Cache=$work/apt/cache" -o APT::Sandbox::User=root
    )
    "${apt[@]}" update
    (cd "$work" && "${apt[@]}" source --download-only python3.13)
    mkdir "$work/source"
    tar -xf "$work"/python3.13_*.orig.tar.xz --strip-components=1 -C "$work/source"
    (
        cd "$work/source"
        ./configure -q --disable-gil --prefix="$prefix"
        make -s -j"$(nproc)"
        make -s install
    ) >"$work/build.log" 2>&1 || {
        tail -50 "$work/build.log"
        exit 1
    }
}

if [ -n "${prefix:-}" ]; then
    build_python "$prefix"
    exit
fi
if [ -z "$python" ]; then
    build_python "$work/python"
    python=$work/python/bin/python3.13t
fi
"$python" -m venv "$work/venv"
PATH=$work/venv/bin:$PATH
# Only wheels: some packages have none for it in their latest version.
pip install -q --disable-pip-version-check --only-binary :all: 'cython>=3.1' hypothesis \
    numpy 'nvidia-cuda-runtime>=13.5,<14' nvidia-ml-py pytest pytest-run-parallel 'setuptools>=77'
mkdir "$work/cuckpt"
cp -r LICENSE README.md pyproject.toml setup.py cuckpt "$work/cuckpt"
pip install -q --disable-pip-version-check --no-build-isolation --no-deps "$work/cuckpt"
python -P -W error -c '
import sys, cuckpt.driver
assert not sys._is_gil_enabled(), "a module of cuckpt turned the GIL on"
print(sys.version)'
# What runs many programs, and has no threads, is left out as well.
many=tests/test_simulator_processes.py
many+=::test_two_hundred_targets_suspend_and_resume_and_leave_nothing
PYTHON_GIL=0 python -P -m pytest --parallel-threads=4 \
    --ignore tests/test_parity.py --ignore tests/test_simulator_peers.py \
    --ignore tests/test_simulator_cuda_core.py --ignore tests/test_simulator_numba.py \
    --ignore tests/test_simulator_threads.py --ignore tests/test_jobs.py \
    --ignore tests/test_cli_contract.py --ignore tests/test_cli_shim.py \
    --deselect "$many" \
    --deselect tests/test_simulator_command.py::test_scenarios_of_the_real_driver_pass
