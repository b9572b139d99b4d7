"""`--compile`: torch compiles the layers of a model, identical ones into one graph, and the loss of its head.

It compiles layers, not the whole model: compile time then does not grow with depth, and training was no slower.
Experts run eagerly.
Compiled kernels sum in another order, so a norm or γ may differ in its last bit, which rarely changes an int8 code.
Everything that is compared with the exported file is therefore computed `eagerly`.
"""

from __future__ import annotations

import contextlib

import torch

from bitnet.model.attention import takes_blocks
from bitnet.model.transformer import Transformer

GRAPHS = 256
"""Graphs of one function in a process; torch's limit for all functions together. torch's default is 8, after which it
runs layers eagerly with only a warning. A model takes up to four, and more when its layers differ: the third run in a
notebook would be slow."""


class CompilerError(ValueError):
    """torch cannot compile on this machine."""


def compile_layers(model: Transformer, backend: str = "inductor") -> None:
    """Compile in place: names of parameters and modules stay. Raises CompilerError where torch cannot compile.

    backend: one of torch.compile's.
    """
    if backend == "inductor" and " " in torch.__path__[0]:  # torch does not quote the path of its headers
        raise CompilerError(
            f"--compile, but torch is installed in {torch.__path__[0]!r}, and cannot compile from a path with a space; "
            "install into another, or leave --compile out"
        )
    probe = torch.compile(torch.neg, backend=backend)
    try:
        probe(torch.zeros(2, device=model.device))
    except Exception as error:  # its type depends on how the compiler is missing or broken
        reason = str(error).strip().splitlines()[0]
        raise CompilerError(
            f"--compile, but torch cannot compile here ({reason}); it needs a C++ compiler, g++ or the one that CXX "
            "names, and Python's headers, on a GPU Triton too; or leave --compile out"
        ) from None
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS)
    for stack in model.stacks:
        # A batch of conversations has any number of pictures, and each would be a graph: the second is for all others.
        dynamic = None if stack is model.vision else False
        for layer in stack.blocks:
            if layer.config.n_experts:  # as many tokens as differ in every pass, and each number would be a graph
                layer.mixture = torch.compiler.disable(layer.mixture)  # type: ignore[method-assign]
            layer.compile(backend=backend, dynamic=dynamic)
        stack.in_blocks = model.device.type == "cuda" and takes_blocks(stack.config)
    model.portion = torch.compile(model.portion, backend=backend, dynamic=False)


def eagerly() -> contextlib.AbstractContextManager[None]:
    """A context in which compiled layers run eagerly, and hooks on their modules are called."""
    stance: contextlib.AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance
