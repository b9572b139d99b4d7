"""Parses Markdown for the tests of the docs: sentences, blocks of code, commands, links."""

from __future__ import annotations

import re
from typing import NamedTuple

FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:(?<=\n\n)|^)((?:    .*(?:\n|$)|\n(?=\n*    ))+)")
ABBREVIATIONS = ("e.g", "i.e", "etc", "vs", "cf", "approx")
_END = re.compile(r"(?<=[.!?])([)\"'*_”]*)\s+")


class Block(NamedTuple):
    language: str  # "" if none is given
    text: str
    fenced: bool


def blocks(page: str) -> list[Block]:
    """Blocks of code, fenced and indented."""
    fenced = [Block(found[1], found[2], True) for found in FENCE.finditer(page)]
    return fenced + [Block("", found[1], False) for found in INDENTED.finditer(_without_lists(FENCE.sub("", page)))]


def _without_lists(page: str) -> str:
    """A page without list items, whose paragraphs are also indented."""
    return re.sub(r"^(?:[-*]|\d+\.) .*\n(?:(?: {2,}.*)?\n(?= {2,}))*(?: {2,}.*\n?)*", "", page, flags=re.MULTILINE)


def prose(page: str) -> list[str]:
    """Paragraphs and items of lists, each in one line; without code, tables, headings and pictures."""
    page = FENCE.sub("\n\n", page)
    for block in blocks(page):
        page = page.replace(block.text, "\n")
    found: list[str] = []
    new = True
    for line in page.splitlines():
        text = line.strip()
        item = re.match(r"(?:[-*]|\d+\.) +(?=\S)", text)
        if not text or text.startswith(("#", "|", "![")):
            new = True
            continue
        if new or item:
            found.append(text[item.end() :] if item else text)
        else:
            found[-1] += " " + text
        new = False
    return found


def sentences(page: str) -> list[str]:
    """Sentences of the prose. A code span counts as one word, and a link as its text."""
    found: list[str] = []
    for paragraph in prose(page):
        text = re.sub(r"`[^`]+`", "CODE", paragraph)
        text = re.sub(r"!?\[((?:[^][]|\[[^]]*\])*)\]\([^)]*\)", lambda link: link[1].replace(". ", ".\0"), text)
        start = 0
        for end in _END.finditer(text):
            before = text[start : end.start()].rsplit(None, 1)[-1].rstrip(".").lstrip("(")
            if before not in ABBREVIATIONS:
                found.append(text[start : end.end()].strip())
                start = end.end()
        found.append(text[start:].strip())
    return [sentence.replace("\0", " ").strip("*") for sentence in found if sentence]


def words(sentence: str) -> list[str]:
    return [word for word in sentence.split() if any(c.isalnum() for c in word)]


def inline_code(page: str) -> list[str]:
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", FENCE.sub("", page))


def links(page: str) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page))


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def commands(page: str) -> list[str]:
    """Commands in blocks and in the text."""
    found = [command for block in blocks(page) for command in commands_of(block)]
    return found + [code for code in inline_code(page) if re.match(r"(python|bitnet) \S", code)]


def commands_of(block: Block) -> list[str]:
    """Commands of a block, without comments, with continued lines joined."""
    text = re.sub(r"\\\n\s*", "", block.text)
    lines: list[str] = []
    if block.language == "sh":
        lines = [re.sub(r"(^|\s)# .*", "", line).strip() for line in text.splitlines()]
    elif block.language == "console":
        lines = [line[2:] for line in text.splitlines() if line.startswith("$ ")]
    elif block.language == "toml":
        lines = re.findall(r"# (bitnet .*)", text)
    return [line for line in lines if line]
