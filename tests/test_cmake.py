"""The engine built, installed and used with CMake, and what make installs."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bitnet_runtime import Model
from command import ARM_CC, CC, run
from docs_text import blocks
from packed_files import SMALL, packed_bytes

ROOT = Path(__file__).parent.parent
RUNTIME = ROOT / "runtime_c"
NO_X86 = [f"-DBITNET_HAS_{tier}=OFF" for tier in ("avx2", "avxvnni", "avx512vnni", "amx")]
"""As with a compiler that is too old for their flags: the engine then has its scalar kernels."""


def cmake_command() -> str:
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert cmake is not None, "cmake is missing: make test installs it"
    return cmake


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A shared and a static library, installed, then moved: nothing may know where it was made."""
    folder, cmake, prefixes = tmp_path_factory.mktemp("installed"), cmake_command(), {}
    for kind, shared in (("static", "OFF"), ("shared", "ON")):
        options = [f"-DBUILD_SHARED_LIBS={shared}", "-DCMAKE_BUILD_TYPE=Debug", f"-DCMAKE_C_COMPILER={CC}"]
        options += NO_X86  # which take nine tenths of the time
        run(cmake, "-S", ROOT, "-B", folder / "build", *options)
        run(cmake, "--build", folder / "build", "--parallel", "2")
        run(cmake, "--install", folder / "build", "--prefix", folder / "made" / kind)
        prefixes[kind] = folder / "moved" / kind
    (folder / "made").rename(folder / "moved")
    return prefixes


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A model, and what runtime_c/examples/generate.c says of the prompt 1 2 3."""
    path = tmp_path_factory.mktemp("model") / "model.bitnet"
    path.write_bytes(packed_bytes(SMALL))
    with Model.load(path) as model, model.session() as session:
        session.append([1, 2, 3])
        session.seed(1)
        lines = []
        for _ in range(5):
            lines.append(session.sample(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, repeat_penalty=1))
            session.append(lines[-1:])
    return path, "".join(f"{token}\n" for token in lines)


@pytest.mark.parametrize("kind", ["shared", "static"])
def test_cmake_finds_the_installed_library(
    kind: str, installed: dict[str, Path], generated: tuple[Path, str], tmp_path: Path
) -> None:
    """The examples are a project of their own, built as another would be."""
    model, expected = generated
    cmake = cmake_command()
    run(cmake, "-S", RUNTIME / "examples", "-B", tmp_path, f"-DCMAKE_PREFIX_PATH={installed[kind]}")
    run(cmake, "--build", tmp_path)
    assert [file.read_bytes() for file in installed[kind].rglob("LICENSE")] == [(ROOT / "LICENSE").read_bytes()]
    assert run(tmp_path / "example_generate", model, "5", "1", "2", "3") == expected
    assert run(tmp_path / "example_batch", model, "2", stdin="1 2 3\n4\n").count("\n") == 2


@pytest.mark.parametrize("kind", ["shared", "static"])
def test_pkg_config_finds_the_installed_library(
    kind: str, installed: dict[str, Path], generated: tuple[Path, str], tmp_path: Path
) -> None:
    if not shutil.which("pkg-config"):
        pytest.skip("no pkg-config")
    model, expected = generated
    (file,) = installed[kind].rglob("bitnet_runtime.pc")
    flags = run("env", f"PKG_CONFIG_PATH={file.parent}", "pkg-config", "--cflags", "--libs", "bitnet_runtime").split()
    version = run("env", f"PKG_CONFIG_PATH={file.parent}", "pkg-config", "--modversion", "bitnet_runtime").strip()
    assert version == importlib.metadata.version("bitnet-edge")
    program = tmp_path / "generate"
    run(CC, RUNTIME / "examples" / "generate.c", *flags, f"-Wl,-rpath,{file.parent.parent}", "-o", program)
    assert run(program, model, "5", "1", "2", "3") == expected


def test_programs_ask_for_the_minor_version_they_were_made_with(installed: dict[str, Path]) -> None:
    """As find_package does: another minor version may have other structs."""
    if not sys.platform.startswith("linux") or not shutil.which("readelf"):
        pytest.skip("no readelf")
    major, minor, _ = importlib.metadata.version("bitnet-edge").split(".")
    (library,) = installed["shared"].rglob("libbitnet_runtime.so")
    assert f"[libbitnet_runtime.so.{major}.{minor}]" in run("readelf", "-dW", library)


def test_places_of_an_installation_may_be_absolute(tmp_path: Path) -> None:
    """As in the builds of Nix and Guix."""
    places = [f"-DCMAKE_INSTALL_{name}=/opt/x/{name.lower()}" for name in ("LIBDIR", "INCLUDEDIR")]
    run(cmake_command(), "-S", ROOT, "-B", tmp_path, "-DCMAKE_INSTALL_PREFIX=/opt/x", *places)
    found = (tmp_path / "bitnet_runtime.pc").read_text().splitlines()
    assert found[:3] == ["prefix=/opt/x", "includedir=/opt/x/includedir", "libdir=/opt/x/libdir"]


@pytest.mark.parametrize("driver", ["", "2"], ids=["cmake", "scikit-build"])
def test_another_project_can_have_it_as_a_folder(driver: str, tmp_path: Path) -> None:
    """The other project's targets keep their names, its libraries stay static, and what collects its sources does not
    collect these. It may be a Python package that scikit-build-core builds."""
    (tmp_path / "CMakeLists.txt").write_text(f"""
        cmake_minimum_required(VERSION 3.20)
        project(game LANGUAGES C)
        set(CMAKE_UNITY_BUILD ON)
        file(WRITE "${{CMAKE_BINARY_DIR}}/rules.c" "int rules(void) {{ return 1; }}")
        add_library(engine "${{CMAKE_BINARY_DIR}}/rules.c")
        add_subdirectory("{ROOT}" bitnet)
        add_library(rules "${{CMAKE_BINARY_DIR}}/rules.c")
        target_link_libraries(rules PRIVATE bitnet_runtime::bitnet_runtime)
        foreach(name engine rules bitnet_runtime)
          get_target_property(type ${{name}} TYPE)
          message(STATUS "${{name}} is ${{type}}")
        endforeach()
        get_target_property(joined bitnet_engine UNITY_BUILD)
        message(STATUS "joined: ${{joined}}")
        """)
    options = [f"-DCMAKE_C_COMPILER={CC}", f"-DSKBUILD={driver}"]
    said = run(cmake_command(), "-S", tmp_path, "-B", tmp_path / "build", *options)
    assert "joined: OFF" in said
    assert re.findall(r"(\w+) is (\w+_LIBRARY)", said) == [
        ("engine", "STATIC_LIBRARY"), ("rules", "STATIC_LIBRARY"), ("bitnet_runtime", "STATIC_LIBRARY"),
    ]  # fmt: skip


def test_what_a_project_around_installs_is_found(tmp_path: Path) -> None:
    """Also if it names no build type; the engine is optimized then, too."""
    (tmp_path / "CMakeLists.txt").write_text(f"""
        cmake_minimum_required(VERSION 3.20)
        project(game LANGUAGES C)
        add_subdirectory("{ROOT}" bitnet)
        """)
    (tmp_path / "next").mkdir()
    (tmp_path / "next" / "CMakeLists.txt").write_text("""
        cmake_minimum_required(VERSION 3.20)
        project(next LANGUAGES C)
        file(WRITE "${CMAKE_BINARY_DIR}/main.c" "int main(void) { return 0; }")
        find_package(bitnet_runtime REQUIRED)
        add_executable(main "${CMAKE_BINARY_DIR}/main.c")
        target_link_libraries(main PRIVATE bitnet_runtime::bitnet_runtime)
        """)
    cmake, build, prefix = cmake_command(), tmp_path / "build", tmp_path / "prefix"
    run(cmake, "-S", tmp_path, "-B", build, f"-DCMAKE_C_COMPILER={CC}", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON")
    commands = json.loads((build / "compile_commands.json").read_text())
    assert all("-O3" in each["command"].split() for each in commands)
    (build / "bitnet" / "libbitnet_runtime.a").touch()  # to install it, it need not be built
    run(cmake, "--install", build, "--prefix", prefix)
    run(cmake, "-S", tmp_path / "next", "-B", tmp_path / "next" / "build", f"-DCMAKE_PREFIX_PATH={prefix}")


def test_a_compiler_for_another_machine_is_enough(tmp_path: Path) -> None:
    """Without a toolchain file, CMake assumes that it builds for this machine."""
    if not shutil.which(ARM_CC):
        pytest.skip(f"no {ARM_CC}")
    run(
        cmake_command(),
        "-S",
        ROOT,
        "-B",
        tmp_path,
        f"-DCMAKE_C_COMPILER={ARM_CC}",
        "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON",
    )
    commands = {
        Path(each["file"]).name: each["command"]
        for each in json.loads((tmp_path / "compile_commands.json").read_text())
    }
    assert "-march=armv8.2-a+dotprod+i8mm" in commands["i8mm.c"]
    assert "-mavx2" not in commands["avx2.c"]


def test_the_page_of_c_builds_for_another_machine(tmp_path: Path) -> None:
    """As shown, up to the program."""
    if not shutil.which(ARM_CC) or not shutil.which("pkg-config"):
        pytest.skip(f"no {ARM_CC}, or no pkg-config")
    fenced = [block.text for block in blocks((ROOT / "docs/c.md").read_text(encoding="utf-8")) if block.fenced]
    (shown,) = [text for text in fenced if "aarch64" in text]
    (program,) = [text for text in fenced if "int main(" in text]
    (tmp_path / "my_program.c").write_text(program, encoding="utf-8")
    shown = shown.replace("cmake ", f"'{cmake_command()}' ").replace("-S .", f"-S '{ROOT}'")
    quick = {**os.environ, "CMAKE_BUILD_TYPE": "Debug"}  # compiles in less time
    subprocess.run(["sh", "-ec", shown], cwd=tmp_path, env=quick, check=True, stdout=subprocess.DEVNULL)
    header = (tmp_path / "my_program").read_bytes()[:20]
    assert header[:4] == b"\x7fELF" and header[18] == 183  # AArch64


def test_the_page_of_c_keeps_the_engine_fast_in_a_project_for_debugging(tmp_path: Path) -> None:
    page = (ROOT / "docs/c.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"`(target_compile_options\(.*\))`", page)
    (tmp_path / "CMakeLists.txt").write_text(f"""
        cmake_minimum_required(VERSION 3.20)
        project(game LANGUAGES C)
        add_subdirectory("{ROOT}" bitnet)
        {line}
        """)
    options = ["-DCMAKE_BUILD_TYPE=Debug", f"-DCMAKE_C_COMPILER={CC}", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"]
    run(cmake_command(), "-S", tmp_path, "-B", tmp_path / "build", *options)
    commands = json.loads((tmp_path / "build/compile_commands.json").read_text())
    engine = [each["command"].split() for each in commands if "/runtime_c/src/" in each["file"]]
    assert engine and all("-g" in words and "-O3" in words and "-O0" not in words for words in engine)


@pytest.mark.parametrize(("build", "flags"), [("Debug", ""), ("MinSizeRel", ""), ("None", "-Os")])
def test_vector_code_leaves_no_vector_half_full(build: str, flags: str, tmp_path: Path) -> None:
    """Else each scalar instruction of the program behind it waits, on some CPUs for 100 cycles. GCC clears the upper
    halves only where it optimizes, and not for size."""
    if os.uname().machine != "x86_64":
        pytest.skip("of x86")
    options = [f"-DCMAKE_BUILD_TYPE={build}", f"-DCMAKE_C_FLAGS={flags}", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"]
    run(cmake_command(), "-S", ROOT, "-B", tmp_path, f"-DCMAKE_C_COMPILER={CC}", *options)
    commands = json.loads((tmp_path / "compile_commands.json").read_text())
    (command,) = [each["command"] for each in commands if Path(each["file"]).name == "avxvnni.c"]
    assembly = run(*shlex.split(command.partition(" -o ")[0]), "-S", "-o", "-", RUNTIME / "src/kernels/x86/avxvnni.c")
    assert "%ymm" in assembly and "vzeroupper" in assembly


@pytest.mark.parametrize("flag", ["-ffast-math", "-Ofast", "-funsafe-math-optimizations"])
def test_configure_refuses_fast_math(flag: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [cmake_command(), "-S", ROOT, "-B", tmp_path, f"-DCMAKE_C_FLAGS={flag}"], capture_output=True, text=True
    )
    assert done.returncode != 0
    assert f"CFLAGS contain {flag}" in done.stderr


def test_a_python_without_headers_is_named(tmp_path: Path) -> None:
    """CMake says of it that its interpreter is missing, too."""
    options = ["-DSKBUILD=2", f"-DPython_EXECUTABLE={sys.executable}", "-DPython_INCLUDE_DIR=/nonexistent"]
    done = subprocess.run([cmake_command(), "-S", ROOT, "-B", tmp_path, *options], capture_output=True, text=True)
    assert done.returncode != 0
    assert "Python.h was not found" in done.stderr and "apt install python3-dev" in done.stderr


needs_make = pytest.mark.skipif(not shutil.which("make"), reason="no make")


@needs_make
def test_make_installs_into_its_own_environment(tmp_path: Path) -> None:
    """There pip refuses to install for the user, as PIP_USER or pip's own configuration may ask."""
    (tmp_path / "ask.mk").write_text("ask: ; @echo $$PIP_USER\n")
    files = ["-f", "Makefile", "-f", tmp_path / "ask.mk"]
    assert run("env", "PIP_USER=1", "make", "--no-print-directory", "-C", ROOT, *files, "ask") == "0\n"


