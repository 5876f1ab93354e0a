from typing import SupportsIndex, TypeAlias

from cuckpt import errors, structs
from cuckpt.errors import *
from cuckpt.structs import *
from cuckpt.structs import (
    CustomStorageArgs,
    checkpoint_checkpoint_args_dtype as checkpoint_checkpoint_args_dtype,
    checkpoint_custom_storage_info_dtype as checkpoint_custom_storage_info_dtype,
    checkpoint_custom_storage_per_device_data_dtype as checkpoint_custom_storage_per_device_data_dtype,
    checkpoint_gpu_pair_dtype as checkpoint_gpu_pair_dtype,
    checkpoint_lock_args_dtype as checkpoint_lock_args_dtype,
    checkpoint_restore_args_dtype as checkpoint_restore_args_dtype,
    checkpoint_unlock_args_dtype as checkpoint_unlock_args_dtype,
    uuid_dtype as uuid_dtype,
)

# None, an address, or a struct object of cuda.bindings, which has no types.
_Foreign: TypeAlias = SupportsIndex | None

def init(flags: SupportsIndex = 0) -> None: ...
def driver_get_version() -> int: ...
def device_get_count() -> int: ...
def device_get(ordinal: SupportsIndex) -> int: ...
def device_get_uuid_v2(dev: SupportsIndex) -> Uuid: ...
def device_primary_ctx_retain(dev: SupportsIndex) -> int: ...
def device_primary_ctx_release_v2(dev: SupportsIndex) -> None: ...
def checkpoint_process_get_state(pid: SupportsIndex) -> ProcessState | int: ...
def checkpoint_process_get_restore_thread_id(pid: SupportsIndex) -> int: ...
def checkpoint_process_lock(
    pid: SupportsIndex, args: CheckpointLockArgs | _Foreign = None
) -> None: ...
def checkpoint_process_checkpoint(
    pid: SupportsIndex, args: CheckpointCheckpointArgs | _Foreign = None
) -> None: ...
def checkpoint_process_restore(
    pid: SupportsIndex, args: CheckpointRestoreArgs | _Foreign = None
) -> None: ...
def checkpoint_process_unlock(
    pid: SupportsIndex, args: CheckpointUnlockArgs | _Foreign = None
) -> None: ...
def checkpoint_operation_complete(
    handle: SupportsIndex | CheckpointCustomStorageInfo | CustomStorageArgs,
) -> None: ...
def library_path() -> str: ...
def has_custom_storage() -> bool: ...

__all__ = [
    "checkpoint_operation_complete",
    "checkpoint_process_checkpoint",
    "checkpoint_process_get_restore_thread_id",
    "checkpoint_process_get_state",
    "checkpoint_process_lock",
    "checkpoint_process_restore",
    "checkpoint_process_unlock",
    "device_get",
    "device_get_count",
    "device_get_uuid_v2",
    "device_primary_ctx_release_v2",
    "device_primary_ctx_retain",
    "driver_get_version",
    "has_custom_storage",
    "init",
    "library_path",
]
__all__ += errors.__all__
__all__ += structs.__all__
