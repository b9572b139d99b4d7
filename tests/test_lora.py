"""`bitnet finetune --lora`: adapters learn, the model stays, and the engine computes what training did."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from bitnet import straight_through
from bitnet.bitlinear import BitLinear, project
from bitnet.config import ModelConfig
from bitnet.model.transformer import Transformer
from bitnet.settings import Settings
from bitnet.setup import building
from bitnet.train import optimizers, schedule
from bitnet.train.checkpoint import Checkpoint
from bitnet_export import PackedFile, export_adapter, export_checkpoint
from bitnet_export.checkpoint.adapter import _difference
from bitnet_runtime import Model
from training import TINY, bitnet, killed_before, losses

torch.set_num_threads(1)

LORA = ["--lora", "4", "--steps", "8", "--save-every", "4", "--eval-every", "4", "--threads", "1", "--batch", "4"]


def write(folder: Path, words: list[str]) -> str:
    folder.mkdir()
    draw = random.Random(0)
    for i in range(8):
        (folder / f"{i}.txt").write_text(" ".join(draw.choice(words) for _ in range(200)))
    return str(folder)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, with model.bitnet in its folder, and text of another kind."""
    folder = tmp_path_factory.mktemp("base")
    text = write(folder / "text", ["red", "cat", "sees", "a"])
    write(folder / "other", ["blue", "dog", "hears", "the"])
    shape = [*TINY[:-2], "--steps", "30", "--tokenizer", "byte", "--set", "n_experts=2", "--set", "experts_per_token=1"]
    assert bitnet("train", *shape, "--set", "normalize_routing=no", "--data", text, "--out", folder / "run") == 0
    export_checkpoint(folder / "run", folder / "model.bitnet", tokens=2000)
    return folder


@pytest.mark.parametrize("bf16", [False, True])
def test_an_adapter_takes_what_its_layer_has_quantized(bf16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs of q, k and v are quantized once; values and gradients are those of separate layers and adapters."""
    torch.manual_seed(0)
    layers = [BitLinear(40, n, bias=n == 24, rank=4 * (n != 16)) for n in (24, 16, 8)]
    for layer in layers:
        layer.weight.requires_grad_(False)
        if layer.adapter_in is not None and layer.adapter_out is not None:
            nn.init.normal_(layer.adapter_in), nn.init.normal_(layer.adapter_out)
    x, learnt = (
        torch.randn(3, 5, 40, requires_grad=True),
        [p for layer in layers for p in layer.parameters() if p.requires_grad],
    )
    count, codes = [], straight_through.activation_codes
    monkeypatch.setattr(straight_through, "activation_codes", lambda x: count.append(1) or codes(x))
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        found = project(x, *layers)
        assert len(count) == 1
        expected = []
        for layer in layers:
            y = straight_through.ternary_linear(x, layer.weight)[0]
            y = y if layer.bias is None else y + layer.bias
            if layer.adapter_in is not None and layer.adapter_out is not None:
                low = straight_through.output_logits(x, layer.adapter_in, "int8")
                y = y + straight_through.raised(low, layer.adapter_out)
            expected.append(y)
    for a, b in zip(found, expected, strict=True):
        assert a.equal(b)
    gradients = [torch.autograd.grad(torch.cat(ys, -1).square().sum(), [x, *learnt]) for ys in (found, expected)]
    assert not any(g.isnan().any() for g in gradients[0])
    for a, b in zip(*gradients, strict=True):  # the same products, added in another order, of bf16 in one product
        assert torch.linalg.vector_norm(a - b) <= (1e-2 if bf16 else 1e-5) * torch.linalg.vector_norm(b)


def test_a_layer_alone_has_an_adapter_that_can_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was in its memory."""
    torch.manual_seed(0)
    plain = BitLinear(16, 8)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: empty(*shape, **options).fill_(torch.nan))
    torch.manual_seed(0)
    layer, x = BitLinear(16, 8, rank=2), torch.randn(3, 16, generator=torch.Generator().manual_seed(1))
    layer(x).sum().backward()
    assert torch.equal(layer(x), plain(x))
    assert layer.adapter_out is not None and layer.adapter_out.grad is not None and layer.adapter_out.grad.any()


