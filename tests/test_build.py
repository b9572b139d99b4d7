"""The build: headers stand alone, the library exports its API and nothing else, versions agree, and a plain `cc *.c`
gives a correct engine."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from bitnet_export import random_model
from bitnet_runtime import Model, _native
from bitnet_runtime._native import ffi, lib
from command import ARM_CC, CC, run
from docs_text import blocks
from packed_files import SMALL, packed_bytes
from vision_models import CAUSAL, PALIGEMMA, TOWERS

ROOT = Path(__file__).parent.parent
RUNTIME = ROOT / "runtime_c"
HEADER = RUNTIME / "include" / "bitnet_runtime.h"
INCLUDES = [f"-I{HEADER.parent}", f"-I{RUNTIME / 'src'}"]  # what docs/c.md gives the compiler
SOURCES = [*RUNTIME.glob("src/**/*.c")]  # those of other machines compile to nothing


def declared_functions() -> set[str]:
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)
    return set(re.findall(r"^BN_API[^(]*?\b(bn_\w+)\(", text, flags=re.MULTILINE))


PLAIN = ["-O2", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden", *INCLUDES]


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Path]:
    """The engine's sources, compiled as docs/c.md promises that they can be without CMake: with no ISA flags."""
    folder = tmp_path_factory.mktemp("plain")
    compiled = {source: folder / f"{number}.o" for number, source in enumerate(SOURCES)}
    for source, target in compiled.items():
        run(CC, *PLAIN, "-c", source, "-o", target)
    return compiled


