"""Checkpoints of a Thinker: our model with their tensors computes the same, and what is not a checkpoint is refused."""

from __future__ import annotations

import copy
import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import hf_models
from bitnet.data import tokenizer
from bitnet_export.convert.incoming import convert, open_source
from bitnet_export.convert.masters import read_start
from bitnet_export.foreign.source import SourceError
from bitnet_runtime import Model
from test_hf_families import model_of
from thinker_reference import Thinker

torch.set_num_threads(1)

SMALL: dict[str, Any] = {
    "vocab_size": 301, "n_layers": 3, "d_model": 36, "n_heads": 3, "d_ff": 52, "dropout": 0.1, "rope_theta": 10000,
    "ctx_len": 50, "use_swiglu": True, "use_gqa": False, "use_moe": False, "num_experts": 5, "num_experts_per_tok": 2,
}  # fmt: skip
FORMS: dict[str, dict[str, Any]] = {
    "dense": {}, "neighbours": {"rope_interleaved": True}, "half the keys": {"use_gqa": True},
    "half the keys, neighbours": {"use_gqa": True, "rope_interleaved": True}, "not gated": {"use_swiglu": False},
    "experts": {"use_moe": True}, "experts, not gated": {"use_moe": True, "use_swiglu": False},
}  # fmt: skip


def make(form: str, **more: Any) -> tuple[dict[str, Any], Thinker]:
    config = SMALL | FORMS[form]
    torch.manual_seed(2)
    model = Thinker(config, **more).eval()
    hf_models.randomize(model, torch.float16, 3)
    return config, model


def save(folder: Path, config: dict[str, Any], state: object, name: str = "thinker.pt") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(state, folder / name)
    return folder


