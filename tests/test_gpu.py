"""What only a GPU can show of training, and that benchmarks/gpu.py, which shows the rest, runs without one."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import bitnet_cli
from bitnet import quant, scaled_sum
from bitnet.config import ModelConfig
from bitnet.model import compiler, transformer
from bitnet.model.transformer import Transformer
from bitnet.settings import Settings
from bitnet.train import passes
from bitnet.train.replay import Replay

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
NAMES = "gpu", "gpu_checks", "gpu_profile", "gpu_steps"
gpu, gpu_checks, gpu_profile, gpu_steps = (importlib.import_module(name) for name in NAMES)

torch.set_num_threads(1)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CONFIG = ModelConfig(
    vocab_size=512, dim=128, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=64, ffn_dim=256, max_context=64,
)  # fmt: skip


def batches(n: int, documents: bool) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 512, (n, 4, 65), generator=generator)
    told = (torch.arange(64) // 20).expand(4, 64).contiguous()
    return [[batch[:, :-1].contiguous(), batch[:, 1:].contiguous(), *([told] if documents else [])] for batch in tokens]


@needs_gpu
@pytest.mark.parametrize("context", [64, 300])
def test_blocks_of_attention_have_the_gradients_of_a_mask(context: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents in texts longer than LONGEST, compiled."""
    monkeypatch.setattr(transformer, "LONGEST", 0)
    torch.manual_seed(0)
    model = Transformer(CONFIG.replace(max_context=context, sliding_window=50, global_every=2)).cuda()
    compiler.compile_layers(model)
    assert model.in_blocks
    tokens = torch.randint(0, 512, (2, context + 1), device="cuda")
    documents = (torch.arange(context, device="cuda") // 20).expand(2, context)
    found = []
    for model.in_blocks in (False, True):
        model.zero_grad(set_to_none=True)
        model(tokens[:, :-1], documents, targets_BT=tokens[:, 1:]).backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for one, other in zip(*found, strict=True):  # an activation at a rounding edge may get the next int8 code
        assert torch.linalg.vector_norm(one - other) <= 1e-2 * torch.linalg.vector_norm(one)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [False, True])
def test_a_product_in_one_kernel_is_that_in_steps(rows: bool, dtype: torch.dtype) -> None:
    """Bit for bit, of sizes that no tile divides."""
    torch.manual_seed(0)
    q, codes = torch.randint(-127, 128, (333, 208), dtype=torch.int8), torch.randint(-1, 2, (300, 208)).to(torch.int8)
    scale, s = torch.rand(300 if rows else 1) + 0.01, torch.rand(333, 1) * 100 + 0.01
    q, codes, scale, s = q.cuda(), codes.cuda(), scale.cuda(), s.cuda()
    assert scaled_sum.possible(q, scale)
    assert torch.equal(
        quant.integer_product(q, codes, scale, s, dtype), quant.product_in_steps(q, codes, scale, s).to(dtype)
    )


@needs_gpu
@pytest.mark.parametrize("kind", ["plain", "documents", "blocks"])
def test_passes_that_are_replayed_are_the_passes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several of a step, λ that rises to 1 and falls back: losses and gradients, each on another batch."""
    if kind == "blocks":
        monkeypatch.setattr(transformer, "LONGEST", 0)
    torch.manual_seed(0)
    documents, model = kind != "plain", Transformer(CONFIG).cuda()
    compiler.compile_layers(model)
    settings = Settings(device="cuda", compile=True, precision="fp32")
    run: Any = argparse.Namespace(
        model=model, forward=model, settings=settings, distillation=None, state={"phased": False}
    )

    def made(batch: Any, counted: Any, amount: Any) -> dict[str, Tensor]:
        return passes.passes(run, batch, counted, amount, {"cross_entropy": 1.0})

    replay = Replay(made, list(model.parameters()))
    for amount in (0.25, 0.5, 1.0, 1.0, 0.75):
        found = []
        for replayed in (False, True):
            model.zero_grad(set_to_none=True)
            losses = []
            for batch in batches(3, documents):
                on_device = [tensor.cuda() for tensor in batch]
                terms = (replay if replayed else made)(on_device, 768.0, amount)
                losses.append(terms["cross_entropy"].item())
            found.append((losses, [p.grad.clone() for p in model.parameters() if p.grad is not None]))
        (losses, gradients), (again, as_recorded) = found
        assert again == pytest.approx(losses, rel=1e-6)
        assert len(gradients) == len(as_recorded) == len(list(model.parameters()))
        for one, other in zip(gradients, as_recorded, strict=True):  # sums of attention have no order on a GPU
            assert torch.linalg.vector_norm(one - other) <= 1e-4 * torch.linalg.vector_norm(one)


@needs_gpu
@pytest.mark.parametrize("name", ["codes", "context"])
def test_on_a_gpu(name: str, tmp_path: Path) -> None:
    """Codes are the CPU's; the memory of an evaluation in fp32 does not grow with the square of the context."""
    passed, said = gpu_checks.CHECKS[name](gpu_checks.Place(tmp_path, "cuda"))
    assert passed, said


