"""`bitnet chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from bitnet_cli.arguments import refuse
from bitnet_cli.kept import Kept
from bitnet_cli.model_options import (
    adapter_of,
    add_adapter,
    add_images,
    add_model,
    add_sampling,
    add_template,
    fitting_session,
    model_path,
    note,
    opened,
    sampling,
)
from bitnet_cli.signals import at_once
from bitnet_cli.texts import typed
from bitnet_runtime.abilities import require_next_token
from bitnet_runtime.sessions.saved import writable
from bitnet_runtime.terminal import escape


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Talk to a model in the terminal; /help there lists the commands. Each line, typed or from a "
        'pipe, is a message; """ begins and ends one of several lines. A paste of several lines is one message where '
        "Python has GNU readline."
    )
    add_model(parser)
    parser.add_argument("--system", type=typed, metavar="TEXT", help="the system prompt")
    add_template(parser)
    add_adapter(parser)
    add_images(parser, "a picture to send with the first message; may be repeated")
    parser.add_argument(
        "--session", type=Path, metavar="FILE", help="continue the conversation in this file, if it exists; it is "
        "written at the end",
    )  # fmt: skip
    add_sampling(parser)
    parser.add_argument("--quiet", action="store_true", help="nothing on stderr but errors")


def run(args: argparse.Namespace) -> int:
    path = model_path(args)
    if path is None:
        return refuse("no model; give a packed file, as in `bitnet chat model.bitnet`")
    keep = None
    if args.session:
        writable(args.session)
        keep = Kept(args.session)
    with at_once():
        from bitnet_cli.conversation import Conversation

    with opened(args, path) as model:
        require_next_token(model)
        note(args, escape(str(model)))
        new = partial(model.session, adapter=adapter_of(model))
        conversation = Conversation(model, args.system, sampling(args), quiet=args.quiet)
        for name in args.image or ():
            conversation.show(name)
        if keep is None or not keep.exists:
            return conversation.run(fitting_session(args, model, new), keep)
        session = model.load_session(args.session)
        if session.adapter != adapter_of(model):
            raise ValueError(f"{args.session} has no adapter, so it goes on without --adapter")
        if session.kv_type != args.kv_type:
            note(args, f"[its cache stays {session.kv_type}, as it was saved]")
        if args.ctx and session.n_ctx != args.ctx:
            note(args, f"[its context stays {session.n_ctx:,} tokens, as it was saved]")
        conversation.restore(session.note, keep_system=args.system is None)
        return conversation.run(session, keep)
