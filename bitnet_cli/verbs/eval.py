"""`bitnet eval`: a checkpoint or a packed file, measured on text or on tasks."""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitnet_cli.arguments import at_least, check_exists, idle
from bitnet_cli.model_options import adapter_of, add_adapter, add_threads
from bitnet_cli.signals import at_once
from bitnet_cli.tasks import in_engine
from bitnet_cli.texts import typed
from bitnet_runtime.shape import KV_TYPES
from bitnet_runtime.terminal import escape, say, show

if TYPE_CHECKING:
    from bitnet.config import ModelConfig
    from bitnet.train.checkpoint import Checkpoint
    from bitnet.train.objectives import Result
    from bitnet_runtime import Model


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Loss of a model on text, or its score on tasks of lm-evaluation-harness. A checkpoint is "
        "measured in PyTorch, a packed file in the engine, with the same result; only a packed model with prefixes "
        "is measured without one. docs/evaluate.md says how to read the figures."
    )
    parser.add_argument("source", metavar="SRC", help="a packed file, a checkpoint, or a run folder (its newest)")
    add_threads(parser)
    add_adapter(parser)
    parser.add_argument("--kv-type", choices=tuple(KV_TYPES), help="numbers in the engine's KV cache [f32]")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    text = parser.add_argument_group("text")
    text.add_argument(
        "--data",
        nargs="+",
        action="extend",
        metavar="NAME",
        help="what to measure; none: the validation text of the run",
    )
    text.add_argument(
        "--column", metavar="NAME", help="field of lines and rows that holds the text; none: as trained, or text"
    )
    text.add_argument(
        "--tokens", type=at_least(0), default=0, metavar="N", help="at most this many, or one window; 0: all [0]"
    )
    text.add_argument(
        "--context", type=at_least(0), default=0, metavar="N", help="tokens of a window; 0: as trained [0]"
    )
    text.add_argument(
        "--stride",
        type=at_least(0),
        default=0,
        metavar="N",
        help="tokens from one window to the next; 0: the context, no overlap [0]",
    )
    text.add_argument(
        "--samples", type=at_least(0), default=0, metavar="N", help="texts to let the model write and print [0]"
    )
    text.add_argument(
        "--prompt", type=typed, metavar="TEXT", help="what the samples begin with; none: a document's beginning"
    )
    tasks = parser.add_argument_group("tasks", "need lm-evaluation-harness, the extra [eval]")
    tasks.add_argument(
        "--tasks", metavar="NAMES", help="names of the harness, or .yaml and .yml files, separated by commas"
    )
    tasks.add_argument(
        "--fewshot", type=at_least(0), metavar="N", help="solved examples before each question; none: by task"
    )
    tasks.add_argument(
        "--limit", type=at_least(0), default=0, metavar="N", help="questions of each task, the first ones; 0: all [0]"
    )
    tasks.add_argument("--chat", action="store_true", help="ask through the chat template")


def run(args: argparse.Namespace) -> int:
    source = Path(args.source)
    check_exists(source)
    is_packed = not source.is_dir()
    if told := idle(
        args,
        ("adapter", is_packed, "is for packed files; a run of an adapter is measured with it"),
        ("data column tokens context stride samples", not args.tasks, "is for text, not for --tasks"),
        ("fewshot limit chat", args.tasks, "goes with --tasks"),
        ("column", args.data, "has no effect without --data"),
        ("prompt", args.samples, "goes with --samples"),
        ("kv_type", is_packed or args.tasks or args.samples, "is for packed files"),
    ):
        raise ValueError(told)
    shown = ""
    figures: dict[str, Any] = {}
    checkpoint = None if is_packed else _opened(source)
    names = args.tasks.split(",") if args.tasks else []
    manager = None
    if checkpoint and names:
        from bitnet.harness import tasks_of

        manager = tasks_of(names)  # a wrong name is told before the checkpoint is packed
    if checkpoint:
        from bitnet import process

        process.keep_freed_memory()
        _check_fits(args, checkpoint.config, sees=bool(checkpoint.config.vision))
        if args.threads:
            from bitnet.setup.hardware import set_threads

            set_threads(args.threads)
    if checkpoint and not args.tasks:
        result, places = of_checkpoint(checkpoint, args)
        figures = asdict(result) | places | {"checkpoint": checkpoint.folder.name}
        shown = line(result, places)
    if is_packed or args.tasks or args.samples:
        with at_once():
            from bitnet_runtime import Model

        adapters = [args.adapter] if args.adapter else ()
        options = {"kv_type": args.kv_type or "f32", "threads": args.threads, "adapters": adapters}
        with in_engine(checkpoint, **options) if checkpoint else Model.load(source, **options) as model:
            say(escape(str(model)))
            _check_fits(args, model, sees=bool(model.image))
            if args.adapter and model.image:
                raise ValueError("--adapter is for models of text alone here; measure its run: bitnet eval RUN")
            adapter = adapter_of(model)
            if names:
                from bitnet.harness import report

                more: dict[str, Any] = {"adapter": adapter, "manager": manager}
                figures, shown = report(model, names, args.fewshot, args.limit, args.chat, **more)
            elif is_packed:
                result, places = of_packed(model, args)
                figures, shown = asdict(result) | places, line(result, places)
            if args.samples:
                figures["samples"] = samples(model, args.prompt or "", args.samples, adapter)
    for i, text in enumerate(figures.get("samples", [])):
        shown += f"\n\n--- sample {i} ---\n{text}"
    show((json.dumps({"source": args.source} | figures) if args.json else shown) + "\n")
    return 0


def _is_encoder(model: Model | ModelConfig) -> bool:
    return model.mask == "bidirectional" or not model.has_head


