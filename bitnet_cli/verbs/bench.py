"""`bitnet bench`: speed and memory of a model on this machine."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from bitnet_cli.arguments import at_least, encodings, idle, refuse
from bitnet_cli.model_options import add_adapter, add_model, load_options, model_path
from bitnet_cli.signals import at_once


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measure a packed file, or random weights of a given shape written to a temporary file: how fast it generates, "
        "turns texts into vectors, or sees images."
    )
    add_model(parser)
    add_adapter(parser)
    parser.add_argument(
        "--shape", metavar="NAME", help="random weights of a preset, such as bitnet-2b4t, tiny, gguf, mini-gpt"
    )
    parser.add_argument(
        "--encoding",
        choices=encodings(),
        help="with --shape: bits a ternary weight (default: 2.0)",
    )
    fitting = "(default: 128, or fewer that fit the context)"
    parser.add_argument("--prompt", type=at_least(1), metavar="N", help=f"tokens of a prompt, or of a text {fitting}")
    parser.add_argument("--gen", type=at_least(1), metavar="N", help=f"tokens to decode {fitting}")
    parser.add_argument(
        "--depth", type=at_least(0), default=0, metavar="N",
        help="tokens already in the KV cache, mostly copies; with --shape the context grows to hold them (default: 0)",
    )  # fmt: skip
    parser.add_argument(
        "--repeat", type=at_least(1), default=3, metavar="N", help="runs to take the median of (default: 3)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    with at_once():
        from bitnet_runtime.bench import bench, table
        from bitnet_runtime.works import USUAL

    path = model_path(args)
    if (path is None) == (args.shape is None):
        return refuse("give either a packed file or --shape NAME")
    if told := idle(
        args,
        ("encoding", args.shape, "needs --shape; a file has its own encoding, which `bitnet export` can change"),
        ("adapter", path, "goes with the packed file that it belongs to, and --shape has random weights"),
    ):
        return refuse(told)
    needed = args.depth + max(args.prompt or USUAL, (args.gen or USUAL) + 1)
    needed = needed if args.depth or args.prompt or args.gen else 0
    with nullcontext(path) if path else _random_file(args.shape, needed, args.encoding or "2.0") as file:
        figures = bench(
            file, prompt=args.prompt, gen=args.gen, depth=args.depth, repeat=args.repeat, **load_options(args)
        )
    made = {"shape": args.shape, "encoding": None if path else args.encoding or "2.0"}
    print(json.dumps(made | figures) if args.json else table(figures))
    return 0


@contextmanager
def _random_file(shape: str, context: int, encoding: str) -> Iterator[Path]:
    """A temporary packed file with random weights of a preset's shape, and a context of at least `context` tokens."""
    from bitnet.presets import PRESETS
    from bitnet_export import random_model
    from bitnet_runtime.errors import ModelTooLargeError

    if shape not in PRESETS:
        raise ValueError(f"shape is {shape!r}, expected one of {', '.join(PRESETS)}")
    config = PRESETS[shape]
    if config.input == "tokens" and config.max_context < context:
        config = config.replace(max_context=context)
    with tempfile.TemporaryDirectory(prefix="bitnet-bench-") as folder:
        path = Path(folder) / f"{shape}.bitnet"
        print(f"writing random weights of shape {shape} …", file=sys.stderr)
        try:
            random_model(config, path, 0, encoding=encoding)
        except MemoryError as error:
            said = f" ({error})" if str(error) else ""
            message = f"memory ran out while shape {shape} was written{said}; take a smaller one"
            raise ModelTooLargeError(message) from None
        yield path
