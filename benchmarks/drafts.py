"""Speculative decoding: acceptance rates of draft tokens, and how fast a text is generated.

    python benchmarks/drafts.py --model MODEL --text FILE [FILE ...]     # on text that it was not trained on
    python benchmarks/drafts.py --shape bitnet-2b4t                      # on random weights

With a model and a text the draft tokens are those of `--draft`: of the model's draft head, if it has one, else of
prompt lookup. The model generates freely from prompts taken from the text; its own tokens are the right ones. The row
`auto` is the engine's default: both, where they are faster. With a shape each draft token is right with a given
probability, so a row shows the speedup at that acceptance rate; with `--layer` each costs as much as one of a draft
layer; with `--depth` this many tokens come before, copies of the first ones. `--texts` runs this many texts together,
as the engine does. Every draft length runs in turn from every prompt, and must give the same tokens as none.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import report
from guesses import AUTO, Guess, Tally, as_good_as, of_layer, repetitions, run
from shapes import SHAPES

from bitnet_export import random_model
from bitnet_runtime import Model, Session
from bitnet_runtime._native import lib
from bitnet_runtime.defaults import resolve
from bitnet_runtime.sessions.sampler import Sampler


def prompts_of(model: Model, texts: Sequence[str], args: argparse.Namespace, n: int) -> list[list[int]]:
    """Prompts from the texts."""
    tokens, draw = model.tokenize("\n".join(texts)), random.Random(0)
    if len(tokens) <= args.prompt:
        raise report.BenchmarkError(
            f"the text has {len(tokens)} tokens, expected more than {args.prompt}, those of a prompt"
        )
    starts = [draw.randrange(len(tokens) - args.prompt) for _ in range(n)]
    return [tokens[start : start + args.prompt] for start in starts]


def on_text(model: Model, texts: Sequence[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows for each temperature and draft length."""
    prompts, rows = prompts_of(model, texts, args, args.prompts), []
    for temperature in args.temperature:
        print(f"temperature {temperature:g} …", file=sys.stderr)
        sampler = Sampler(resolve({"temperature": temperature}, None, model.defaults), model.vocab_size)
        tallies = {most: Tally() for most in (0, *args.draft, AUTO)}
        with pair(model, args.prompt + args.gen) as (session, plain):
            layer = of_layer(session, sampler) if model.has_draft else None
            for seed, prompt in enumerate(prompts):
                run_all(
                    session, plain, prompt, seed, sampler,
                    lambda _, prompt=prompt, layer=layer: layer or repetitions(prompt), args.gen, tallies,
                )  # fmt: skip
        rows += found({"temperature": temperature}, tallies)
    return rows


