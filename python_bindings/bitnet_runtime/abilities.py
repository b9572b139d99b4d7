"""What a model has to be able to do, said before any work."""

from __future__ import annotations

from bitnet_runtime.errors import UnsupportedModelError
from bitnet_runtime.images.info import ImageInfo
from bitnet_runtime.shape import ModelShape


def require_text(model: ModelShape) -> None:
    """Raises UnsupportedModelError if the model only sees images."""
    if not model.has_text:
        raise UnsupportedModelError(
            f"{model.path.name} sees images and takes no text: see Model.encode_image and embed_images"
        )


def require_head(model: ModelShape) -> None:
    """Raises UnsupportedModelError if the model has no logits."""
    require_text(model)
    if not model.has_head:
        verbs = ("embed", "similarity") if model.image else ("embed",)
        calls = " and ".join(f"Model.{verb} (`bitnet {verb}`)" for verb in verbs)
        turns = f"it turns a text into a vector, see {calls}"
        if not model.has_embedding:
            turns = "it turns vectors into one, see Session.embed_embeddings"
        raise UnsupportedModelError(f"{model.path.name} has no head, so it gives no logits and no text: {turns}")


def require_images(model: ModelShape) -> ImageInfo:
    """Raises UnsupportedModelError if the model sees no images."""
    if model.image is None:
        takes = "text" if model.has_embedding else "vectors"
        raise UnsupportedModelError(f"{model.path.name} sees no images, it takes {takes} alone")
    return model.image


def require_image_token(model: ModelShape) -> ImageInfo:
    """Raises UnsupportedModelError if images have no place in a prompt."""
    seen = require_images(model)
    if seen.image_token < 0:
        raise UnsupportedModelError(
            f"{model.path.name} has no image token, so no images in a prompt: it compares them with texts, "
            "see Model.similarity"
        )
    return seen


def require_embedding(model: ModelShape) -> None:
    """Raises UnsupportedModelError if the model has no table of tokens."""
    require_text(model)
    if not model.has_embedding:
        raise UnsupportedModelError(
            f"{model.path.name} has no embedding of tokens: it takes vectors, see Session.append_embeddings "
            "and embed_embeddings"
        )


def require_next_token(model: ModelShape) -> None:
    """Raises UnsupportedModelError if the model predicts no next token: it has no head, or is bidirectional."""
    require_head(model)
    if model.mask == "bidirectional":
        raise UnsupportedModelError(
            f"{model.path.name} is bidirectional: its tokens see those that follow, so none can be generated or "
            "scored; use embed, or Session.append for the logits of a whole text"
        )


def require_similarity(model: ModelShape) -> ImageInfo:
    """Raises UnsupportedModelError if the model does not make comparable vectors of images and texts."""
    seen = require_images(model)
    if not (seen.pooled and model.has_embedding and model.pooling):
        answers = "it answers questions on images, see Model.generate (`bitnet generate --image`)"
        why = answers if model.has_head else "it has no vectors for texts"
        raise UnsupportedModelError(f"{model.path.name} does not compare images with texts: {why}")
    return seen
