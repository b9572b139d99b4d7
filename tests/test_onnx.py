"""ONNX decoders in onnxruntime against numpy in fp64, against each other, and against the engine."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper
from tokenizers import Tokenizer

from bitnet.config import ModelConfig
from bitnet_export import PackedFile, PackedFormatError, VerificationError, random_model, repack
from bitnet_export.foreign.onnx import FORMS, OnnxReport, write_onnx
from bitnet_export.foreign.onnx import graph as graph_module
from bitnet_export.foreign.onnx import write as write_module
from bitnet_export.foreign.onnx.session import OnnxModel
from bitnet_export.packed import encodings, records
from bitnet_export.packed.layout import pack_ternary
from bitnet_export.packed.random_model import _draw
from bitnet_export.packed.writer import Encoded, write_packed
from onnx_reference import Reference, worst_of_rows
from runtime_models import TEMPLATE, byte_tokenizer

pytestmark = pytest.mark.usefixtures("no_spinning")

BITNET = ModelConfig(  # 2B4T in small; no width a multiple of 16, 127 or 128
    vocab_size=301, dim=130, n_layers=3, n_heads=3, n_kv_heads=1, head_dim=34, ffn_dim=259, max_context=96,
)  # fmt: skip
CONFIGS = {
    "bitnet": BITNET,
    "llama": BITNET.replace(
        activation="silu", sub_norm=False, tie_embeddings=False, head_format="f16", weight_scale="row", n_heads=4,
        n_kv_heads=2,
    ),
    "qwen3": BITNET.replace(
        activation="silu", sub_norm=False, qk_norm=True, head_format="f16", weight_scale="group", qkv_bias=True,
    ),
    "gemma3": BITNET.replace(
        activation="gelu", sub_norm=False, post_norm=True, linear_norm=True, qk_norm=True, embedding_scale=11.4,
        sliding_window=5, global_every=3, rope_local_theta=100.0, attention_scale=0.25, head_format="f32",
    ),
    "soft caps": BITNET.replace(
        residual_scale=0.5, logit_softcap=3.0, attention_softcap=2.0, rope_dim=20, rope_attention_factor=1.25,
        sliding_window=6, tie_embeddings=False, ternary=("q", "o", "up", "down"),
    ),
    "layer norms": BITNET.replace(
        norm="layer", norm_bias=True, ffn="plain", activation="relu", position="learned", o_bias=True, ffn_bias=True,
        head_bias=True, n_kv_heads=3,
    ),
    "a norm behind the table": BITNET.replace(
        norm="layer", norm_bias=True, embedding_norm=True, head_format="f16", n_layers=2,
    ),
    "no positions": BITNET.replace(position="none", rope_dim=0, pre_norm=False, post_norm=True),
}  # fmt: skip
TABLES = {"ternary rows": encodings.SCALE_ROW, "bonsai": encodings.SCALE_GROUP}  # models whose embedding is ternary
CONFIGS["ternary rows"] = CONFIGS["llama"].replace(head_format="int8")
CONFIGS["mixed scopes"] = BITNET
CONFIGS["bonsai"] = CONFIGS["qwen3"].replace(tie_embeddings=True)


GROUPED = [name for name, c in CONFIGS.items() if c.weight_scale == "group" or name == "mixed scopes"]
CASES = [(name, form) for name in CONFIGS for form in FORMS if not (form == "int8" and name in GROUPED)]


@functools.cache
def packed_model(folder: Path, name: str) -> Path:
    path, config = folder / f"{name}.bitnet", CONFIGS[name]

    def source(spec: records.Spec) -> Encoded:
        random = np.random.Generator(np.random.SFC64([1, *spec.key]))
        role = records.ROLES[spec.key.role]
        scope = encodings.SCOPE_NAMES.index(config.weight_scale) if role in config.ternary else encodings.SCALE_NONE
        if role in ("embedding", "head") and spec.key.part == 0:
            scope = TABLES.get(name, encodings.SCALE_NONE)
        if name == "mixed scopes" and role in ("q", "gate"):
            scope = encodings.SCALE_GROUP
        if scope not in (encodings.SCALE_ROW, encodings.SCALE_GROUP) or spec.key.part:
            return _draw(spec, config, random, 0.3, encodings.TERNARY_2BIT)
        codes = random.integers(-1, 2, (spec.rows, spec.cols)).astype(np.int8)
        groups = [-(-spec.cols // 128)] if scope == encodings.SCALE_GROUP else []
        scales = random.uniform(0.05, 0.2, [spec.rows, *groups]).astype(np.float16).astype(np.float32)
        return Encoded(encodings.TERNARY_2BIT, scope, pack_ternary(codes), scales)

    write_packed(path, [config], source)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("onnx")


@functools.cache
def export(folder: Path, name: str, form: str) -> tuple[OnnxReport, OnnxModel]:
    out = folder / f"{name}-{form}"
    report = write_onnx(packed_model(folder, name), out, form=form)
    return report, OnnxModel(out / "model.onnx", CONFIGS[name], threads=1)


def tokens(config: ModelConfig, *shape: int) -> NDArray[np.int64]:
    return np.random.default_rng(7).integers(0, config.vocab_size, shape)


@pytest.mark.parametrize(("name", "form"), CASES)
def test_computes_what_numpy_computes(folder: Path, name: str, form: str) -> None:
    report, decoder = export(folder, name, form)
    prompts = tokens(CONFIGS[name], 12, 8)
    reference = Reference(PackedFile.open(packed_model(folder, name)))
    difference = worst_of_rows(decoder.run(prompts)[0], np.stack([reference.logits(prompt) for prompt in prompts]))
    # Of 96 tokens most have no activation that fp32 rounds to another code than fp64 (design: the noise floor).
    assert np.median(difference) <= 1e-5
    assert report.form == form and report.onnx_bytes > 0


@pytest.mark.parametrize("name", ["bitnet", "llama", "soft caps"])
def test_the_engine_agrees(folder: Path, name: str) -> None:
    report, _ = export(folder, name, "int8")
    assert report.compared == 32 * 8 + 96 and report.prompts_median <= 1e-5
    assert min(*report.prefill, *report.decode) > 0
    assert json.loads(json.dumps(report.to_dict()))["form"] == "int8" and "in the form int8" in str(report)


@pytest.mark.parametrize(("change", "form"), [({"ternary": (), "head_format": "f32"}, "float"), ({}, "2bit")])
def test_a_model_without_norms_has_a_noise_floor(
    change: dict[str, Any], form: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without gains to move, any difference would be too large: here of floats that grow from layer to layer."""
    name = f"no norms, {form}"
    bare = BITNET.replace(pre_norm=False, sub_norm=False, final_norm=False, n_layers=2)
    monkeypatch.setitem(CONFIGS, name, bare.replace(**change))
    report, _ = export(folder, name, form)
    assert report.compared and report.floor_mean > 0


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in GROUPED])
def test_all_forms_give_the_same_bits(folder: Path, name: str) -> None:
    text = tokens(CONFIGS[name], 2, 40)
    logits = {form: export(folder, name, form)[1].run(text)[0] for form in FORMS}
    assert logits["float"].tobytes() == logits["int8"].tobytes() == logits["2bit"].tobytes()


