"""A simulated machine with GPUs, whose driver can checkpoint and restore.

The driver is a ``libcuda.so.1`` of its own, with a ``libnvidia-ml.so.1`` (NVML)
beside it. Programs find them by ``LD_LIBRARY_PATH``; which machine they run on
stands in ``CUCKPT_SIMULATOR``.
Every process of a machine shares its GPUs: one can checkpoint another.
"""

from cuckpt.simulator.fault import Fault
from cuckpt.simulator.gpu import DEFAULT_MEMORY_BYTES, Gpu
from cuckpt.simulator.machine import (
    LIBRARY,
    NVML_LIBRARY,
    Machine,
    SimulatorError,
)

__all__ = [
    "DEFAULT_MEMORY_BYTES",
    "LIBRARY",
    "NVML_LIBRARY",
    "Fault",
    "Gpu",
    "Machine",
    "SimulatorError",
]
