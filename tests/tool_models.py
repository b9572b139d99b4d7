"""Tools for tests, formats of calls, and models that write calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from image_models import packed
from runtime_models import SMALL, TEMPLATE, byte_tokenizer, scripted_model

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a town.",
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string", "maxLength": 6}, "days": {"type": "integer", "maximum": 9}},
            "required": ["town"],
            "additionalProperties": False,
        },
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}
TOOLS = [WEATHER, CLOCK]
FLAT: Any = [{"type": "function", "strict": False, **tool["function"]} for tool in TOOLS]  # of OpenAI's responses
ASK: Any = [{"role": "user", "content": "weather?"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"town": "Köln", "days": 3}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'

# Templates in the style of published models.
QWEN = r"""{%- if tools %}<|im_start|>system
{%- for tool in tools %}{{ '\n' ~ (tool | tojson) }}{%- endfor %}
{{ 'write: <tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>' }}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
{%- else %}{{- '<|im_start|>' + m.role + '\n' + (m.content or '') }}
{%- for call in m.tool_calls or [] %}
{%- set call = call.function %}
{{- '\n' if m.content or not loop.first else '' }}
{{- '<tool_call>\n{"name": "' + call.name + '", "arguments": ' + (call.arguments | tojson) + '}\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\n' }}{%- endif %}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
FALCON = r"""{%- if tools %}{{- '<tools>' + (tools | tojson(indent=2)) + '</tools>\nwrite:\n<tool_call>\n[\n  {\"name\":
 \"function_name\", \"arguments\": {\"arg1\": 1}}\n]\n</tool_call>\n' }}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{- '<tool_response>\n' + m.content + '\n</tool_response>\n' }}
{%- else %}{{- '<|' + m.role + '|>\n' + (m.content or '') }}
{%- if m.tool_calls %}{{- '\n<tool_call>\n' + (m.tool_calls | tojson) + '\n</tool_call>' }}{%- endif %}{{- '\n' }}
{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{%- endif %}"""
LLAMA = r"""{%- for m in messages %}{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}
{%- if tools and loop.first %}
{{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.\n' }}
{%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\n' }}{%- endfor %}{%- endif %}
{%- if m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
{%- set call = m.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' }}
{%- else %}{{- m.content | trim }}{%- endif %}{{- '<|eot_id|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""
TEMPLATES = {"told by us": TEMPLATE, "tags": QWEN, "list": FALCON, "json": LLAMA}


def pieces(text: str) -> list[bytes]:
    """A text as distinct tokens of a few bytes each; characters may be split between them."""
    data, found = text.encode(), list[bytes]()
    while data:
        size = next(n for n in range(min(3, len(data)), len(data) + 1) if data[:n] not in found)
        found.append(data[:size])
        data = data[size:]
    return found


def unheld_model(path: Path, template: str = TEMPLATE) -> Path:
    """A random model that writes anything unless a grammar constrains it."""
    words = byte_tokenizer()
    config = SMALL.replace(vocab_size=words.get_vocab_size(), max_context=2048)
    ends = {"eos_token_ids": [words.token_to_id("<|end|>")]}
    return packed(path, config, template=template, generation=ends, words=words)


def calling_model(path: Path, answer: str, template: str = TEMPLATE, **more: Any) -> Path:
    """A model that gives this answer."""
    return scripted_model(path, pieces(answer), template=template, max_context=2048, **more)