def together(model: Model, texts: Sequence[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows for each temperature and number of texts answered together, with the engine's drafts and without: whole
    answers, prompts included."""
    starts, rows = prompts_of(model, texts, args, max(args.texts) * args.prompts), []
    for temperature, n in ((temperature, n) for temperature in args.temperature for n in args.texts):
        print(f"{n} texts, temperature {temperature:g} …", file=sys.stderr)
        without, drafted = [], []
        for seed in range(args.prompts):
            options = {"max_tokens": args.gen, "seed": seed, "temperature": temperature}
            runs = [answered(model, starts[seed * n : (seed + 1) * n], draft, options) for draft in (0, 0, None)]
            if any(run[0] != runs[0][0] for run in runs):
                raise report.BenchmarkError(f"drafts gave other tokens than none: {runs}")
            without.append(runs[1][1])  # the first is not counted
            drafted.append(runs[2][1])
        ratio = statistics.median(fast / none for fast, none in zip(drafted, without, strict=True))
        speeds = {"none_tok_s": statistics.median(without), "auto_tok_s": statistics.median(drafted)}
        rows.append({"temperature": temperature, "texts": n, "ratio": ratio} | speeds)
    return rows


def answered(model: Model, prompts: list[list[int]], draft: int | None, options: dict[str, Any]) -> tuple[Any, float]:
    """Tokens of each, and tokens per second of all together."""
    begin = time.perf_counter()
    tokens = [result.tokens for result in model.generate(prompts, draft=draft, **options)]
    return tokens, sum(map(len, tokens)) / (time.perf_counter() - begin)


def on_shape(model: Model, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows for each depth, acceptance rate and draft length, at temperature 0. The prompts consist of tokens
    that a draft layer can guess; the model generates from all tokens."""
    sampler, rows = Sampler(resolve({"temperature": 0}), model.vocab_size), []
    for depth in args.depth:
        with pair(model, args.prompt + depth + args.gen) as (session, plain):
            for one in (session, plain) if depth else ():
                one.feed([token % model.vocab_size for token in range(lib.BN_REPEATED)], keep_logits=False)
                one.repeat(depth)
            layer = partial(session.guess, sampler) if model.has_draft else None
            for share in args.right:
                print(f"{share:.0%} right behind {depth} tokens …", file=sys.stderr)
                tallies = {most: Tally() for most in (0, *args.draft)}
                for seed in range(args.prompts):
                    prompt = [random.Random(seed).randrange(-(-model.vocab_size // 4)) for _ in range(args.prompt)]
                    run_all(
                        session, plain, prompt, seed, sampler,
                        lambda right, share=share, seed=seed, layer=layer: as_good_as(right, share, seed, layer),
                        args.gen, tallies, depth,
                    )  # fmt: skip
                rows += found({"share_right": share, "depth": depth}, tallies)
    return rows


@contextmanager
def pair(model: Model, n_ctx: int) -> Iterator[tuple[Session, Session]]:
    """Two sessions, the second without the draft layer, which takes time even when it does not guess."""
    with model.session(n_ctx) as session, Session._new(model, n_ctx, draft=False) as plain:
        yield session, plain


def run_all(session: Session, plain: Session, prompt: Sequence[int], seed: int, sampler: Sampler,
            make: Callable[[list[int]], Guess], n: int, tallies: dict[int, Tally], depth: int = 0) -> None:  # fmt: skip
    """Run every draft length, the length 0 in `plain`. make(the right tokens) returns the guesser."""
    right = run(plain, prompt, seed, sampler, make([]), n, 0, Tally(), depth)  # warm-up, not counted
    for most, tally in tallies.items():
        tokens = run(session if most else plain, prompt, seed, sampler, make(right), n, most, tally, depth)
        if tokens != right:
            raise report.BenchmarkError(f"drafts of {most} gave other tokens than none: {tokens} and {right}")


def found(setting: dict[str, float], tallies: dict[int, Tally]) -> list[dict[str, Any]]:
    """A ratio is the median over prompts, whose runs are close in time."""
    none = tallies[0].speeds
    return [
        setting
        | {"draft": most}
        | tally.row()
        | {
            "ratio": statistics.median(
                with_guesses / without for with_guesses, without in zip(tally.speeds, none, strict=True)
            )
        }
        for most, tally in tallies.items()
    ]


def named(most: int) -> str:
    return "auto" if most == AUTO else str(most)


def markdown(results: dict[str, Any]) -> str:
    """The page of results."""
    by_depth = "depth" in results["rows"][0]
    rows = [
        ([row["depth"]] if by_depth else []) + [
            row.get("temperature", row.get("share_right")), named(row["draft"]), row["tokens_per_pass"], row["tok_s"],
            f"{row['ratio']:.2f} ×", " ".join(f"{share:.0%}" for share in row["right"][:8]),
        ]
        for row in results["rows"]
    ]  # fmt: skip
    setting = "temperature" if "temperature" in results["rows"][0] else "acceptance rate"
    head = [
        *(["tokens before"] if by_depth else []),
        setting,
        "draft tokens",
        "tokens a pass",
        "tok/s",
        "of none",
        "accepted, by place",
    ]
    said = f"{results['prompts']} prompts of {results['prompt']} tokens, {results['gen']} more each"
    return "\n".join(
        [
            f"# {results['model']}: what speculative decoding brings",
            "",
            f"{said}, threads {results['threads']}, {results['isa']}; medians, in turn. A draft token counts when "
            "those before it were right. The first is of a token that sampling gives anyway.",
            "",
            report.table(head, rows),
            *(of_texts(results["together"]) if results["together"] else []),
        ]
    )


def of_texts(rows: list[dict[str, Any]]) -> list[str]:
    head = ["temperature", "texts together", "tok/s without", "with", "of that"]
    cells = [
        [row["temperature"], row["texts"], row["none_tok_s"], row["auto_tok_s"], f"{row['ratio']:.2f} ×"]
        for row in rows
    ]
    return [
        "",
        "Whole answers, prompts included, with as many draft tokens as the engine makes by itself:",
        "",
        report.table(head, cells),
    ]


def panels(results: dict[str, Any]) -> list[report.Panel]:
    """Speed with draft tokens relative to that without, for each setting."""
    drafts = [named(n) for n in dict.fromkeys(row["draft"] for row in results["rows"])]
    settings: dict[float, dict[str, list[float]]] = {}
    for row in results["rows"]:
        lines = settings.setdefault(row.get("temperature", row.get("share_right")), {})
        lines.setdefault(f"behind {row['depth']}" if row.get("depth") else "", []).append(row["ratio"])
    name = "temperature" if "temperature" in results["rows"][0] else "acceptance rate"
    return [
        report.Panel(f"{name} {setting:g}: speed by number of draft tokens, 0 is 1", drafts, lines, unit=" ×")
        for setting, lines in settings.items()
    ]


def arguments(line: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Measure what speculative decoding brings.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", type=Path, metavar="FILE", help="a trained model, with --text")
    add("--text", type=Path, nargs="+", default=[], metavar="FILE", help="text that it was not trained on")
    add("--shape", choices=SHAPES, default="bitnet-2b4t", help="of a random model, without --model")
    add("--layer", action="store_true", help="with --shape: the model has a draft layer, which makes the draft tokens")
    add("--temperature", type=float, nargs="+", default=[0.0, 0.8, 1.0], metavar="T", help="with --model")
    add("--right", type=float, nargs="+", default=[0.5, 0.7, 0.9], metavar="P", help="acceptance rate, with --shape")
    add("--depth", type=int, nargs="+", default=[0], metavar="N", help="tokens before, with --shape: 0, or 64 and more")
    add("--texts", type=int, nargs="*", default=[], metavar="N", help="also so many together, with --model")
    add("--draft", type=int, nargs="+", default=[1, 2, 4, 8], metavar="N", help="draft tokens at a time")
    add("--prompts", type=int, default=5, metavar="N", help="prompts")
    add("--prompt", type=int, default=64, metavar="N", help="tokens of each")
    add("--gen", type=int, default=96, metavar="N", help="tokens behind each")
    add("--threads", type=int, metavar="N", help="threads; none: as many as cores")
    add("--out", type=Path, default=report.RESULTS, metavar="FOLDER", help="where results go")
    args = parser.parse_args(line)
    if bool(args.model) != bool(args.text):
        parser.error("--model and --text go together")
    if min(*args.draft, args.prompts, args.prompt, args.gen, 1) < 1:
        parser.error("numbers of draft tokens, prompts and tokens: expected 1 or more")
    if any(depth and depth < lib.BN_REPEATED for depth in args.depth):
        parser.error(f"--depth: expected 0, or {lib.BN_REPEATED} or more")
    return args


def main(line: list[str] | None = None) -> None:
    args = arguments(line)
    name = args.model.stem if args.model else args.shape
    what = f"--model {args.model.name} --text …" if args.model else f"--shape {args.shape}" + " --layer" * args.layer
    what += f" --texts {' '.join(map(str, args.texts))}" if args.texts else ""
    what += f" --depth {' '.join(map(str, args.depth))}" if any(args.depth) else ""
    numbers = f"--draft {' '.join(map(str, args.draft))} --prompts {args.prompts} --prompt {args.prompt}"
    origin = report.origin(f"python benchmarks/drafts.py {what} {numbers} --gen {args.gen}")
    (report.ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=report.ROOT / "build", prefix="drafts-") as folder:
        path = args.model or Path(folder) / "model.bitnet"
        if not args.model:
            print(f"writing random weights of shape {args.shape} …", file=sys.stderr)
            n_ctx = max(args.depth) + args.prompt + args.gen
            shape = SHAPES[args.shape].replace(max_context=max(n_ctx, SHAPES[args.shape].max_context))
            random_model(shape.with_draft() if args.layer else shape, path)
        with Model.load(path, threads=args.threads) as model:
            texts = [text.read_text(encoding="utf-8") for text in args.text]
            rows = on_text(model, texts, args) if args.model else on_shape(model, args)
            many = together(model, texts, args) if args.model and args.texts else []
            machine = {"threads": model.threads, "isa": model.isa}
    numbers_of = {"prompts": args.prompts, "prompt": args.prompt, "gen": args.gen, "drafts": [0, *args.draft]}
    results = {"origin": origin, "model": name} | numbers_of | machine | {"rows": rows, "together": many}
    text = markdown(results)
    report.write(args.out, f"drafts-{name}", results, text, panels(results))
    print(text)


if __name__ == "__main__":
    report.run(main)
