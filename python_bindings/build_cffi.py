"""The cffi builder of `bitnet_runtime._native`.

The public C header is the only description of the C API: the region between its two cffi marks
is used verbatim, so that nothing can drift. In API mode a mismatched signature is only a C
compiler warning, so compile the output with -Werror.

    python -m cffi.gen_src exec-python python_bindings/build_cffi.py _native.c

writes C that includes "bitnet_runtime.h" and compiles to `bitnet_runtime/_native.abi3.so`. It
depends on this file and on the header; generate it at build time, never commit it.
"""

from pathlib import Path

from cffi import FFI

HEADER = Path(__file__).resolve().parent.parent / "runtime_c" / "include" / "bitnet_runtime.h"


def declarations(header: str) -> str:
    """The plain C between the cffi marks of the header's text, without BN_API."""
    _, begin, rest = header.partition("/* cffi-begin")
    region, end, _ = rest.partition("/* cffi-end")
    if not (begin and end):
        raise ValueError(f"{HEADER} has no region between 'cffi-begin' and 'cffi-end'")
    _, _, region = region.partition("*/")  # the rest of the first mark's comment
    return region.replace("BN_API ", "")


# How `bitnet_runtime.handles` frees: later calls from finalizers of the same garbage get NULL.
FREEING = """
static void drop_model(bn_model **cell) {
    bn_model_close(*cell);
    *cell = NULL;
}

static void drop_session(bn_session **cell) {
    bn_session_free(*cell);
    *cell = NULL;
}
"""

ffibuilder = FFI()
ffibuilder.cdef(declarations(HEADER.read_text(encoding="utf-8")))
ffibuilder.cdef("void drop_model(bn_model **cell); void drop_session(bn_session **cell);")
ffibuilder.set_source("bitnet_runtime._native", f'#include "bitnet_runtime.h"\n{FREEING}')
