"""Conversion and its verification, independent of any foreign format."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from bitnet_cli import main
from bitnet_export import PackedFile, VerificationError, random_model
from bitnet_export.convert.incoming import convert, open_source, pack_source
from bitnet_export.convert.verify_source import verify_source
from bitnet_export.foreign.gguf.write import write_gguf
from bitnet_export.foreign.hf.write import write_folder
from bitnet_export.foreign.source import SourceError
from bitnet_export.packed import encodings
from bitnet_export.packed.content import Content
from packed_source import ODD, flipped, source_of
from runtime_models import byte_tokenizer

CONFIGS = {
    "relu2": ODD,
    "silu, untied, no sub norms": ODD.replace(activation="silu", sub_norm=False, tie_embeddings=False),
    "rows": ODD.replace(weight_scale="row"),
    "groups": ODD.replace(weight_scale="group", ffn_dim=200),
    "gemma": ODD.replace(
        activation="gelu", sub_norm=False, post_norm=True, qk_norm=True, embedding_scale=6.3, sliding_window=5,
        global_every=2, rope_local_theta=100.0,
    ),
    "norm before every projection": ODD.replace(linear_norm=True, sub_norm=False),
    "embeddings": ODD.replace(has_head=False, pooling="last"),
    "soft cap": ODD.replace(logit_softcap=2.0, qkv_bias=True),
}  # fmt: skip


@pytest.fixture(params=CONFIGS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "model.bitnet"
    random_model(CONFIGS[request.param], path, 5, tokenizer=byte_tokenizer().to_str().encode())
    return path


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is converted is compared with torch alone."""
    monkeypatch.setattr("bitnet.kernels._run", lambda name, *_: pytest.fail(f"{name} is the engine's"))


@pytest.mark.parametrize("head", ["int8", "f16", "f32"])
def test_what_is_packed_is_what_was_read(model: Path, tmp_path: Path, head: str) -> None:
    source, out = source_of(model), tmp_path / "out.bitnet"
    checks = []
    pack_source(source, out, head=head, check=lambda file: checks.append(verify_source(source, file, tokens=300)))
    before, after = PackedFile.open(model), PackedFile.open(out)
    for key, record in after.tensors.items():
        if record.encoding in encodings.TERNARY.values():
            assert np.array_equal(after.codes(record), before.codes(before.tensors[key]))
            assert np.array_equal(after.scales(record), before.scales(before.tensors[key]))
    (checked,) = checks
    assert checked.short.tokens == 128 and checked.long.tokens == 256
    assert checked.ternary_weights == before.configs[0].ternary_weights
    assert (checked.head.cost == 0) == (head == "f32")  # only this holds the published floats exactly


def test_an_encoding_that_does_not_hold_the_scales_is_refused(tmp_path: Path) -> None:
    """As in `bitnet export`; `bitnet convert` once ignored the option silently."""
    random_model(ODD.replace(weight_scale="group"), tmp_path / "m.bitnet", 5)
    source, out = source_of(tmp_path / "m.bitnet"), tmp_path / "out.bitnet"
    with pytest.raises(SourceError, match=r"q\.weight cannot be stored as TERNARY_5TRIT with group scale .*--encoding"):
        pack_source(source, out, encoding="1.6")
    with pytest.raises(SourceError, match=r"up\.weight cannot be stored as TERNARY_2BIT_ROWS with group scale"):
        pack_source(source, out, sparse=True)
    assert list(tmp_path.iterdir()) == [tmp_path / "m.bitnet"]


def test_more_tokens_than_are_computed_side_by_side_are_refused(tmp_path: Path) -> None:
    for tokens in (0, 100_000):
        with pytest.raises(ValueError, match=f"tokens is {tokens}, expected an integer from 1 to 8192"):
            convert(tmp_path, tmp_path / "out.bitnet", tokens=tokens)


def test_lines_where_nothing_is_zero_are_refused(tmp_path: Path) -> None:
    for activation in ("silu", "relu2"):
        random_model(ODD.replace(dim=64, head_dim=32, n_heads=2, activation=activation), tmp_path / "m.bitnet", 5)
        write_folder(tmp_path / "m.bitnet", tmp_path / activation)
    with pytest.raises(ValueError, match=r"sparse leaves out what relu² makes 0, and .*silu has activation = 'silu'"):
        convert(tmp_path / "silu", tmp_path / "out.bitnet", sparse=True)
    assert not (tmp_path / "out.bitnet").exists()
    convert(tmp_path / "relu2", tmp_path / "out.bitnet", sparse=True, tokens=64)
    assert PackedFile.open(tmp_path / "out.bitnet").sparse


def test_each_layer_that_is_compared_is_told(tmp_path: Path) -> None:
    """Of a large model it takes minutes."""
    random_model(ODD, tmp_path / "a", 5)
    source, steps = source_of(tmp_path / "a"), []
    pack_source(
        source, tmp_path / "b", check=lambda file: verify_source(source, file, tokens=64, progress=steps.append)
    )
    told = [step for step in dict.fromkeys(steps) if "the reference, layer" in step]
    n = ODD.n_layers
    assert n > 1 and told == [f"comparing with the source: the reference, layer {i + 1} of {n}" for i in range(n)]


