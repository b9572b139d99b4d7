"""What guesses of the next tokens bring: how many are right, and how fast a text then is.

    python benchmarks/drafts.py --model MODEL --text FILE [FILE ...]     # on text that it was not trained on
    python benchmarks/drafts.py --shape bitnet-2b4t                      # on random weights

With a model and a text the guesses are those of `--draft`: of the model's draft layer, if it has one, else repetitions
in the text. The model runs freely from prompts out of the text: what is right is what it says itself. The row `auto`
is what the engine does when nothing is said: both, as far as they are quicker. With a shape each guess is right with a
probability that is given, so that a row says what guesses that good would bring; with `--layer` each costs what it
costs to make them with a draft layer.
Every length of draft runs in turn from every prompt, and has to give the same tokens as none.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import report
from shapes import SHAPES

from bitnet_export import random_model
from bitnet_runtime import Model, Session
from bitnet_runtime.answer import Lookup
from bitnet_runtime.defaults import resolve
from bitnet_runtime.generation import AT_ONCE
from bitnet_runtime.sampler import Sampler

Guess = Callable[[list[int], int], list[int]]
"""(the tokens so far, how many to guess at most) -> guesses."""

AUTO = -1  # in place of a length of draft: as the engine does it


@dataclass
class Tally:
    """Of all runs with one length of draft."""

    tokens: int = 0
    passes: int = 0
    offered: list[int] = field(default_factory=list)  # by place in the draft: guesses whose turn came
    right: list[int] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)  # tokens a second of each run

    def count(self, draft: Sequence[int], out: Sequence[int]) -> None:
        self.passes += 1
        right = 0
        while right < min(len(draft), len(out)) and draft[right] == out[right]:
            right += 1
        for place in range(min(right + 1, len(draft))):  # behind the first that is wrong none is looked at
            if place == len(self.offered):
                self.offered.append(0)
                self.right.append(0)
            self.offered[place] += 1
            self.right[place] += place < right

    def row(self) -> dict[str, Any]:
        shares = [right / offered for right, offered in zip(self.right, self.offered, strict=True)]
        return {
            "tokens_per_pass": self.tokens / self.passes,
            "right": shares,
            "tok_s": statistics.median(self.speeds),
        }


def run(session: Session, prompt: Sequence[int], seed: int, sampler: Sampler, guess: Guess, n: int, most: int,
        tally: Tally) -> list[int]:  # fmt: skip
    """n tokens behind a prompt, with drafts of up to `most`."""
    session.rewind(0)
    session.feed(prompt)
    session.seed(seed)
    tokens: list[int] = []
    begin = time.perf_counter()
    while len(tokens) < n:
        left = n - len(tokens)
        draft = guess(tokens, min(most, left)) if most > 0 else []
        out = session.advance(sampler, draft, min(AT_ONCE, left) if most == AUTO else 1)
        tally.count(draft, out)
        tokens += out
    seconds = time.perf_counter() - begin
    tally.tokens += len(tokens)
    tally.speeds.append(len(tokens) / seconds)
    return tokens


def repetitions(prompt: Sequence[int]) -> Guess:
    """As `--draft` guesses."""
    lookup, known = Lookup(prompt), 0

    def guess(tokens: list[int], most: int) -> list[int]:
        nonlocal known
        for token in tokens[known:]:
            lookup.add(token)
        known = len(tokens)
        return lookup.guess(most)

    return guess


def of_layer(session: Session, sampler: Sampler) -> Guess:
    """The token that comes, and what the model's draft layer guesses behind it."""

    def guess(tokens: list[int], most: int) -> list[int]:
        token = session.draw(sampler)
        return [token, *(guessed for guessed, _ in session.guess(sampler, token, most - 1))] if most > 1 else [token]

    return guess


