"""The cost of a training step, ternary against full precision: time, and memory kept for the backward pass.

The models take their steps in turn, in one process, so that other load on the machine affects both. The step is that of
`bitnet train`: forward, loss, backward, clipping, optimizer. A ternary model is measured as at the end of a run, and
while its quantizers are phased in (λ = 0.5), when products are float.

    python benchmarks/training_speed.py
    python benchmarks/training_speed.py --width 256 --compile
    python benchmarks/training_speed.py --quick          # seconds; its figures mean nothing
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import report
import torch
from torch import Tensor, nn

from bitnet import process
from bitnet.config import ModelConfig
from bitnet.model import compiler
from bitnet.model.positions import rope_tables
from bitnet.model.transformer import Transformer
from bitnet.settings import Settings
from bitnet.train import optimizers

KINDS = ("full precision", "ternary", "coming in")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def config_of(width: int, kind: str, context: int) -> ModelConfig:
    """Four layers, heads of 64, feed-forward of 8/3 widths: the shape of the laptop presets."""
    heads = max(1, width // 64)
    model = ModelConfig(
        vocab_size=2048, dim=width, n_layers=4, n_heads=heads, n_kv_heads=max(1, heads // 2), head_dim=64,
        ffn_dim=-(-8 * width // 3 // 32) * 32, max_context=context,
    )  # fmt: skip
    return model.replace(ternary=(), head_format="f32") if kind == "full precision" else model


def flops_per_token(config: ModelConfig) -> int:
    """FLOPs of the products with weights: 2 forward, 4 backward for each weight. Attention is not counted."""
    d, queries, keys = config.dim, config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    of_layer = d * (2 * queries + 2 * keys) + 3 * d * config.ffn_dim
    return 6 * (config.n_layers * of_layer + d * config.vocab_size)


def stepper(kind: str, width: int, args: argparse.Namespace, precision: str, compiled: bool) -> Callable[[], None]:
    """A function that runs one optimizer step on random tokens."""
    config = config_of(width, kind, args.context)
    torch.manual_seed(0)
    model = Transformer(config).to(args.device)
    model.recompute = args.recompute
    if compiled:
        compiler.compile_layers(model)
    optimizer = optimizers.build(model, Settings())
    tokens = torch.randint(0, config.vocab_size, (args.batch, args.context + 1), device=args.device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with model.partly_quantized(0.5 if kind == "coming in" else 1.0):
            with torch.autocast(args.device, torch.bfloat16, enabled=precision == "bf16"):
                loss = model.loss(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def seconds(work: Callable[[], Any], device: str) -> float:
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start


def peak_flops(precision: str, device: str) -> float:
    """FLOP/s of torch's product of two square matrices, the best of ten."""
    n = 8192 if device == "cuda" else 1024
    a = torch.randn(n, n, dtype=DTYPES[precision], device=device)
    return 2 * n**3 / min(seconds(lambda: a @ a, device) for _ in range(10))


def saved_bytes(work: Callable[[], Tensor], parameters: list[nn.Parameter]) -> int:
    """Bytes that a forward pass keeps for the backward pass: each storage once, parameters not counted."""
    own = {p.untyped_storage().data_ptr() for p in parameters}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = work()  # keeps the saved tensors alive, so that no address is reused
    del result
    return sum(kept.values())


