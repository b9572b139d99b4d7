"""What the weights of a stack are before anything is learnt."""

from __future__ import annotations

from torch import nn

from bitnet.config import ModelConfig


def draw_weights(stack: nn.Module) -> None:
    """Normal weights, gains 1, biases 0, adapters that add nothing. stack: a module with a `config`.

    Ternary codes do not depend on the deviation, but the learning rate counts in its units,
    and γ does: o and down begin small, so that the token itself, of size D**-0.5, is not
    drowned in the residual stream by what random layers add to it. (Against 0.02 everywhere:
    5.3 nats instead of 5.8 after 150,000 tokens, three layers of width 128.)
    Of images, what is float keeps the size of its inputs, and a patch becomes as large as a token.
    """
    config: ModelConfig = stack.config  # type: ignore[assignment]
    small, row = 0.02 / (2 * config.n_layers), config.dim**-0.5
    for name, parameter in stack.named_parameters():
        if parameter.dim() == 2:
            role = name.split(".")[-2]
            kept = parameter.shape[1] ** -0.5
            std = {"embedding": row, "position": row, "o": small, "down": small, "projector": kept}.get(role, 0.02)
            std = kept if name.endswith("adapter_in") else 0.0 if name.endswith("adapter_out") else std
            std = row * kept if role == "patch" else kept if name.startswith("pool.") else std
            nn.init.normal_(parameter, std=std)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif name in ("class_embedding", "pool.probe"):
            nn.init.normal_(parameter, std=row if name == "class_embedding" else 1.0)
