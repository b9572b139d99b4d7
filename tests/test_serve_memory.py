"""Clients share the memory of texts: one that holds most of it pauses its latest answers, and nothing is lost."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest

from bitnet_runtime.answers.together import Passes
from bitnet_runtime.defaults import Sampling
from bitnet_runtime.facts import guide_of
from bitnet_serve.endpoints.embeddings import Embedding
from bitnet_serve.models import shares
from bitnet_serve.models.generation import Ask, End, Event, Failure, Generation, Mailbox, Text
from bitnet_serve.models.registry import Served
from bitnet_serve.models.task import Task
from bitnet_serve.server import Serving
from runtime_models import SMALL, small_model
from servers import served, wait

CONTEXT = 1024


class Box:
    """A mailbox whose reader stops after some events, and goes on when he may."""

    def __init__(self, most: float = 30) -> None:
        self.events: list[Event] = []
        self.most = most

    def put(self, index: int, event: Event) -> None:
        self.events.append(event)

    @property
    def full(self) -> bool:
        return len(self.events) > self.most

    @property
    def ended(self) -> bool:
        return bool(self.events) and not isinstance(self.events[-1], Text)

    @property
    def end(self) -> End:
        assert isinstance(self.events[-1], End), self.events[-1]
        return self.events[-1]

    @property
    def texts(self) -> list[Text]:
        return [event for event in self.events if isinstance(event, Text)]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.texts)


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """With memory for three whole contexts."""
    path = small_model(tmp_path_factory.mktemp("models"), config=SMALL.replace(max_context=CONTEXT))
    with served(path) as probe, only(probe).model.session() as session:
        size = session.nbytes
    with served(path, max_cache=3 * size + size // 2) as serving:
        yield serving


def only(serving: Serving) -> Served:
    return next(iter(serving.models.values()))


def generation(served: Served, prompt: Sequence[int], box: Box, **asked: Any) -> Generation:
    options = Sampling(**{"max_tokens": None, "seed": 3, "ignore_eos": "regex" not in asked} | asked)
    more: dict[str, Any] = {"guide": guide_of(served.model, options)} if "regex" in asked else {}
    return Generation(served, Ask([*prompt], options, **more), cast(Mailbox, box), 0, None)


@pytest.mark.parametrize("prompt", [40, 600])
@pytest.mark.parametrize(
    ("asked", "more"),
    [
        ({}, {}),
        ({"draft": 4, "temperature": 0.0}, {}),
        ({"draft": 0, "presence_penalty": 0.5}, {"receipt": True}),
        ({}, {"top": 2}),
        ({"regex": "[ab]{20}so it goes on[ab]{30}"}, {"top": 0}),
        ({"regex": "[ab]{20}so it goes on[ab]{30}"}, {"receipt": True}),
    ],
)
def test_an_answer_that_pauses_at_any_moment_has_the_same_bits(
    serving: Serving, asked: dict[str, Any], more: dict[str, Any], prompt: int
) -> None:
    model, rng, found = only(serving), random.Random(prompt), []
    ids = [rng.randrange(97, 123) for _ in range(prompt)]
    for share in (0.0, 0.1, 0.4):
        box, passes, paused = Box(), Passes(), 0
        task = generation(model, ids, box, max_tokens=60, **asked)
        for name, value in more.items():
            object.__setattr__(task._ask, name, value)
        task.open()
        while not task.done:
            if rng.random() < share:
                task.pause()
                assert task.nbytes == 0 and not task.can_pause
                paused += 1
                if rng.random() < 0.5:  # its text was kept, and gives way, too
                    for kept in model.sessions._kept:
                        model.sessions._memory.drop(kept)
                task.open()
            assert task.writer is not None
            task.writer.moment = 0  # a token in a pass
            [(_, error)] = passes.run([task.writer])
            assert error is None
            task.read()
        task.close()
        end = box.end
        receipt = end.receipt.to_json() if end.receipt else None
        found.append(
            ([(each.text, each.scored) for each in box.texts], end.finish_reason, end.completion_tokens, receipt)
        )
        assert (end.prompt_tokens, task.prompt_tokens + end.reused) == (prompt, prompt)
        assert bool(paused) == bool(share)
    assert found[0] == found[1] == found[2]


def test_a_client_with_all_memory_makes_room_for_another(serving: Serving) -> None:
    """At once, though none of its answers ends. The paused one goes on then, as if nothing had been."""
    model = only(serving)
    boxes = {name: Box() for name in ("a1", "a2", "a3", "b1")}
    tasks = {name: generation(model, name.encode() * 20, box) for name, box in boxes.items()}
    for name in ("a1", "a2", "a3"):
        model.scheduler.submit([tasks[name]], "a")
    wait(lambda: all(boxes[name].full for name in ("a1", "a2", "a3")))
    boxes["b1"].most = CONTEXT
    model.scheduler.submit([tasks["b1"]], "b")
    wait(lambda: boxes["b1"].ended, 20)
    assert not any(boxes[name].ended for name in ("a1", "a2", "a3"))
    for box in boxes.values():
        box.most = CONTEXT
    wait(lambda: all(box.ended for box in boxes.values()), 20)
    for name, box in boxes.items():
        alone = model.model.generate([*name.encode() * 20], max_tokens=None, seed=3, ignore_eos=True)
        assert (box.text, box.end.completion_tokens) == (alone.text, len(alone.tokens))


def test_an_answer_that_is_cancelled_while_it_pauses_ends(serving: Serving) -> None:
    model = only(serving)
    boxes = [Box() for _ in range(4)]
    tasks = [generation(model, [i, 7], box) for i, box in enumerate(boxes)]
    model.scheduler.submit(tasks[:3], "a")
    wait(lambda: all(box.full for box in boxes[:3]))
    model.scheduler.submit(tasks[3:], "b")
    wait(lambda: boxes[3].full, 20)
    model.scheduler.cancel(tasks)
    wait(lambda: all(box.ended for box in boxes), 20)
    assert [box.end.finish_reason for box in boxes] == ["cancelled"] * 4
    wait(lambda: model.scheduler.load == (0, 0))


def test_a_text_that_can_never_fit_is_refused_at_once(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a file was replaced by that of a model with more context. It waited for the end of all that ran, and
    nobody else began meanwhile."""
    model, boxes = only(serving), [Box() for _ in range(2)]
    tasks = [generation(model, [i, 7], box) for i, box in enumerate(boxes)]
    model.scheduler.submit(tasks[:1])
    wait(lambda: boxes[0].full)
    monkeypatch.setattr(model.sessions._memory, "most", tasks[0].nbytes - 1)
    model.scheduler.submit(tasks[1:])
    wait(lambda: boxes[1].ended, 20)
    [failure] = boxes[1].events
    assert isinstance(failure, Failure) and not boxes[0].ended
    assert str(failure.error).startswith("1,024 tokens take 1 MB, but the texts of all models may take 0;")
    model.scheduler.cancel(tasks)
    wait(lambda: model.scheduler.load == (0, 0))


