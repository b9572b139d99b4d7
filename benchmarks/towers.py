"""A vision tower on random weights, compared with onnxruntime and transformers: time per image, in one run.

    python benchmarks/towers.py --files build/towers    # SigLIP So400m/14 at 224 pixels: two cores, 6 GB of memory

The files take some minutes to make and are kept; later runs take 3 minutes.

Each program runs in its own process and is warmed up; then they take turns, so that other load on the machine affects
all of them. Between two turns there is a pause, in which the threads of the previous program stop spinning. Ours has
ternary weights. The others have weights of the same shape in the precisions in which they are fastest: fp32 and bf16
for transformers, fp32 and dynamic int8 for onnxruntime, with graphs exported by torch.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import report
from shapes import FAMILIES

from bitnet.config import ModelConfig
from bitnet_export import random_model
from bitnet_runtime import Model, default_threads
from bitnet_runtime.images import vision

OURS = {"bitnet-edge": "f16", "bitnet-edge, int8 keys": "int8"}  # ternary weights; type of the KV cache
TORCH = {"transformers, fp32": "float32", "transformers, bf16": "bfloat16"}
ONNX = {"onnxruntime, fp32": "float.onnx", "onnxruntime, int8": "int8.onnx"}
PAUSE = 0.1  # seconds
SMALL: dict[str, Any] = {"dim": 96, "n_layers": 2, "n_heads": 4, "n_kv_heads": 4, "head_dim": 24, "ffn_dim": 160}

Pass = Callable[[], object]


def tower(config: ModelConfig, attention: str = "sdpa") -> Any:
    """The tower of transformers in our shape."""
    from transformers import SiglipVisionConfig, SiglipVisionModel

    made = SiglipVisionConfig(
        hidden_size=config.dim, num_hidden_layers=config.n_layers, num_attention_heads=config.n_heads,
        intermediate_size=config.ffn_dim, image_size=config.image_size, patch_size=config.patch_size,
        hidden_act="gelu_pytorch_tanh", vision_use_head=False, attn_implementation=attention,
    )  # fmt: skip
    return SiglipVisionModel(made).eval()


def prepare(config: ModelConfig, folder: Path, n: int) -> None:
    """Create the files of the programs that read one, unless they exist. The last file is written last."""
    if (folder / ONNX["onnxruntime, int8"]).exists():
        return
    import torch
    from onnxruntime.quantization import QuantType, quantize_dynamic

    random_model(config, folder / "model.bitnet")

    class States(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = tower(config, "eager")

        def forward(self, pixels: torch.Tensor) -> Any:
            return self.tower(pixels).last_hidden_state

    pixels = torch.zeros(n, 3, config.image_size, config.image_size)
    floats = folder / ONNX["onnxruntime, fp32"]
    torch.onnx.export(States(), (pixels,), floats, dynamo=False, opset_version=20, input_names=["pixels"])
    quantize_dynamic(floats, folder / ONNX["onnxruntime, int8"], weight_type=QuantType.QInt8, per_channel=True)


def opened(name: str, config: ModelConfig, folder: Path, n: int, threads: int) -> Pass:
    """Open a program; returns a function that runs one pass over n images."""
    pixels = np.random.default_rng(0).random((n, 3, config.image_size, config.image_size), np.float32)
    if name in OURS:
        model = Model.load(folder / "model.bitnet", threads=threads, kv_type=OURS[name])
        return lambda: vision.encode(model, pixels)
    if name in ONNX:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        session = onnxruntime.InferenceSession(folder / ONNX[name], options, providers=["CPUExecutionProvider"])
        return lambda: session.run(None, {"pixels": pixels})
    import torch

    torch.set_num_threads(threads)
    dtype = getattr(torch, TORCH[name])
    eyes, given = tower(config).to(dtype), torch.from_numpy(pixels).to(dtype)

    def run() -> object:
        with torch.inference_mode():
            return eyes(given).last_hidden_state

    return run


def worker(channel: Connection, name: str, *job: Any) -> None:
    """Send the seconds of a pass on every request."""
    run = opened(name, *job)
    run()
    channel.send(0.0)
    while channel.recv():
        start = time.perf_counter()
        run()
        channel.send(time.perf_counter() - start)


def measure(args: argparse.Namespace, config: ModelConfig, folder: Path) -> list[dict[str, Any]]:
    """A row for each program."""
    prepare(config, folder, args.images)
    context, names = multiprocessing.get_context("spawn"), [*OURS, *TORCH, *ONNX]
    channels: dict[str, Connection] = {}
    for name in names:
        channels[name], theirs = context.Pipe()
        job = (theirs, name, config, folder, args.images, args.threads)
        context.Process(target=worker, args=job, daemon=True).start()
        theirs.close()  # so that its end is seen here
        try:
            channels[name].recv()
        except EOFError:
            raise report.BenchmarkError(f"{name} ended before its first pass") from None
        print(f"{name}: ready", file=sys.stderr)
    took: dict[str, list[float]] = {name: [] for name in names}
    end = time.monotonic() + args.seconds
    while time.monotonic() < end or len(took[names[0]]) < 3:
        for name, channel in channels.items():
            time.sleep(PAUSE)
            channel.send(True)
            took[name].append(channel.recv())
    for channel in channels.values():
        channel.send(False)
    return [
        {"program": name, "seconds": statistics.median(found), "quickest": min(found), "passes": len(found)}
        for name, found in took.items()
    ]


def markdown(results: dict[str, Any]) -> str:
    rows, ours = results["rows"], results["rows"][0]["seconds"]
    cells = [
        [row["program"], row["passes"], 1e3 * row["seconds"], 1e3 * row["quickest"], f"{row['seconds'] / ours:.2f} ×"]
        for row in rows
    ]
    return (
        f"# A vision tower beside other programs, {results['shape']}, {results['threads']} threads\n\n"
        f"{results['images']} images at a time, in turn; medians.\n\n"
        + report.table(["program", "passes", "ms a pass", "quickest", "of the first"], cells)
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[n for n in FAMILIES if FAMILIES[n].input == "images"], default="so400m-14")
    parser.add_argument("--images", type=int, default=2, help="in a pass [2]")
    parser.add_argument("--threads", type=int, default=default_threads(), help="of each program")
    parser.add_argument("--seconds", type=float, default=120, help="of taking turns [120]")
    parser.add_argument("--files", type=Path, help="folder of what the programs read, for one shape and --images; kept")
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder of table, figures and JSON")
    parser.add_argument("--quick", action="store_true", help="a tiny tower, a few passes")
    args = parser.parse_args(argv)
    config = FAMILIES[args.shape]
    if args.quick:
        config, args.seconds = config.replace(image_size=56, **SMALL), 0
    words = "benchmarks/towers.py " + " ".join(sys.argv[1:] if argv is None else argv)
    results = {"origin": report.origin(f"python {words.strip()}"), "shape": args.shape} | {
        name: getattr(args, name) for name in ("images", "threads")
    }
    if args.files:
        args.files.mkdir(parents=True, exist_ok=True)
        results["rows"] = measure(args, config, args.files)
    else:
        os.makedirs(report.ROOT / "build", exist_ok=True)
        with tempfile.TemporaryDirectory(dir=report.ROOT / "build", prefix="towers-") as folder:
            results["rows"] = measure(args, config, Path(folder))
    series = {"": [1e3 * row["seconds"] for row in results["rows"]]}
    names = [row["program"].replace(", ", "\n") for row in results["rows"]]
    report.write(args.out, "towers", results, markdown(results), [report.Panel("ms a pass", names, series)])
    print(markdown(results))
    return 0


if __name__ == "__main__":
    report.run(main)
