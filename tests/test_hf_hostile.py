"""Damaged and hostile Hugging Face folders and files: one clear error each, and no file. For safetensors files see
test_hf_hostile_safetensors, for tensors test_hf_hostile_tensors, for config.json test_hf_hostile_config."""

from __future__ import annotations

import json
import os
import time

import pytest

import hf_models
from bitnet_export.convert.incoming import open_source, pack_source
from bitnet_export.foreign.hf.folder import Folder
from bitnet_export.foreign.hf.weights import Quantization
from bitnet_export.foreign.source import SourceError
from hf_refused import edit, refused


@pytest.fixture(scope="module")
def packed():
    return hf_models.llama_packed()


@pytest.fixture
def folder(packed, tmp_path):
    return packed.save(tmp_path / "model")


@pytest.fixture
def sharded(packed, tmp_path):
    return packed.save(tmp_path / "model", shards=3)


@pytest.mark.parametrize("shards", [1, 3])
def test_the_folder_itself_converts(packed, tmp_path, shards):
    with open_source(packed.save(tmp_path / "model", shards)) as source:
        pack_source(source, tmp_path / "out.bitnet")


# ---- files ----


def test_no_config(tmp_path):
    refused_here = tmp_path / "empty"
    refused_here.mkdir()
    refused(refused_here, "no config.json")
    (refused_here / "config.json").write_text("{}")
    refused(refused_here, "an empty config.json")
    (refused_here / "b.gguf").touch()
    refused(refused_here, r"holds b\.gguf, expected a Hugging Face folder; `bitnet convert .*b\.gguf OUT` reads")
    (refused_here / "a.gguf").touch()
    refused(refused_here, r"holds a\.gguf and 1 more")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not the JSON expected"),
        (b"[]", "holds an array, expected an object"),
        (b"\xff\xfe", "not the JSON expected"),
        (b'{"a": 1, "a": 2}', "'a' occurs 2 times"),
        (b'{"a": NaN}', "not a finite number"),
        (rb'{"a": "\uD800"}', r"config.json is not the JSON expected: .* can't encode character '.ud800'"),
        (b'{"a": 1e999}', "not a finite number"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not the JSON expected"),
        (b"[" * 100_000, "not the JSON expected"),
        (b'{"a": "' + b"x" * (9 << 20) + b'"}', "larger than"),
    ],
    ids=lambda value: str(value)[:16],
)
def test_bad_json(folder, content, message):
    (folder / "config.json").write_bytes(content)
    refused(folder, message)


