"""Who has the next free place of a server."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from bitnet_serve.models.scheduler import OverloadedError, Scheduler
from bitnet_serve.models.task import Task
from servers import wait


class Named(Task):
    """Says when it begins, and ends when it may."""

    def __init__(self, name: str, begun: list[str]) -> None:
        self.name, self.begun, self.may_end, self.closed = name, begun, threading.Event(), threading.Event()
        self.pieces = 0

    def open(self) -> None:
        self.begun.append(self.name)
        if self.name == "gate":
            assert self.may_end.wait(30)

    def piece(self, most: int) -> None:
        time.sleep(0.001)
        self.pieces += 1
        self.done = self.may_end.is_set()

    def close(self) -> None:
        self.closed.set()


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    made = Scheduler(places=4, queue=64, name="")
    yield made
    made.close()


def order(requests: list[tuple[str, str]], places: int = 2) -> list[str]:
    """The order in which tasks begin at places that become free in turn. requests: client, and names of tasks."""
    begun: list[str] = []
    scheduler = Scheduler(places=places, queue=64, name="")
    gate = Named("gate", begun)
    scheduler.submit([gate])
    wait(lambda: begun == ["gate"])
    asked = [[Named(name, begun) for name in names.split()] for _, names in requests]
    for (client, _), tasks in zip(requests, asked, strict=True):
        scheduler.submit(tasks, client)
    known = {task.name: task for tasks in asked for task in tasks} | {"gate": gate}
    gate.may_end.set()
    for i in range(len(known)):
        wait(lambda i=i: len(begun) >= min(i + places, len(known)))
        task = known[begun[i]]
        task.may_end.set()
        assert task.closed.wait(30)
    scheduler.close()
    return begun[1:]


def test_a_client_with_many_requests_lets_others_pass() -> None:
    requests = [("a", "a1"), ("a", "a2"), ("a", "a3"), ("a", "a4"), ("b", "b1"), ("b", "b2"), ("c", "c1")]
    assert order(requests) == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]


def test_a_request_with_many_answers_lets_others_pass() -> None:
    assert order([("a", "a1 a2 a3 a4"), ("a", "b1")]) == ["a1", "b1", "a2", "a3", "a4"]


def test_clients_take_turns_at_one_place() -> None:
    assert order([("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), ("c", "c1")], 1) == ["a1", "b1", "c1", "a2", "a3"]


def test_a_client_with_all_places_leaves_others_their_share(scheduler: Scheduler) -> None:
    """At once, and not when one of its long answers has ended. Its latest wait meanwhile, and go on then."""
    begun: list[str] = []
    tasks = {name: Named(name, begun) for name in ["a1", "a2", "a3", "a4", "a5", "b1", "b2", "b3", "c1"]}

    def ask(*names: str) -> None:
        for name in names:
            scheduler.submit([tasks[name]], name[0])

    def run(*names: str) -> None:
        """These do, and no others that have begun."""
        before = {name: task.pieces for name, task in tasks.items()}
        wait(lambda: all(tasks[name].pieces > before[name] + 5 for name in names))
        assert all(tasks[name].pieces <= before[name] + 1 for name in tasks if name not in names)

    ask("a1", "a2", "a3", "a4", "a5")
    run("a1", "a2", "a3", "a4")
    ask("b1", "b2", "b3")
    wait(lambda: begun == ["a1", "a2", "a3", "a4", "b1", "b2"])
    run("a1", "a2", "b1", "b2")
    ask("c1")
    wait(lambda: begun[-1] == "c1")
    run("a1", "a2", "b1", "c1")
    for name in ("b1", "b2"):
        tasks[name].may_end.set()
    wait(lambda: begun[-1] == "b3")
    run("a1", "a2", "b3", "c1")
    assert "a5" not in begun


def test_answers_of_a_request_that_nobody_reads_do_not_begin(scheduler: Scheduler) -> None:
    """They would all go on together when it is read again, and others would wait for the end of most of them."""
    begun: list[str] = []
    behind = threading.Event()

    class Read(Named):
        @property
        def waits(self) -> bool:
            return behind.is_set()

    many = [Read(f"many{i}", begun) for i in range(20)]
    scheduler.submit(many)
    wait(lambda: len(begun) == 4)
    behind.set()
    other = Named("other", begun)
    scheduler.submit([other])
    wait(lambda: other.pieces > 20)
    assert scheduler.load == (5, 16)
    many[0].cancelled = True  # it is the same when one has left
    wait(many[0].closed.is_set)
    wait(lambda pieces=other.pieces: other.pieces > pieces + 20)
    assert scheduler.load == (4, 16)
    other.may_end.set()
    behind.clear()
    wait(lambda: begun[-1] == "many4")


def test_clients_take_turns_with_pieces(scheduler: Scheduler) -> None:
    """However many each of them has. So none waits for all the long texts of another."""
    begun: list[str] = []
    long = [Named(f"a{i}", begun) for i in range(3)]
    for task in long:
        scheduler.submit([task], "a")
    wait(lambda: len(begun) == 3)
    other = Named("b", begun)
    scheduler.submit([other], "b")
    wait(lambda: other.pieces > 50)
    after = [(task.pieces, other.pieces) for task in long]
    wait(lambda: other.pieces > 150)
    made = sum(task.pieces - before for task, (before, _) in zip(long, after, strict=True))
    assert abs(made - (other.pieces - after[0][1])) <= 12


def test_a_short_text_does_not_wait_for_a_piece_of_each_long_one() -> None:
    begun: list[str] = []
    scheduler = Scheduler(places=16, queue=64, name="")
    long = [Named("long", begun) for _ in range(10)]
    made = list[int]()

    class Noting(Named):
        def open(self) -> None:
            made.append(sum(task.pieces for task in long))

        def piece(self, most: int) -> None:
            self.open()
            self.done = True

    scheduler.submit(long, "a")
    wait(lambda: all(task.pieces for task in long))
    for _ in range(5):
        short = Noting("", begun)
        scheduler.submit([short], "a")
        assert short.closed.wait(30)
    scheduler.close()
    assert all(end - begin <= 1 for begin, end in zip(made[::2], made[1::2], strict=True))


class Short(Named):
    """One of a client who asks again as soon as he is answered."""

    def __init__(self, begun: list[str], again: Callable[[], None]) -> None:
        super().__init__("", begun)
        self.again = again

    def piece(self, most: int) -> None:
        self.done = True
        self.again()


@pytest.mark.parametrize("client", ["a", "b"])
def test_short_texts_that_keep_coming_do_not_stop_a_long_one(scheduler: Scheduler, client: str) -> None:
    begun: list[str] = []
    long = Named("long", begun)

    def ask() -> None:
        with contextlib.suppress(OverloadedError):  # at the end
            scheduler.submit([Short(begun, ask)], client)

    ask()
    ask()
    scheduler.submit([long], "a")
    wait(lambda: long.pieces > 20, 10)
