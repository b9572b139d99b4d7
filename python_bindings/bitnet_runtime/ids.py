"""Token ids in any form that a caller may have."""

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


NO_TOKEN = -1  # stands in a text for a vector


def token_ids(value: Ids, param: str, vocab_size: int, *, vectors: bool = False, or_text: bool = False) -> list[int]:
    """The ids as a list of ints below `vocab_size`; it may be empty. `param` is how the caller knows them.

    vectors: NO_TOKEN is one of them. or_text: the caller could have given a text.
    """
    least = NO_TOKEN if vectors else 0
    if not _is_sequence(value):
        expected = f"expected {'a text, or ' if or_text else ''}token ids, as in [1, 2, 3]"
        raise InvalidParameterError(f"{param} is {shown(value)}, {expected}", param)
    ids = []
    for each in value.tolist() if hasattr(value, "tolist") else value:
        try:
            if isinstance(each, bool):  # which Python takes for 0 or 1
                raise TypeError
            ids.append(operator.index(each))
        except TypeError:
            message = f"{param} has {shown(each)}, expected token ids, as in [1, 2, 3]"
            raise InvalidParameterError(message, param) from None
    if ids and (min(ids) < least or max(ids) >= vocab_size):
        wrong = next(token for token in ids if not least <= token < vocab_size)
        raise InvalidParameterError(
            f"{param} has the id {shown(wrong)}, expected ids from 0 to {vocab_size - 1}"
            + (f", or {NO_TOKEN} for a row of embeddings" if vectors else ""),
            param,
        )
    return ids


def embedding_rows(value: object, dim: int, rows: int | None = None) -> NDArray[np.float32]:
    """Vectors in place of tokens as float32[n, dim], n >= 1, in one piece. rows: how many it must have, if known."""
    import numpy as np

    expected = f"float32 of shape ({'n' if rows is None else rows}, {dim})"
    try:
        array = np.asarray(value)
    except Exception as error:  # whatever an object's own conversion raises
        raise InvalidParameterError(f"embeddings: {error}, expected {expected}", "embeddings") from None
    fits = array.ndim == 2 and array.shape[1] == dim and (len(array) >= 1 if rows is None else len(array) == rows)
    if array.dtype.kind != "f" or not fits:
        found = f"{array.dtype} of shape {array.shape}" if array.ndim else shown(value)
        raise InvalidParameterError(f"embeddings are {found}, expected {expected}", "embeddings")
    with np.errstate(over="ignore"):  # such as 1e300, which is refused below
        array = np.ascontiguousarray(array, np.float32)
    if not np.isfinite(array).all():
        place = np.argwhere(~np.isfinite(array))[0].tolist()
        raise InvalidParameterError(
            f"embeddings have {array[tuple(place)]} in row {place[0]}, column {place[1]}, expected finite numbers",
            "embeddings",
        )
    return array


def is_several(value: object, param: str) -> bool:
    """Whether this is a list of prompts, not one. Raises InvalidParameterError: it is neither."""
    if isinstance(value, str):
        return False
    if not _is_sequence(value):
        raise InvalidParameterError(
            f"{param} is {shown(value)}, expected a text, a list of token ids, or a list of these", param
        )
    if hasattr(value, "ndim"):
        array: Any = value
        return bool(array.ndim > 1 or (len(array) and isinstance(array[0], str)))
    assert isinstance(value, Sequence)
    # rows of arrays and tensors have an __index__ too; but one of no dimension is an id, as list(tensor) gives them
    return len(value) > 0 and (not hasattr(value[0], "__index__") or getattr(value[0], "ndim", 0) > 0)


def refuse_several(value: object, param: str, advice: str) -> None:
    """Raises InvalidParameterError: there are several prompts, expected one."""
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
