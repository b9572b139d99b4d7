"""Weights in the files of torch.save: of folders from before safetensors, and of training loops."""

from __future__ import annotations

import json
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import hf_families
from bitnet_export.convert.incoming import convert, open_source
from bitnet_export.foreign.hf import pickled
from bitnet_export.foreign.hf.folder import Folder
from bitnet_export.foreign.hf.pickled import open_pickled
from bitnet_export.foreign.source import SourceError
from bitnet_runtime import Model

torch.set_num_threads(1)  # tiny tensors: waking threads takes longer than the work


def assert_as_theirs(theirs: torch.nn.Module, folder: Path) -> None:
    convert(folder, folder.parent / "m.bitnet", head="f32", tokens=100)
    tokens = hf_families.tokens_of(2, 20)
    with Model.load(folder.parent / "m.bitnet", kv_type="f32") as model:
        for text, expected in zip(tokens.tolist(), hf_families.result(theirs, tokens).numpy(), strict=True):
            with model.session(n_ctx=len(text)) as session:
                found = session.append(text, "all")
            # The weights are numbers that f16 holds, so that nothing but the order of sums differs.
            assert np.abs(found - expected).max() <= 1e-5 * max(1.0, np.abs(expected).max())


def old_form(folder: Path, shards: int, zipped: bool) -> None:
    """As save_pretrained wrote before safetensors, with buffers that nothing reads."""
    state = load_file(folder / "model.safetensors")
    state |= {"h.0.attn.bias": torch.ones(3, 3, dtype=torch.bool), "transformer.h.1.attn.bias": torch.ones(3).byte()}
    (folder / "model.safetensors").unlink()
    if shards == 1:
        torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
        return
    places = {name: f"pytorch_model-{i % shards}.bin" for i, name in enumerate(state)}
    for shard in set(places.values()):
        torch.save({name: state[name] for name in state if places[name] == shard}, folder / shard)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))


@pytest.mark.parametrize(("shards", "zipped"), [(1, True), (1, False), (3, True)])
def test_weights_in_the_form_before_safetensors(shards: int, zipped: bool, tmp_path: Path) -> None:
    theirs = hf_families.save("gpt2", tmp_path / "model")
    old_form(tmp_path / "model", shards, zipped)
    assert_as_theirs(theirs, tmp_path / "model")


def test_checkpoints_as_training_loops_write_them(tmp_path: Path) -> None:
    """Weights beside other things, in fp64, and as parts of larger tensors, which torch.save writes whole."""
    theirs = hf_families.save("llama", tmp_path / "model")
    state = load_file(tmp_path / "model" / "model.safetensors")
    q, k, v = (f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkv")
    joint = torch.cat([state[q], state[k], state[v]]).double()
    state[q], state[k], state[v] = joint.split([30, 10, 10])
    up = "model.layers.2.mlp.up_proj.weight"
    state[up] = state[up].T.contiguous().T  # not contiguous
    (tmp_path / "model" / "model.safetensors").unlink()
    torch.save({"state_dict": state, "epoch": 3}, tmp_path / "model" / "pytorch_model.bin")
    assert_as_theirs(theirs, tmp_path / "model")
    torch.save(
        {"model_state_dict": state}, tmp_path / "model" / "pytorch_model.bin", _use_new_zipfile_serialization=False
    )
    assert_as_theirs(theirs, tmp_path / "model")


def test_the_weights_of_the_old_form_stay_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read from it when they are needed, also where it does not say what its directory says."""
    hf_families.save("llama", tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(state, tmp_path / "pytorch_model.bin")
    entries = open_pickled(Folder(tmp_path))
    for name, tensor in state.items():
        entry = entries[name]
        assert entry.offset > 0 and entry.file.size == (tmp_path / "pytorch_model.bin").stat().st_size
        assert np.array_equal(entry.floats().all(), tensor.float().numpy())
    monkeypatch.setattr(pickled, "_parts", lambda *_: {64: 1})
    with pytest.raises(SourceError, match=r"is not where the directory of the file has it; write it again"):
        open_pickled(Folder(tmp_path))


def test_a_file_that_is_compressed(tmp_path: Path) -> None:
    """Random data do not get smaller, so that their sizes do not tell."""
    whole, file = tmp_path / "whole", tmp_path / "pytorch_model.bin"
    torch.save({"x": torch.randn(1000, generator=torch.Generator().manual_seed(0))}, whole)
    with zipfile.ZipFile(whole) as given, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as made:
        for each in given.infolist():
            made.writestr(each.filename, given.read(each))
    with pytest.raises(SourceError, match="is compressed, or has parts"):
        open_pickled(Folder(tmp_path))


class Beyond:
    """A tensor of a pickle that begins behind the end of its data."""

    def __init__(self, start: int, shape: tuple[int, ...], steps: tuple[int, ...]) -> None:
        self.parts = torch.zeros(8)._typed_storage(), start, shape, steps, False, OrderedDict()

    def __reduce__(self) -> Any:
        return torch._utils._rebuild_tensor_v2, self.parts


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("beyond", [(8, (8,), (1,)), (4, (8,), (1,)), (-1, (8,), (1,)), (0, (2, 4), (8, 1))], ids=str)
def test_tensors_that_lead_out_of_their_data(beyond: Any, zipped: bool, tmp_path: Path) -> None:
    hf_families.save("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    state = {"model.norm.weight": Beyond(*beyond)}
    torch.save(state, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    with pytest.raises(SourceError, match=r"no checkpoint of tensors|not where the directory"), open_source(tmp_path):
        pass


def test_a_shard_of_the_old_form_that_is_missing_or_runs_code(tmp_path: Path) -> None:
    hf_families.save("gpt2", tmp_path / "model")
    old_form(tmp_path / "model", 3, True)
    shard = tmp_path / "model" / "pytorch_model-1.bin"
    shard.unlink()
    with pytest.raises(SourceError, match=r"pytorch_model-1.bin is missing, pytorch_model.bin.index.json names it"):
        convert(tmp_path / "model", tmp_path / "m.bitnet")
    shard.write_bytes(b"")
    with pytest.raises(SourceError, match=r"pytorch_model-1.bin is no checkpoint .* wrote: it ends too soon$"):
        convert(tmp_path / "model", tmp_path / "m.bitnet")
    torch.save({"x": Path("anything but a tensor")}, shard)
    with pytest.raises(SourceError, match=r"pytorch_model-1.bin is no checkpoint of tensors alone"):
        convert(tmp_path / "model", tmp_path / "m.bitnet")