@pytest.fixture(scope="module")
def plain_library(objects: dict[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("plain") / "libbitnet_runtime.so"
    run(CC, "-shared", *objects.values(), "-lm", "-lpthread", "-o", library)
    return library


def logits(library: ctypes.CDLL, model: Path, tokens: list[int]) -> bytes:
    """The bits of one row of logits for each token, straight through the C API."""
    handle, session, detail = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.create_string_buffer(256)
    ids = (ctypes.c_int32 * len(tokens))(*tokens)
    out = np.full((len(tokens), SMALL.vocab_size), np.nan, np.float32)
    assert library.bn_model_open(bytes(model), None, ctypes.byref(handle), detail) == 0, detail.value
    assert library.bn_session_new(handle, None, ctypes.byref(session)) == 0
    assert library.bn_session_append(session, ids, len(tokens), 2, out.ctypes.data_as(ctypes.c_void_p)) == 0
    library.bn_session_free(session)
    library.bn_model_close(handle)
    assert np.isfinite(out).all()
    return out.tobytes()


@pytest.mark.parametrize(("language", "compiler"), [("c", CC), ("c++", os.environ.get("CXX", "c++"))])
def test_header_compiles_alone(language: str, compiler: str) -> None:
    if not shutil.which(compiler):
        pytest.skip(f"no {compiler}")
    strict = ["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only"]
    run(compiler, *strict, f"-I{HEADER.parent}", "-x", language, "-", stdin="#include <bitnet_runtime.h>\n")


X86_PARTS = ("f", "bw", "dq", "vl", "vnni")


@pytest.mark.parametrize(
    ("folder", "compiler", "flags"),
    [
        ("src", CC, []),
        ("src/kernels", CC, []),
        ("src/kernels/scalar", CC, []),
        ("src/kernels/x86", CC, ["-mf16c", "-mfma", "-mpclmul", *(f"-mavx512{part}" for part in X86_PARTS)]),
        ("src/kernels/arm", ARM_CC, ["-march=armv8.2-a+dotprod+i8mm"]),
    ],
)
def test_headers_inside_compile_alone(folder: str, compiler: str, flags: list[str]) -> None:
    """And they may be included twice. One that cannot is a template: its name and the next test say so."""
    if "x86" in folder and os.uname().machine != "x86_64":
        pytest.skip("of x86")
    if not shutil.which(compiler):
        pytest.skip(f"no {compiler}")
    headers = [path for path in (RUNTIME / folder).glob("*.h") if not path.stem.endswith("_template")]
    assert headers
    strict = ["-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-Wno-unused-function", "-fsyntax-only", *flags]
    for header in headers:
        twice = f'#include "{header}"\n' * 2
        run(compiler, *strict, *INCLUDES, "-x", "c", "-", stdin=twice)


def test_no_source_warns_where_a_project_asks_for_iso_c() -> None:
    """Options of the project whose folder this is are those of its sources, too; -Werror often is among them."""
    x86 = ["-mavx2", "-mf16c", "-mfma", "-mpclmul", *(f"-mavx512{part}" for part in X86_PARTS)]
    flags = x86 if os.uname().machine == "x86_64" else ["-march=armv8.2-a+dotprod+i8mm"]
    run(CC, "-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only", *flags, *INCLUDES, *SOURCES)


TEMPLATES = sorted(RUNTIME.glob("src/**/*_template.h"))


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: str(path.stem))
def test_templates_name_their_parameters(path: Path) -> None:
    """In one block at the top; they are checked before any use and undefined at the end."""
    text = path.read_text(encoding="utf-8")
    comment, _, code = text.partition("*/")
    parameters = set(re.findall(r"^ \*   ([A-Z][A-Z0-9_]+)", comment.partition("Parameters:")[2], re.MULTILINE))
    asked = set(re.findall(r"!defined\((\w+)\)|#ifndef (\w+)|#ifdef (\w+)", code))
    assert parameters
    assert parameters <= set(re.findall(r"^#undef (\w+)", code, re.MULTILINE))
    assert parameters == {name for names in asked for name in names if name}
    command = [CC, *INCLUDES, "-fsyntax-only", "-x", "c", str(path)]
    assert '#error "a parameter is missing"' in subprocess.run(command, capture_output=True, text=True).stderr


def test_the_module_is_hardened() -> None:
    """Read-only tables of addresses, canaries on the stack, checked copies."""
    if not sys.platform.startswith("linux") or not shutil.which("readelf"):
        pytest.skip("no readelf")
    module = Path(str(_native.__file__))
    assert "GNU_RELRO" in run("readelf", "-lW", module)
    assert "BIND_NOW" in run("readelf", "-dW", module)
    symbols = run("readelf", "-sW", "--dyn-syms", module)
    if "__asan_init" not in symbols:  # make sanitize
        assert "__stack_chk_fail" in symbols or "__stack_chk_guard" in symbols
        assert "__vsnprintf_chk" in symbols or "GLIBC" not in symbols


def test_the_module_calls_its_own_functions(tmp_path: Path) -> None:
    """Even if the program that loads it has the same functions, perhaps of another version."""
    if not sys.platform.startswith("linux") or "LD_PRELOAD" in os.environ:  # make sanitize
        pytest.skip("no LD_PRELOAD")
    other = tmp_path / "other.so"
    source = 'const char *bn_version(void) { return "another"; }'
    run(CC, "-shared", "-fPIC", "-x", "c", "-", "-o", other, stdin=source)
    program = "from bitnet_runtime._native import ffi, lib; print(ffi.string(lib.bn_version()).decode())"
    said = run("env", f"LD_PRELOAD={other}", sys.executable, "-c", program)
    assert said.strip() == importlib.metadata.version("bitnet-edge")


@pytest.mark.parametrize("flag", ["-Ofast", "-ffast-math", "-ffinite-math-only", "-mfpmath=387"])
def test_flags_that_change_results_are_refused(flag: str) -> None:
    if flag == "-mfpmath=387" and os.uname().machine != "x86_64":
        pytest.skip("of x86")
    elementary = RUNTIME / "src" / "kernels" / "elementary.c"
    command = [CC, "-O2", flag, *INCLUDES, "-fsyntax-only", str(elementary)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0
    assert "#error" in done.stderr or "unknown argument" in done.stderr or "not supported" in done.stderr, done.stderr


def test_a_build_that_fuses_products_and_sums_is_refused(objects: dict[Path, Path], tmp_path: Path) -> None:
    """With flags that the preprocessor does not see. Where the compiler does not fuse by default, these do not
    either."""
    machine = os.uname().machine
    if machine not in ("x86_64", "aarch64") or ffi.string(lib.bn_isa_name(0)) == b"scalar":
        pytest.skip("no fused instruction")
    library, model = tmp_path / "fused.so", tmp_path / "model.bitnet"
    model.write_bytes(packed_bytes())
    fma = ["-mfma"] if machine == "x86_64" else []
    asks = RUNTIME / "src" / "model.c"
    others = [target for source, target in objects.items() if source != asks]
    run(CC, *PLAIN, *fma, "-ffp-contract=fast", "-shared", asks, *others, "-lm", "-lpthread", "-o", library)
    handle, detail = ctypes.c_void_p(), ctypes.create_string_buffer(256)
    status = ctypes.CDLL(str(library)).bn_model_open(bytes(model), None, ctypes.byref(handle), detail)
    assert status == lib.BN_ERR_UNSUPPORTED
    assert b"-ffp-contract=off" in detail.value


def test_library_exports_what_the_header_declares(plain_library: Path) -> None:
    if not shutil.which("nm"):
        pytest.skip("no nm")
    symbols = run("nm", "-D", "--defined-only", plain_library)
    exported = {line.split()[-1] for line in symbols.splitlines()}
    assert exported - {"_init", "_fini"} == declared_functions()


def test_plain_build_computes_the_same_bits(plain_library: Path, tmp_path: Path) -> None:
    """Portable C without CMake against the installed engine on the best tier of this CPU."""
    model, tokens = tmp_path / "model.bitnet", [1, 18, 0, 7, 7, 3, 11, 2, 5]
    model.write_bytes(packed_bytes(SMALL))
    plain = ctypes.CDLL(str(plain_library))
    plain.bn_isa_name.restype = ctypes.c_char_p
    assert plain.bn_isa_name(0) in (b"scalar", b"neon")
    with Model.load(model) as installed, installed.session() as session:
        expected = session.append(tokens, logits="all")
    assert logits(plain, model, tokens) == expected.tobytes()


def test_example_of_the_header_runs(plain_library: Path, tmp_path: Path) -> None:
    """Unchanged: it ends when its context is full, or earlier at the end token."""
    example = "\n".join(re.findall(r"^ \*     (.*)$", HEADER.read_text().partition("Determinism.")[0], re.MULTILINE))
    assert "bn_session_append" in example
    program = f"""#include <bitnet_runtime.h>
        #include <stdio.h>
        #include <stdlib.h>
        int main(int argc, char **argv) {{
            const int32_t prompt[] = {{1, 2, 3}}, n_prompt = 3, eos = atoi(argv[argc - 1]);
            {example}
            printf("%d %d", (int)status, (int)token);
        }}"""
    library = plain_library.parent
    strict = ["-Wall", "-Wextra", "-Werror"]
    run(
        CC, *strict, f"-I{HEADER.parent}", "-x", "c", "-", "-o", tmp_path / "example",
        f"-L{library}", f"-Wl,-rpath,{library}", "-lbitnet_runtime", stdin=program,
    )  # fmt: skip
    (tmp_path / "model.bitnet").write_bytes(packed_bytes(SMALL))

    def ends_with(eos: object) -> tuple[int, int]:
        done = subprocess.run([tmp_path / "example", str(eos)], cwd=tmp_path, capture_output=True, timeout=60)
        status, token = map(int, done.stdout.split())
        return status, token

    context_full = 16
    status, token = ends_with(-1)
    assert status == context_full
    assert ends_with(token) == (0, token)


def test_versions_agree(plain_library: Path) -> None:
    library = ctypes.CDLL(str(plain_library))
    library.bn_version.restype = ctypes.c_char_p
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    cmake = re.search(r"VERSION (\d+\.\d+\.\d+) LANGUAGES", (ROOT / "CMakeLists.txt").read_text())
    changes = re.search(r"^## \[(\d+\.\d+\.\d+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert cmake is not None and changes is not None
    versions = {
        "pyproject.toml": project["version"],
        "CMakeLists.txt": cmake[1],
        "the newest in CHANGELOG.md": changes[1],
        "bn_version()": library.bn_version().decode(),
        "installed": importlib.metadata.version("bitnet-edge"),
    }
    assert len(set(versions.values())) == 1, versions


def test_the_example_of_images_says_what_python_says(plain_library: Path, tmp_path: Path) -> None:
    program, ppm, pixels = tmp_path / "image", tmp_path / "a cat.ppm", bytes(range(196)) * 3  # 14 × 14 × RGB
    example = RUNTIME / "examples" / "image.c"
    run(CC, "-std=c11", example, *INCLUDES, plain_library, f"-Wl,-rpath,{plain_library.parent}", "-o", program)
    ppm.write_bytes(b"P6 14 14 255\n" + pixels)
    models = {
        "decoder": PALIGEMMA,
        "causal": CAUSAL,
        "towers": TOWERS.replace(similarity_scale=9.0, similarity_bias=-4.0),
    }
    for name, config in models.items():
        random_model(config, tmp_path / name)
    for name in ("decoder", "causal"):
        with Model.load(tmp_path / name) as model:
            answer = model.generate([250, 7, 8], images=ppm, max_tokens=5, temperature=0).tokens
        assert run(program, tmp_path / name, ppm, "5", "7", "8").split() == [str(token) for token in answer]
    with Model.load(tmp_path / "towers") as model:
        fits = float(model.similarity(ppm, [[7, 8]])[0, 0])
    # Printed with 6 digits; the fp32 sum of 36 products in another order
    assert abs(float(run(program, tmp_path / "towers", ppm, "0", "7", "8")) - fits) < 1e-5

    wrong = {
        b"P6 15 14 255\n": "expected a PPM file (P6) of 14 x 14 pixels",
        b"P5 14 14 255\n": "expected a PPM file",
        b"P6 14 14 65535\n": "expected a PPM file",
        b"P6 14 14 255": "expected a PPM file",
        b"P6 14 14 255\n" + pixels[1:]: "ends after 587 of 588 bytes",
    }
    for content, message in wrong.items():
        ppm.write_bytes(content)
        done = subprocess.run([program, tmp_path / "decoder", ppm, "5", "7"], capture_output=True, text=True)
        assert done.returncode == 1 and message in done.stderr, content


@pytest.fixture(scope="module")
def compiled(plain_library: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with example_batch, the program of docs/c.md, and a model with room for eight tokens."""
    folder = tmp_path_factory.mktemp("programs")
    (shown,) = [block.text for block in blocks((ROOT / "docs/c.md").read_text()) if "int main(" in block.text]
    (folder / "my_program.c").write_text(shown)
    for source in (RUNTIME / "examples" / "batch.c", folder / "my_program.c"):
        linked = [plain_library, f"-Wl,-rpath,{plain_library.parent}"]
        run(CC, "-std=c11", "-Wall", "-Wextra", "-Werror", source, *INCLUDES, *linked, "-o", folder / source.stem)
    random_model(SMALL.replace(max_context=8), folder / "model.bitnet")
    return folder


def test_the_program_of_the_docs_says_why_it_ends(compiled: Path) -> None:
    done = subprocess.run([compiled / "my_program"], cwd=compiled, capture_output=True, text=True)
    assert done.returncode == 1 and len(done.stdout.split()) == 8
    assert done.stderr == "more tokens than the session's context holds\n"


@pytest.mark.parametrize(
    ("lines", "texts"), [("1\n" * 16, 16), ("\n1 2\n" * 16 + "\n \t\n", 16), ("1\n" * 17, 0)], ids=["16", "blank", "17"]
)
def test_the_example_of_batches_takes_16_texts(compiled: Path, lines: str, texts: int) -> None:
    words = [compiled / "batch", compiled / "model.bitnet", "2"]
    done = subprocess.run(words, input=lines, capture_output=True, text=True)
    assert (done.returncode, done.stdout.count("\n")) == (0 if texts else 2, texts)
    assert ("more than 16 lines with token ids" in done.stderr) == (not texts)


def test_the_example_of_batches_takes_no_part_of_a_line(compiled: Path) -> None:
    words = [compiled / "batch", compiled / "model.bitnet", "2"]
    done = subprocess.run(words, input="1" + " " * (1 << 16) + "2\n", capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "a line has more than 65534 characters" in done.stderr
    done = subprocess.run(words, input="1" + " " * 65533 + "\n", capture_output=True, text=True)
    assert done.returncode == 0


def test_runtime_needs_no_torch() -> None:
    """`import bitnet_runtime` and the command line's help work where torch cannot be imported."""
    block = "import sys; sys.modules['torch'] = None; "
    run(sys.executable, "-c", block + "import bitnet_runtime; bitnet_runtime.Model")
    run(
        sys.executable,
        "-c",
        block + "sys.argv = ['bitnet', 'generate', '--help']; import bitnet_cli; bitnet_cli.main()",
    )
