"""The declarations of _driver.pxd against NVIDIA's own cuda.h."""

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

import cuckpt
from cuckpt import errors

pytestmark = pytest.mark.thread_unsafe(reason="each test runs a compiler")

PXD = (Path(cuckpt.__file__).parent / "_driver.pxd").read_text()
CUDA_H = (
    Path(importlib.util.find_spec("nvidia.cu13").submodule_search_locations[0])
    / "include/cuda.h"
)

STRUCTS = {
    "CUuuid": ["bytes"],
    "CUcheckpointGpuPair": ["oldUuid", "newUuid"],
    "CUcheckpointLockArgs": ["timeoutMs", "reserved0", "reserved1"],
    "CUcheckpointCheckpointArgs": ["customStorageInfo_out", "reserved"],
    "CUcheckpointRestoreArgs": [
        "gpuPairs",
        "gpuPairsCount",
        "padding0",
        "customStorageInfo_out",
        "reserved",
    ],
    "CUcheckpointUnlockArgs": ["reserved"],
    "CUcheckpointCustomStorageInfo": ["handle", "perDeviceData", "deviceCount"],
    "CUcheckpointCustomStoragePerDeviceData": ["devPtr", "size", "stream"],
}

PROTOTYPES = {
    "cuInit": "(unsigned int)",
    "cuDriverGetVersion": "(int *)",
    "cuDeviceGetCount": "(int *)",
    "cuDeviceGet": "(CUdevice *, int)",
    "cuDeviceGetUuid": "(CUuuid *, CUdevice)",
    "cuDevicePrimaryCtxRetain": "(CUcontext *, CUdevice)",
    "cuDevicePrimaryCtxRelease": "(CUdevice)",
    "cuCheckpointProcessGetState": "(int, CUprocessState *)",
    "cuCheckpointProcessGetRestoreThreadId": "(int, int *)",
    "cuCheckpointProcessLock": "(int, CUcheckpointLockArgs *)",
    "cuCheckpointProcessCheckpoint": "(int, CUcheckpointCheckpointArgs *)",
    "cuCheckpointProcessRestore": "(int, CUcheckpointRestoreArgs *)",
    "cuCheckpointProcessUnlock": "(int, CUcheckpointUnlockArgs *)",
    "cuCheckpointOperationComplete": "(CUcheckpointOperationHandle)",
}


def declared_c():
    """Return the C code that _driver.pxd puts into every module."""
    code = re.search(r'cdef extern from \*:\n +"""\n(.*?)"""', PXD, re.DOTALL)[1]
    return code.replace("\\\\", "\\")


def declared_enum(name):
    body = re.search(rf"ctypedef enum {name}:\n((?:    .+\n)+)", PXD)[1]
    return {n: int(v) for n, v in re.findall(r"(\w+) = (\d+)", body)}


def compile_with_cuda_h(tmp_path, suffix, statements):
    source = tmp_path / f"layout{suffix}"
    source.write_text(
        f"#include <cuda.h>\n#include <stddef.h>\n{declared_c()}\n"
        + "\n".join(statements)
    )
    return subprocess.run(
        [
            *("cc", "-fsyntax-only", "-Wall", "-Wextra", "-Werror"),
            *("-Wno-unused-function", f"-I{CUDA_H.parent}", source),
        ],
        capture_output=True,
        text=True,
    )


def layout_statements():
    for struct, fields in STRUCTS.items():
        ours = f"cuckpt_{struct}"
        yield f"CUCKPT_STATIC_ASSERT(sizeof({struct}) == sizeof({ours}));"
        for field in fields:
            place = f"offsetof({{}}, {field})"
            size = f"sizeof((({{}} *) 0)->{field})"
            for same in place, size:
                yield (
                    f"CUCKPT_STATIC_ASSERT({same.format(struct)} == "
                    f"{same.format(ours)});"
                )


@pytest.mark.parametrize("suffix", [".c", ".cpp"])
def test_structs_match_cuda_h(tmp_path, suffix):
    result = compile_with_cuda_h(tmp_path, suffix, layout_statements())
    assert result.returncode == 0, result.stderr


def test_comparison_notices_a_difference(tmp_path):
    wrong = (
        "CUCKPT_STATIC_ASSERT(sizeof(CUuuid) == sizeof(cuckpt_CUcheckpointGpuPair));"
    )
    result = compile_with_cuda_h(tmp_path, ".c", [wrong])
    assert "static assertion failed" in result.stderr


def test_every_struct_and_field_is_compared():
    declared = {}
    for name, body in re.findall(
        r'ctypedef struct (\w+)\s*\\?\s*"cuckpt_\w+":\n((?:        .+\n)+)', PXD
    ):
        declared[name] = re.findall(r"(\w+)(?:\[\d+\])?$", body, re.MULTILINE)
    assert declared == STRUCTS


def test_prototypes_match_cuda_h(tmp_path):
    statements = [
        f"_Static_assert(__builtin_types_compatible_p(__typeof__(&{name}), "
        f'CUresult (*){parameters}), "{name}");'
        for name, parameters in PROTOTYPES.items()
    ]
    result = compile_with_cuda_h(tmp_path, ".c", statements)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("enum", ["CUresult", "CUprocessState"])
def test_enum_values_match_cuda_h(tmp_path, enum):
    statements = [
        f"CUCKPT_STATIC_ASSERT({name} == {value});"
        for name, value in declared_enum(enum).items()
    ]
    result = compile_with_cuda_h(tmp_path, ".c", statements)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("enum", "tag", "prefix"),
    [
        ("CUresult", "cudaError_enum", "CUDA_"),
        ("CUprocessState", "CUprocessState_enum", "CU_PROCESS_STATE_"),
    ],
)
def test_enum_is_complete(enum, tag, prefix):
    body = re.search(rf"enum {tag} \{{(.*?)\}} {enum};", CUDA_H.read_text(), re.DOTALL)
    code = re.sub(r"/\*.*?\*/", "", body[1], flags=re.DOTALL)
    assert set(re.findall(rf"\b{prefix}\w+", code)) == set(declared_enum(enum))


def test_python_enums_are_the_c_ones():
    assert {f"CUDA_{r.name}": int(r) for r in errors.Result} == declared_enum(
        "CUresult"
    )
    assert {
        f"CU_PROCESS_STATE_{s.name}": int(s) for s in errors.ProcessState
    } == declared_enum("CUprocessState")
