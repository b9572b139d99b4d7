"""A packed file as a Hugging Face folder: what transformers computes from it, and the way back."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import packed_files
from bitnet.config import ModelConfig
from bitnet_export import PackedFile, random_model
from bitnet_export.checkpoint import sparsity
from bitnet_export.checkpoint.repack import repack
from bitnet_export.convert.incoming import open_source, pack_source
from bitnet_export.foreign.gguf.write import write_gguf
from bitnet_export.foreign.hf.write import write_folder
from bitnet_export.foreign.onnx import write_onnx
from bitnet_export.packed import encodings, records
from bitnet_export.packed.records import ROLES
from bitnet_runtime import Model
from packed_source import assert_same_tensors, source_of
from runtime_models import TEMPLATE, byte_tokenizer

BITNET = ModelConfig(
    vocab_size=131, dim=48, n_layers=3, n_heads=3, n_kv_heads=1, head_dim=16, ffn_dim=100, max_context=200,
)  # fmt: skip
PLAIN = BITNET.replace(sub_norm=False, activation="silu")
YARN: dict[str, Any] = {"rope_scaling": "yarn", "rope_factor": 4.0, "rope_attention_factor": 1.2}
LLAMA3: dict[str, Any] = {"rope_scaling": "llama3", "rope_factor": 8.0}
CONFIGS = {
    "BitNetForCausalLM": BITNET,
    "BitNetForCausalLM, biases": BITNET.replace(qkv_bias=True, o_bias=True, tie_embeddings=False),
    "BitNetForCausalLM, some ternary": BITNET.replace(ternary=("q", "v", "up", "down"), head_format="f16"),
    "LlamaForCausalLM": PLAIN.replace(tie_embeddings=False, rope_theta=5e5, head_dim=10),
    "LlamaForCausalLM, rows, odd": PLAIN.replace(ffn_dim=101, weight_scale="row", vocab_size=133),
    "LlamaForCausalLM, groups": PLAIN.replace(
        dim=150, head_dim=50, ffn_dim=140, weight_scale="group", head_format="f32"
    ),
    "LlamaForCausalLM, scaled": PLAIN.replace(rope_original_context=64, ffn_bias=True, **LLAMA3),
    "LlamaForCausalLM, norms inside": PLAIN.replace(linear_norm=True, head_format="f32", activation="gelu"),
    "Qwen3ForCausalLM": PLAIN.replace(qk_norm=True, dim=52, head_dim=32, rope_original_context=50, **YARN),
    "Qwen3ForCausalLM, Bonsai": PLAIN.replace(
        qk_norm=True, dim=150, head_dim=50, ffn_dim=140, weight_scale="group", head_format="ternary"
    ),
    "Qwen3ForCausalLM, windows": PLAIN.replace(qk_norm=True, sliding_window=5, global_every=3),
    "Qwen2ForCausalLM, windows": PLAIN.replace(qkv_bias=True, sliding_window=5),
    "Qwen2ForCausalLM": PLAIN.replace(qkv_bias=True, rope_scaling="linear", rope_factor=2.0),
    "MistralForCausalLM": PLAIN.replace(sliding_window=7, activation="relu"),
    "GemmaForCausalLM": PLAIN.replace(activation="gelu", embedding_scale=48**0.5, head_dim=10),
    "Gemma2ForCausalLM": PLAIN.replace(
        activation="gelu",
        embedding_scale=float(np.float32(48**0.5)),
        post_norm=True,
        attention_scale=17**-0.5,
        sliding_window=7,
        global_every=2,
        attention_softcap=5.0,
        logit_softcap=9.0,
        head_format="f16",
    ),
    "Gemma2ForCausalLM, no window": PLAIN.replace(
        activation="gelu", embedding_scale=48**0.5, post_norm=True, head_dim=10, head_format="f16"
    ),
}


def build(config: ModelConfig, path: Path, seed: int = 1, **sections: Any) -> Path:
    """A random model, with what `random_model` does not draw: scaled RoPE and other sections."""
    random_model(config.replace(rope_scaling="none"), path.with_suffix(".random"), seed)
    source = dataclasses.replace(source_of(path.with_suffix(".random")), config=config, **sections)
    pack_source(source, path, head=config.head_format)
    path.with_suffix(".random").unlink()
    return path


@pytest.fixture(scope="module", autouse=True)
def _eager() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):  # transformers unpacks weights in a function that it compiles
        yield


@pytest.fixture(scope="module", params=list(CONFIGS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """Packed file, folder, architecture."""
    folder = tmp_path_factory.mktemp("hf")
    path = build(CONFIGS[request.param], folder / "m.bitnet")
    write_folder(path, folder / "hf")
    return path, folder / "hf", request.param.split(",")[0]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"temperature": "hot"}, "temperature is 'hot', expected a number"),
        ({"top_k": -7}, "top_k is -7, expected an integer from 0"),
        ({"bos_token_id": -1}, r"special tokens in the metadata are \[\] and -1, expected ids below 300"),
        ({"bos_token_id": 10**12}, "expected ids below 300"),
        ({"eos_token_ids": [2, 300]}, r"are \[2, 300\] and None, expected ids below 300"),
        ({"eos_token_ids": [True]}, "expected ids below 300"),
        ({"padding": {"token_id": 1}}, "`padding` in the metadata is"),
    ],
)
def test_odd_defaults_are_one_error_whatever_is_written(tmp_path: Path, said: dict[str, Any], message: str) -> None:
    config = PLAIN.replace(vocab_size=300, dim=64, head_dim=32, n_heads=2, ffn_dim=128, activation="silu")
    path = build(config, tmp_path / "m.bitnet", tokenizer=byte_tokenizer().to_str().encode())
    odd = packed_files.with_generation(path, tmp_path / "odd.bitnet", **said)
    for write in (write_folder, write_onnx):
        with pytest.raises(ValueError, match=message):
            write(odd, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == [path, odd]


def test_no_end_of_an_answer_is_no_number_of_tokens(tmp_path: Path) -> None:
    """-1 means as many as fit, which transformers does not know."""
    path = build(PLAIN, tmp_path / "m.bitnet")
    for tokens, found in ((-1, None), (0, None), (7, 7)):
        said = packed_files.with_generation(path, tmp_path / f"{tokens}.bitnet", max_tokens=tokens)
        write_folder(said, tmp_path / str(tokens))
        assert GenerationConfig.from_pretrained(tmp_path / str(tokens)).max_new_tokens == found


def load(folder: Path) -> Any:
    found, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info  # no missing, unexpected or mismatched tensor
    return found


def log_probabilities(forward: Callable[[list[int]], Any], texts: list[list[int]]) -> NDArray[np.float64]:
    return np.stack([torch.as_tensor(forward(text)).double().log_softmax(-1).numpy() for text in texts])


@torch.no_grad()
def test_transformers_gives_the_same_logits(model: tuple[Path, Path, str]) -> None:
    path, folder, architecture = model
    theirs = load(folder)
    assert type(theirs).__name__ == architecture
    rng = np.random.default_rng(0)
    short, long = (rng.integers(0, 131, shape).tolist() for shape in ((24, 7), (8, 80)))

    def torch_logits(text: list[int]) -> Any:
        return theirs(torch.tensor([text])).logits[0]

    with Model.load(path, kv_type="f32") as engine, engine.session() as session:

        def our_logits(text: list[int]) -> Any:
            session.reset()
            return session.append(text, "all")

        apart = np.abs(log_probabilities(our_logits, short) - log_probabilities(torch_logits, short))
        ours = log_probabilities(our_logits, long)
    # Design, the noise floor: two right fp32 programs differ by a few 1e-6 until an activation falls on the
    # other side of a rounding edge, which happens in one of ten prompts of these small models.
    assert np.median(apart.max(axis=(1, 2))) <= 1e-5
    # Later tokens see all that happened before; the distance of one pair of right programs is a draw, so take
    # several: fp64, and fp32 with gains of the norms that differ by half a unit in the last place.
    fp32, floors = log_probabilities(torch_logits, long), []
    norms = [(p, p.clone()) for name, p in theirs.named_parameters() if "norm" in name]
    for seed in range(5):
        random = torch.Generator().manual_seed(seed)
        for gains, exact in norms:
            gains.copy_(exact * (1 + 6e-8 * torch.randn(exact.shape, generator=random)))
        floors.append(log_probabilities(torch_logits, long))
    for gains, exact in norms:
        gains.copy_(exact)
    theirs.double()
    floors.append(log_probabilities(torch_logits, long))
    assert np.abs(ours - fp32).mean() <= 1e-5 + 1.5 * max(np.abs(other - fp32).mean() for other in floors)


def test_there_and_back_gives_the_same_codes_and_scales(model: tuple[Path, Path, str], tmp_path: Path) -> None:
    path, folder, _ = model
    ours = PackedFile.open(path)
    with open_source(folder) as source:
        pack_source(source, tmp_path / "back.bitnet", head=ours.configs[0].head_format)
    assert_same_tensors(PackedFile.open(tmp_path / "back.bitnet"), ours)


def test_floats_of_a_class_of_ternary_models_stay_floats(tmp_path: Path) -> None:
    """Of BitNetForCausalLM, floats that nothing is said about are masters."""
    path = build(BITNET.replace(ternary=(), head_format="f32"), tmp_path / "m.bitnet")
    write_folder(path, tmp_path / "hf")
    text, theirs = list(range(20)), load(tmp_path / "hf")
    with torch.inference_mode(), Model.load(path, kv_type="f32") as ours, ours.session() as session:
        expected = theirs(torch.tensor([text])).logits[0].numpy()
        assert np.abs(session.append(text, "all") - expected).max() <= 1e-5 * np.abs(expected).max()  # fp32 sums
    with open_source(tmp_path / "hf") as source:
        assert source.config.ternary == ()
        pack_source(source, tmp_path / "back.bitnet", head="f32")
    assert_same_tensors(PackedFile.open(tmp_path / "back.bitnet"), PackedFile.open(path))


def test_biases_of_norms_have_no_scale(tmp_path: Path) -> None:
    """In a ternary BERT these norms come after those of projections."""
    config = PLAIN.replace(
        n_kv_heads=3, norm="layer", norm_bias=True, position="learned", ffn="plain", qkv_bias=True, o_bias=True,
        ffn_bias=True, mask="bidirectional", pre_norm=False, residual_norm=True, embedding_norm=True, final_norm=False,
        has_head=False, activation="gelu_erf", pooling="mean", head_format="f32",
    )  # fmt: skip
    path = build(config, tmp_path / "m.bitnet")
    write_folder(path, tmp_path / "hf")
    test_there_and_back_gives_the_same_codes_and_scales((path, tmp_path / "hf", "BertModel"), tmp_path)


@pytest.mark.parametrize("stored", [{"encoding": "1.6"}, {"encoding": "2.0", "sparse": True}])
def test_how_the_packed_file_stores_its_weights_does_not_matter(
    tmp_path: Path, stored: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparsity, "require_zeros", lambda *_: None)  # no architecture of llama.cpp has relu² like this
    path = build(BITNET.replace(activation="silu"), tmp_path / "m.bitnet")
    repack(path, tmp_path / "other.bitnet", **stored)
    for name in ("m", "other"):
        write_folder(tmp_path / f"{name}.bitnet", tmp_path / name)
        write_gguf(tmp_path / f"{name}.bitnet", tmp_path / f"{name}.gguf", body="F16", head="F32")
    assert (tmp_path / "m.gguf").read_bytes() == (tmp_path / "other.gguf").read_bytes()
    assert (tmp_path / "m" / "model.safetensors").read_bytes() == (tmp_path / "other/model.safetensors").read_bytes()


def test_tokens_template_and_generation_defaults(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer([b"abc"])
    end = tokenizer.token_to_id("<|end|>")
    generation = {"eos_token_ids": [end], "bos_token_id": end, "temperature": 0.5, "repeat_penalty": 1.1, "seed": 7}
    config = BITNET.replace(vocab_size=tokenizer.get_vocab_size() + 2)
    sections = {"tokenizer": tokenizer.to_str().encode(), "template": TEMPLATE.encode(), "generation": generation}
    write_folder(build(config, tmp_path / "m.bitnet", **sections), tmp_path / "hf")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = "héllo  wörld\n\t<|user|>x"
    assert theirs(text)["input_ids"] == [end, *tokenizer.encode(text).ids]  # as the engine does with a bos_token_id
    assert theirs.eos_token_id == theirs.bos_token_id == end
    chat = theirs.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    assert chat == "<|user|>Hi<|end|><|assistant|>"
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").generation_config
    assert (found.eos_token_id, found.temperature, found.repetition_penalty) == ([end], 0.5, 1.1)
    assert found.do_sample is True
    with open_source(tmp_path / "hf") as source:
        assert source.tokenizer is not None
        assert Tokenizer.from_str(source.tokenizer.decode()).encode(text).ids == theirs(text)["input_ids"]
        assert source.template == sections["template"]
        special = {"bos_token": "<|end|>", "eos_token": "<|end|>"}
        assert source.generation == {key: value for key, value in generation.items() if key != "seed"} | {
            "special_tokens": special,
            "repeat_last_n": -1,
        }
    # And once more: nothing is put before a text twice.
    with open_source(tmp_path / "hf") as source:
        pack_source(source, tmp_path / "again.bitnet")
    write_folder(tmp_path / "again.bitnet", tmp_path / "hf2")
    assert AutoTokenizer.from_pretrained(tmp_path / "hf2")(text)["input_ids"] == theirs(text)["input_ids"]


CUT_MERGE = json.dumps(
    {"model": {"type": "BPE", "vocab": {"a": 0, "é": 1}, "merges": [["a", "é"]], "continuing_subword_prefix": "x"}}
).encode()  # the library ends the process
PANICS = json.dumps(
    {
        "model": {"type": "BPE", "vocab": {}, "merges": []},
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    }
).encode()


@pytest.mark.parametrize(
    ("kind", "content", "message"),
    [
        (records.METADATA, b'{"generation": 5}', "`generation` in the metadata is 5, expected an object"),
        (records.METADATA, b'{"generation": {"eos_token_ids": [1, "x"]}}', r"are \[1, 'x'\] and None, expected ids"),
        (records.METADATA, b'{"generation": {"bos_token_id": "x"}}', r"are \[\] and 'x', expected ids"),
        (records.TOKENIZER, b"{}", "section TOKENIZER is refused by the tokenizers library"),
        (records.TOKENIZER, CUT_MERGE, "section TOKENIZER is refused: .* has the merge"),
        (records.TOKENIZER, PANICS, "section TOKENIZER is refused by the tokenizers library"),
    ],
)
def test_sections_that_are_none(tmp_path: Path, kind: int, content: bytes, message: str) -> None:
    random_model(BITNET, tmp_path / "m.bitnet")
    file = packed_files.with_section((tmp_path / "m.bitnet").read_bytes(), kind, content)
    (tmp_path / "m.bitnet").write_bytes(file)
    with pytest.raises(ValueError, match=message):
        write_folder(tmp_path / "m.bitnet", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["m.bitnet"]


def test_what_the_same_logits_need_is_said(tmp_path: Path) -> None:
    random_model(BITNET, tmp_path / "m.bitnet")
    said = str(write_folder(tmp_path / "m.bitnet", tmp_path / "out"))
    assert "dtype float32" in said and "--kv-type f32" in said


def test_defaults_under_other_names_of_the_runtime_are_written_too(tmp_path: Path) -> None:
    path = build(BITNET, tmp_path / "m.bitnet", generation={"temp": 0.5, "n_predict": 7, "repetition_penalty": 1.1})
    write_folder(path, tmp_path / "hf")
    found = json.loads((tmp_path / "hf" / "generation_config.json").read_text())
    assert (found["temperature"], found["max_new_tokens"], found["repetition_penalty"]) == (0.5, 7, 1.1)


@pytest.mark.parametrize("to", ["hf", "gguf", "onnx"])
def test_defaults_that_are_lost_are_named(to: str, tmp_path: Path) -> None:
    write: Any = {
        "hf": write_folder,
        "gguf": functools.partial(write_gguf, body="F32", head="F32"),
        "onnx": write_onnx,
    }[to]
    said = {"temp": 0.5, "presence_penalty": 1.5, "frequency_penalty": 0, "stop": ["User:"], "n_predict": 7}
    path = build(PLAIN, tmp_path / "m.bitnet", generation=said | {"repeat_penalty": 1.1})
    found = write(path, tmp_path / "out").notes
    lost = "presence_penalty = 1.5, stop = ['User:']" + ", max_tokens = 7" * (to == "gguf")
    assert f"of the sampling defaults were left out: {lost}" in found
    latest = "looks at the whole text in transformers, repeat_penalty here at the latest 64 tokens"
    assert any(latest in line for line in found) == (to != "gguf")
    path = build(PLAIN, tmp_path / "all.bitnet", generation={"temp": 0.5, "repeat_penalty": 1.1, "repeat_last_n": -1})
    assert not any("defaults" in line or "penalty" in line for line in write(path, tmp_path / "all").notes)


def test_greedy_defaults(tmp_path: Path) -> None:
    path = build(BITNET, tmp_path / "m.bitnet", generation={"temperature": 0, "top_k": 5})
    write_folder(path, tmp_path / "hf")
    found = json.loads((tmp_path / "hf" / "generation_config.json").read_text())
    assert found == {"bos_token_id": None, "eos_token_id": None, "do_sample": False}


@pytest.mark.parametrize("ffn_dim", [21, 24])
def test_experts_that_transformers_cannot_group_are_told(ffn_dim: int, tmp_path: Path) -> None:
    config = ModelConfig(
        vocab_size=64, dim=32, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=16, ffn_dim=ffn_dim, max_context=32,
        ternary=(), head_format="f32", sub_norm=False, activation="silu", n_experts=3, experts_per_token=2,
    )  # fmt: skip
    random_model(config, tmp_path / "m")
    notes = write_folder(tmp_path / "m", tmp_path / "hf").notes
    told = [note for note in notes if "rows of 32 and 21 numbers" in note]
    assert bool(told) == (ffn_dim == 21) and all('experts_implementation="eager"' in note for note in told)
    how = {"experts_implementation": "eager"} if told else {}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32, **how)
    assert model(torch.arange(8)[None]).logits.shape == (1, 8, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logit_softcap": 30.0}, "nearest is BitNetForCausalLM: logit_softcap is 30.0, it computes 0.0"),
        ({"n_heads": 2, "n_kv_heads": 2}, "n_heads · head_dim is 32, its norm before o has dim = 48 inputs"),
        (
            {"sub_norm": False, "dim": 50, "ffn_bias": True},
            "LlamaForCausalLM: dim is 50, it wants a multiple of n_heads",
        ),
        ({"ffn": "plain"}, "ffn is 'plain', it computes 'gated'"),
        ({"o_bias": True}, "o_bias is True, it computes False"),
        ({"rope_attention_factor": 1.2}, "rope_attention_factor is 1.2, it computes 1.0"),
        ({"sub_norm": False, "n_experts": 3, "experts_per_token": 2}, "MixtralForCausalLM: its experts are parameters"),
        ({"sub_norm": False, "post_norm": True, "embedding_scale": 2.0}, "embedding_scale is 2.0, it computes 6.92820"),
        ({"sub_norm": False, "post_norm": True, "embedding_scale": 2.0, "dim": 36}, "it computes 6.0;|computes 6.0$"),
        ({"rope_dim": 8}, "rope_dim is 8, only models whose whole heads turn"),
        ({"attention_scale": 0.5}, "attention_scale is 0.5, only 1/sqrt"),
        ({"linear_norm": True}, "linear_norm with a quantized head"),
        ({"linear_norm": True, "input": "embeddings", "tie_embeddings": False}, "input is 'embeddings', it computes"),
        ({"linear_norm": True, "ternary": ("q",)}, "linear_norm with projections of floats"),
    ],
)
def test_what_transformers_does_not_compute_is_refused_by_name(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = tmp_path / "m.bitnet"
    random_model(BITNET.replace(**change), path)
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        write_folder(path, tmp_path / "hf")
    assert list(tmp_path.iterdir()) == [path]


def test_a_table_of_frequencies_that_is_not_rope_theta(tmp_path: Path) -> None:
    random_model(BITNET, tmp_path / "random.bitnet")
    file = PackedFile.open(tmp_path / "random.bitnet")

    def source(spec: records.Spec) -> Any:
        from bitnet_export.packed.writer import Encoded

        record = file.tensors[spec.key]
        if ROLES[spec.key.role] == "rope_frequencies":
            return Encoded.f32(file.values(record) * np.float32(1.001))
        scales = None if record.scope == encodings.SCALE_NONE else file.scales(record)
        return Encoded(record.encoding, record.scope, file.stored(record), scales)

    from bitnet_export.packed.writer import write_packed

    write_packed(tmp_path / "m.bitnet", [BITNET], source)
    with pytest.raises(ValueError, match="rope_frequencies is not the table of rope_theta = 10000"):
        write_folder(tmp_path / "m.bitnet", tmp_path / "hf")


def test_nothing_is_overwritten_and_nothing_is_left_behind(tmp_path: Path) -> None:
    path, out = build(BITNET, tmp_path / "m.bitnet"), tmp_path / "hf"
    out.mkdir()
    (out / "mine").write_text("mine")
    with pytest.raises(FileExistsError, match="is there already"):
        write_folder(path, out)
    with pytest.raises(FileNotFoundError, match="create it first"):
        write_folder(path, tmp_path / "none" / "hf")
    (out / "mine").unlink()
    seen = []

    def stop(line: str) -> None:
        seen.append(line)
        if len(seen) == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_folder(path, out, progress=stop)
    assert sorted(tmp_path.iterdir()) == [out, path] and not any(out.iterdir())
    written = write_folder(path, out)  # an existing empty folder is fine
    assert seen == [f"writing tensor {n} of {written.tensors}" for n in range(1, 11)]
    assert written.file_bytes == sum(file.stat().st_size for file in out.iterdir())
