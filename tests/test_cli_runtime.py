"""`bitnet generate | chat | embed | bench` as a user runs them."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import bitnet_cli
from bitnet.presets import PRESETS
from bitnet_export import random_adapter, random_model
from bitnet_runtime import InvalidParameterError, Model
from bitnet_runtime.bench import table
from bitnet_runtime.model import KV_TYPES
from command import bitnet
from runtime_models import TEMPLATE, byte_tokenizer, scripted_model, small_model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `small` (random), `script` (answers "Hello world"), `chat` (with template), `slow`."""
    folder = tmp_path_factory.mktemp("models")
    small_model(folder).rename(folder / "small")
    small_model.cache_clear()
    scripted_model(folder / "script", [b"Hello", b" wor", b"ld"])
    scripted_model(folder / "chat", [b"Good", b" day"], template=TEMPLATE, max_context=256)
    slow = PRESETS["tiny"].replace(max_context=1 << 16)
    random_model(slow, folder / "slow", tokenizer=byte_tokenizer().to_str().encode())
    return folder


def test_the_answer_goes_to_stdout_and_the_rest_to_stderr(models: Path) -> None:
    done = bitnet("generate", models / "script", "-p", "go", "-s", 5)
    assert (done.returncode, done.stdout) == (0, "Hello world\n")
    assert re.search(
        r"^Prompt: 2 tokens, [\d.]+ tok/s · Generation: 3 tokens, [\d.]+ tok/s · Peak memory: [\d.]+ GB · Seed: 5$",
        done.stderr,
        re.M,
    )
    assert "<Model script:" in done.stderr


