"""The tokens around a text, as the engine, training and other formats take them."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, processors

from bitnet_runtime.tokenizer.edges import begun, edges_of

START, TEXT, END = 0, 1, 2


def words(around: str) -> Tokenizer:
    found = Tokenizer(models.WordLevel({"<s>": START, "a": TEXT, "</s>": END}, unk_token="a"))
    found.post_processor = processors.TemplateProcessing(single=around, special_tokens=[("<s>", START), ("</s>", END)])
    return found


@pytest.mark.parametrize(
    ("around", "start", "before", "behind"),
    [
        ("$0", None, [], []),
        ("$0", START, [START], []),
        ("<s> $0 </s>", None, [START], [END]),
        ("<s> $0 </s>", START, [START], [END]),
        ("<s> <s> $0", START, [START], []),
        ("<s> <s> $0", None, [START, START], []),
        ("</s> $0 <s>", START, [START, END], [START]),
    ],
)
def test_the_start_token_comes_once(around: str, start: int | None, before: list[int], behind: list[int]) -> None:
    made = words(around)
    assert edges_of(made, start) == (before, behind)
    assert begun(made.encode("a").ids, start) == [*before, TEXT, *behind]
