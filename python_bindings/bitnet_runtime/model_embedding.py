"""The part of `Model` that turns texts into vectors, and compares them with those of pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from bitnet_runtime.abilities import require_similarity
from bitnet_runtime.answers.ready import text_tokens
from bitnet_runtime.defaults import truth
from bitnet_runtime.embedding import embed
from bitnet_runtime.errors import naming, shown
from bitnet_runtime.ids import is_several
from bitnet_runtime.model_images import cosines, likely, scaled
from bitnet_runtime.model_text import ModelText

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from bitnet_runtime.ids import Prompt
    from bitnet_runtime.images.processor import Image


class ModelEmbedding(ModelText):
    """Vectors of texts, and how well they fit pictures."""

    def embed(
        self, text: Prompt | Sequence[Prompt], *, pooling: str | None = None, adapter: str | None = None
    ) -> NDArray[np.float32]:
        """The embedding of each text, a vector of length 1, so that products are cosines: float32 (n, info.width).

        text: one (n = 1) or a list, each a string or token ids. Strings get what the file's tokenizer
        adds around them, such as an end token, and are filled up to a length if the file says so.
        pooling: "last", "mean" or "first", of the tokens' states; None: as the file says. A decoder
        whose file says nothing can embed as well, if a pooling is given.
        """
        several = is_several(text, "text") or (not isinstance(text, str) and not len(text))
        texts = cast("Sequence[Prompt]", text if several else [text])
        filled = []
        for i, one in enumerate(texts):
            with naming(f"text[{i}], {shown(one)}" if len(texts) > 1 else ""):
                filled.append(text_tokens(self, one))
        return embed(self, filled, pooling, adapter)

    def similarity(
        self,
        images: Image | Sequence[Image],
        texts: Prompt | Sequence[Prompt],
        *,
        probabilities: bool = False,
        adapter: str | None = None,
    ) -> NDArray[np.float32]:
        """How well pictures and texts fit: float32 (pictures, texts), of one or of lists.

        The cosine of their vectors times the scale that the model learned, plus its bias. probabilities: of each pair
        by itself, where the model has a bias (SigLIP learned that); else of each text among those given (CLIP).
        adapter: of the vectors of texts; those of pictures have none.
        """
        seen, apart = require_similarity(self), truth("probabilities", probabilities)
        logits = scaled(cosines(self.embed_images(images), self.embed(texts, adapter=adapter)), seen)
        return likely(logits, seen) if apart else logits