@pytest.mark.parametrize(("alpha", "outward"), [(8, 4.0), (0, 2.0)])
def test_steps_are_those_of_an_adapter_whose_output_has_a_factor(alpha: float, outward: float) -> None:
    """Of a factor of the model itself, as LoRA has it: with weight decay, too."""
    torch.manual_seed(0)
    settings = Settings(source="s", lora=2, lora_alpha=alpha, optimizer="adamw", weight_decay=0.5, quantize_warmup=0.0)
    config = ModelConfig(vocab_size=30, dim=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=8, ffn_dim=24,
                         max_context=8, adapter_rank=2, adapters=("q",))  # fmt: skip
    model = Transformer(config)
    building.hold(model, settings)
    ours = [p for p in model.parameters() if p.requires_grad]
    torch.nn.init.normal_(ours[1])
    factors = (1.0, outward)  # of A, and of B: alpha / rank, 2 unless given
    plain = [nn.Parameter(p.detach() / factor) for p, factor in zip(ours, factors, strict=True)]
    optimizer, place = optimizers.build(model, settings), schedule.Place(0.2, 0.2)
    expected = torch.optim.AdamW(plain, schedule.learning_rate(settings, place), betas=(0.9, 0.95), weight_decay=0.5)
    for _ in range(5):
        for p, of_plain, factor in zip(ours, plain, factors, strict=True):
            p.grad = torch.randn_like(p)
            of_plain.grad = factor * p.grad
        optimizers.set_rates(optimizer, settings, place)
        optimizer.step(), expected.step()
    for p, of_plain, factor in zip(ours, plain, factors, strict=True):
        torch.testing.assert_close(p, factor * of_plain, rtol=1e-5, atol=1e-6)


def test_gradients_are_clipped_as_those_of_an_adapter_whose_output_has_a_factor() -> None:
    a, b = (nn.Parameter(torch.zeros(2, 3)) for _ in range(2))
    a.grad, b.grad = (torch.full_like(p, value) for p, value in ((a, 0.3), (b, 0.1)))
    groups = [{"params": [a], "decays": True, "rate": 1.0}, {"params": [b], "decays": True, "rate": 4.0}]
    norm = 6**0.5 * (0.3**2 + 0.4**2) ** 0.5
    assert float(optimizers.clip([a, b], optimizers.adamw(groups), norm / 2)) == pytest.approx(norm)
    assert torch.allclose(a.grad, torch.tensor(0.15)) and torch.allclose(b.grad, torch.tensor(0.05))