@needs_make
def test_make_notices_a_clone_that_was_moved(tmp_path: Path) -> None:
    """Nothing in the environment of a moved clone starts; that of a copy would start what is in the original."""
    clone = tmp_path / "it's a clone"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", clone / ".venv"], check=True)
    shutil.copy(ROOT / "Makefile", clone)
    (clone / ".venv" / "made").touch()
    command = ["make", "--no-print-directory", ".venv/made"]
    assert subprocess.run(command, cwd=clone).returncode == 0
    moved = clone.rename(tmp_path / "moved")
    done = subprocess.run(command, cwd=moved, capture_output=True, text=True)
    assert done.returncode == 2 and "error: .venv was made in another folder" in done.stderr
    assert (moved / ".venv" / "made").exists()


@needs_make
@pytest.mark.parametrize("instead", ["/nonexistent/python3", "another"])
def test_make_notices_that_the_python_of_its_environment_is_gone(instead: str, tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / ".venv"], check=True)
    (tmp_path / ".venv" / "made").touch()
    if instead == "another":  # the same name after an upgrade: it looks for packages elsewhere
        next((tmp_path / ".venv" / "lib").iterdir()).rename(tmp_path / ".venv" / "lib" / "python3.2")
    else:
        (tmp_path / ".venv" / "bin" / "python").unlink()
        (tmp_path / ".venv" / "bin" / "python").symlink_to(instead)
    command = ["make", "--no-print-directory", ".venv/made"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "error: the Python that .venv was made with is gone" in done.stderr


@needs_make
def test_make_leaves_the_environment_of_somebody_else_alone(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / ".venv"], check=True)
    mine = tmp_path / ".venv" / "mine"
    mine.touch()
    command = ["make", "--no-print-directory", ".venv/made", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "not from this Makefile" in done.stderr and mine.exists()
    (tmp_path / ".venv" / "bin" / "activate").unlink()  # written last: without it, what was killed is made anew
    assert subprocess.run(command, cwd=tmp_path).returncode == 0
    assert not mine.exists()