def test_a_file_may_be_as_large_as_its_limit(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    assert Folder(tmp_path).read("a", 3) == b"abc"
    with pytest.raises(SourceError, match="a is larger than 2 bytes"):
        Folder(tmp_path).read("a", 2)


@pytest.mark.parametrize(
    "name",
    ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"],
)
def test_what_git_leaves_in_place_of_a_large_file(folder, name):
    (folder / name).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 17\n")
    refused(folder, f"{name} is a Git LFS pointer; fetch the real file with: git lfs pull")


def test_a_shard_that_git_left_out(sharded):
    (sharded / "model-00002-of-00003.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    refused(sharded, "model-00002-of-00003.safetensors is a Git LFS pointer")


def test_a_name_twice_among_many(folder):
    """Names are counted in one pass; comparing pairs would take hours."""
    names = ", ".join(f'"{i}": 0' for i in range(600_000))
    (folder / "config.json").write_text(f'{{{names}, "599999": 0}}')
    start = time.monotonic()
    refused(folder, "'599999' occurs 2 times")
    assert time.monotonic() - start < 60


def test_many_fields_that_are_not_known(folder):
    edit(folder, **{f"field_{i:06d}": i for i in range(100_000)})
    with open_source(folder) as source:
        lines = [line for line in source.assumptions if "config.json has" in line]
    assert len(lines) == 21 and "99980 more fields" in lines[-1]


def test_many_modules_that_are_not_converted():
    """Layers × names: a list of 8 MB against 1,024 layers of seven projections."""
    names = frozenset(f"x.{i}" for i in range(1_000_000)) | {"model.layers.3", "5.mlp.down_proj"}
    quantization = Quantization(True, False, False, 1e-6, names)
    modules = [f"model.layers.{i}.{name}" for i in range(1024) for name in ("self_attn.q_proj", "mlp.down_proj")]
    start = time.monotonic()
    left = [module for module in modules if not quantization.converts(module)]
    assert time.monotonic() - start < 60
    assert [m for m in left if "down" not in m] == ["model.layers.3.self_attn.q_proj"]
    assert len(left) == 2 + sum(str(i).endswith("5") for i in range(1024))


def test_no_weights(folder):
    (folder / "model.safetensors").rename(folder / "training_args.bin")
    refused(
        folder, r"neither model.safetensors nor .*, but training_args.bin; of its kind pytorch_model.bin and shards"
    )
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"")
    refused(folder, r"but model-00001-of-00002.safetensors, training_args.bin; shards want .*index.json beside them")
    (folder / "a.bin").write_bytes(b"")
    refused(folder, r"but model-00001-of-00002.safetensors, a.bin, training_args.bin; shards want")
    (folder / "a.bin").unlink()
    (folder / "training_args.bin").rename(folder / "pytorch_model.bin")
    refused(folder, r"pytorch_model.bin is no checkpoint of tensors alone that torch.save wrote")
    for name in ("model-00001-of-00002.safetensors", "pytorch_model.bin"):
        (folder / name).unlink()
    refused(folder, "and no other weights; download the model again")
    (folder / "model.onnx").write_bytes(b"")
    refused(folder, "but model.onnx; a graph is not read, give the model that it was made from")


def test_an_adapter_of_peft(folder):
    """Alone, or with the config.json of its model; beside a whole model it is left out, which is said."""
    (folder / "adapter_config.json").write_text("{}")
    with open_source(folder) as source:
        left = "the adapter of adapter_config.json is left out, the model is that of model.safetensors alone"
        assert left in source.assumptions
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    refused(folder, "is an adapter of PEFT, expected a whole model; merge_and_unload")
    (folder / "config.json").unlink()
    refused(folder, "is an adapter of PEFT, expected a whole model; merge_and_unload")


def test_missing_shard(sharded):
    (sharded / "model-00002-of-00003.safetensors").unlink()
    refused(sharded, "model-00002-of-00003.safetensors is missing")


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/../../b", "", "a\0b"])
def test_names_that_lead_out(sharded, name):
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    index["weight_map"]["lm_head.weight"] = name
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(sharded, "is not the name of a file in this folder")


MANY = {str(i): f"{i}" for i in range(1001)}


@pytest.mark.parametrize("places", [None, [], {}, {"a": 1}, MANY], ids=lambda places: str(places)[:9])
def test_bad_weight_map(sharded, places):
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    refused(sharded, "weight_map is not an object|more than 1000 files")


def test_index_and_shards_disagree(sharded):
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.extra"] = index["weight_map"]["lm_head.weight"]
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(sharded, "tensor model.extra is missing in")
    del index["weight_map"]["model.extra"], index["weight_map"]["lm_head.weight"]
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(sharded, "lm_head.weight is there, but .* has it nowhere")


def test_links(folder):
    outside = folder.parent / "elsewhere"
    (folder / "model.safetensors").rename(outside)
    (folder / "model.safetensors").symlink_to(outside)
    refused(folder, "is a link to .*elsewhere, outside of the folder")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("nothing")
    refused(folder, "a link to a file that does not exist")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("model.safetensors")
    refused(folder, "cannot be read")


def test_links_of_the_hubs_cache(folder):
    """snapshots/REVISION holds links into blobs; that is how most published models lie on a disk."""
    cache = folder.parent / "cache"
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots" / "rev").mkdir(parents=True)
    for file in folder.iterdir():
        (cache / "snapshots" / "rev" / file.name).symlink_to(file.rename(cache / "blobs" / f"sha-{file.name}"))
    with open_source(cache / "snapshots" / "rev") as source:
        pack_source(source, folder.parent / "out.bitnet")


def test_not_a_regular_file(folder):
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    refused(folder, "not a regular file")


# ---- the rest ----


def test_another_models_tokenizer(folder):
    from tokenizers import Tokenizer, models

    (folder / "tokenizer.json").write_text(Tokenizer(models.BPE({f"t{i}": i for i in range(400)}, [])).to_str())
    refused(folder, "token id 399, config.json has vocab_size 301")
    (folder / "tokenizer.json").write_text("{}")
    refused(folder, "is refused by the tokenizers library")


def test_bad_generation_defaults(folder):
    """Those that the engine does not accept are left out; the rest is kept."""
    said = {"do_sample": True, "temperature": "hot", "top_k": -1, "top_p": 0.5}
    (folder / "generation_config.json").write_text(json.dumps(said))
    with open_source(folder) as source:
        assert {name: source.generation.get(name) for name in said} == dict.fromkeys(said) | {"top_p": 0.5}
        for line in ("temperature is 'hot', expected a number", "top_k is -1, expected an integer from 0"):
            said = f"of generation_config.json was left out: {line}"
            assert any(found.startswith(said) for found in source.assumptions)
    (folder / "generation_config.json").write_text('{"eos_token_id": [999, 7, true, 4]}')
    with open_source(folder) as source:
        assert source.generation["eos_token_ids"] == [4, 7]
        said = "of eos_token_id = [999, 7, True, 4] was left out: 999, True, expected token ids below 301"
        assert said in source.assumptions
    (folder / "generation_config.json").write_text('{"eos_token_id": [999]}')
    with open_source(folder) as source:
        assert source.generation["eos_token_ids"] == [2]  # of config.json
