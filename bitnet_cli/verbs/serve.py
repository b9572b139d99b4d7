"""`bitnet serve`: models over HTTP, for clients of OpenAI's API and for a browser."""

from __future__ import annotations

import argparse
import logging
import os
import re
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitnet_cli.arguments import at_least, idle, refuse
from bitnet_cli.model_options import add_engine, add_template, fitting_session, load, note
from bitnet_cli.signals import at_once
from bitnet_runtime.model_sessions import limit
from bitnet_runtime.paths import adapter_name
from bitnet_runtime.terminal import escape
from bitnet_serve.options import Options

if TYPE_CHECKING:
    from bitnet_runtime.model import Model

KEY = "BITNET_API_KEY"
MB = 1_000_000
USUAL = Options()


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Answer over HTTP as OpenAI's and Anthropic's APIs do, and show a page to talk to the model. Needs no key and "
        "listens to this machine only, unless told otherwise. A client names a model by its file, without the ending."
    )
    parser.add_argument(
        "model", nargs="+", type=Path, metavar="MODEL", help="packed model files; the first is the default"
    )
    parser.add_argument("--host", help=f"address to listen on (default: {USUAL.host})")
    place = parser.add_mutually_exclusive_group()
    place.add_argument(
        "--port", type=at_least(0, 65535), default=USUAL.port, metavar="N", help="0: any (default: %(default)s)"
    )
    place.add_argument(
        "--unix", type=Path, metavar="PATH", help="listen on a Unix socket, which only its owner may use"
    )
    _add_limits(parser)
    _add_reuse(parser)
    parser.add_argument(
        "--log-requests",
        action="store_true",
        help="a line for each answer on stderr: id, address, path, model, tokens, seconds, status; never a text",
    )
    parser.add_argument(
        "--adapter", action="append", default=[], type=_adapter, metavar="[NAME=]FILE", help="an adapter of the "
        "model, which requests name as MODEL:NAME, by default its file's; may be repeated; with several models "
        "MODEL:NAME=FILE",
    )  # fmt: skip
    add_template(parser)
    _add_access(parser)
    add_engine(parser)
    parser.add_argument("--quiet", action="store_true", help="nothing on stderr but errors")


def _add_limits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--parallel",
        type=at_least(1),
        default=USUAL.parallel,
        metavar="N",
        help="most answers in a batch; they join and leave between passes (default: %(default)s)",
    )
    parser.add_argument(
        "--queue",
        type=at_least(0),
        default=USUAL.queue,
        metavar="N",
        help="requests that may wait; others get 503 (default: %(default)s)",
    )
    parser.add_argument(
        "--grace",
        type=at_least(0),
        default=USUAL.grace,
        metavar="SECONDS",
        help="time for answers to end after SIGTERM, SIGHUP or Ctrl-C; a second one ends them at once "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--max-body", type=at_least(1), metavar="MB", help="largest request (default: 1, 16 with images)"
    )
    parser.add_argument(
        "--max-cache",
        type=at_least(1),
        metavar="MB",
        help="most memory of all KV caches together; requests beyond it wait (default: what is free)",
    )
    parser.add_argument(
        "--models-memory",
        type=at_least(1),
        metavar="MB",
        help="most memory of all models and adapters together; other models are loaded on request, in place of those "
        "that nobody uses (default: three quarters of what is free)",
    )


def _add_reuse(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cache-dir",
        type=Path,
        metavar="FOLDER",
        help="keep the prefix cache, texts of more than 64 tokens, for the next server, also after kill -9; only its "
        "owner may read it",
    )
    parser.add_argument(
        "--cache-dir-size",
        type=at_least(1),
        metavar="MB",
        help=f"largest size of that folder (default: {USUAL.cache_dir_size // MB})",
    )
    parser.add_argument("--no-reuse", action="store_true", help="no prefix cache: compute each prompt in full")


def _add_access(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("who may ask")
    group.add_argument(
        "--api-key", action="append", metavar="KEY", help=f"require a key; may be repeated (or environment {KEY})"
    )
    group.add_argument(
        "--allow-host", action="append", default=[], type=_host, metavar="NAME", help="another host name of this server"
    )
    group.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        type=_origin,
        metavar="ORIGIN",
        help="a site whose pages may send requests",
    )


def _adapter(text: str) -> tuple[str, str, Path]:
    """The model, which may be "", the adapter's name, and its file."""
    name, equals, file = text.partition("=")
    if not equals:
        return "", adapter_name(Path(text)), Path(text)
    model, _, name = name.rpartition(":")
    if not (name and file):
        raise argparse.ArgumentTypeError(f"{text!r}, expected FILE, NAME=FILE, or MODEL:NAME=FILE")
    return model, name, Path(file)


