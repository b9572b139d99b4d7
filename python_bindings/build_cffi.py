"""The cffi builder of `bitnet_runtime._native`.

C headers are the only description of the C API: the region between the two cffi marks of each
is used verbatim, so that nothing can drift. In API mode a mismatched signature is only a C
compiler warning, so compile the output with -Werror.

    python -m cffi.gen_src exec-python python_bindings/build_cffi.py _native.c

writes C that includes "bitnet_runtime.h" and compiles to `bitnet_runtime/_native.abi3.so`. It
depends on this file and on the headers; generate it at build time, never commit it.
"""

from pathlib import Path

from cffi import FFI

RUNTIME = Path(__file__).resolve().parent.parent / "runtime_c"
HEADERS = [
    RUNTIME / "include/bitnet_runtime.h",
    RUNTIME / "src/kernels/training.h",
    RUNTIME / "src/training/training.h",
]


def declarations(header: Path) -> str:
    """The plain C between the cffi marks of a header, without BN_API."""
    _, begin, rest = header.read_text(encoding="utf-8").partition("/* cffi-begin")
    region, end, _ = rest.partition("/* cffi-end")
    if not (begin and end):
        raise ValueError(f"{header} has no region between 'cffi-begin' and 'cffi-end'")
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
for header in HEADERS:
    ffibuilder.cdef(declarations(header))
ffibuilder.cdef("void drop_model(bn_model **cell); void drop_session(bn_session **cell);")
ffibuilder.set_source(
    "bitnet_runtime._native", f'#include "bitnet_runtime.h"\n#include "training/training.h"\n{FREEING}'
)