@pytest.mark.parametrize(("name", "form"), [("bitnet", "2bit"), ("gemma3", "int8"), ("soft caps", "float")])
def test_a_prompt_in_pieces_and_token_by_token(folder: Path, name: str, form: str) -> None:
    decoder, text = export(folder, name, form)[1], tokens(CONFIGS[name], 2, 24)
    whole, cache = decoder.run(text)
    assert [part.shape for part in cache] == [(2, CONFIGS[name].n_kv_heads, 24, 34)] * 6
    for sizes in ([1] * 24, [7, 1, 16], [24]):
        rows, cache = [], None
        for end, size in zip(np.cumsum(sizes), sizes, strict=True):
            logits, cache = decoder.run(text[:, end - size : end], cache)
            rows.append(logits)
        # onnxruntime adds up the scores of other shapes in another order: fp32 noise, and rounding edges after it.
        assert np.median(worst_of_rows(np.concatenate(rows, 1), whole)) <= 1e-5


@pytest.mark.parametrize(("name", "form"), [("bitnet", "int8"), ("gemma3", "float"), ("layer norms", "2bit")])
def test_padding_before_a_text_changes_nothing(folder: Path, name: str, form: str) -> None:
    decoder, text = export(folder, name, form)[1], tokens(CONFIGS[name], 2, 12)
    mask = np.ones((2, 13), np.int64)
    mask[1, :5] = 0
    batch, cache = decoder.run(text, None, mask[:, :12])
    after, _ = decoder.run(text[:, :1], cache, mask)
    for row, start in ((0, 0), (1, 5)):
        alone, cache_alone = decoder.run(text[row : row + 1, start:])
        # Sums over a longer row of scores, zeros among them, are added up in another order: fp32 noise.
        assert np.median(worst_of_rows(batch[row : row + 1, start:], alone)) <= 1e-5
        next_alone, _ = decoder.run(text[row : row + 1, :1], cache_alone)
        assert worst_of_rows(after[row : row + 1], next_alone).max() < 0.1  # the next token, once: rounding edges
    assert np.isfinite(batch).all()  # padding itself gives numbers too