def test_adapters_learn_and_the_model_stays(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    options = [*LORA, "--data", base / "other", "--lora-linears", "q", "v", "up", "down", "--keep-best"]
    assert bitnet("finetune", base / "run", *options, "--out", run) == 0
    before, after = Checkpoint.open(base / "run"), Checkpoint.open(run)
    assert after.config.adapter_rank == 4 and after.config.adapters == ("q", "v", "up", "down")
    named = set(after.tensor_names())
    assert after.state["parameters"] == sum(after.tensor(name).numel() for name in named if ".adapter_" in name)
    for name in before.tensor_names():
        assert torch.equal(before.tensor(name), after.tensor(name)), name
    learnt = named - set(before.tensor_names())
    assert len(learnt) == 2 * 2 * (2 + 2 * 2) and all(".adapter_" in name for name in learnt)
    assert all(after.tensor(name).abs().max() > 0 for name in learnt if "layers.0.q" in name)
    log = losses(run)
    start = next(record["start"]["nats_per_token"] for record in log if "start" in record)
    assert log[-1]["validation"]["nats_per_token"] < start - 0.01

    alone = export_adapter(run, base / "model.bitnet", tmp_path / "a.bitnet", tokens=2000)
    report = export_checkpoint(run, tmp_path / "whole.bitnet", tokens=2000)
    with pytest.raises(ValueError, match=r"whole.bitnet is not the model .*: it has adapters of its own; export"):
        export_adapter(run, tmp_path / "whole.bitnet", tmp_path / "b.bitnet", tokens=500)
    assert report.tensors_equal == len(before.tensor_names()) + len(learnt) + 1  # with the frequencies of RoPE
    size = (tmp_path / "a.bitnet").stat().st_size
    export_adapter(run, base / "model.bitnet", tmp_path / "a.bitnet", tokens=500)  # again
    with pytest.raises(FileExistsError, match=r"a.bitnet exists and is an adapter, expected a packed file"):
        export_checkpoint(run, tmp_path / "a.bitnet", tokens=500)
    assert alone.adapter_bytes == size and f"adapter    {size / 1e6:.2f} MB" in str(alone)
    assert size < (base / "model.bitnet").stat().st_size / 2
    capsys.readouterr()
    assert bitnet("inspect", tmp_path / "a.bitnet", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["kind"] == "adapter" and facts["weights"] == PackedFile.open(base / "model.bitnet").weights._asdict()
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    with torch.no_grad():
        expected = after.model(torch.tensor([tokens]))[0].numpy()
    beside = Model.load(base / "model.bitnet", kv_type="f32", adapters=[tmp_path / "a.bitnet"])
    with beside as model, model.session(adapter="a") as session:
        found = session.append(tokens, "all")
    with Model.load(tmp_path / "whole.bitnet", kv_type="f32") as model, model.session() as session:
        assert (session.append(tokens, "all") == found).all()
    # One row: a few activations may fall on the other side of a rounding edge, see docs/precision.md.
    assert np.median(np.abs(found - expected)) < 1e-5


def test_scales_of_the_same_model_may_differ_by_a_rounding(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a converted model, whose code computes the mean in its own way."""
    whole, model = (PackedFile.open(base / "model.bitnet") for _ in range(2))
    for factor, differs in ((1 + 2**-22, False), (1 + 1e-4, True)):
        monkeypatch.setattr(model, "scales", lambda record, f=factor: whole.scales(record) * np.float32(f))
        assert bool(_difference(whole, model)) == differs
    monkeypatch.undo()
    record = next(record for record in model.tensors.values() if record.encoding.bits)
    codes = model.codes(record)
    codes[0] = -codes[0]
    monkeypatch.setattr(model, "codes", lambda r: codes if r is record else whole.codes(r))
    assert _difference(whole, model)


def test_a_run_goes_on_in_the_same_bits(base: Path, tmp_path: Path) -> None:
    options = [*LORA, "--data", base / "other"]
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    assert bitnet("finetune", base / "run", *options, "--out", whole) == 0
    killed_before(6, "finetune", base / "run", *options, "--out", parted)
    assert bitnet("finetune", "--resume", "--out", parted) == 0
    assert losses(whole) == losses(parted)
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (whole / "step-000008" / name).read_bytes() == (parted / "step-000008" / name).read_bytes()


@pytest.mark.parametrize("more", [("--head", "f16"), ("--sparse", "on"), ("--encoding", "1.6")])
def test_an_adapter_keeps_the_encoding_of_its_model(
    more: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bitnet("export", tmp_path, tmp_path / "a.bitnet", "--base", tmp_path / "m.bitnet", *more) == 2
    assert "--base goes with a run or a checkpoint alone: the model keeps" in capsys.readouterr().err


def test_what_does_not_go_together_is_refused(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    roles = ("user", "assistant")
    talks = [{"messages": [{"role": role, "content": f"{role} {i}"} for role in roles]} for i in range(8)]
    (tmp_path / "talks.jsonl").write_text("\n".join(map(json.dumps, talks)))
    cases = {
        ("--lora", "0"): "--lora is 0, expected the rank of adapters; leave it out to train the whole model",
        ("--lora-linears", "q"): "without an adapter; add --lora RANK",
        ("--lora", "4", "--optimizer", "muon"): "--optimizer muon does not go with --lora",
        ("--lora", "4", "--embedding-lr", "0.01"): "--embedding-lr does not go with --lora, which trains only adapters",
        ("--lora", "4", "--set", "dropout=0.1"): "--set dropout does not go with --lora",
        ("--lora", "4", "--lora-linears", "head"): "--lora-linears has 'head', expected some of q, k",
        ("--lora", "4", "--chat", tmp_path / "talks.jsonl"): "finetune it so without --lora first",
        ("--draft-only", "--chat", tmp_path / "talks.jsonl"): "finetune it so without --draft-only first",
        ("--lora", "4", "--fim", "0.5"): "--preference or --fim needs",
        ("--lora", "4096"): "lora is 4096, expected at most the model's width, ",
        ("--lora", "4", "--draft-only"): "--draft-only and --lora are both given",
        ("--lora", "4", "--quantize-warmup", "0.5"): "--quantize-warmup does not go with --lora",
    }
    for options, said in cases.items():
        data = () if "--chat" in options else ("--data", base / "other")
        assert bitnet("finetune", base / "run", *data, *options, "--out", tmp_path / "run") in (1, 2), options
        assert said in capsys.readouterr().err, options
    assert bitnet("train", *TINY, "--lora", "4", "--out", tmp_path / "run") in (1, 2)
    assert "unknown option '--lora'" in capsys.readouterr().err
    with pytest.raises(ValueError, match="has no adapters"):
        export_adapter(base / "run", base / "model.bitnet", tmp_path / "a.bitnet", tokens=500)
    for out, error, message in (
        (tmp_path / "none" / "a.bitnet", FileNotFoundError, "none does not exist; create it first"),
        (tmp_path, IsADirectoryError, "is a directory, expected the name of a file to write"),
    ):
        with pytest.raises(error, match=message):
            export_adapter(base / "run", base / "model.bitnet", out, tokens=500)
    assert PackedFile.open(base / "model.bitnet").weights and not list(tmp_path.glob(".*"))


def test_an_adapter_does_not_replace_its_base(base: Path, tmp_path: Path) -> None:
    packed, link = shutil.copy(base / "model.bitnet", tmp_path / "base.bitnet"), tmp_path / "link.bitnet"
    link.symlink_to(packed)
    before = packed.read_bytes()
    for given in (packed, link):
        with pytest.raises(FileExistsError, match="is the source and would be replaced"):
            export_adapter(base / "run", given, packed, tokens=500)
    other = shutil.copy(packed, tmp_path / "other.bitnet")
    with pytest.raises(FileExistsError, match=r"other.bitnet exists and is a packed file, expected an adapter"):
        export_adapter(base / "run", packed, other, tokens=500)
    assert packed.read_bytes() == other.read_bytes() == before
