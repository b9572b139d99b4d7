"""Token ids, in whatever form a caller has them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bitnet_runtime.errors import InvalidParameterError, shown

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ids = Sequence[int] | NDArray[np.integer[Any]]
    """Token ids: a list, another sequence, or an array of one dimension."""

    Prompt = str | Ids
    """A text, or token ids."""

NO_SEQUENCES = (bytes, bytearray, memoryview)  # of bytes, which are no ids


def token_ids(value: Ids, param: str, vocab_size: int) -> list[int]:
    """The ids as a list of ints below `vocab_size`; it may be empty. `param` is how the caller knows them."""
    if not _is_sequence(value):
        raise InvalidParameterError(f"{param} is {shown(value)}, expected token ids, as in [1, 2, 3]", param)
    try:
        ids = list(map(operator.index, value.tolist() if hasattr(value, "tolist") else value))
    except TypeError as error:
        raise InvalidParameterError(f"{param}: {error}, expected token ids, as in [1, 2, 3]", param) from None
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        raise InvalidParameterError(
            f"{param} has the id {shown(wrong)}, expected ids from 0 to {vocab_size - 1}", param
        )
    return ids


def is_several(value: object, param: str) -> bool:
    """Whether it is a list of prompts, not one. Raises InvalidParameterError: it is neither."""
    if isinstance(value, str):
        return False
    if not _is_sequence(value):
        raise InvalidParameterError(
            f"{param} is {shown(value)}, expected a text, a list of token ids, or a list of these", param
        )
    if hasattr(value, "ndim"):  # an array
        return bool(value.ndim > 1)
    assert isinstance(value, Sequence)
    return len(value) > 0 and (not hasattr(value[0], "__index__") or hasattr(value[0], "__len__"))


def refuse_several(value: object, param: str, advice: str) -> None:
    """Raises InvalidParameterError: several prompts, where one is taken."""
    if _is_sequence(value) and is_several(value, param):
        first = value[0]  # type: ignore[index]  # it is a sequence
        if isinstance(first, str) or _is_sequence(first):
            raise InvalidParameterError(f"{param} is {shown(value)}, expected one: {advice}", param)


def _is_sequence(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return True
    if isinstance(value, (str, *NO_SEQUENCES)):
        return False
    return isinstance(value, Sequence) or (hasattr(value, "tolist") and getattr(value, "ndim", 0) > 0)
