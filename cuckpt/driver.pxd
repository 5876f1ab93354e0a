"""For other Cython code: the C functions and types of cuckpt._driver.

    from cuckpt.driver cimport CUresult, cuCheckpointProcessRestore

They are named as in `cuda.bindings.cydriver`. The struct classes are in
`cuckpt.structs`.
"""

from cuckpt._driver cimport *
