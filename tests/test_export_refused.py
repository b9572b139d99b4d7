"""Checkpoints that give no packed file: damaged ones, files that differ from their checkpoint, wrong usage."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import hostile_packed
import packed_files
from bitnet.config import ModelConfig
from bitnet.data import tokenizer
from bitnet.train import checkpoint
from bitnet.train.checkpoint import Checkpoint
from bitnet_cli import main
from bitnet_export import PackedFile, VerificationError, export_checkpoint, verify
from bitnet_export.checkpoint import pack
from bitnet_export.checkpoint.findings import Report
from bitnet_export.checkpoint.pack import pack_checkpoint
from bitnet_export.packed import records
from bitnet_export.packed.writer import Encoded, write_packed
from seeded_checkpoints import SMALL, make_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("times", [2, 3])
def test_a_run_that_goes_on_may_remove_the_checkpoint(
    times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A running run removes old checkpoints: then the next one is taken, up to three times."""
    made, left = make_checkpoint(tmp_path / "run"), [times]
    inner = pack.pack_checkpoint

    def removed(source: Checkpoint, *args: Any, **options: Any) -> None:
        if left[0]:
            left[0] -= 1
            source.folder.rename(source.folder.with_name(f"step-{9 - left[0]:06}"))  # a newer one takes its place
        inner(source, *args, **options)

    monkeypatch.setattr(pack, "pack_checkpoint", removed)
    code = main(["export", str(made.parent), str(tmp_path / "m.bitnet"), "--tokens", "64"])
    said = capsys.readouterr().err
    assert (code, "step-000008 is gone: its run goes on, and keeps the newest; try again" in said) == (
        (0, False) if times == 2 else (1, True)
    )
    assert (tmp_path / "m.bitnet").exists() is (times == 2)


def test_one_removed_while_it_is_compared_is_not_exported_without_its_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, inner = make_checkpoint(tmp_path / "run"), pack.compare
    newer = made.with_name("step-000009")
    shutil.copytree(made, newer.with_name("newer"))

    def removed(source: Checkpoint, file: Path, tokens: int) -> Report:
        if not newer.exists():
            shutil.rmtree(made)
            newer.with_name("newer").rename(newer)
        return inner(source, file, tokens=tokens)

    monkeypatch.setattr(pack, "compare", removed)
    report = export_checkpoint(made.parent, tmp_path / "m.bitnet", tokens=64)
    assert report.checkpoint == newer.name and "no tokenizer" not in report.text


def edit(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Replace (or remove, with None) tensors of a checkpoint; dots are written as double underscores."""
    weights = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        weights.pop(name.replace("__", "."), None)
        if tensor is not None:
            weights[name.replace("__", ".")] = tensor
    save_file(weights, folder / "model.safetensors")


# ---- a file that is not the checkpoint's is not kept ----


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("layers.1.down.weight", lambda e: e.data.__setitem__(0, e.data[0] ^ (2 if e.data[0] & 3 != 1 else 1))),
        ("layers.0.q.weight", lambda e: e.scales.__imul__(np.float32(1.000001))),
        ("layers.0.ffn_norm.weight", lambda e: e.data.__imul__(np.float32(1.000001))),
        ("embedding.weight", lambda e: e.data.__setitem__(3, e.data[3] ^ 0x10)),
    ],
)
def test_one_wrong_number_is_found(
    name: str, change: Any, untrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = pack.encode

    def wrong(spec: records.Spec, weight: torch.Tensor, config: ModelConfig, body: int) -> Encoded:
        tensor = right(spec, weight, config, body)
        if spec.key.name != name:
            return tensor
        scales = None if tensor.scales is None else tensor.scales.copy()
        tensor = tensor._replace(data=tensor.data.copy(), scales=scales)
        change(tensor)
        return tensor

    monkeypatch.setattr(pack, "encode", wrong)
    with pytest.raises(VerificationError, match=f"{name}: .* differ from the checkpoint's"):
        export_checkpoint(untrained, tmp_path / "m.bitnet", tokens=64)
    assert not [file for file in os.listdir(tmp_path) if "m.bitnet" in file]


def test_an_engine_that_computes_something_else_is_found(
    untrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = __import__("bitnet_export.checkpoint.verify", fromlist=["verify"])
    right = module.engine_scores
    for error, message in (
        (lambda s: s - 3e-5, "median difference in short prompts"),
        (lambda s: s - 0.5 * (s.size > 64 * 7), "mean difference in a long text"),  # more than the prompts have
        (lambda s: s * np.nan, "nan nats"),
    ):
        monkeypatch.setattr(module, "engine_scores", lambda *args, error=error: error(right(*args)))
        with pytest.raises(VerificationError, match=message):
            export_checkpoint(untrained, tmp_path / "m.bitnet", tokens=1024)
        assert not [file for file in os.listdir(tmp_path) if "m.bitnet" in file]


def test_a_model_that_diverged_is_told_from_an_engine_that_is_wrong(
    untrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss far above that of guessing, 5.55 nats here, has a larger rounding error."""
    module = __import__("bitnet_export.checkpoint.verify", fromlist=["verify"])
    for name in ("engine_scores", "torch_scores"):
        right = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, right=right, of=name: 80 * right(*args) + (of[0] == "e") * 1e-3)
    with pytest.raises(VerificationError, match=r"nats a token, where guessing costs 5\.55: its run diverged"):
        export_checkpoint(untrained, tmp_path / "m.bitnet", tokens=1024)
    assert not [file for file in os.listdir(tmp_path) if "m.bitnet" in file]


