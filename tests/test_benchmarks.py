"""The parts of benchmarks/ that neither train nor need llama.cpp, on a model of half a million weights."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import signal
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from bitnet.config import ModelConfig
from bitnet_runtime import Model, machine
from runtime_models import small_model
from servers import served

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
drafts, engine, passes, peers, report, serving, vs = map(
    importlib.import_module, ("drafts", "engine", "passes", "peers", "report", "serving", "vs_llama_cpp")
)


SMALL = ModelConfig(
    vocab_size=300, dim=256, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=64, ffn_dim=512, max_context=64,
    activation="silu",
)  # fmt: skip


@pytest.mark.parametrize(
    ("value", "text"), [(7, "7"), (0.5, "0.50"), (7.944, "7.94"), (33.33, "33.3"), (1234.5, "1,234")]
)
def test_numbers(value: float, text: str) -> None:
    assert report.number(value) == text


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        (lambda: 3, 3),
        (lambda: vs.run_llama("/nowhere/python", {}), "error: [Errno 2] No such file or directory: '/nowhere/python'"),
        (lambda: serving.check([argparse.Namespace(failed=report.BenchmarkError("why"))]), "error: why"),
        (lambda: signal.raise_signal(signal.SIGINT), 130),
    ],
)
def test_what_ends_a_benchmark_is_a_line(ends: Any, code: object) -> None:
    with pytest.raises(SystemExit) as found:
        report.run(ends)
    assert found.value.code == code


def test_a_peer_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    """Is told before the weights are written, which takes minutes."""
    with pytest.raises(SystemExit):
        peers.arguments(["--llama-bench", "/nowhere/llama-bench", "--model", "x.gguf"])
    assert "--llama-bench is /nowhere/llama-bench, which is no program" in capsys.readouterr().err


def ours(decode: float, prefill: float, bandwidth: float) -> dict[str, Any]:
    prefills = {"8": prefill, "32": 2 * prefill}
    return {"decode": decode, "prefill": prefills, "read_bandwidth_gb_s": bandwidth, "int8_peak_gmac_s": 200.0}


def test_results_of_a_comparison(tmp_path: Path) -> None:
    runs = {
        vs.OURS: [ours(10.0, 20.0, 5.0), ours(30.0, 50.0, 9.0), ours(20.0, 90.0, 8.0)],
        vs.THEIRS: [{"decode": 8.0, "prefill": {"8": 10.0, "32": 20.0}}] * 3,
    }
    read = {vs.OURS: 200_000_000, vs.THEIRS: 400_000_000}
    rows = vs.summary(2, runs, 10**9, read)
    assert [row["test"] for row in rows] == ["decode", "prefill 8", "prefill 32"]
    assert rows[0]["tok_s"] == {vs.OURS: 20.0, vs.THEIRS: 8.0}
    assert [row["ratio"] for row in rows] == [2.5, 5.0, 5.0]
    assert rows[0]["share_of_limit"] == pytest.approx({vs.OURS: 20 * 0.2 / 8, vs.THEIRS: 8 * 0.4 / 8})
    assert rows[1]["share_of_limit"] == pytest.approx({vs.OURS: 50 / 200, vs.THEIRS: 10 / 200})
    results = {
        "origin": report.origin("python benchmarks/x.py"), "shape": "small", "head": "q6_K", "logit_correlation": 0.99,
        "versions": {vs.THEIRS: "1.0"}, "bytes_per_token": read, "rows": rows,
    }  # fmt: skip
    report.write(tmp_path, "small", results, vs.markdown(results), vs.panels(results))
    assert json.loads((tmp_path / "small.json").read_text())["rows"] == rows
    page = (tmp_path / "small.md").read_text()
    assert "| 2 | decode | 8.00 | 20.0 | 2.50 × | 40% | 50% | 8.0 GB/s |" in page
    for part in (machine.cpu_name(), "python benchmarks/x.py", results["origin"]["commit"]):
        assert part in page
    assert is_picture(tmp_path / "small.png")


PEER = """#!/bin/sh
'''exec' "{python}" "$0" "$@" # the path of Python may have a space
' '''
import json, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
print("repacked")
common = {{"build_commit": "abc", "model_type": "small", "model_size": 10**6, "model_n_params": {parameters}}}
tests = [(int(n), 0) for n in given["-p"].split(",")] + [(0, int(given["-n"]))]
speed = 1000 * int(given["-t"]) * int(given["-rtr"])
print(json.dumps([common | {{"n_prompt": p, "n_gen": n, "avg_ts": speed / (2 if n else 1)}} for p, n in tests]))
"""


def test_a_peer_in_turn(tmp_path: Path, bench_here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "read_bandwidth", lambda threads: 10.0 * threads)  # each takes a second
    monkeypatch.setattr(machine, "int8_peak", lambda isa, threads: 100.0 * threads)
    program, gguf = tmp_path / "llama-bench", tmp_path / "small.gguf"
    gguf.write_bytes(bytes(900_000))  # less than the program says, which counts a table twice
    line = ["--model", str(gguf), "--name", "peer", "--option=-rtr", "--option=3"]
    line += ["--packed", str(small_model(tmp_path, config=SMALL)), "--prompt", "8", "16", "--gen", "4"]
    line += ["--llama-bench", str(program), "--rounds", "1", "--out", str(tmp_path / "out")]

    def build(text: str, parameters: int = SMALL.ternary_weights + SMALL.vocab_size * SMALL.dim) -> None:
        program.write_text(text.format(python=sys.executable, parameters=parameters))
        program.chmod(0o755)

    build(PEER)
    peers.main(line)
    found = json.loads((tmp_path / "out" / "peers-peer.json").read_text())
    assert 900_000 <= found["bytes_per_token"]["peer"] < 910_000
    rows = found["rows"]
    assert [(row["threads"], row["test"], row["tok_s"]["peer"]) for row in rows] == [
        (1, "decode", 1500), (1, "prefill 8", 3000), (1, "prefill 16", 3000),
        (2, "decode", 3000), (2, "prefill 8", 6000), (2, "prefill 16", 6000),
    ]  # fmt: skip
    assert all(row["ratio"] == row["tok_s"][vs.OURS] / row["tok_s"]["peer"] for row in rows)
    page = (tmp_path / "out" / "peers-peer.md").read_text()
    assert "peer: abc, small, small.gguf" in page and str(tmp_path) not in page
    build(PEER, 10**9)
    with pytest.raises(RuntimeError, match=r"small.gguf has 1,000,000,000 parameters, expected about 1,"):
        peers.main(line)
    build("#!/bin/sh\necho wrong >&2; exit 3")
    with pytest.raises(RuntimeError, match=r"ended with 3:\nwrong"):
        peers.main(line)
    for said in ("nothing", "[]", '[{{"n_prompt": 8}}]'):
        build(f"#!/bin/sh\necho '{said}'")
        with pytest.raises(RuntimeError, match="the output of llama-bench lacks"):
            peers.main(line)
    with pytest.raises(SystemExit):
        peers.arguments([*line, "--name", "a/b"])


def test_what_drafts_bring(tmp_path: Path) -> None:
    tally = drafts.Tally()
    for draft, out in (([], [5]), ([5, 6, 7], [5, 6]), ([5, 6], [5, 6]), ([1, 2], [9])):
        tally.count(draft, out)
        tally.tokens += len(out)
    assert (tally.offered, tally.right, tally.passes, tally.tokens) == ([3, 2, 1], [2, 2, 0], 4, 6)

    text, model = tmp_path / "text.txt", small_model(tmp_path, config=SMALL)
    text.write_text("def f(x):\n    return x\n" * 20)
    line = ["--draft", "2", "4", "--prompts", "2", "--prompt", "9", "--gen", "20", "--out", str(tmp_path / "out")]
    drafts.main([*line, "--model", str(model), "--text", str(text), "--temperature", "0", "1"])
    results = json.loads((tmp_path / "out" / f"drafts-{model.stem}.json").read_text())
    assert [(row["temperature"], row["draft"]) for row in results["rows"]] == [
        (t, n) for t in (0, 1) for n in (0, 2, 4, drafts.AUTO)
    ]  # fmt: skip
    assert all(row["tokens_per_pass"] >= 1 and row["tok_s"] > 0 for row in results["rows"])
    assert is_picture(tmp_path / "out" / f"drafts-{model.stem}.png")

    args = drafts.arguments([*line, "--right", "0", "1", "--texts", "1", "3"])
    with Model.load(model) as loaded:
        rows = drafts.together(loaded, [text.read_text()], args)
        assert [(row["temperature"], row["texts"]) for row in rows] == [(t, n) for t in (0, 0.8, 1) for n in (1, 3)]
        rows = drafts.on_shape(loaded, args)
    assert [row["tokens_per_pass"] for row in rows] == [1, 1, 1, 1, 2, 4]
    assert [row["right"] for row in rows[1:]] == [[0.0], [0.0], [], [1.0, 1.0], [1.0] * 4]
    (tmp_path / "layer").mkdir()
    layered = SMALL.replace(max_context=128).with_draft()
    with Model.load(small_model(tmp_path / "layer", config=layered)) as loaded:
        rows = drafts.on_text(loaded, [text.read_text()], args)
        assert [row["draft"] for row in rows] == [0, 2, 4, drafts.AUTO] * 3
        assert all(row["right"][0] == 1 for row in rows if row["draft"] > 0)  # the token that would have come anyway
        args.depth, args.prompt, args.gen = [0, 64], 4, 8
        rows = drafts.on_shape(loaded, args)
    assert [row["tokens_per_pass"] for row in rows] == [1, 1, 1, 1, 2, 4] * 2
    text.write_text("short")
    with pytest.raises(ValueError, match=r"the text has . tokens, expected more than 9"):
        drafts.main([*line, "--model", str(model), "--text", str(text)])
    with pytest.raises(SystemExit):
        drafts.arguments(["--model", str(model)])


def is_picture(path: Path) -> bool:
    raw = path.read_bytes()
    width, height = struct.unpack(">II", raw[16:24])
    return raw.startswith(b"\x89PNG\r\n") and width > 600 and height > 300


def test_the_engine_end_to_end(tmp_path: Path, bench_here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(engine.SHAPES, "small", SMALL)
    monkeypatch.setattr(machine, "read_bandwidth", lambda threads: 10.0 * threads)  # each takes a second
    monkeypatch.setattr(machine, "int8_peak", lambda isa, threads: 100.0 * threads)
    args = argparse.Namespace(
        threads=[1, 2], context=[16, 80], kv_type=["f16", "int8"], batch=[1, 3], prompt=8, gen=4, repeat=1
    )
    results = {"origin": report.origin("")} | engine.measure("small", tmp_path / "model.bitnet", args)
    assert [row["threads"] for row in results["threads"]] == [1, 2]
    assert [row["isa"] for row in results["tiers"]] == machine.available_isas()
    assert [row["decode"]["depth"] for row in results["context"]] == [16, 16, 80, 80]
    assert [row["name"] for row in results["context"]][2:] == ["context 80, f16", "context 80, int8"]
    single, three = results["batches"]
    cache = SMALL.n_layers * 2 * SMALL.n_kv_heads * SMALL.head_dim * 2  # bytes of a token at f16
    assert three["decode"]["bytes_per_token"] - single["decode"]["bytes_per_token"] == 2 * cache * 2
    for row in (row for sweep in ("threads", "context", "tiers", "batches") for row in results[sweep]):
        decode = row["decode"]
        assert decode["gb_s"] == pytest.approx(decode["tok_s"] / row["batch"] * decode["bytes_per_token"] / 1e9)
        assert decode["bandwidth_share"] == pytest.approx(decode["gb_s"] / row["read_bandwidth_gb_s"])
    report.write(tmp_path, "small", results, engine.markdown(results), engine.panels(results))
    assert "| batch 3 |" in (tmp_path / "small.md").read_text()
    assert math.isfinite(json.loads((tmp_path / "small.json").read_text())["first_token_ms"])
    assert is_picture(tmp_path / "small.png")


COUNTS = {"decode": 20, "embed": 5, "images": 3, "answer": 16}


def test_shares_of_passes(tmp_path: Path) -> None:
    """Each pass is compared with the limit measured right after it."""
    head = "avx2 2 1000000 500000 1000000 100 64 2000000"
    printed = f"{head}\n0.010 5.0 100.0\n0.020 2.5 50.0\n0.005 10.0 200.0\n"
    rows = [{"shape": "small"} | passes.summary(printed, kind, count, "f16") for kind, count in COUNTS.items()]
    decode, embed, images, answer = rows
    assert (decode["isa"], decode["threads"], decode["passes"]) == ("avx2", 2, 3)
    assert decode["bytes_per_token"] == 500_000 + 128 * 100  # the mean depth of 256 tokens
    assert decode["tok_s"] == pytest.approx([1500, 2000, 3000])
    assert decode["share"] == pytest.approx([20 * 512_800 / 0.010 / 5e9] * 3)
    assert embed["share"] == pytest.approx([5 * 128 * 1e6 / 0.010 / 100e9] * 3)
    assert images["share"] == pytest.approx([3 * 2e6 / 0.010 / 100e9] * 3) and images["tok_s"][1] == 3 * 64 / 0.010
    assert answer["macs"] == 2e6 + (64 + 16) * 1e6 and answer["seconds"][1] == 0.010
    results = {"origin": report.origin("python benchmarks/passes.py"), "rows": rows}
    report.write(tmp_path, "passes", results, passes.markdown(rows), passes.panels(rows))
    assert (
        "| small | decode 20 | 3 | 10.0 | 2,000 | 21% (21% to 21%) | read bandwidth | 5.0 GB/s |"
        in (tmp_path / "passes.md").read_text()
    )
    assert is_picture(tmp_path / "passes.png")


def test_requests_to_a_server_are_measured(tmp_path: Path) -> None:
    """Two servers in turn, and as many processes."""
    args = argparse.Namespace(clients=[1, 3], prompt=5, gen=20, each=2, probes=3, repeat=1, threads=1, long=200)
    path = small_model(tmp_path)
    with served(path, parallel=5) as server:
        both = [serving.Server("a", server.address), serving.Server("b", server.address, {"seed": 5})]
        rows = serving.measure(both, path, args)
    separate = "separate processes"
    assert [(row["name"], row["server"]) for row in rows[:6]] == [
        (clients, name) for clients in ("1 client", "3 clients") for name in ("a", "b", separate)
    ]
    assert all(row["tok_s"] > 0 for row in rows[:6]) and [row["server"] for row in rows[6:]] == ["a", "b"]
    assert all(0 < row["first_ms_p50"] <= row["first_ms_p99"] for row in rows if row["server"] != separate)
    assert "| 3 clients | separate processes |" in serving.page({"rows": rows, "settings": vars(args)})
    assert [*serving.panels(rows)[0].series] == ["a", "b", separate]
    per_answer = [row["tok_s"] / row["answers_s"] for row in rows if "answers_s" in row]
    assert per_answer == pytest.approx([args.gen] * 4)  # no answer ended early


def test_requests_that_fail_are_no_figures(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path, args = small_model(tmp_path), argparse.Namespace(probes=1, long=10)
    with served(path) as server:
        with pytest.raises(RuntimeError, match=r"a request was answered with 400: .*the id 1000000"):
            serving.together(serving.Server("a", server.address), [[[5]], [[10**6]]], 1)
        for wrong in (1, 4):  # the one whose first token is awaited, and those beside whom it comes
            with pytest.raises(RuntimeError, match="a request was answered with 400"):
                serving.beside_others(
                    serving.Server("a", server.address),
                    lambda n, wrong=wrong: [[[10**6 if n == wrong else 5]]] * n,
                    args,
                )
    with pytest.raises(RuntimeError, match="one of 2 processes with a copy of the model each failed"):
        serving.apart(path, 1, [[[5, 6]], [[5, 10**6]]], 4)
    assert "10" in capfd.readouterr().err  # what was wrong


def test_towers(tmp_path: Path) -> None:
    """Every program gives as many vectors per image as ours, of the same width."""
    towers = importlib.import_module("towers")
    config = towers.FAMILIES["so400m-14"].replace(image_size=28, **towers.SMALL)
    towers.prepare(config, tmp_path, 2)
    for name in (*towers.OURS, *towers.TORCH, *towers.ONNX):
        out = towers.opened(name, config, tmp_path, 2, 1)()
        (out,) = out if isinstance(out, list) else (out,)
        assert tuple(out.shape) == (2, 4, config.dim), name
    rows = [{"program": name, "seconds": s, "quickest": s, "passes": 3} for name, s in (("a", 0.5), ("b", 1.5))]
    assert "| 3.00 × |" in towers.markdown({"rows": rows, "shape": "s", "images": 2, "threads": 1})