def test_every_way_to_give_model_and_prompt(models: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt").write_text("go", encoding="utf-8")
    for args, stdin in (
        (("-m", models / "script", "--prompt", "go"), ""),
        ((models / "script", "-f", tmp_path / "prompt"), ""),
        ((models / "script",), "go"),
    ):
        done = bitnet("generate", *args, "--quiet", stdin=stdin)
        assert (done.returncode, done.stdout, done.stderr) == (0, "Hello world\n", "")


def test_json(models: Path) -> None:
    done = bitnet("generate", models / "script", "-p", "go", "--json", "--stop", " w", "-s", 3)
    found = json.loads(done.stdout)
    assert found["text"] == "Hello"
    assert (found["finish_reason"], found["seed"]) == ("stop", 3)
    assert found["usage"] == {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4, "reasoning_tokens": 0}
    assert found["timings"]["generation_tokens_per_second"] > 0


def test_vectors_of_texts(models: Path, tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("one text\ntwo\x0btexts\n", encoding="utf-8")
    with Model.load(models / "small") as model:
        vectors = model.embed(["one text", "two\x0btexts"], pooling="mean")
    common = models / "small", "--pooling", "mean", "--quiet"
    for args, stdin in (
        (("-p", "one text", "--text", "two\x0btexts"), ""),
        (("-f", tmp_path / "lines"), ""),
        ((), "\ufeffone text\r\ntwo\x0btexts"),  # as editors of Windows write it
    ):
        done = bitnet("embed", *common, *args, stdin=stdin)
        assert done.returncode == 0 and not done.stderr
        assert np.array_equal(np.array([json.loads(line) for line in done.stdout.splitlines()], np.float32), vectors)
    alike = json.loads(bitnet("embed", *common, "-f", tmp_path / "lines", "--similarity", "--json").stdout)
    assert alike["texts"] == ["one text", "two\x0btexts"]
    assert np.allclose(alike["similarity"], vectors @ vectors.T, atol=1e-6)
    table = bitnet("embed", *common, "-f", tmp_path / "lines", "--similarity").stdout.splitlines()
    assert [line.split()[0] for line in table] == ["1.0000", f"{vectors[1] @ vectors[0]:.4f}"]


def test_a_prompt_in_a_locale_without_its_characters(models: Path) -> None:
    """It is UTF-8 all the same; the bytes of another encoding are refused."""
    generate = [sys.executable, "-m", "bitnet", "generate", models / "small", "-n", "4", "--json", "-s", "1"]
    asked = {"env": os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0"}, "capture_output": True, "text": True}
    done = subprocess.run([*generate, "-p", "xé".encode(), "--stop", "é".encode()], **asked)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["usage"]["prompt_tokens"] == 3
    done = subprocess.run([*generate, "-p", b"x\xe9"], **asked)
    assert done.returncode == 2
    assert r"-p/--prompt: 'x\udce9' is neither UTF-8 nor ascii, the encoding of the locale" in done.stderr


def test_vectors_with_an_adapter(models: Path, tmp_path: Path) -> None:
    random_adapter(models / "small", tmp_path / "a.bitnet", rank=4)
    common = "--pooling", "mean", "--quiet", "--adapter", tmp_path / "a.bitnet"
    with Model.load(models / "small", adapters=[tmp_path / "a.bitnet"]) as model:
        expected = model.embed("one text", pooling="mean", adapter="a")[0]
    found = json.loads(bitnet("embed", models / "small", *common, "-p", "one text").stdout)
    assert np.array_equal(np.array(found, np.float32), expected)
    done = bitnet("embed", models / "small", *common, "-i", "a.png")
    assert done.returncode == 2 and "--adapter changes the vectors of texts alone" in done.stderr
    done = bitnet("embed", models / "small", "--pooling", "mean", "-i", "a.png")
    assert done.returncode == 2 and "--pooling changes the vectors of texts alone" in done.stderr


def test_an_unknown_instruction_set(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BITNET_ISA", "z80")
    with pytest.raises(InvalidParameterError, match=r"^BITNET_ISA is 'z80', expected one of .*scalar$"):
        Model.load(models / "small")
    with Model.load(models / "small", isa="scalar") as model:
        assert model.isa == "scalar"


def test_the_command_line_and_python_give_the_same_tokens(models: Path) -> None:
    for kv_type in KV_TYPES:
        flags = ("-s", 11, "-n", 40, "--temp", 1.2, "--json", "--kv-type", kv_type)
        done = bitnet("generate", models / "small", "-p", "abc", *flags)
        with Model.load(models / "small", kv_type=kv_type) as model:
            tokens = model.generate("abc", seed=11, max_tokens=40, temperature=1.2).tokens
        assert json.loads(done.stdout)["tokens"] == tokens


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("generate",), 2, "no model"),
        (("generate", "{}/script", "--temp", "-1"), 2, "temperature is -1.0, expected a number from 0 to"),
        (("generate", "{}/script", "-n", "many"), 2, "max_tokens is 'many', expected an integer from -1"),
        (("generate", "{}/script", "--top-q", "1"), 2, "--top-q"),
        (("generate", "{}/script", "-p", "x", "-f", "y"), 2, "not allowed with"),
        (("generate", "{}/script", "-p", "x", "-p", "y"), 2, "-p is given twice, expected once"),
        (("generate", "{}/script", "-p", "x", "--adapter", "a", "--adapter", "b"), 2, "--adapter is given twice"),
        (("generate", "{}/script", "--logit-bias", "x"), 2, "expected a token id, =, and a number or -inf"),
        (("generate", "{}/script", "-t", "0"), 2, "expected an integer from 1 to 256"),
        (("generate", "{}/none", "-p", "x"), 1, "expected a packed file, as `bitnet export` makes of a run"),
        (("generate", "{}", "-p", "x"), 1, "directory"),
        (("generate", sys.executable, "-p", "x"), 1, "this is an ELF program"),
        (("generate", "{}/script", "-p", "x" * 65), 1, "the prompt has 65 tokens, the context holds 64; shorten it$"),
        (("generate", "{}/script", "-p", "x" * 65, "-c", "9"), 1, "holds 9; shorten it; -c N allows up to 64$"),
        (("generate", "{}/script", "-p", "x", "-c", "65"), 1, "--ctx is 65, expected an integer from 1 to 64"),
        (("chat", "{}/script", "-c", "65"), 1, "--ctx is 65, expected an integer from 1 to 64"),
        (("generate", "{}/script", "-m", "{}/chat", "-p", "x"), 1, "two models"),
        (("generate", "{}/script", "-p", "x", "--stop", ""), 2, "--stop is empty, expected a value"),
        (
            ("generate", "{}/script", "-p", "x", "--stop", "a\udcff"),
            2,
            r"--stop: 'a\\udcff' is no UTF-8",
        ),
        (("generate", "{}/script", "-p", "x", "--logit-bias", "1=inf"), 2, "'1=inf', expected a token id"),
        (("generate", "{}/script", "-p", "x", "--grammar", "/dev/zero"), 2, "/dev/zero has more than 256 MiB"),
        (
            ("generate", "{}/script", "--regex", "a", "--grammar", __file__),
            2,
            "--grammar: not allowed with argument --regex",
        ),
        (("generate", "{}/script", "-f", "/dev/zero"), 1, "/dev/zero has more than 256 MiB, expected a text"),
        (("generate", "{}/script", "-f", "{}/script"), 1, "script: byte 0 is 0x89, expected UTF-8 text"),
        (("generate", "{}/script", "-p", ""), 1, "prompt is empty"),
        (
            ("generate", "{}/script", "-f", "{}/none"),
            1,
            "No such file.*/none; expected a file with the text to continue$",
        ),
        (("generate", "{}/script", "-f", "{}"), 1, "Is a directory: .*; expected a file with the text to continue$"),
        (("embed", "{}/small", "-f", "{}/none"), 1, "No such file.*/none; expected a file with a text on each line$"),
        (("inspect", "{}/none"), 1, "No such file.*/none; expected a packed file, a model or an adapter$"),
        (("verify-receipt", "{}/script", "{}/none"), 1, "/none; expected a file of bitnet generate --receipt$"),
        (("generate", "{}/script", "-p", "x", "--isa", "z80"), 2, "--isa: 'z80', expected one of"),
        (
            ("generate", "{}/script", "-p", "x", "-t", "257"),
            2,
            "-t/--threads: '257', expected an integer from 1 to 256",
        ),
        (("chat",), 2, "no model"),
        (("embed",), 2, "no model"),
        (
            ("embed", "{}/small", "--pooling", "mean", "-p", "a", "-p", ""),
            1,
            r"text\[1\] has no tokens; give at least one character",
        ),
        (("embed", "{}/small", "-f", "/dev/null"), 1, "/dev/null has no line, expected a text on each"),
        (("embed", "{}/small", "-p", "a"), 1, "pooling"),
        (("bench", "{}/script", "--gen", "9" * 5000), 2, "--gen: '9+, expected an integer from 1 to 2147483647"),
        (("bench",), 2, "either a packed file or --shape"),
        (("bench", "--shape", "huge"), 1, "shape is 'huge', expected one of tiny"),
        (
            ("bench", "{}/script", "--prompt", "100"),
            1,
            "^bitnet: error: --prompt 100 needs 100 tokens, the context holds 64; lower it$",
        ),
        (
            ("bench", "{}/script", "--depth", "64"),
            1,
            "error: --depth 64 needs 66 tokens, the context holds 64; lower it",
        ),
        (("bench", "{}/script", "--gen", "64", "--prompt", "1"), 1, "error: --gen 64 needs 65 tokens, .*; lower it"),
        (
            ("bench", "{}/script", "--depth", "60", "--prompt", "9"),
            1,
            "error: --depth 60 with --prompt 9 needs 69 tokens, the context holds 64; lower them",
        ),
        (("generate", "{}/script", "-p", "x", "--max-p", "3"), 2, "unknown option '--max-p'$"),
        (("bench", "{}/script", "--encoding", "1.6"), 2, "--encoding needs --shape"),
        (
            ("generate", "{}/script", "-p", "x", "--adapter", "none/a"),
            1,
            "No such file or directory: none/a; expected an adapter, as .* --lora`$",
        ),
        (("bench", "{}/none"), 1, "No such file.*/none; expected a packed model file$"),
        (("bench", "-m", "{}/none"), 1, "No such file.*/none; expected a packed model file$"),
    ],
)
def test_one_clear_line_and_the_right_exit_code(models: Path, args: tuple[str, ...], code: int, message: str) -> None:
    done = bitnet(*(arg.replace("{}", str(models)) for arg in args))
    assert done.returncode == code
    assert re.search(message, done.stderr, re.M)
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_closed_pipe_is_quiet(models: Path) -> None:
    generate = [
        sys.executable,
        "-m",
        "bitnet",
        "generate",
        f"{models}/slow",
        "-t",
        "1",
        "-p",
        "x",
        "-n",
        "400",
        "--quiet",
    ]
    command = f"{shlex.join(generate)} | head -c 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, timeout=60)
    assert len(done.stdout) == 1
    assert done.stderr == b""


def test_closed_streams(models: Path) -> None:
    generate = "unset PYTHONUNBUFFERED; " + shlex.join([sys.executable, "-m", "bitnet", "generate", f"{models}/script"])
    for redirection, code, out, err in (
        ("-p go 2>&-", 0, "Hello world\n", ""),
        ("-p go 2>/dev/full", 0, "Hello world\n", ""),
        ("-p '' 2>/dev/full", 1, "", ""),
        ("-p go --quiet >/dev/full", 1, "", "bitnet: error: No space left on device: standard output\n"),
        ("-p go >&-", 1, "", "bitnet: error: standard output is closed, expected a place for the answer\n"),
        ("<&-", 2, "", "bitnet: error: no prompt; give -p TEXT or -f FILE, or pipe text in\n"),
    ):
        done = subprocess.run(["bash", "-c", f"{generate} {redirection}"], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout, done.stderr) == (code, out, err)


def test_ctrl_c_ends_generate_with_130(models: Path) -> None:
    options = ["-p", "x", "-n", "none", "-t", "1", "-s", "0"]
    command = [sys.executable, "-m", "bitnet", "generate", str(models / "slow"), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Generation:" in errors
    assert "Traceback" not in errors


# ---- bench ----


Measured = Callable[..., str]


@pytest.fixture
def measured(bench_here: None, capsys: pytest.CaptureFixture[str]) -> Measured:
    """What `bitnet bench` prints."""

    def run(*args: object) -> str:
        assert bitnet_cli.main(["bench", *map(str, args)]) == 0
        return capsys.readouterr().out

    return run


def test_bench_json(models: Path, measured: Measured) -> None:
    found = json.loads(
        measured(models / "small", "-t", 1, "--prompt", 64, "--gen", 32, "--depth", 16, "--repeat", 2, "--json")
    )
    for key in ("cpu", "isa", "threads", "read_bandwidth_gb_s", "int8_peak_gmac_s", "load_ms", "peak_rss_mb"):
        assert found[key], key
    decode, prefill = found["decode"], found["prefill"]
    assert decode["gb_s"] == pytest.approx(decode["tok_s"] * decode["bytes_per_token"] / 1e9)
    assert decode["bytes_per_token"] > found["model"]["weight_bytes_per_token"]
    assert decode["bandwidth_share"] == pytest.approx(decode["gb_s"] / found["read_bandwidth_gb_s"])
    assert prefill["gmac_s"] == pytest.approx(prefill["tok_s"] * found["model"]["ternary_weights"] / 1e9)
    assert 0 < prefill["int8_peak_share"] < 1
    assert len(decode["runs"]) == len(prefill["runs"]) == 2
    assert found["rows"]["ratio"][0] == 1 and len(found["rows"]["ms"]) == len(found["rows"]["ratio"]) == 8
    assert (prefill["n"], decode["n"], decode["depth"]) == (64, 32, 16)
    large = found | {"model": found["model"] | {"file_mb": 1e4}}
    for share, told in ((0.25, True), (0.95, False), (None, False)):
        assert ("25% of the file in huge pages" in table(large | {"huge_share": share})) == told
    assert "huge pages" not in table(found | {"huge_share": 0.25})  # the caches hold it


def test_bench_with_an_adapter(models: Path, tmp_path: Path, measured: Measured) -> None:
    """The adapter is read for each token; a file that is not one of the model is refused."""
    args = [models / "small", "-t", 1, "--prompt", 8, "--gen", 4, "--repeat", 1, "--json"]
    random_adapter(models / "small", tmp_path / "a.bitnet")
    found = [json.loads(measured(*args, *more)) for more in ([], ["--adapter", tmp_path / "a.bitnet"])]
    size = (tmp_path / "a.bitnet").stat().st_size
    weights = [each["model"]["weight_bytes_per_token"] for each in found]
    assert weights[1] == weights[0] + size and found[1]["decode"]["tok_s"] > 0
    done = bitnet("bench", *args, "--adapter", models / "script")
    assert done.returncode == 1 and str(models / "script") in done.stderr
    done = bitnet("bench", "--shape", "tiny", "--adapter", tmp_path / "a.bitnet")
    assert done.returncode == 2 and "--adapter goes with the packed file that it belongs to" in done.stderr


def test_bench_at_any_depth(measured: Measured) -> None:
    """The part of the depth that is not computed is quick, and the context is as large as needed."""
    told = measured("--shape", "mini-gpt", "-t", 1, "--depth", 20_000, "--gen", 4, "--repeat", 1)
    assert "decode   4 tokens at depth 20000 (all but 64 of them copies): " in told


def test_bench_fits_the_context_unless_told(models: Path, measured: Measured) -> None:
    found = json.loads(measured(models / "script", "-t", 1, "--depth", 10, "--repeat", 1, "--json"))
    assert (found["prefill"]["n"], found["decode"]["n"]) == (54, 53)


def test_bench_shape_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: Measured) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    told = measured("--shape", "mini-gpt", "--encoding", "1.6", "--gen", 8, "--repeat", 1)
    for word in (
        "limits",
        "load",
        "memory",
        "prefill",
        "decode",
        "% of the read bandwidth",
        "% of the int8 peak",
        "8 in",
    ):
        assert word in told
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("encoding", ["ascii", "ascii:surrogateescape"])  # the latter in the locale C
def test_an_output_that_lacks_characters(encoding: str, tmp_path: Path) -> None:
    """A locale of Latin-1 or ASCII: what it cannot show is escaped, and the rest is there."""
    command = [sys.executable, "-m", "bitnet", "inspect", str(small_model(tmp_path))]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONIOENCODING": encoding})
    assert done.returncode == 0 and "\\xd7" in done.stdout and not done.stderr