def _check_fits(args: argparse.Namespace, model: Model | ModelConfig, sees: bool) -> None:
    """Raises ValueError: an option for another model or data. sees: whether the model takes images."""
    if args.samples and _is_encoder(model):
        raise ValueError(f"--samples, but {args.source} is an encoder, which writes no text; leave it out")
    if args.column and sees:
        raise ValueError("--column is for text, not for records of images; leave it out")
    if args.column:
        from bitnet.data import tokenized

        if folder := tokenized.named(args.data):
            tokenized.check_read(folder, None, args.column)


def _opened(source: Path) -> Checkpoint:
    with at_once():
        from bitnet.train.checkpoint import Checkpoint

    checkpoint = Checkpoint.open(source)
    if checkpoint.folder != source:
        say(str(checkpoint.folder))  # of a run folder the newest
    return checkpoint


def samples(model: Model, prompt: str, n: int, adapter: str | None = None) -> list[str]:
    """Texts that begin with the prompt, the same ones each time."""
    return [prompt + model.generate(prompt, seed=i, adapter=adapter).text for i in range(n)]


def of_packed(model: Model, args: argparse.Namespace) -> tuple[Result, dict[str, int]]:
    """The result of a packed file, and the context and stride it is of."""
    with at_once():
        from bitnet.data import conversations, corpus, dataset, files, tokenized, tokenizer
        from bitnet.evaluate.loss import Overlapping, evaluate_packed

    if _is_encoder(model) and not model.image:
        raise ValueError(f"{args.source} is a packed encoder, which is not measured; measure its run: bitnet eval RUN")
    if not args.data:
        what = "records of images" if model.image else "the text"
        raise ValueError(f"{args.source} is packed and holds no text to measure it on; give {what} with --data")
    if not model.has_tokenizer:
        raise ValueError(f"{args.source} has no tokenizer, so text cannot be measured")
    words = tokenizer.parse(model.tokenizer_json.decode(), args.source)
    first = tokenizer.separator(words, model.metadata.get("generation") or {}, packed=True)
    context, stride = _window(args, model.n_ctx, model.n_ctx)
    if conversations.among(args.data, args.column or ""):
        raise ValueError(
            f"{args.data[0]} holds conversations, on which only a run is measured: bitnet eval RUN --data …"
        )
    if model.image:
        return _of_packed_with_images(model, args, words, context), {"context": context}
    with tempfile.TemporaryDirectory() as scratch:
        if folder := tokenized.named(args.data):
            tokenized.check_of(folder, words, first)
            (text,) = tokenized.read(folder, "validation")[1]
        else:
            texts = corpus.Documents(args.data, args.column or files.COLUMN)
            text = dataset.tokenize(texts, words, Path(scratch), "text", first)
            if texts.left_out:
                say(texts.left_out)
        if model.mask == "prefix":
            say("measured without a prefix, unlike its checkpoint: each token from those before it")
        result = evaluate_packed(model, Overlapping(text, stride), context, args.tokens, adapter_of(model))
    return result, {"context": context, "stride": stride}


def _of_packed_with_images(model: Model, args: argparse.Namespace, words: Any, context: int) -> Result:
    """The result of a packed model that answers questions about images, or matches them with texts."""
    from bitnet.evaluate import packed_pictures

    if args.stride:
        raise ValueError("--stride is for text of which each token follows from those before it; leave it out")
    with tempfile.TemporaryDirectory() as scratch:
        return packed_pictures.evaluate(model, words, args.data, context, Path(scratch), args.tokens)


def of_checkpoint(checkpoint: Checkpoint, args: argparse.Namespace) -> tuple[Result, dict[str, int]]:
    """The result of a checkpoint on its own objective, and the context and stride it is of."""
    from bitnet.data import dataset, mixture
    from bitnet.evaluate.loss import check_vocabulary
    from bitnet.settings import Settings
    from bitnet.setup import measured
    from bitnet.train import objectives

    folder, model, state = checkpoint.folder, checkpoint.model, checkpoint.state_if_any
    if not state and not args.data:
        raise ValueError(f"{folder}/state.json is missing, so what it learned from is not known; give text with --data")
    check_vocabulary(checkpoint.words, model.config, str(folder))
    settings = Settings.from_dict(checkpoint.state_of_run["settings"]) if state else Settings()
    context, stride = _window(args, settings.context or model.config.max_context, model.config.max_context)
    with tempfile.TemporaryDirectory() as scratch:
        text = measured.of_checkpoint(checkpoint, settings, args.data, context, Path(scratch), say, args.column or "")
        plain = isinstance(text, dataset.Tokens) or (isinstance(text, mixture.Sources) and not text.view)
        overlaps = plain and not settings.draft_only
        if args.stride and not overlaps:
            raise ValueError("--stride is for text of which each token follows from those before it; leave it out")
        result = objectives.evaluate(model, text, settings, context, args.tokens, stride if overlaps else 0)
    return result, {"context": context} | ({"stride": stride} if overlaps else {})


def _window(args: argparse.Namespace, usual: int, most: int) -> tuple[int, int]:
    """Context and stride in tokens. usual: the default context; most: the context of the model."""
    context = args.context or usual
    if context > most:
        raise ValueError(f"--context is {context}, the model has at most {most}")
    stride = args.stride or context
    if stride > context:
        raise ValueError(f"--stride is {stride}, expected at most the context, {context}; tokens would be left out")
    return context, stride


def line(result: Result, places: dict[str, int]) -> str:
    where = "".join(f", {name} {n:,}" for name, n in places.items())
    return f"{result}  ({result.details}{where})"
