"""The page of `bitnet serve`, used as a person would, in a headless browser."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import browser
from bitnet_serve.server import Serving
from browser import Browser
from runtime_models import TEMPLATE, scripted_model, slow_model
from servers import served, wait

SCRIPT = [b"Good", b" day", b" to", b" <b>", b"you", b"</b>", b", \xe2\x82", b"\xac!"]
LONG = "an-assistant-of-a-rather-long-name"
pytestmark = pytest.mark.skipif(browser.FOUND is None, reason="no Chromium is installed")


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("models")
    script = scripted_model(folder / f"{LONG}.bitnet", SCRIPT, template=TEMPLATE, max_context=256)
    with served(script, slow_model(folder)) as serving:
        yield serving


@contextlib.contextmanager
def opened(serving: Serving, folder: Path, *, width: int = 900, dark: bool = False) -> Iterator[Browser]:
    with Browser(folder / "browser", width, dark=dark) as page:
        page.open(serving.address)
        page.until("document.querySelector('#model')?.options.length === 2")
        yield page
        assert page.errors == []
        assert all(url.startswith((f"{serving.address}/", "data:,")) for url in page.requested)


def say(page: Browser, text: str) -> None:
    page.run("document.querySelector('#text').focus()")
    page.type(text)
    page.key("Enter", 13)


ANSWERED = "!running && talk.length && talk.at(-1).role === 'assistant'"


def test_a_conversation(serving: Serving, tmp_path: Path) -> None:
    with opened(serving, tmp_path) as page:
        say(page, "hello")
        page.until(ANSWERED)
        text = page.run("document.querySelector('article.assistant > div').textContent")
        assert text == "Good day to <b>you</b>, €!"  # as text: nothing of it becomes a tag
        assert "tok/s" in page.run("document.querySelector('article.assistant footer').textContent")

        place = page.run(
            "(b => [b.left + 3, b.top + 3])(document.querySelector('.assistant span').getBoundingClientRect())"
        )
        page.hover(*place)
        tip = page.until("!document.querySelector('#tip').hidden && document.querySelector('#tip').textContent")
        assert tip.startswith("▸ Good") and "100.0 %" in tip and tip.count("\n") >= 3

        page.run("[...document.querySelectorAll('button')].find(b => b.textContent === 'Regenerate').click()")
        page.until(ANSWERED)
        assert page.run("talk.length") == 2

        page.run("[...document.querySelectorAll('button')].find(b => b.textContent === 'Edit').click()")
        page.run("document.querySelector('article textarea').select()")
        page.type("another")
        page.key("Enter", 13)
        page.until(ANSWERED)
        assert page.run("talk.map(m => m.role + ': ' + m.text)") == ["user: another", "assistant: " + text]

        page.key("KeyN", 78, 1)
        assert page.run("talk.length") == 0


def test_thoughts_are_folded_away(tmp_path: Path) -> None:
    template = TEMPLATE + "{# <think> </think> #}"
    thinks = scripted_model(tmp_path / "a.bitnet", [b"<think>", b"hm", b"</think>", *SCRIPT], template=template)
    with served(thinks, slow_model(tmp_path)) as serving, opened(serving, tmp_path) as page:
        say(page, "hello")
        page.until(ANSWERED)
        assert page.run("document.querySelector('article.assistant details').open") is False
        assert page.run("document.querySelector('article.assistant details p').textContent") == "hm"
        assert page.run("talk.at(-1).text") == "Good day to <b>you</b>, €!"


def test_settings_are_asked_for_and_kept(serving: Serving, tmp_path: Path) -> None:
    with opened(serving, tmp_path, width=360, dark=True) as page:
        page.run("document.querySelector('#open').click()")
        page.run("for (const [n, v] of [['max_tokens', 2], ['seed', 7], ['system', 'be kind'], ['theme', 'light']])"
                 "{ settings[n].value = v; settings[n].onchange() }")  # fmt: skip
        body = page.run(f"(talk = [{{role: 'user', text: 'x'}}, {{}}], request(models['{LONG}'])[1])")
        assert (body["max_tokens"], body["seed"]) == (2, 7)
        assert body["messages"] == [{"role": "system", "content": "be kind"}, {"role": "user", "content": "x"}]
        page.run("talk = []")
        say(page, "hello")
        page.until(ANSWERED)
        assert page.run("talk[1].text") == "Good day" and "cut off" in page.run("talk[1].note")
        assert page.run("document.documentElement.scrollWidth") <= 360  # a phone needs no sideways scrolling
        assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(251, 250, 248)"
        page.open(serving.address + "/?again")
        page.until("document.querySelector('#model')?.options.length === 2")
        assert page.run("settings.seed.value") == "7"


def test_stop(serving: Serving, tmp_path: Path) -> None:
    """Also with a model that only continues texts."""
    scheduler = serving.models["slow"].scheduler
    with opened(serving, tmp_path) as page:
        page.run("(m => { m.value = 'slow'; m.onchange() })(document.querySelector('#model'))")
        assert "continues texts" in page.run("document.querySelector('#log').textContent")
        page.run("settings.max_tokens.value = 60000")
        say(page, "Once")
        page.until("talk.at(-1)?.text.length > 20")
        page.key("Escape", 27)
        page.until("!running")
        assert page.run("talk[1].note") == "stopped"
        wait(lambda: scheduler.load == (0, 0))


def test_a_key_is_asked_for(tmp_path: Path) -> None:
    with served(slow_model(tmp_path), api_keys=["secret"]) as serving, Browser(tmp_path / "browser") as page:
        page.open(serving.address)
        for typed, expected in (
            ("", "The server asks for an API key: see Settings"),
            ("wrong", "The API key is wrong"),
        ):
            page.until("document.activeElement?.name === 'key'")
            if typed:
                page.type(typed)
                page.key("Enter", 13)
            page.until(f"document.querySelector('#log').textContent.includes('{expected}')")
        page.run("settings.key.select()")
        page.type("secret")
        page.key("Enter", 13)
        page.until("document.querySelector('#model').options.length === 1")
