"""How clients share a model: who begins, who pauses, and whose prompt is read on.

A free place goes to the client with the fewest tasks running. Who has more than an equal share of the places has his
latest tasks pause when others come. If there is no memory for a task, those of clients with more of it pause, and give
theirs back. Clients take turns with pieces of prompts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from bitnet_serve.models.task import Task


def next_of(queue: Iterable[Task], running: Iterable[Task], active: Sequence[Task], places: int) -> Task | None:
    """Which of those that wait begins; None: it would pause at once. active: those running that take a place.

    That of the client with the fewest active tasks, then of the request with the fewest, then the first. But none of a
    request whose reader is behind: he would not read it, and all its answers would go on together when he reads again.
    """
    behind = {task.request for task in running if task.waits}
    clients, requests = Counter(task.client for task in active), Counter(task.request for task in active)
    able = (task for task in queue if task.request not in behind)
    task = min(able, key=lambda task: (clients[task.client], requests[task.request]), default=None)
    if task is None:
        return None
    share = clients[task.client] + 1
    return task if sum(min(n, share) for n in clients.values()) < places else None


def with_places(active: Sequence[Task], places: int) -> list[Task]:
    """The first of each client, then the second of each, and so on. The others pause: there are more than places where
    clients came later, or some have waited for their readers."""
    if len(active) <= places:
        return list(active)
    seen, place = Counter[object](), dict[Task, int]()
    for task in active:
        place[task] = seen[task.client]
        seen[task.client] += 1
    return sorted(active, key=place.__getitem__)[:places]


def giving_way(running: Sequence[Task], client: object, size: int, lacks: int) -> list[Task]:
    """Those that pause for a task of this client which needs `size` bytes, of which so many are not free; none, if that
    would not be enough.

    Each is the latest of the client who then holds most, as long as that is more than this one would have: so none of
    them can take it back. The first task of each client goes on, however large it is, or none might come to its end.
    """
    held, firsts = Counter[object](), set[object]()
    latest, found = list[Task](), list[Task]()
    for task in running:
        held[task.client] += task.nbytes
        if task.client in firsts and task.can_pause:
            latest.insert(0, task)
        firsts.add(task.client)
    would_have = held[client] + size
    while lacks > 0:
        other = max(latest, key=lambda task: held[task.client], default=None)
        if other is None or held[other.client] <= would_have:
            return []
        latest.remove(other)
        found.append(other)
        held[other.client] -= other.nbytes
        lacks -= other.nbytes
    return found


def in_turn(coming: Iterable[Task], new_first: bool) -> list[Task]:
    """Tasks with prompts to read, in the order of their next pieces: first of the client whose latest is longest ago.

    new_first: of a client's tasks those without a piece yet come first. If that alternates, a short text waits for one
    piece of a long one and not for one of each, nor do long ones wait for all short ones that keep coming.
    """
    tasks = list(coming)
    latest = Counter[object]()
    for task in tasks:
        latest[task.client] = max(task.turn, latest[task.client])
    return sorted(tasks, key=lambda task: (latest[task.client], new_first and task.had_turn, task.turn))
