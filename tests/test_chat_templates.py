"""Prompts of chat templates in the style of published models, byte for byte those of apply_chat_template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import foreign_tokenizers as foreign
from bitnet_export.foreign.hf.folder import Folder
from bitnet_export.foreign.hf.tokenizer import tokenizer_of
from bitnet_runtime import TemplateError
from bitnet_runtime.chat.template import ChatTemplate
from bitnet_runtime.tokenizer.text import Tokenizer

# ruff: noqa: E501  a line of a template cannot be cut

TEMPLATES = {
    "2b4t": "{% for m in messages %}{{ bos_token if loop.first else '' }}{{ m['role'] | capitalize }}: "
    "{{ m['content'] | trim }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}",
    "llama3": """{{- bos_token }}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}{%- if tools is not none %}{{- "Tools!\\n" }}{%- endif %}
{{- system }}{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
""",
    "falcon3": """{% for message in messages %}
{% if message['role'] in ('system', 'user') %}
{{ '<|' + message['role'] + '|>\n' + message['content'] + '\n' }}
{% elif not loop.last %}
{{ '<|assistant|>\n' + message['content'] + eos_token + '\n' }}
{% else %}
{{ '<|assistant|>\n' + message['content'] + eos_token }}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}""",
    "qwen3": """{%- set ns = namespace(last=messages|length - 1, seeking=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.seeking and message.role == 'user' and message.content is string %}
        {%- set ns.seeking = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content, thought = message.content, '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}""",
    "gemma": """{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}
    {%- set first = messages[0]['content'] + '\n\n' -%}{%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first = '' -%}{%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('Conversation roles must alternate user/assistant') }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\n' + (first if loop.first else '') }}{{ message['content'] | trim }}{{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}
""",
    "chatml": "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] "
    "+ '<|im_end|>' + '\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "mistral": """{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{{- bos_token }}
{%- for message in messages if message.role != 'system' %}
    {%- if message.role == 'user' %}{{- ' [INST] ' ~ (system ~ '\\n\\n' if loop.first and system else '') ~ message.content ~ ' [/INST]' }}
    {%- else %}{{- ' ' + message.content|trim + eos_token }}
    {%- endif %}
{%- endfor %}
""",
    "llama2": "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content.strip() + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' '  + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}",
    "tools": """    {% if tools is none and documents is none %}
plain
    {% endif %}
{{ messages | tojson }}
{{ messages[0] | tojson(indent=2) }}
{{ {'b': 'é<>&\\'', 'a': [1, 2.5, none, true]} | tojson(separators=(',', ':'), sort_keys=true) }}
{{ strftime_now('%d %b %Y') }}{{ unk_token }}|{{ pad_token }}|{{ nothing }}
""",
    "loops": """{% for m in messages %}
  {% if m.role == 'system' %}{% continue %}{% endif %}
  {% if loop.index > 3 %}{% break %}{% endif %}
  {% generation %}{{ m.content | upper }}{% endgeneration %}
{% endfor %}
{% macro turn(m) %}<{{ m.role }}>{{ m.content | replace(' ', '_') }}{% endmacro %}
{% set all %}{% for m in messages %}{{ turn(m) }}{{ ', ' if not loop.last }}{% endfor %}{% endset %}
{{ all }} {{ messages | map(attribute='role') | join('-') }} {{ messages | selectattr('role', 'eq', 'user') | list | length }}
""",
}

TALKS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "Hello  there\n"}],
    "system": [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": "naïve 東京 🙂 <b> 'x' \"y\""},
    ],
    "long": [
        {"role": "user", "content": "  1+1?"},
        {"role": "assistant", "content": "<think>\nadd\n</think>\n\n2", "tool_calls": None},
        {"role": "user", "content": "\tand 2+2?  "},
    ],
    "answered": [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a", "reasoning": "\nbecause\n"},
    ],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that knows the special tokens of every template here."""
    words = foreign.Tokenizer.from_str(foreign.byte_level("llama-bpe").to_str())
    special = ["<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>", "<|assistant|>", "[INST]"]
    words.add_special_tokens(special)
    words.add_tokens(["<think>", "</think>"])
    names = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "pad_token": "<|end_of_text|>"}
    return foreign.save(
        tmp_path_factory.mktemp("chat") / "m", words, tokenizer_class="PreTrainedTokenizerFast", **names
    )


@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_prompt_of_apply_chat_template(folder: Path, name: str, talk: str) -> None:
    (folder / "chat_template.jinja").write_text(TEMPLATES[name])
    theirs = AutoTokenizer.from_pretrained(folder)
    definition, template, generation, _ = tokenizer_of(Folder(folder), 1000)
    assert template == TEMPLATES[name]
    assert definition is not None
    ours = Tokenizer(definition, 1000, generation.get("bos_token_id"))
    messages = TALKS[talk]
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    tokens = ChatTemplate(template).encode(messages, ours, generation["special_tokens"])
    assert ours.decode(tokens, skip_special=False) == text
    assert tokens == theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert tokens.count(theirs.bos_token_id) == text.count("<|begin_of_text|>"), "the start token once, by the template"


def test_a_template_that_refuses_refuses_in_both(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(TEMPLATES["gemma"])
    theirs = AutoTokenizer.from_pretrained(folder)
    messages = TALKS["one"] * 2
    with pytest.raises(Exception, match="must alternate"):
        theirs.apply_chat_template(messages, tokenize=False)
    definition, template, generation, _ = tokenizer_of(Folder(folder), 1000)
    assert definition is not None
    assert template is not None
    with pytest.raises(TemplateError, match="must alternate"):
        ChatTemplate(template).encode(messages, Tokenizer(definition, 1000), generation["special_tokens"])