class StepsHere:
    """Takes the place of a process that makes steps, which needs seconds to begin."""

    def __init__(self, cases: list[Any], *_: object) -> None:
        self.cases, self.process = cases, argparse.Namespace(returncode=0)

    def results(self) -> Iterator[dict[str, Any]]:
        yield from gpu_steps.results_of(self.cases, gpu.QUICK_SIZE, "cpu", float("inf"))


def test_quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A failure is reported, and the rest still runs: a process that fails is replaced."""

    def fails(place: Any) -> Any:
        raise RuntimeError("no such luck")

    processes = iter([gpu.Steps, StepsHere])
    monkeypatch.setattr(gpu, "Steps", lambda *args: next(processes)(*args))
    monkeypatch.setitem(gpu_checks.CHECKS, "chat", fails)
    monkeypatch.setattr(gpu, "QUICK", [gpu.QUICK[0], gpu.Case("nowhere"), *gpu.QUICK[1:3]])
    where = ["--device", "cpu", "--out", str(tmp_path)]
    assert gpu.main(["--quick", "--parts", "codes", "context", "chat", "speed", *where]) == 1
    results = json.loads((tmp_path / "gpu.json").read_text())
    assert {part["part"]: part["passed"] for part in results["parts"]} == {
        "codes": True, "context": True, "chat": False, "speed": False
    }  # fmt: skip
    first, broken, *rows = results["rows"]
    assert [row["kind"] for row in (first, *rows)] == list(gpu.KINDS) and "KeyError" in broken["error"]
    for row in (first, *rows):
        assert row["ms"] == pytest.approx(1e3 * sum(row["seconds"]) / 2) and 0 < row["utilisation"] < 1
    printed = capsys.readouterr().out
    assert "all else is equal bit for bit" in printed and "FAILED chat: RuntimeError: no such luck" in printed
    assert "| quick | full precision | eager |" in (tmp_path / "gpu.md").read_text()
    assert (tmp_path / "gpu.png").read_bytes().startswith(b"\x89PNG")


def test_runs_of_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def here(words: list[str]) -> Any:
        capsys.readouterr()
        assert bitnet_cli.main(words[3:]) == 0
        return json.loads(capsys.readouterr().out)

    monkeypatch.setattr(gpu_checks, "OPTIMIZERS", ("muon",))
    monkeypatch.setattr(gpu_checks, "run", here)
    monkeypatch.setattr(gpu_checks, "together", lambda commands: [here(words) for words in commands])
    place = gpu_checks.Place(tmp_path, "cpu", steps=2, threads=1)
    passed, said = gpu_checks.exactness(place)
    assert passed and "muon eager 0e+00 nats and 0e+00 of the gradient at first, 0.0e+00 nats at most" in said
    passed, said = gpu_checks.chat(place)
    assert passed and "after 20 steps" in said
    assert gpu_checks.equal_codes(tmp_path / "cpu-muon", tmp_path / "beginning") < 1


def test_groups_of_kernels() -> None:
    step = ("Optimizer.step#Chained.step", 40.0, 60.0)
    spans = [
        ("nvjet_sm90_tst_64x32", 0.0, 10.0), ("triton_red_fused_rms_norm", 5.0, 20.0), step, ("nvjet_tst", 45.0, 50.0),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop", 60.0, 80.0), ("multi_tensor_apply", 80.0, 81.0),
        ("triton_per_fused__log_softmax", 90.0, 100.0), ("_scaled_sum_tile", 88.0, 90.0),
    ]  # fmt: skip
    kernels = [span for span in spans if span is not step]
    assert [gpu_profile.group_of(span, [step]) for span in kernels] == [
        "products", "norms, quantizers, gates, residuals", "optimizer", "attention", "clipping, sums of gradients",
        "loss of the head", "products",
    ]  # fmt: skip
    assert gpu_profile.busy(kernels) == 20 + 5 + 21 + 12
    text = "\n".join(gpu_profile.table(spans))
    assert "| GPU idle | 0.04 | 42.0% |" in text and "| in all | 0.10 |  |" in text
    assert "| `nvjet_sm90_tst_64x32` | 1 | 0.01 |" in text
