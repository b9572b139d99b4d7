"""Who has the next free place of a server."""

from __future__ import annotations

import threading
import time

from bitnet_serve.models.scheduler import Scheduler
from bitnet_serve.models.task import Task
from servers import wait


class Named(Task):
    """Says when it begins, and ends when it may."""

    def __init__(self, name: str, begun: list[str]) -> None:
        self.name, self.begun, self.may_end, self.closed = name, begun, threading.Event(), threading.Event()

    def open(self) -> None:
        self.begun.append(self.name)
        if self.name == "gate":
            assert self.may_end.wait(30)

    def piece(self, most: int) -> None:
        time.sleep(0.001)
        self.done = self.may_end.is_set()

    def close(self) -> None:
        self.closed.set()


def order(requests: list[tuple[str, str]]) -> list[str]:
    """The order in which tasks begin at two places that become free in turn. requests: client, and names of tasks."""
    begun: list[str] = []
    scheduler = Scheduler(places=2, queue=64, name="")
    gate = Named("gate", begun)
    scheduler.submit([gate])
    wait(lambda: begun == ["gate"])
    asked = [[Named(name, begun) for name in names.split()] for _, names in requests]
    for (client, _), tasks in zip(requests, asked, strict=True):
        scheduler.submit(tasks, client)
    known = {task.name: task for tasks in asked for task in tasks} | {"gate": gate}
    gate.may_end.set()
    for i in range(len(known)):
        wait(lambda i=i: len(begun) >= min(i + 2, len(known)))
        task = known[begun[i]]
        task.may_end.set()
        assert task.closed.wait(30)
    scheduler.close()
    return begun[1:]


def test_a_client_with_many_requests_lets_others_pass() -> None:
    requests = [("a", "a1"), ("a", "a2"), ("a", "a3"), ("a", "a4"), ("b", "b1"), ("b", "b2"), ("c", "c1")]
    assert order(requests) == ["a1", "b1", "a2", "b2", "a3", "c1", "a4"]


def test_a_request_with_many_answers_lets_others_pass() -> None:
    assert order([("a", "a1 a2 a3 a4"), ("a", "b1")]) == ["a1", "b1", "a2", "a3", "a4"]