def _adapters(models: list[str], given: list[tuple[str, str, Path]]) -> dict[str, dict[str, Path]]:
    """The adapters of each model, by name. Raises ValueError."""
    found: dict[str, dict[str, Path]] = {name: {} for name in models}
    for model, name, file in given:
        owner = model or models[0]
        if owner not in found or (not model and len(models) > 1):
            raise ValueError(
                f"--adapter {name}={file} names no model; expected MODEL:{name}={file} of one of {', '.join(models)}"
            )
        if name in found[owner]:
            raise ValueError(f"two adapters of {owner} have the name {name}")
        found[owner][name] = file
    return found


def _host(text: str) -> str:
    """A host as in the Host header, without port and brackets."""
    if not re.fullmatch(r"[\w.-]+|[0-9A-Fa-f.]*(:[0-9A-Fa-f.]*){2,}", text):
        raise argparse.ArgumentTypeError(f"{text!r}, expected a name or an address alone, such as my.example")
    return text


def _origin(text: str) -> str:
    """An origin as browsers send it."""
    origin = text.lower().removesuffix("/")
    if origin not in ("*", "null") and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin):
        raise argparse.ArgumentTypeError(f"{text!r}, expected scheme and host, such as https://my.example")
    return origin


def run(args: argparse.Namespace) -> int:
    one = f"goes with one model, and {len(args.model)} are given; serve it by itself"
    if told := idle(
        args,
        ("host", not args.unix, "is an address of the network, and --unix listens on none; leave one of them out"),
        ("cache_dir", not args.no_reuse, "keeps the prefix cache, which --no-reuse turns off; leave one of them out"),
        ("cache_dir_size", args.cache_dir, "is of the folder that --cache-dir names; name one, or leave it out"),
        ("chat_template", len(args.model) == 1, one),
    ):
        return refuse(told)
    key = os.environ.get(KEY)
    keys = args.api_key or ([] if key is None else [key])
    if not all(keys):
        return refuse(f"{KEY} is empty, expected a key; unset it if anyone may send requests")
    if not all(key.isascii() and key.isprintable() for key in keys):
        where = "--api-key" if args.api_key else KEY
        return refuse(f"{where} has characters other than printable ASCII, such as the end of a line; choose another")
    if any(key != key.strip() for key in keys):
        return refuse("an API key begins or ends with a space, and no header of a request can; leave the space out")
    names = [path.name.removesuffix(".bitnet") for path in args.model]
    if twice := [name for name in names if names.count(name) > 1]:
        return refuse(f"two models have the same name, {escape(twice[0])}; rename a file")
    with at_once():
        from bitnet_serve.guard import local_hosts
        from bitnet_serve.server import Serving

    options = Options(
        host=args.host or USUAL.host,
        port=args.port,
        unix=args.unix,
        api_keys=keys,
        allow_hosts=args.allow_host,
        cors_origins=args.cors_origin,
        parallel=args.parallel,
        queue=args.queue,
        grace=args.grace,
        max_body=_megabytes(args.max_body),
        max_cache=_megabytes(args.max_cache),
        models_memory=_megabytes(args.models_memory),
        cache_dir=args.cache_dir,
        cache_dir_size=_megabytes(args.cache_dir_size) or USUAL.cache_dir_size,
        log_requests=args.log_requests,
        reuse=not args.no_reuse,
    )
    if not (keys or options.unix or local_hosts(options.host)):
        open_to = f"anyone who reaches {options.host} may send requests"
        note(args, f"[{open_to}; --api-key KEY requires a key, --allow-host NAME the name of this server]")
    adapters = _adapters(names, args.adapter)
    models = {name: partial(_load, args, path, adapters[name]) for name, path in zip(names, args.model, strict=True)}
    serving = Serving(models, options)
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns about each piece for a client that has left
    note(args, f"Listening on {serving.address}")
    return 130 if serving.run() else 0


def _load(
    args: argparse.Namespace, path: Path, adapters: dict[str, Path], look: bool, without: Collection[str]
) -> Model:
    """A model with as much context as fits. look: only to be inspected. without: adapters to leave out."""
    kept = {name: file for name, file in adapters.items() if name not in without}
    changes: dict[str, Any] = {"verify": False, "mmap": True} if look else {}
    if len(args.model) > 1:
        changes["n_ctx"] = None  # --ctx may be more than one of them has
    model = load(args, path, adapters=kept, **changes)
    try:
        if args.ctx:
            limit(model, args.ctx)
        if model.has_text:
            fitting_session(args, model, model.session).close()
        if not look:
            note(args, escape(str(model)))
    except BaseException:
        model.close()
        raise
    return model


def _megabytes(n: int | None) -> int:
    return (n or 0) * MB