def initializers(out: Path) -> dict[str, NDArray[Any]]:
    model = onnx.load(out / "model.onnx")  # with the weights
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


@pytest.mark.parametrize(("name", "form"), CASES)
def test_the_weights_are_those_of_the_packed_file(folder: Path, name: str, form: str) -> None:
    export(folder, name, form)
    stored, file, seen = initializers(folder / f"{name}-{form}"), PackedFile.open(packed_model(folder, name)), 0
    for record in file.tensors.values():
        if not record.encoding.ternary:
            continue
        found, codes = stored[record.key.name], file.codes(record)
        if form == "2bit":
            found, grouped = unpack_two_bits(found), record.scope == encodings.SCALE_GROUP
            padding = found[..., 43 if grouped else 127 :]
            assert not padding.any()
            inputs = found[..., : 43 if grouped else 127].reshape(len(found), -1)
            if grouped:
                inputs = inputs.reshape(len(found), -1, 129)[..., :128].reshape(len(found), -1)
                scales = stored[f"{record.key.name}.scale"]
                assert np.array_equal(scales[:, ::3].ravel(), file.scales(record))
                assert np.array_equal(scales, np.repeat(scales[:, ::3], 3, 1))
            assert not inputs[:, record.cols :].any()
            found = inputs[:, : record.cols]
        elif record.key.role == records.ROLE["embedding"] or record.key.role == records.ROLE["head"]:
            found = found if form == "float" else found.astype(np.int16) - 128
        else:
            found = found.T
        expected = file.values(record) if record.scope == encodings.SCALE_GROUP and form == "float" else codes
        assert np.array_equal(found, expected)
        if record.scope != encodings.SCALE_GROUP:
            assert np.array_equal(stored[f"{record.key.name}.scale"], file.scales(record))
        seen += 1
    assert seen == sum(record.encoding.ternary for record in file.tensors.values()) >= 12


def unpack_two_bits(found: NDArray[np.uint8]) -> NDArray[np.int8]:
    """(N, blocks, bytes) to (N, blocks, inputs), as MatMulNBits reads them with its zero at 2."""
    return np.stack([found >> 2 * i & 3 for i in range(4)], -1).reshape(*found.shape[:2], -1).astype(np.int8) - 2


@pytest.mark.parametrize("encoding", [{"encoding": "1.6"}, {"encoding": "2.0", "sparse": True}])
def test_however_the_source_is_encoded(folder: Path, tmp_path: Path, encoding: dict[str, Any]) -> None:
    export(folder, "bitnet", "2bit")
    repack(packed_model(folder, "bitnet"), tmp_path / "other", **encoding)
    assert (tmp_path / "other").read_bytes() != packed_model(folder, "bitnet").read_bytes()
    write_onnx(tmp_path / "other", tmp_path / "out", form="2bit")
    for name in ("model.onnx", "model.onnx_data"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / "bitnet-2bit" / name).read_bytes()