class Sized(Task):
    def __init__(self, client: str, nbytes: int, can_pause: bool = True) -> None:
        self.client, self._nbytes, self._can_pause = client, nbytes, can_pause

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property
    def can_pause(self) -> bool:
        return self._can_pause


@pytest.mark.parametrize(
    ("running", "asked", "lacks", "expected"),
    [
        ("a4 a4 a4", "b4", 4, [2]),
        ("a4 a4 a4", "b4", 5, [2, 1]),
        ("a4 a4 a4", "b4", 9, []),  # the first of a client goes on, and none pauses in vain
        ("a4 a4 a4", "a4", 4, []),  # for himself none pauses
        ("a9", "b1", 1, []),
        ("a4 a4 b4", "b4", 4, []),  # he would have as much then
        ("a4 a5 b4", "b4", 4, [1]),
        ("a1 c3 a2 c3 a3", "b1", 1, [4]),  # on ties the latest
        ("a1 c3 a2 c4 a3", "b1", 1, [3]),  # of him who has most
        ("a1 c3 a2 c4 a3", "b1", 5, [3, 4]),
        ("a4 a4 a4 a4!", "b4", 4, [2]),  # what cannot pause goes on,
        ("a2 a3 b9!", "b1", 1, []),  # but its memory is counted: b would have more,
        ("a9! a2 b4", "b1", 1, [1]),  # and here a has
    ],
)
def test_who_makes_room(running: str, asked: str, lacks: int, expected: list[int]) -> None:
    tasks: list[Task] = [Sized(word[0], int(word[1]), word[2:] != "!") for word in running.split()]
    found = shares.giving_way(tasks, asked[0], int(asked[1:]), lacks)
    assert [tasks.index(task) for task in found] == expected


def test_the_memory_of_all_that_runs_is_counted(serving: Serving) -> None:
    """Also of what cannot pause."""
    model = only(serving)
    plain, echoing = (generation(model, [1, 2], Box()) for _ in range(2))
    object.__setattr__(echoing._ask, "score_prompt", True)
    embedding = Embedding(model, [[1, 2], [3, 4, 5]], "mean", cast(Mailbox, Box()))
    tasks: list[Task] = [plain, echoing, embedding]
    for task in tasks:
        assert task.nbytes == 0
        task.open()
    embedding.piece(5)  # both texts at once, each in a session
    assert all(task.nbytes for task in tasks)
    assert sum(task.nbytes for task in tasks) == sum(model.sessions._taken.values())
    assert [task.can_pause for task in tasks] == [True, False, False]
    for task in tasks:
        task.close()
        assert task.nbytes == 0


def test_texts_to_embed_wait_for_no_memory_that_they_can_do_without(serving: Serving) -> None:
    """Where one of them has some, other models need not wait until there is more."""
    model, box = only(serving), Box()
    memory = model.sessions._memory
    embedding = Embedding(model, [[1, 2], [3, 4, 5]], "mean", cast(Mailbox, box))
    embedding.open()
    size = embedding.nbytes
    taken = 0
    while memory.take(size // 2, model.sessions, waits=False):
        taken += size // 2
    memory.give(size // 2)
    embedding.piece(5)
    assert len(embedding.vectors) == 1 and embedding.nbytes == size  # there is no room for another at a time
    assert memory.take(size // 4, "another model")
    embedding.piece(5)
    assert embedding.done
    embedding.close()
    memory.give(taken - size // 2 + size // 4)


def test_nobody_takes_back_what_he_gave() -> None:
    """Whoever pauses for another would have more than that one with his answer again: so it comes to an end."""
    rng = random.Random(0)
    for _ in range(300):
        most, running = rng.randrange(10, 40), list[Task]()
        waiting: list[Task] = [Sized(rng.choice("abc"), rng.randrange(1, 12), rng.random() < 0.7) for _ in range(9)]
        for _ in range(200):
            for task in waiting:
                lacks = task.nbytes - most + sum(each.nbytes for each in running)
                others = shares.giving_way(running, task.client, task.nbytes, lacks)
                if lacks <= sum(each.nbytes for each in others):
                    break
            else:
                break
            waiting = [each for each in waiting if each is not task] + others
            running = [each for each in running if each not in others] + [task]
        else:
            raise AssertionError("no end")