def as_good_as(right: Sequence[int], share: float, seed: int, layer: Guess | None = None) -> Guess:
    """Each guess is the right token with this probability, else another one; layer: costs what this does, too. The
    first, of the token that sampling gives, is then always right, as a layer begins behind it."""
    draw = random.Random(seed)

    def guess(tokens: list[int], most: int) -> list[int]:
        coming = right[len(tokens) : len(tokens) + most]
        if layer and coming:
            layer(tokens, most)
        return [token if draw.random() < share or (layer and i == 0) else token ^ 1 for i, token in enumerate(coming)]

    return guess


def on_text(model: Model, texts: Sequence[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of each temperature and length of draft."""
    tokens, draw, rows = model.tokenize("\n".join(texts)), random.Random(0), []
    if len(tokens) <= args.prompt:
        raise ValueError(f"the text has {len(tokens)} tokens, expected more than {args.prompt}, those of a prompt")
    starts = [draw.randrange(len(tokens) - args.prompt) for _ in range(args.prompts)]
    for temperature in args.temperature:
        print(f"temperature {temperature:g} …", file=sys.stderr)
        sampler = Sampler(resolve({"temperature": temperature}, None, model.defaults), model.vocab_size)
        tallies = {most: Tally() for most in (0, *args.draft, AUTO)}
        with pair(model, args.prompt + args.gen) as (session, plain):
            layer = of_layer(session, sampler) if model.has_draft else None
            for seed, start in enumerate(starts):
                prompt = tokens[start : start + args.prompt]
                run_all(
                    session, plain, prompt, seed, sampler,
                    lambda _, prompt=prompt, layer=layer: layer or repetitions(prompt), args.gen, tallies,
                )  # fmt: skip
        rows += found({"temperature": temperature}, tallies)
    return rows


def on_shape(model: Model, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of each share of right guesses and length of draft, at temperature 0."""
    sampler, rows = Sampler(resolve({"temperature": 0}), model.vocab_size), []
    with pair(model, args.prompt + args.gen) as (session, plain):
        layer = of_layer(session, sampler) if model.has_draft else None
        for share in args.right:
            print(f"{share:.0%} right …", file=sys.stderr)
            tallies = {most: Tally() for most in (0, *args.draft)}
            for seed in range(args.prompts):
                prompt = [random.Random(seed).randrange(model.vocab_size) for _ in range(args.prompt)]
                run_all(
                    session, plain, prompt, seed, sampler,
                    lambda right, share=share, seed=seed: as_good_as(right, share, seed, layer), args.gen, tallies,
                )  # fmt: skip
            rows += found({"share_right": share}, tallies)
    return rows


@contextmanager
def pair(model: Model, n_ctx: int) -> Iterator[tuple[Session, Session]]:
    """Two sessions, the second of them without the draft layer, which takes time whether it guesses or not."""
    with model.session(n_ctx) as session, Session._new(model, n_ctx, draft=False) as plain:
        yield session, plain


def run_all(session: Session, plain: Session, prompt: Sequence[int], seed: int, sampler: Sampler,
            make: Callable[[list[int]], Guess], n: int, tallies: dict[int, Tally]) -> None:  # fmt: skip
    """Every length of draft, none of them in `plain`. make(the tokens that come) guesses."""
    right = run(plain, prompt, seed, sampler, make([]), n, 0, Tally())  # which is not counted
    for most, tally in tallies.items():
        tokens = run(session if most else plain, prompt, seed, sampler, make(right), n, most, tally)
        if tokens != right:
            raise RuntimeError(f"drafts of {most} gave other tokens than none: {tokens} and {right}")


def found(setting: dict[str, float], tallies: dict[int, Tally]) -> list[dict[str, Any]]:
    """A ratio is the median of those of each prompt, which stand close in time."""
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
    rows = [
        [
            row.get("temperature", row.get("share_right")), named(row["draft"]), row["tokens_per_pass"], row["tok_s"],
            f"{row['ratio']:.2f} ×", " ".join(f"{share:.0%}" for share in row["right"][:8]),
        ]
        for row in results["rows"]
    ]  # fmt: skip
    setting = "temperature" if "temperature" in results["rows"][0] else "guesses right"
    head = [setting, "guesses", "tokens a pass", "tok/s", "of none", "right, by place"]
    said = f"{results['prompts']} prompts of {results['prompt']} tokens, {results['gen']} more each"
    return "\n".join(
        [
            f"# {results['model']}: what guesses bring",
            "",
            f"{said}, threads {results['threads']}, {results['isa']}; medians, in turn. A guess counts when "
            "those before it were right. The first is of a token that sampling gives anyway.",
            "",
            report.table(head, rows),
        ]
    )


def panels(results: dict[str, Any]) -> list[report.Panel]:
    """Speed with guesses, of that without, for each setting."""
    drafts = [named(n) for n in dict.fromkeys(row["draft"] for row in results["rows"])]
    settings: dict[float, list[float]] = {}
    for row in results["rows"]:
        settings.setdefault(row.get("temperature", row.get("share_right")), []).append(row["ratio"])
    name = "temperature" if "temperature" in results["rows"][0] else "guesses right"
    return [
        report.Panel(f"{name} {setting:g}: speed by number of guesses, 0 is 1", drafts, {"": ratios}, unit=" ×")
        for setting, ratios in settings.items()
    ]


def arguments(line: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Measure what guesses of the next tokens bring.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", type=Path, metavar="FILE", help="a trained model, with --text")
    add("--text", type=Path, nargs="+", default=[], metavar="FILE", help="text that it was not trained on")
    add("--shape", choices=SHAPES, default="bitnet-2b4t", help="of a random model, without --model")
    add("--layer", action="store_true", help="with --shape: the model has a draft layer, which makes the guesses")
    add("--temperature", type=float, nargs="+", default=[0.0, 0.8, 1.0], metavar="T", help="with --model")
    add("--right", type=float, nargs="+", default=[0.5, 0.7, 0.9], metavar="P", help="share, with --shape")
    add("--draft", type=int, nargs="+", default=[1, 2, 4, 8], metavar="N", help="guesses at a time")
    add("--prompts", type=int, default=5, metavar="N", help="prompts")
    add("--prompt", type=int, default=64, metavar="N", help="tokens of each")
    add("--gen", type=int, default=96, metavar="N", help="tokens behind each")
    add("--threads", type=int, metavar="N", help="threads; none: as many as cores")
    add("--out", type=Path, default=report.RESULTS, metavar="FOLDER", help="where results go")
    args = parser.parse_args(line)
    if bool(args.model) != bool(args.text):
        parser.error("--model and --text go together")
    if min(*args.draft, args.prompts, args.prompt, args.gen, 1) < 1:
        parser.error("numbers of guesses, prompts and tokens: expected 1 or more")
    return args


def main(line: list[str] | None = None) -> None:
    args = arguments(line)
    name = args.model.stem if args.model else args.shape
    what = f"--model {args.model.name} --text …" if args.model else f"--shape {args.shape}" + " --layer" * args.layer
    numbers = f"--draft {' '.join(map(str, args.draft))} --prompts {args.prompts} --prompt {args.prompt}"
    origin = report.origin(f"python benchmarks/drafts.py {what} {numbers} --gen {args.gen}")
    (report.ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=report.ROOT / "build", prefix="drafts-") as folder:
        path = args.model or Path(folder) / "model.bitnet"
        if not args.model:
            print(f"writing random weights of shape {args.shape} …", file=sys.stderr)
            random_model(SHAPES[args.shape].with_draft() if args.layer else SHAPES[args.shape], path)
        with Model.load(path, threads=args.threads) as model:
            texts = [text.read_text(encoding="utf-8") for text in args.text]
            rows = on_text(model, texts, args) if args.model else on_shape(model, args)
            machine = {"threads": model.threads, "isa": model.isa}
    numbers_of = {"prompts": args.prompts, "prompt": args.prompt, "gen": args.gen, "drafts": [0, *args.draft]}
    results = {"origin": origin, "model": name} | numbers_of | machine | {"rows": rows}
    text = markdown(results)
    report.write(args.out, f"drafts-{name}", results, text, panels(results))
    print(text)


if __name__ == "__main__":
    main()