def block_bytes(config: ModelConfig, args: argparse.Namespace, precision: str) -> float:
    """Bytes that one layer keeps per token."""
    model = Transformer(config).to(args.device)
    block, x = model.layers[0], torch.randn(args.batch, args.context, config.dim, device=args.device)
    cos, sin = rope_tables(config.of_layer(0), args.context, like=x)

    def forward() -> Tensor:
        with torch.autocast(args.device, torch.bfloat16, enabled=precision == "bf16"):
            y: Tensor = block(x.requires_grad_(), cos, sin)
        return y

    return saved_bytes(forward, list(model.parameters())) / (args.batch * args.context)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each width, precision, and compiled or not."""
    rows = []
    for precision in args.precision:
        peak = peak_flops(precision, args.device)
        for width, compiled in itertools.product(args.width, [False, True] if args.compile else [False]):
            torch._dynamo.reset()  # it keeps only a few graphs per layer
            configs = {kind: config_of(width, kind, args.context) for kind in KINDS[:2]}
            steps = {kind: stepper(kind, width, args, precision, compiled) for kind in KINDS}
            start = {kind: seconds(step, args.device) for kind, step in steps.items()}
            times: dict[str, list[float]] = {kind: [] for kind in KINDS}
            for _ in range(args.repeat):
                for kind, step in steps.items():
                    times[kind].append(seconds(step, args.device))
            middle = {kind: statistics.median(of_kind) for kind, of_kind in times.items()}
            tokens = args.batch * args.context
            rows.append({
                "width": width, "precision": precision, "compiled": compiled,
                "tok_s": {kind: tokens / t for kind, t in middle.items()},
                "cost": middle["ternary"] / middle["full precision"],
                "cost_coming_in": middle["coming in"] / middle["full precision"],
                "share_of_peak": {kind: flops_per_token(config) * tokens / middle[kind] / peak
                                  for kind, config in configs.items()},
                "peak_gflops": peak / 1e9, "first_step_s": start, "seconds": times,
                "saved_bytes": {kind: block_bytes(config, args, precision) for kind, config in configs.items()},
            })  # fmt: skip
            print(f"{width} {precision}{' compiled' if compiled else ''}: {rows[-1]['cost']:.2f} ×", file=sys.stderr)
    return rows


def markdown(results: dict[str, Any]) -> str:
    head = ["width", "precision", "full precision, tok/s", "ternary, tok/s", "cost of a step", "coming in",
            "share of peak", "ternary", "bytes kept, full precision", "ternary"]  # fmt: skip
    table = [
        [row["width"], row["precision"] + (", compiled" if row["compiled"] else ""),
         *(row["tok_s"][kind] for kind in KINDS[:2]), f"{row['cost']:.2f} ×", f"{row['cost_coming_in']:.2f} ×",
         *(f"{s:.0%}" for s in row["share_of_peak"].values()),
         *(f"{b:,.0f}" for b in row["saved_bytes"].values())]
        for row in results["rows"]
    ]  # fmt: skip
    o = results["options"]
    return "\n".join([
        "# A training step, ternary against full precision", "", report.table(head, table), "",
        f"{o['batch']} sequences of {o['context']} tokens, {o['threads']} threads on {o['device']}, four layers; "
        f"medians of {o['repeat']} steps, all models in turn{', recomputing' if o['recompute'] else ''}. "
        "Cost: time of a ternary step over that of full precision; coming in: at λ = 0.5. "
        "Share of peak: products with weights, over the rate of torch's product of square matrices in that precision. "
        "Bytes kept: by one layer, for a token, until the backward pass, when it is not compiled.",
    ])  # fmt: skip


def panels(results: dict[str, Any]) -> list[report.Panel]:
    rows = results["rows"]
    labels = [f"{r['width']} {r['precision']}" + ("\ncompiled" if r["compiled"] else "") for r in rows]
    return [
        report.Panel("tokens a second", labels, {kind: [r["tok_s"][kind] for r in rows] for kind in KINDS}),
        report.Panel(
            "bytes a layer keeps for a token", labels, {k: [r["saved_bytes"][k] for r in rows] for k in KINDS[:2]}
        ),
    ]


def parsed(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, nargs="+", default=[128, 256, 512], help="widths of the models")
    parser.add_argument("--precision", nargs="+", choices=DTYPES, default=list(DTYPES), help="fp32, bf16, or both")
    parser.add_argument("--compile", action="store_true", help="measure compiled layers, too")
    parser.add_argument("--recompute", action="store_true", help="with activations computed again")
    parser.add_argument("--batch", type=int, default=8, help="sequences in a step")
    parser.add_argument("--context", type=int, default=256, help="tokens in a sequence")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--repeat", type=int, default=5, help="steps of each model")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    parser.add_argument("--quick", action="store_true", help="one small step of each, to see that it runs")
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder of the results")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device; name another one with --device cpu")
    if args.quick:
        args.width, args.batch, args.context, args.repeat = [64], 2, 32, 1
    return args


def main(argv: list[str] | None = None) -> None:
    args = parsed(argv)
    torch.set_num_threads(args.threads)
    process.keep_freed_memory()
    words = sys.argv[1:] if argv is None else argv
    command = " ".join(["python benchmarks/training_speed.py", *words])
    options = {name: getattr(args, name) for name in ("batch", "context", "threads", "repeat", "device", "recompute")}
    results: dict[str, Any] = {"origin": report.origin(command), "options": options, "rows": measure(args)}
    name = "training_speed" + ("-compiled" if args.compile else "")
    report.write(args.out, name, results, markdown(results), panels(results))
    print(markdown(results))


if __name__ == "__main__":
    report.run(main)