def test_verify_of_another_checkpoint_fails(trained: Path, untrained: Path, tmp_path: Path) -> None:
    pack_checkpoint(Checkpoint.open(trained), tmp_path / "m.bitnet")
    with pytest.raises(VerificationError, match="differ from the checkpoint's"):
        verify(untrained, tmp_path / "m.bitnet")


def test_torch_alone_is_what_the_engine_is_compared_with(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels of a training step are the engine's."""
    pack_checkpoint(Checkpoint.open(trained), tmp_path / "m.bitnet")
    monkeypatch.setattr("bitnet.kernels._run", lambda name, *_: pytest.fail(f"{name} is the engine's"))
    verify(trained, tmp_path / "m.bitnet", tokens=1024)


# ---- bad checkpoints ----


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers__0__q__weight": None}, r"tensor layers\.0\.q\.weight is missing"),
        ({"extra": torch.zeros(2)}, "tensor extra is there, config.json does not call for it"),
        ({"layers__1__o__weight": torch.ones(40, 40)}, r"layers\.1\.o\.weight is 40×40, config\.json calls for 40×64"),
        ({"final_norm__weight": torch.full((40,), float("nan"))}, r"final_norm\.weight holds NaN or infinity"),
        ({"layers__0__up__weight": torch.full((72, 40), float("inf"))}, "holds NaN or infinity"),
    ],
)
def test_bad_checkpoints(changes: dict[str, Any], message: str, untrained: Path, tmp_path: Path) -> None:
    edit(untrained, **changes)
    with pytest.raises(checkpoint.CheckpointError, match=message):
        export_checkpoint(untrained, tmp_path / "m.bitnet")
    assert os.listdir(tmp_path) == ["run"]


def test_a_tokenizer_of_another_model(untrained: Path, tmp_path: Path) -> None:
    words = tokenizer.build("char", ["αβγδ"], 300)
    (untrained / "tokenizer.json").write_text(words.to_str())
    with pytest.raises(ValueError, match=r"has token id 260, .* has vocab_size 257"):
        export_checkpoint(untrained, tmp_path / "m.bitnet")


def test_a_checkpoint_without_tokenizer_is_compared_on_random_tokens(untrained: Path, tmp_path: Path) -> None:
    (untrained / "tokenizer.json").unlink()
    (untrained / "state.json").unlink()
    report = export_checkpoint(untrained, tmp_path / "m.bitnet", tokens=512)
    assert report.text.startswith("random tokens")
    assert PackedFile.open(tmp_path / "m.bitnet").section(records.TOKENIZER) is None


# ---- the command line ----


