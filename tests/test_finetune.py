"""`bitnet finetune`: a full-precision model becomes ternary, ends in the engine, and can be distilled and resumed."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Words
from tokenizers import models, pre_tokenizers, processors
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import bitnet_cli
import hf_families
import hf_models
from bitnet import quant, straight_through
from bitnet.config import TERNARY_LINEARS, ModelConfig
from bitnet.data import dataset, tokenizer
from bitnet.model.transformer import Transformer
from bitnet.settings import Settings, flag_of
from bitnet.setup import texts
from bitnet.train import checkpoint, loop, runlog, schedule, source_model
from bitnet.train.checkpoint import Checkpoint
from bitnet_export import PackedFile, export_checkpoint
from bitnet_export.convert.incoming import open_source
from bitnet_export.convert.masters import read_start
from bitnet_export.foreign.source import SourceError
from bitnet_export.packed import records
from bitnet_export.packed.records import NONE, ROLE, Key
from bitnet_runtime import Model
from bitnet_runtime.tokenizer.text import Tokenizer

torch.set_num_threads(1)

SHAPE: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "head_dim": 16,
}  # fmt: skip
FAST = ["--threads", "1", "--steps", "8", "--batch", "4", "--context", "24", "--save-every", "4", "--precision", "fp32"]


def full_precision(family: str) -> torch.nn.Module:
    if family == "llama":
        model: torch.nn.Module = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False))
    elif family == "mixtral":
        experts = {"num_local_experts": 3, "num_experts_per_tok": 2, "experts_implementation": "eager"}
        model = MixtralForCausalLM(MixtralConfig(**SHAPE, **experts))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=True))
    hf_models.randomize(model, torch.float32, seed=1)
    return model.eval()


def save(model: torch.nn.Module, folder: Path) -> Path:
    model.save_pretrained(folder)
    tokenizer.build("byte", [], 257).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module", params=["llama", "qwen3", "mixtral"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Path]:
    model = full_precision(request.param)
    return model, save(model, tmp_path_factory.mktemp("source") / request.param)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder, rng = tmp_path_factory.mktemp("text"), random.Random(0)
    for i in range(8):
        (folder / f"{i}.txt").write_text(" ".join(rng.choice(["red", "cat", "sees", "a"]) for _ in range(200)))
    return str(folder)


def run(*argv: object) -> int:
    return bitnet_cli.main([str(word) for word in argv])


def losses(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in r.items() if k != "seconds"} for r in runlog.read(folder / "log.jsonl")]


# ---- reading a source ----


def test_without_quantizers_the_model_is_the_source(source: tuple[torch.nn.Module, Path]) -> None:
    theirs, folder = source
    start = read_start(str(folder))
    assert start.config.ternary == () and "full-precision" in start.what
    config = start.defaults()[1]
    assert config.ternary == TERNARY_LINEARS and config.head_format == "int8"
    model, inserted = source_model.build(start, config)
    tokens = torch.randint(0, 300, (3, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs(tokens).logits
        with model.partly_quantized(0.0):
            found = model(tokens)
        ternary = model(tokens)
        untouched = Transformer(start.config)
        untouched.load_state_dict(dict(start.weights))
        plain = untouched(tokens)
    assert not inserted
    # fp32 sums of up to a hundred products in another order.
    size = float(expected.abs().max())
    assert torch.allclose(found, expected, rtol=0, atol=1e-5 * size)
    assert torch.allclose(plain, expected, rtol=0, atol=1e-5 * size)
    assert not torch.allclose(ternary, expected, rtol=0, atol=0.1 * size)
    assert model.amount == 1.0


@pytest.mark.parametrize("name", hf_families.MAKE)
def test_every_family_is_read(name: str, tmp_path: Path) -> None:
    """Computes what transformers does, before its quantizers come in."""
    theirs = hf_families.save(name, tmp_path / "model")
    tokenizer.build("byte", [], 257).save(str(tmp_path / "model" / "tokenizer.json"))
    start = read_start(str(tmp_path / "model"))
    settings, config = start.defaults()
    assert start.config.ternary == () and config.ternary == TERNARY_LINEARS and settings["quantize_warmup"] > 0
    model = source_model.build(start, config)[0].eval()
    tokens = hf_families.tokens_of(3, 30)
    expected = hf_families.result(theirs, tokens)
    with torch.no_grad(), model.partly_quantized(0.0):
        found = model.hidden(tokens) if hf_families.is_encoder(name) else model(tokens)
    # fp32 sums of up to a hundred products in another order.
    assert float((found - expected).abs().max()) <= 1e-5 * max(1.0, float(expected.abs().max()))


def test_an_encoder_becomes_ternary_by_contrast(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A published full-precision one; the error for `--objective next` says what it is for. As in BERT, only its
    tokenizer says which tokens surround a text, and the run compares what the engine will."""
    hf_families.save("bert", tmp_path / "bert")
    listed = [
        "[CLS]",
        "[SEP]",
        "[UNK]",
        *["how", "now", "brown", "cow", "0", "1", "2", "3", "4", "5", "6", "7", "8", "9"],
    ]
    words = Words(models.WordLevel({word: n for n, word in enumerate(listed)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    around = [("[CLS]", 0), ("[SEP]", 1)]
    words.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=around)
    words.add_special_tokens(listed[:3])
    words.save(str(tmp_path / "bert" / "tokenizer.json"))
    options = f"--steps 4 --batch 4 --context 24 --threads 1 --layers-every 0 --eval-every 100 --out {tmp_path / 'run'}"
    lines = [" ".join(random.Random(n).choices(listed[3:], k=12)) for n in range(60)]
    records = [json.dumps({"a": line, "b": line[:9]}) + "\n" for line in lines]
    (tmp_path / "pairs.jsonl").write_text("".join(records))
    given = ["finetune", str(tmp_path / "bert"), "--data", str(tmp_path / "pairs.jsonl"), "--validation", "0.4"]
    assert bitnet_cli.main([*given, *options.split()]) == 1
    assert "the model has no head; add --set has_head=yes, or --objective contrastive" in capsys.readouterr().err
    given += ["--objective", "contrastive", "--set", "pooling=mean"]
    assert bitnet_cli.main([*given, *options.split()]) == 0
    checkpoint = Checkpoint.open(tmp_path / "run")
    made = checkpoint.config
    assert made.mask == "bidirectional" and made.norm == "layer" and made.ternary == TERNARY_LINEARS
    kept = dataset.tokenize(["how now", "cow " * 90], checkpoint.words, tmp_path, "text", 0)
    rows, _, documents = texts.pairs_of(kept, checkpoint.words, checkpoint.generation, True).rows([0], 24)
    ours = Tokenizer(checkpoint.words.to_str().encode(), made.vocab_size)
    assert rows[0][documents[0] == 0].tolist() == ours.encode("how now")
    assert rows[1].tolist() == [*ours.encode("cow " * 90)[:23], 1]


def test_masters_of_a_ternary_model_stay_ternary_from_the_first_step(tmp_path: Path) -> None:
    published = hf_models.bitnet_masters()
    folder = published.save(tmp_path / "masters")
    words = tokenizer.build("byte", [], 257)
    words.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    ends = list(range(published.config["vocab_size"]))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    start = read_start(str(folder))
    settings, config = start.defaults()
    assert start.config.ternary == TERNARY_LINEARS == config.ternary and "float masters" in start.what
    assert start.template == "{{ messages }}"
    assert settings["quantize_warmup"] == 0.0 and config.sub_norm
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(start.weights["layers.1.down.weight"], published.tensors[name].float())
    assert start.writer
    with start.writer() as writes:  # in two batches; every token ends a text
        assert list(writes([[1, 2, 3]] * 65, 4, 0)) == [[1, 2, 3, 0]] * 65


def test_masters_that_their_folder_does_not_declare(tmp_path: Path) -> None:
    """As those of Falcon-E, which were trained as a plain Llama: the report says what config.json lacks."""
    published = hf_models.falcon_masters()
    declared = published.config.pop("quantization_config")
    folder = published.save(tmp_path / "masters")
    tokenizer.build("byte", [], 257).save(str(folder / "tokenizer.json"))
    with open_source(folder) as source:
        assert source.config.ternary == ()
        lines = [line for line in source.assumptions if "if they are masters" in line]
    start = read_start(str(folder))
    assert start.config.ternary == () and lines == [each for each in start.assumptions if "masters" in each]
    told = json.loads("{" + lines[0].partition("write ")[2].removesuffix(" into config.json") + "}")
    assert told["quantization_config"]["quant_method"] == declared["quant_method"]
    (folder / "config.json").write_text(json.dumps(published.config | told | {"is_bitnet_config": True}))
    with open_source(folder) as source:
        assert "float masters" in source.what and source.assumptions == ()
        found = source.load(Key(0, 1, ROLE["down"], NONE, 0))
    assert np.array_equal(found.codes, published.ternary["model.layers.1.mlp.down_proj"][0])
    assert read_start(str(folder)).config.ternary == TERNARY_LINEARS


@pytest.mark.parametrize("make", [hf_models.bitnet_packed, hf_models.llama_packed, hf_models.trilm, hf_models.bonsai])
def test_packed_or_ternary_weights_are_refused(make: Any, tmp_path: Path) -> None:
    folder = make().save(tmp_path / "model")
    with pytest.raises(SourceError, match=r"is ternary already: the float masters .* Take the revision with masters"):
        read_start(str(folder))


def test_other_sources_are_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(SourceError, match="is a GGUF file, whose weights are quantized; expected a checkpoint"):
        read_start(str(tmp_path / "m.gguf"))
    (tmp_path / "m.txt").write_text("text")
    with pytest.raises(SourceError, match=r"m\.txt is a file of an unknown kind; expected a checkpoint, or a Hugging"):
        read_start(str(tmp_path / "m.txt"))
    (tmp_path / "m.bitnet").write_bytes(records.MAGIC + bytes(100))
    with pytest.raises(
        SourceError, match=r"is a packed model: .* name the run folder or checkpoint that it was exported from, or the"
    ):
        read_start(str(tmp_path / "m.bitnet"))
    with pytest.raises(checkpoint.CheckpointError, match="does not exist, expected a checkpoint"):
        read_start(str(tmp_path / "nowhere"))
    (tmp_path / "texts").mkdir()
    with pytest.raises(SourceError, match=r"texts has no config.json and no checkpoint; .*; text goes with --data"):
        read_start(str(tmp_path / "texts"))
    model = full_precision("llama")
    model.save_pretrained(tmp_path / "silent")
    with pytest.raises(source_model.SourceModelError, match="it has no tokenizer"):
        read_start(str(tmp_path / "silent")).defaults()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = torch.nan
    with pytest.raises(SourceError, match=r"layers.1.up.weight holds NaN or infinity"):
        read_start(str(save(model, tmp_path / "nan")))


def test_options_that_do_not_fit_the_weights(source: tuple[torch.nn.Module, Path], text: str, tmp_path: Path,
                                             capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    arguments = ("finetune", source[1], "--data", text, "--out", tmp_path / "run", *FAST)
    assert run(*arguments, "--set", "ffn_dim=40") == 1
    assert "is [32, 48] in the source and [32, 40] in the model asked for" in capsys.readouterr().err
    for option in ("distill = 0.5", "lora = 4", "draft_only = true", "self_written = 9"):
        assert run("train", "--config", _toml(tmp_path, option), "--data", text, "--out", tmp_path / "other") == 1
        flag = flag_of(option.split()[0])
        assert f"{flag} is an option of `bitnet finetune`" in capsys.readouterr().err
    assert run(*arguments, "--quantize-warmup", "0.6") == 1
    assert "--quantize-warmup is 0.6, expected 0 to 0.5" in capsys.readouterr().err
    assert run(*arguments, "--chat", "x.jsonl") == 1
    assert "both --data and --chat are given" in capsys.readouterr().err


def _toml(folder: Path, line: str) -> Path:
    (folder / "c.toml").write_text(f"[train]\n{line}\n")
    return folder / "c.toml"


# ---- from finetuning to the engine ----


def test_from_a_folder_to_the_engine(source: tuple[torch.nn.Module, Path], text: str, tmp_path: Path) -> None:
    """Finetuned, killed, resumed to the same bits, exported; the engine gives what torch gives."""
    options = ("finetune", source[1], "--data", text, *FAST, "--distill", "0.5", "--lr", "0.002")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert run(*options, "--out", whole) == 0
    update = loop.update

    def kill(self: loop.Run) -> Any:
        if self.state["step"] == 6:
            raise KeyboardInterrupt
        return update(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "update", kill)
        assert run(*options, "--out", killed) == 130
    assert run("finetune", tmp_path, "--out", killed, "--resume") == 1  # not the source that it began with
    assert run("finetune", "--out", killed, "--resume") == 0
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (killed / "step-000008" / name).read_bytes() == (whole / "step-000008" / name).read_bytes()
    assert losses(killed) == losses(whole)

    steps = [record for record in losses(whole) if "loss" in record]
    assert [round(r["quantized"], 4) for r in steps] == [0.125, 0.375, 0.625, 0.875, 1, 1, 1, 1]
    for r in steps:
        # each term is logged as fp32, the loss is their sum in fp32
        assert r["loss"] == pytest.approx(0.5 * r["cross_entropy"] + 0.5 * r["divergence"], rel=1e-6)
    report = export_checkpoint(whole, tmp_path / "m.bitnet", tokens=512)
    assert report is not None  # export_checkpoint compares engine and torch, and writes nothing otherwise
    file = PackedFile.open(tmp_path / "m.bitnet")
    assert file.configs[0].ternary == TERNARY_LINEARS
    model = Checkpoint.open(whole).model
    prompt = torch.randint(0, 257, (1, 6), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = torch.log_softmax(model(prompt), -1)[0, -1].numpy()
    with Model.load(tmp_path / "m.bitnet") as engine:
        session = engine.session()
        session.append(prompt[0].tolist())
        logits = np.array(session.logits, np.float64).reshape(-1)
    found = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    assert np.abs(found - expected).max() < 0.03  # design §10: an activation may fall over a rounding edge


def test_sub_norms_are_added_and_calibrated(source: tuple[torch.nn.Module, Path], text: str, tmp_path: Path) -> None:
    start = read_start(str(source[1]))
    config = start.defaults()[1].replace(sub_norm=True)
    tokens = torch.randint(0, 300, (4, 24), generator=torch.Generator().manual_seed(0))
    model, inserted = source_model.build(start, config)
    experts = [f"experts.{i}." for i in range(config.n_experts)] or [""]
    places = ["attn_sub_norm", *(f"{expert}ffn_sub_norm" for expert in experts)]
    assert sorted(inserted) == sorted(f"layers.{i}.{place}.weight" for i in range(2) for place in places)
    plain = source_model.build(start, start.config)[0]

    def distance() -> float:
        with torch.no_grad(), model.partly_quantized(0.0):
            return float((torch.log_softmax(model(tokens), -1) - torch.log_softmax(plain(tokens), -1)).abs().mean())

    before = distance()
    source_model.calibrate(model, inserted, tokens)
    assert distance() < 0.7 * before
    source_model.calibrate(model, inserted, tokens[:1, :1])  # nothing is known of experts that no token chose
    assert all(bool(model.get_parameter(name).isfinite().all()) for name in inserted)
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert run("finetune", source[1], "--data", text, *FAST, "--set", "sub_norm=true", "--out", tmp_path / "run") == 0
    assert Checkpoint.open(tmp_path / "run").config.sub_norm


def test_from_our_own_full_precision_run(text: str, tmp_path: Path) -> None:
    shape = ["dim=32", "n_layers=1", "n_heads=2", "n_kv_heads=1", "head_dim=16", "ffn_dim=48", "max_context=24"]
    words = [word for option in [*shape, "ternary=[]", "head_format='f32'"] for word in ("--set", option)]
    before = ["train", *words, *FAST, "--tokenizer", "byte", "--data", text, "--out", tmp_path / "float"]
    assert run(*before) == 0
    assert run("finetune", tmp_path / "float", *FAST, "--data", text, "--out", tmp_path / "ternary") == 0
    assert Checkpoint.open(tmp_path / "ternary").config.ternary == TERNARY_LINEARS
    start = source_model.read_checkpoint(tmp_path / "ternary")
    assert start.defaults()[0]["quantize_warmup"] == 0.0


# ---- the warm-up of the quantizers ----


def test_schedule_ends_half_way_at_the_latest() -> None:
    settings = Settings(source="x", quantize_warmup=0.5)
    assert [schedule.quantization(settings, schedule.Place(p, p)) for p in (0, 0.25, 0.5, 0.75, 1)] == [0, 0.5, 1, 1, 1]
    assert schedule.quantization(Settings(quantize_warmup=0.0), schedule.Place(0.0, 0.0)) == 1.0


PRECISIONS = [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.15)]
"""And how far sums of some 16 products of order 1 may be off: integers are always scaled in fp32."""


@pytest.mark.parametrize("precision, off", PRECISIONS)
@pytest.mark.parametrize("amount", [0.0, 0.3, 1.0])
def test_partly_quantized_products_by_hand(amount: float, precision: torch.dtype, off: float) -> None:
    """Of one input with two matrices, in fp64, in fp32 and under autocast."""
    random_ = torch.Generator().manual_seed(0)
    sizes = ((5, 16), (7, 16), (3, 16), (5, 7), (5, 3))
    x, w1, w2, g1, g2 = (torch.randn(*size, generator=random_, dtype=torch.float64) for size in sizes)
    if precision != torch.float64:
        x, w1, w2, g1, g2 = (each.float() for each in (x, w1, w2, g1, g2))
    x_eff = x + amount * (torch.div(*quant.activation_codes(x)) - x)
    w1_eff, w2_eff = (w + amount * (torch.mul(*quant.ternary_codes(w)) - w) for w in (w1, w2))
    learnt = [each.requires_grad_() for each in (x, w1, w2)]
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
        ys = straight_through.ternary_linear(x, w1, w2, amount=amount)
        found = [*ys, *torch.autograd.grad(ys, learnt, (g1, g2))]
    expected = [x_eff @ w1_eff.T, x_eff @ w2_eff.T, g1 @ w1_eff + g2 @ w2_eff, g1.T @ x_eff, g2.T @ x_eff]
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a.double(), b.double(), rtol=0, atol=off if amount < 1 else max(off, 1e-5))


@pytest.mark.parametrize("amount", [0.3, 1.0])
def test_only_what_learns_has_a_gradient(amount: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """And only for that is anything kept and multiplied."""
    products: list[int] = []
    kept: list[int] = []
    product = straight_through.product

    def counted(*operands: torch.Tensor, **onto: Any) -> torch.Tensor:
        products.append(1)
        return product(*operands, **onto)

    def pack(saved: torch.Tensor) -> torch.Tensor:
        kept.append(saved.numel())
        return saved

    monkeypatch.setattr(straight_through, "product", counted)
    for learns in ((True, False, False), (False, True, True), (True, False, True)):
        x, w1, w2 = (torch.randn(n, 16, requires_grad=each) for n, each in zip((5, 7, 3), learns, strict=True))
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            y1, y2 = straight_through.ternary_linear(x, w1, w2, amount=amount)
        products.clear()
        learnt = [each for each in (x, w1, w2) if each.requires_grad]
        assert all(g.any() for g in torch.autograd.grad([y1, y2], learnt, [torch.randn(5, 7), torch.randn(5, 3)]))
        assert len(products) == 2 * sum(learns) - learns[1] - learns[2]
        assert (x.numel() in kept) == any(learns[1:])


def test_amount_comes_back_after_an_error() -> None:
    model = Transformer(ModelConfig(vocab_size=9, dim=16, n_layers=1, n_heads=1, n_kv_heads=1, head_dim=16,
                                    ffn_dim=16, max_context=8))  # fmt: skip
    with pytest.raises(ZeroDivisionError), model.partly_quantized(0.5):
        assert model.layers[0].q.amount == 0.5
        raise ZeroDivisionError
    assert model.amount == model.layers[0].q.amount == 1.0


def test_new_tokens_are_the_mean_of_the_others(source: tuple[torch.nn.Module, Path]) -> None:
    start = read_start(str(source[1]))
    model = source_model.build(start, start.config.replace(vocab_size=302))[0]
    table = start.weights["embedding.weight"]
    assert torch.equal(model.embedding.weight[:300], table)
    assert torch.equal(model.embedding.weight[300:], table.mean(0).expand(2, -1))