def test_names_and_shapes_of_inputs_and_outputs(folder: Path) -> None:
    session = export(folder, "bitnet", "int8")[1].session
    cache = ["batch", 1, "past", 34]
    assert [(x.name, x.shape) for x in session.get_inputs()][:4] == [
        ("input_ids", ["batch", "length"]),
        ("attention_mask", ["batch", "past + length"]),
        ("position_ids", ["batch", "length"]),
        ("past_key_values.0.key", cache),
    ]
    assert [x.name for x in session.get_outputs()] == ["logits"] + [
        f"present.{i}.{kind}" for i in range(3) for kind in ("key", "value")
    ]
    assert session.get_outputs()[0].shape == ["batch", "length", 301]
    assert session.get_outputs()[1].shape == ["batch", 1, "past + length", 34]


def test_the_folder_has_what_other_tools_ask_for(tmp_path: Path) -> None:
    config = BITNET.replace(n_layers=1)
    words, template = byte_tokenizer().to_str().encode(), TEMPLATE.encode()
    generation = {"eos_token_ids": [256], "bos_token_id": 1, "temperature": 0.7}
    write_packed(
        tmp_path / "m",
        [config],
        lambda spec: _draw(spec, config, np.random.Generator(np.random.SFC64(1)), 0.3, encodings.TERNARY_2BIT),
        metadata={"generation": generation},
        tokenizer=words,
        template=template,
    )
    out = tmp_path / "out"
    out.mkdir()  # an empty folder is fine
    write_onnx(tmp_path / "m", out)
    assert sorted(p.name for p in out.iterdir()) == [
        "chat_template.jinja", "config.json", "genai_config.json", "generation_config.json", "model.onnx",
        "model.onnx_data", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert (out / "chat_template.jinja").read_bytes() == template
    ids = Tokenizer.from_file(str(out / "tokenizer.json")).encode("ab").ids
    assert ids == [1, *byte_tokenizer().encode("ab").ids]  # the start token, as the engine puts it
    described = json.loads((out / "config.json").read_text())
    assert described["num_key_value_heads"] == 1 and described["head_dim"] == 34 and described["eos_token_id"] == [256]
    names = json.loads((out / "genai_config.json").read_text())["model"]["decoder"]
    session = OnnxModel(out / "model.onnx", config, threads=1).session
    told = {name % 0 if "%d" in name else name for name in (*names["inputs"].values(), *names["outputs"].values())}
    assert told == {x.name for x in (*session.get_inputs(), *session.get_outputs())}
    expected = {"bos_token_id": 1, "eos_token_id": [256], "temperature": 0.7, "do_sample": True}
    assert json.loads((out / "generation_config.json").read_text()) == expected


# ---- what goes wrong ----


@pytest.fixture
def nothing_written(tmp_path: Path) -> Iterator[Path]:
    """A path to write to, after which the folder is as it was."""
    before = set(tmp_path.iterdir())
    yield tmp_path / "out"
    left = {path.name for path in set(tmp_path.iterdir()) - before}
    assert not {name for name in left if name.startswith((".", "out"))}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input": "draft"}, "input = 'draft'"),
        ({"adapter_rank": 3, "adapters": ("q",)}, "(adapter_rank = 3), which no graph has; give the model without"),
    ],
)
def test_a_model_it_cannot_say_is_refused_by_name(
    nothing_written: Path, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    config, random = BITNET.replace(n_layers=1, **change), np.random.Generator(np.random.SFC64(1))
    write_packed(tmp_path / "m", [config], lambda spec: _draw(spec, config, random, 0.3, encodings.TERNARY_2BIT))
    with pytest.raises(ValueError, match="cannot be written as ONNX") as error:
        write_onnx(tmp_path / "m", nothing_written)
    assert words in str(error.value)


def test_group_scales_are_refused_in_the_form_that_has_none(folder: Path, nothing_written: Path) -> None:
    with pytest.raises(ValueError, match="which the form int8 has not; add --form 2bit or --form float"):
        write_onnx(packed_model(folder, "bonsai"), nothing_written, form="int8")


def test_several_stacks_are_refused(nothing_written: Path, tmp_path: Path) -> None:
    config, random = BITNET.replace(n_layers=1), np.random.Generator(np.random.SFC64(1))
    write_packed(
        tmp_path / "m", [config, config], lambda spec: _draw(spec, config, random, 0.3, encodings.TERNARY_2BIT)
    )
    with pytest.raises(ValueError, match="expected one, or one followed by its draft or its vision stack"):
        write_onnx(tmp_path / "m", nothing_written)


def test_a_model_that_the_engine_cannot_run_is_written_without_a_comparison(tmp_path: Path) -> None:
    config = BITNET.replace(n_layers=1).with_draft()
    assert config.draft
    random_model(config.replace(draft=config.draft.replace(sliding_window=5)), tmp_path / "m")
    report = write_onnx(tmp_path / "m", tmp_path / "out")
    assert report.compared == 0 and (tmp_path / "out" / "model.onnx").is_file()
    assert str(report).endswith("\nlogits     not compared: the engine cannot run this model")


def test_an_unknown_form_is_refused(folder: Path, nothing_written: Path) -> None:
    with pytest.raises(ValueError, match="form is '4bit', expected one of float, int8, 2bit"):
        write_onnx(packed_model(folder, "bitnet"), nothing_written, form="4bit")


def test_a_damaged_source_is_refused(folder: Path, nothing_written: Path, tmp_path: Path) -> None:
    content = bytearray(packed_model(folder, "bitnet").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "m").write_bytes(content)
    with pytest.raises(PackedFormatError, match="checksum"):
        write_onnx(tmp_path / "m", nothing_written)
    (tmp_path / "m").write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(PackedFormatError, match="GGUF"):
        write_onnx(tmp_path / "m", nothing_written)


@pytest.mark.parametrize("generation", [[1], {"eos_token_ids": ["</s>"]}, {"bos_token_id": "<s>"}])
def test_strange_metadata_is_refused(nothing_written: Path, tmp_path: Path, generation: Any) -> None:
    config, random = BITNET.replace(n_layers=1), np.random.Generator(np.random.SFC64(1))
    write_packed(
        tmp_path / "m",
        [config],
        lambda spec: _draw(spec, config, random, 0.3, encodings.TERNARY_2BIT),
        metadata={"generation": generation},
    )
    with pytest.raises(ValueError, match="in the metadata"):
        write_onnx(tmp_path / "m", nothing_written)


def test_what_is_there_is_left_alone(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for out in ("out", "file"):
        with pytest.raises(FileExistsError, match="is there already"):
            write_onnx(packed_model(folder, "bitnet"), tmp_path / out)
    assert (tmp_path / "out" / "mine").read_text() == (tmp_path / "file").read_text() == "mine"
    with pytest.raises(FileNotFoundError, match="create it first"):
        write_onnx(packed_model(folder, "bitnet"), tmp_path / "none" / "out")


def test_a_graph_that_computes_something_else_is_not_kept(
    folder: Path, nothing_written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_module._Model, "activation", lambda self, x: self.g.op("Relu", x))  # not squared
    with pytest.raises(VerificationError, match="onnxruntime against the engine: median difference"):
        write_onnx(packed_model(folder, "bitnet"), nothing_written)


def test_a_full_disk_leaves_nothing(folder: Path, nothing_written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(write_module.onnx, "save", full)
    with pytest.raises(OSError, match="no space left"):
        write_onnx(packed_model(folder, "bitnet"), nothing_written)


def test_a_folder_whose_name_is_no_utf_8(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"on\\udce8' is not UTF-8, .* give another"):
        write_onnx(packed_model(folder, "bitnet"), tmp_path / os.fsdecode(b"on\xe8"))
    assert not any(tmp_path.iterdir())