def test_export_and_inspect(untrained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "m.bitnet")
    assert main(["export", str(untrained.parent), out, "--tokens", "600", "--json"]) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert printed.err.startswith("writing the file and comparing it")  # said before, in a log, too
    assert report["file"] == out and report["short"]["median"] <= 1e-5 and report["long"]["tokens"] == 576
    for word in ("size", "fp16", "zeros", "weights", "prompts", "text", "loss", "head", "inputs"):
        assert word in printed.err
    assert (
        f"{report['bits_per_weight']:.2f} bits a weight, counting those that are not ternary; fp16 has" in printed.err
    )
    floor = f"torch in fp32 and in fp64 differ by {report['long']['floor_mean']:.1e} on average"
    assert f"{report['long']['worst']:.1e} at worst, which is rounding: {floor}" in printed.err
    assert report["head"]["cost"] == 0.0 and len(report["zero_inputs"]["after"]) == SMALL.n_layers

    for option, value in (("--head", "f16"), ("--tokens", "600")):
        assert main(["export", out, str(tmp_path / "again"), option, value]) == 2
        assert f"{option} goes with a checkpoint" in capsys.readouterr().err and not (tmp_path / "again").exists()

    assert main(["inspect", out, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    file = PackedFile.open(out)
    assert facts["file_size"] == file.file_size and facts["config"] == [SMALL.to_dict()]
    assert [s["name"] for s in facts["sections"]] == ["STACKS", "TENSORS", "METADATA", "TOKENIZER", "DATA"]
    q = next(t for t in facts["tensors"] if t["name"] == "layers.0.q.weight")
    assert q["shape"] == [64, 40] and q["encoding"] == "TERNARY_2BIT" and q["bytes"] == 64 * 4 * 3 + 4
    assert 0.2 < q["zero_fraction"] < 0.5 and q["scale"][0] == q["scale"][1] > 0

    assert main(["inspect", out]) == 0
    table = capsys.readouterr().out
    assert "layers.1.down.weight" in table and "64 × 40" in table and f"{file.sections[0].crc:08x}" in table


@pytest.mark.parametrize("verb", ["export", "convert"])
@pytest.mark.parametrize(("ending", "target"), [("gguf", "m.gguf --to gguf"), ("onnx", "m --to onnx")])
def test_a_packed_file_is_not_named_as_another_kind(
    verb: str, ending: str, target: str, untrained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb, str(untrained), str(tmp_path / f"m.{ending}")]) == 2
    packed = tmp_path / "m.bitnet"
    message = f"expected a name such as {packed}; after that, `bitnet convert {packed} {tmp_path}/{target}`\n"
    assert message in capsys.readouterr().err and not (tmp_path / f"m.{ending}").exists()


def test_inspect_refuses_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m.gguf").write_bytes(hostile_packed.foreign_files()["gguf"])
    for path, message in ((tmp_path / "m.gguf", "found a GGUF file"), (tmp_path / "none", "No such file")):
        assert main(["inspect", str(path)]) == 1
        printed = capsys.readouterr()
        assert printed.out == "" and message in printed.err and printed.err.count("\n") == 1


def test_inspect_never_sends_escapes_to_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "a\x1b[31m\x9b\r\n\u202e\x00"
    config = packed_files.SMALL.replace(name="b\x1b]0;x\x07")
    source = PackedFile(packed_files.packed_bytes())

    def same(spec: records.Spec) -> Encoded:
        return Encoded.f32(source.values(source.tensors[spec.key]))

    write_packed(tmp_path / "m", [config], same, metadata={evil: {evil: evil}})
    assert main(["inspect", str(tmp_path / "m")]) == 0
    assert all(c.isprintable() or c == "\n" for c in capsys.readouterr().out)


@pytest.mark.parametrize("words", [["export"], ["export", "x"], ["inspect"], ["export", "a", "b", "--tokens", "0"]])
def test_wrong_usage(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert "error" in capsys.readouterr().err


def test_export_fails_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tmp_path / "none"), str(tmp_path / "m")]) == 1
    printed = capsys.readouterr().err
    assert "none does not exist, expected a checkpoint or a run folder, or a packed file" in printed
    assert printed.count("\n") == 1  # and no line that says that a file is being written
    folder = make_checkpoint(tmp_path / "run")
    (folder / "manifest.json").unlink()
    shutil.copy(folder / "config.json", folder / "model.safetensors")
    assert main(["export", str(folder), str(tmp_path / "m")]) == 1
    printed = capsys.readouterr().err
    _, failed = printed.splitlines()  # the first says that it began
    assert "damaged or not a safetensors file" in failed
    assert os.listdir(tmp_path) == ["run"]


@pytest.mark.parametrize(
    "name",
    ["step-000009/model.safetensors", "step-000009/optimizer.safetensors", "step-000009/config.json", "log.jsonl"],
)
@pytest.mark.parametrize("source", [".", "step-000009"])
def test_no_part_of_the_run_is_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, source: str
) -> None:
    run = tmp_path / "run a"
    folder = make_checkpoint(run)
    folder = folder.rename(run / "step-000009")
    (run / "log.jsonl").write_text("{}\n")
    before = (run / name).read_bytes()
    assert main(["export", str(run / source), str(run / name)]) == 1
    assert f"{run / name} is in the source and would be replaced; give another name" in capsys.readouterr().err
    assert (run / name).read_bytes() == before


def test_what_can_be_told_at_once_is_said_before_the_work_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, text, empty = make_checkpoint(tmp_path / "run"), tmp_path / "a.txt", tmp_path / "empty"
    text.write_text("no packed file")
    empty.mkdir()
    out = tmp_path / "m.bitnet"
    for words, told in (
        ([made, tmp_path / "none" / "m.bitnet"], f"folder {tmp_path / 'none'} does not exist; create it first"),
        ([made, text], f"{text} exists and is not a packed file; give another name"),
        ([made, tmp_path], f"{tmp_path} is a directory, expected the name of a file to write"),
        ([empty, out], f"{empty} has no model.safetensors and no step-* folder, expected a checkpoint"),
        ([text, out], f"{text}: "),
        ([made, out, "--base", text], f"{text}: "),
    ):
        assert main(["export", *map(str, words)]) == 1
        assert capsys.readouterr().err.startswith(f"bitnet: error: {told}")