def same(folder: Path, theirs: Thinker) -> None:
    with open_source(folder) as source:
        ours = model_of(source)
    tokens = torch.randint(0, 301, (4, 40), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected, found = theirs(tokens), ours(tokens)
    # fp32 sums of up to a hundred products in another order; theirs turns by angles of another rounding.
    assert float((found - expected).abs().max()) <= 2e-5 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("form", FORMS)
def test_what_its_project_computes(form: str, tmp_path: Path) -> None:
    config, theirs = make(form)
    same(save(tmp_path / "model", config, theirs.state_dict()), theirs)


def test_where_the_weights_are(tmp_path: Path) -> None:
    """With training state, compiled, with a bias of the head, as safetensors."""
    config, theirs = make("dense", head_bias=True)
    state = theirs.state_dict()
    compiled = {key.replace("blocks.0.", "blocks.0._orig_mod."): value for key, value in state.items()}
    whole = {"model": compiled, "optimizer": {"state": {}}, "step": 7, "best_val_loss": 3.0, "scaler": None}
    folder = save(tmp_path / "model", config, whole, "thinker_step_7.pt")
    same(folder, theirs)
    save(folder, config, {"thinker": state}, "thinker_best.pt")
    same(folder, theirs)
    with open_source(folder) as source:
        assert "the weights are those of thinker_best.pt" in source.assumptions and source.config.head_bias
        assert any("RoPE turns the halves of a head" in line for line in source.assumptions)
    save_file(state, folder / "model.safetensors")
    for path in folder.glob("*.pt"):
        path.unlink()
    same(folder, theirs)


@pytest.mark.parametrize("form", ["dense", "experts", "neighbours"])
def test_it_runs(form: str, tmp_path: Path) -> None:
    config, theirs = make(form)
    convert(save(tmp_path / "model", config, theirs.state_dict()), tmp_path / "m.bitnet", head="f32", tokens=100)
    tokens = torch.randint(0, 301, (3, 20), generator=torch.Generator().manual_seed(0))
    with Model.load(tmp_path / "m.bitnet", kv_type="f32") as model, torch.inference_mode():
        for text, expected in zip(tokens.tolist(), theirs(tokens).numpy(), strict=True):
            with model.session() as session:
                found = session.append(text, "all")
            assert abs(found - expected).max() <= 2e-5 * max(1.0, abs(expected).max())  # as above


def test_it_is_a_source_of_finetune(tmp_path: Path) -> None:
    config, theirs = make("dense")
    folder = save(tmp_path / "model", config, theirs.state_dict())
    tokenizer.build("byte", [], 257).save(str(folder / "tokenizer.json"))
    start = read_start(str(folder))
    assert "full-precision" in start.what
    assert torch.equal(start.weights["layers.1.k.weight"], theirs.state_dict()["blocks.1.attn.qkv.weight"][36:72])


class Evil:
    def __reduce__(self) -> Any:
        return print, ("ran",)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (Evil(), "is no checkpoint of tensors alone"),
        ([torch.ones(3)], "holds a list, expected a dictionary of tensors"),
        ({"model": {"tok_emb.weight": 5}}, "tensor tok_emb.weight is a int, expected a tensor"),
        ({}, "norm1.weight is missing"),
        ({"tok_emb.weight": torch.ones(301, 36, dtype=torch.complex64)}, "has dtype torch.complex64"),
        ({"tok_emb.weight": torch.ones(301, 36).to_sparse()}, "layout torch.sparse_coo|no checkpoint of tensors"),
        ({"tok_emb.weight": torch.ones(1, 1).expand(1 << 40, 36)}, "repeats the 4 bytes of a smaller one"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_checkpoint(state: object, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save(tmp_path / "model", SMALL, state)
    with pytest.raises(SourceError, match=message), open_source(folder):
        pass
    assert not capsys.readouterr().out


@pytest.mark.parametrize("content", [b"", b"PK\3\4", b"\x80\2}q\0.", pickle.dumps({"a": 1}), bytes(1000), b"hello"])
def test_other_bytes(content: bytes, tmp_path: Path) -> None:
    folder = save(tmp_path / "model", SMALL, {})
    (folder / "thinker.pt").write_bytes(content)
    with pytest.raises(SourceError), open_source(folder):
        pass


def test_what_is_small_and_would_fill_the_memory(tmp_path: Path) -> None:
    """Compressed a thousandfold, or with entries that share the same bytes."""
    folder = save(tmp_path / "model", SMALL, {"a": torch.zeros(1000), "b": torch.zeros(1000)})
    path = folder / "thinker.pt"
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    with pytest.raises(SourceError, match=r"thinker\.pt is compressed"), open_source(folder):
        pass
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
        first = next(each for each in archive.infolist() if each.file_size == 4000)
        for i in range(3):
            twice = copy.copy(first)
            twice.filename = f"archive/data/{7 + i}"
            archive.filelist.append(twice)
    with pytest.raises(SourceError, match="parts that overlap"), open_source(folder):
        pass


def test_every_truncation(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", SMALL, make("dense")[1].state_dict())
    content = (folder / "thinker.pt").read_bytes()
    for cut in range(0, 100, 7):
        (folder / "thinker.pt").write_bytes(content[: len(content) * cut // 100])
        with pytest.raises(SourceError), open_source(folder):
            pass


def test_which_file(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", SMALL, {}, "a.pt")
    save(folder, SMALL, {}, "b.pt")
    with pytest.raises(SourceError, match=r"has 2 files .pt; expected model.safetensors, thinker_best.pt"):
        read_start(str(folder))
    for path in folder.glob("*.pt"):
        path.unlink()
    with pytest.raises(SourceError, match=r"neither model.safetensors nor a file .pt"):
        read_start(str(folder))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_heads": 5}, "head_dim is missing|d_model"),
        ({"use_moe": "yes"}, "use_moe is 'yes', expected true or false"),
        ({"use_moe": True, "num_experts_per_tok": 9}, "num_experts_per_tok is 9"),
        ({"n_layers": -1}, "n_layers is -1"),
        ({"rope_interleaved": 1}, "rope_interleaved is 1"),
    ],
)
def test_bad_configurations(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "model", SMALL | changes, make("dense")[1].state_dict())
    with pytest.raises(SourceError, match=message), open_source(folder):
        pass
