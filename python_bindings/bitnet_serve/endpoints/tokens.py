"""/tokenize, /detokenize and /tokenizer_info"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bitnet_runtime.model import Model
from bitnet_serve.endpoints import chat, fields, offers, older
from bitnet_serve.errors import refuse
from bitnet_serve.models.registry import Served

KNOWN = ("model", "prompt", "messages", "tools", "add_special_tokens", *chat.FRAME)


def tokenized(served: Served, asked: Mapping[str, Any]) -> dict[str, Any]:
    fields.check_known(asked, KNOWN, samples=False)
    asked, _ = older.newer(asked)
    if "messages" in asked:
        if "prompt" in asked:
            raise refuse("prompt is given beside messages, expected one of them", "prompt")
        if fields.take(asked, "add_special_tokens", bool, False):
            raise refuse(
                "add_special_tokens goes with prompt; a template says itself which there are", "add_special_tokens"
            )
        tokens = chat.prompt_tokens(served.model, *chat.framed(asked, chat.messages(asked)), offers.of_chat(asked))
    elif mine := [name for name in ("tools", *chat.FRAME) if name in asked]:
        raise refuse(f"{mine[0]} goes with messages, and prompt is a text of its own", mine[0])
    else:
        add = fields.take(asked, "add_special_tokens", bool, True)
        tokens = served.model.tokenize(fields.text(asked, "prompt"), add_bos=add)
    return {"tokens": tokens, "count": len(tokens), "max_model_len": served.model.n_ctx}


def detokenized(served: Served, asked: Mapping[str, Any]) -> dict[str, Any]:
    fields.check_known(asked, ("model", "tokens"), samples=False)
    if "tokens" not in asked:
        raise refuse("tokens is missing, expected token ids", "tokens", "missing_required_parameter")
    tokens: list[Any] = fields.take(asked, "tokens", list, [])
    if any(isinstance(token, bool) for token in tokens):  # which Python takes for 0 and 1
        raise refuse("tokens has true or false, expected token ids, as in [1, 2, 3]", "tokens")
    return {"prompt": served.model.detokenize(tokens, skip_special=False)}


def tokenizer_info(model: Model) -> dict[str, Any]:
    named = model.special_tokens
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    tokens = {name: named.get(name) or None for name in names}
    return tokens | {"chat_template": model.template_source or None, "model_max_length": model.n_ctx}
