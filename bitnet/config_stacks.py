"""Two stacks of one model: what a vision stack or a draft has to be beside the other.

Each check raises ValueError: what was found, and what is expected.
"""

from __future__ import annotations

from typing import Any


def check_vision(config: Any, vision: Any) -> None:
    """Check that the vision stack gives what the other takes, or vectors that can be compared."""
    for field, found, expected in (
        ("vision.input", vision.input, "images"),
        ("vision.vision", vision.vision, None),
        ("input", config.input, "tokens"),
    ):
        if found != expected:
            raise ValueError(f"{field} is {found!r}, expected {expected!r} of a model with vision")
    if config.name == vision.name:
        raise ValueError(f"name and vision.name are both {config.name!r}, expected two names")
    if config.image_token:
        _check_decoder(config, vision)
    else:
        _check_towers(config, vision)


def _check_decoder(config: Any, vision: Any) -> None:
    """A decoder that takes vectors of an image in place of tokens."""
    if config.mask == "bidirectional" or not config.has_head:
        raise ValueError(
            f"image_token is {config.image_token} with mask = {config.mask!r} and has_head = {config.has_head}, "
            "expected a decoder: a head, and the mask 'prefix' or 'causal'"
        )
    if vision.width != config.dim:
        raise ValueError(
            f"vision gives vectors of {vision.width} numbers, expected {config.dim}, the dim of the decoder; "
            f"set vision.out_dim = {config.dim}"
        )


def _check_towers(config: Any, vision: Any) -> None:
    """Two towers, whose vectors are compared."""
    if config.has_head:
        raise ValueError(
            "has_head is True with vision and image_token = 0, expected an image_token (a decoder that reads images) "
            "or has_head = False (vectors of texts, to compare with those of images)"
        )
    for field, pooling in (("pooling", config.pooling), ("vision.pooling", vision.pooling)):
        if pooling == "none":
            raise ValueError(f"{field} is 'none', expected a pooling to one vector per text or image, such as 'mean'")
    if vision.width != config.width:
        raise ValueError(
            f"images give vectors of {vision.width} numbers and texts of {config.width}, expected as many; "
            "set out_dim or vision.out_dim"
        )


def check_draft(config: Any, draft: Any) -> None:
    """Check that a draft takes the model's states and embeddings, and gives what its head takes."""
    for field, found, expected in (
        ("draft.input", draft.input, "draft"),
        ("draft.has_head", draft.has_head, False),
        ("draft.vision", draft.vision, None),
        ("draft.draft", draft.draft, None),
        ("draft.mask", draft.mask, "causal"),
        ("draft.embedding_norm", draft.embedding_norm, False),
        ("draft.pooling", draft.pooling, "none"),
        ("draft.out_dim", draft.out_dim, 0),
        ("draft.dim", draft.dim, config.dim),
        ("draft.max_context", draft.max_context, config.max_context),
        ("input", config.input, "tokens"),
        ("mask", config.mask, "causal"),
        ("has_head", config.has_head, True),
        ("vision", config.vision, None),
    ):
        if found != expected:
            raise ValueError(f"{field} is {found!r}, expected {expected!r} of a model with a draft")
    if draft.position not in ("rope", "none"):
        raise ValueError(f"draft.position is {draft.position!r}, expected 'rope' or 'none'")
    if config.name == draft.name:
        raise ValueError(f"name and draft.name are both {config.name!r}, expected two names")
