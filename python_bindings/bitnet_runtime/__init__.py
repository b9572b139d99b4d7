"""Run a packed BitNet b1.58 model on a CPU.

    from bitnet_runtime import Model

    with Model.load("model.bitnet") as model:
        print(model.generate("def main(", max_tokens=64).text)
        for piece in model.stream("import "):
            print(piece.text, end="", flush=True)

Needs the compiled engine alone: `tokenizers` is imported when text is used, numpy when an array is
asked for, Pillow when a picture has to be decoded or resized, and jinja2 in a process of its own on
the first chat.
"""

from bitnet_runtime.answers.logprobs import Scored
from bitnet_runtime.answers.receipt import Receipt
from bitnet_runtime.answers.result import Piece, Result, Timings, Usage
from bitnet_runtime.answers.stream import Stream
from bitnet_runtime.answers.together import Batch
from bitnet_runtime.answers.verifying import Verdict
from bitnet_runtime.asynchronous import AsyncStream
from bitnet_runtime.chat.tools import ToolCall
from bitnet_runtime.defaults import Sampling
from bitnet_runtime.errors import (
    BitnetError,
    CacheFullError,
    CancelledError,
    ClosedError,
    ContextLengthError,
    GrammarError,
    ImageError,
    InvalidParameterError,
    MissingDependencyError,
    ModelFileError,
    ModelFormatError,
    ModelNotFoundError,
    ModelTooLargeError,
    NumericError,
    ReceiptError,
    SessionFileError,
    StateError,
    TemplateError,
    ThreadError,
    TokenizerError,
    ToolCallError,
    UnsupportedModelError,
)
from bitnet_runtime.machine import available_isas, default_threads, version
from bitnet_runtime.model import Model
from bitnet_runtime.sessions.sampler import Sampler
from bitnet_runtime.sessions.session import Session
from bitnet_runtime.shape import ModelInfo

__version__ = version()

__all__ = [
    "AsyncStream",
    "Batch",
    "BitnetError",
    "CacheFullError",
    "CancelledError",
    "ClosedError",
    "ContextLengthError",
    "GrammarError",
    "ImageError",
    "InvalidParameterError",
    "MissingDependencyError",
    "Model",
    "ModelFileError",
    "ModelFormatError",
    "ModelInfo",
    "ModelNotFoundError",
    "ModelTooLargeError",
    "NumericError",
    "Piece",
    "Receipt",
    "ReceiptError",
    "Result",
    "Sampler",
    "Sampling",
    "Scored",
    "Session",
    "SessionFileError",
    "StateError",
    "Stream",
    "TemplateError",
    "ThreadError",
    "Timings",
    "TokenizerError",
    "ToolCall",
    "ToolCallError",
    "UnsupportedModelError",
    "Usage",
    "Verdict",
    "available_isas",
    "default_threads",
]