def test_ternary_tables_are_of_two_bits_whatever_the_layers_are(tmp_path: Path) -> None:
    random_model(ODD.replace(head_format="ternary"), tmp_path / "m.bitnet", 5)
    pack_source(source_of(tmp_path / "m.bitnet"), tmp_path / "out.bitnet", encoding="1.6")
    kinds = {key.name: record.encoding for key, record in PackedFile.open(tmp_path / "out.bitnet").tensors.items()}
    assert kinds["embedding.weight"] == encodings.TERNARY_2BIT
    assert kinds["layers.0.q.weight"] == encodings.TERNARY_5TRIT


def cut_short(monkeypatch: pytest.MonkeyPatch, file: Path, read: int) -> list[int]:
    """The sizes of what is read of a file; before the read of that number it loses all but 100 bytes."""
    original, sizes = Content.read, []

    def counting(content: Content, start: int, size: int) -> np.ndarray:
        if content._what == str(file):
            if len(sizes) == read:
                os.truncate(file, 100)
            sizes.append(size)
        return original(content, start, size)

    monkeypatch.setattr(Content, "read", counting)
    return sizes


@pytest.mark.parametrize("kind", ["folder", "gguf", "packed to hf", "packed to gguf", "packed to onnx", "packed"])
def test_a_source_that_is_cut_short_meanwhile(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Truncated by another program: one error, where a mapped file would end this process with a signal."""
    (tmp_path / "in").mkdir()
    model, out = tmp_path / "in" / "m.bitnet", tmp_path / "out"
    random_model(ODD.replace(dim=64, head_dim=32, n_heads=2, ffn_dim=128, activation="silu"), model, 5)
    source, words = model, ["export" if kind == "packed" else "convert"]
    if kind.startswith("packed to"):
        words += ["--to", kind.rpartition(" ")[2]]
        words += ["--type", "F16"] * kind.endswith("gguf")
    if kind == "folder":
        write_folder(model, tmp_path / "in" / "hf")
        source = tmp_path / "in" / "hf"
    if kind == "gguf":
        source = tmp_path / "in" / "m.gguf"
        write_gguf(model, source, body="F16", head="F32")
    file = source / "model.safetensors" if source.is_dir() else source
    words += [str(source), str(out)]
    with monkeypatch.context() as patch:
        sizes = cut_short(patch, file, -1)
        assert main(words) == 0
    (shutil.rmtree if out.is_dir() else os.remove)(out)
    capsys.readouterr()
    cut_short(monkeypatch, file, len(sizes) // 2)
    assert main(words) == 1
    *steps, error = capsys.readouterr().err.splitlines()
    assert error.startswith(f"bitnet: error: {file} had ") and "it was cut short while it was read" in error
    assert not any("error" in step for step in steps) and [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_short_context_and_few_tokens(tmp_path: Path) -> None:
    random_model(ODD.replace(max_context=4), tmp_path / "a", 5)
    source, checks = source_of(tmp_path / "a"), []
    pack_source(source, tmp_path / "b", check=lambda file: checks.append(verify_source(source, file, tokens=3)))
    assert (checks[0].short.windows, checks[0].long.tokens) == (32, 8)


@pytest.mark.parametrize("role", ["q", "down", "ffn_norm"])
def test_a_difference_in_the_layers_is_found(tmp_path: Path, role: str) -> None:
    random_model(ODD, tmp_path / "a", 5)
    source, out = source_of(tmp_path / "a"), tmp_path / "out"
    with pytest.raises(VerificationError, match=rf"layers\.0\.{role}\.weight: (codes|values) in the file differ"):
        pack_source(source, out, check=lambda file: verify_source(flipped(source, role), file, tokens=64))
    assert not out.exists()


def test_a_difference_in_the_head_is_found(tmp_path: Path) -> None:
    random_model(ODD.replace(tie_embeddings=False), tmp_path / "a", 5)
    source, out = source_of(tmp_path / "a"), tmp_path / "out"
    with pytest.raises(VerificationError, match="all logits"):
        pack_source(source, out, check=lambda file: verify_source(flipped(source, "head"), file, tokens=64))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is an empty file"),
        (b"PK\x03\x04....", "is a zip archive, such as a torch checkpoint"),
        (b"what is this", "is a file of an unknown kind"),
        (b"\x89BITNET\n\1\0\0\0\1\0\0\0" + bytes(48), "is an adapter, expected the model that it belongs to"),
        (b"\x89BITNET\n", "is a packed file already; say what it should become: --to hf, gguf or onnx"),
    ],
)
def test_what_is_no_published_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, said: str
) -> None:
    (tmp_path / "model").write_bytes(content)
    assert main(["convert", str(tmp_path / "model"), str(tmp_path / "out")]) == 1
    captured = capsys.readouterr()
    assert said in captured.err and captured.err.count("\n") == 1 and not captured.out
    with pytest.raises(SourceError), open_source(tmp_path / "model"):
        pass
    assert not (tmp_path / "out").exists()
