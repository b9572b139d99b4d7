"""The verbs of the `bitnet` command, in the order of `bitnet --help`."""

from __future__ import annotations

from typing import NamedTuple


class Verb(NamedTuple):
    """A line of `bitnet --help`. bitnet_cli/verbs/NAME.py has the rest, and is imported when the verb is typed:

    def arguments(parser): says what the verb does, and adds what it takes
    def run(args): does it, and returns the exit code
    """

    name: str
    help: str
    extra: str = "train"  # of pyproject.toml: what to install when a package is missing


VERBS = (
    Verb("tokenize", "turn text into token ids once, for many runs"),
    Verb("train", "train a model on text"),
    Verb("report", "one page of figures about a training run"),
    Verb("eval", "measure a model on text or on tasks"),
    Verb("export", "write a checkpoint as one packed file", "export"),
    Verb("convert", "a published model to a packed file, or a packed file to another format", "export"),
    Verb("finetune", "train an existing model further; a full-precision one becomes ternary"),
    Verb("inspect", "show what is in a packed file"),
    Verb("generate", "continue a text"),
    Verb("verify-receipt", "check that an answer came from a model"),
    Verb("chat", "talk to a model"),
    Verb("serve", "answer over HTTP, as OpenAI's and Anthropic's APIs do, with a chat page", "serve"),
    Verb("embed", "vectors of texts or pictures, or how alike they are"),
    Verb("similarity", "how well texts fit pictures", "images"),
    Verb("bench", "measure speed and memory against the machine's limits"),
)
