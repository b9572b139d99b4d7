"""Training in several processes started by torchrun, with DDP or FSDP2.

docs/several-machines.md says what stays the same.

Each function also works in a run of one process, where it changes nothing. All processes have to call collective
functions; values that decide how a run continues (losses, signals, clocks) pass through `total`, `largest` or
`from_first`, so that all processes decide alike and none waits for one that has exited.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import os
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from bitnet import process
from bitnet.model.transformer import Transformer

T = TypeVar("T")

PATIENCE = datetime.timedelta(days=1)
"""How long processes wait for the first to read the text. A dead process is detected by torchrun, not by this."""

POLL = 0.02  # seconds


class ParallelError(ValueError):
    """The processes of a run cannot work together."""


def launched() -> bool:
    """Whether torchrun, or a scheduler that sets the same variables, started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_first() -> bool:
    """Whether this process prints, writes the log, and locks the run folder."""
    return rank() == 0


@functools.cache
def _met() -> tuple[Store, int, int]:
    """The store, this process's rank and the world size. Called once per process, as the first one hosts the store."""
    return cast(tuple[Store, int, int], next(rendezvous("env://")))


@contextlib.contextmanager
def joined() -> Iterator[None]:
    """A context with the process group initialized: gloo, and NCCL on CUDA devices.

    When several processes fail, the first reports why; the others exit silently with code 1.
    """
    if not launched():
        yield
        return
    try:
        store = process.interruptible(_join)
    except RuntimeError as error:  # of torch, which has one for each way to fail
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        said = str(error).partition("\n")[0]
        raise ParallelError(
            f"this process did not meet the others of its run at {where}: {said}; check that the first one runs there, "
            "that the port is free and open, and that all were started"
        ) from error
    try:
        yield
    except (KeyboardInterrupt, SystemExit):  # by a signal
        with contextlib.suppress(RuntimeError):
            store.add("stopped", 1)
        raise
    except Exception as error:
        if not _speaks(store):
            sys.exit(1)
        if isinstance(error, RuntimeError) and "onnection" in str(error):  # gloo has no exception of its own
            if store.add("stopped", 0):
                raise ParallelError("another process of this run was stopped by a signal") from None
            raise ParallelError("another process of this run ended without an error; perhaps memory ran out") from None
        raise
    _leave()


def _leave() -> None:
    gc.collect()  # DDP models are in reference cycles and hold the group, whose threads must not outlive Python
    dist.destroy_process_group()


def _join() -> Store:
    """Initialize the process group as soon as all are there. Returns the store that they share."""
    kept, number, count = _met()
    if dist.is_initialized():  # a run that failed left its group
        _leave()
    kept.set_timeout(PATIENCE)
    store = PrefixStore(_meeting(kept, number, count), kept)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=number, world_size=count, timeout=PATIENCE)
    return store


def _meeting(store: Store, number: int, count: int) -> str:
    """A name that only the processes which meet now know. The store may hold keys of others: of an earlier run of these
    processes, or, as torchrun keeps its store when it starts them again, of processes that are gone.

    The first process makes it up. It tells each of the others under a name of their own, until they have heard it.
    """
    mine, left = uuid.uuid4().hex, list(range(1, count))
    if number:
        store.set(f"here-{number}", mine)
        name = store.get(mine).decode()
        store.set(f"{name}-{number}", "")
        return name
    while left := [other for other in left if not store.check([f"{mine}-{other}"])]:
        for here in (f"here-{other}" for other in left):
            if store.check([here]):  # perhaps still the name of one that is gone
                store.set(store.get(here).decode(), mine)
        time.sleep(POLL)
    return mine


def take_gpu() -> None:
    """Give "cuda" a different device in each process of a machine."""
    there = torch.cuda.device_count()
    if "LOCAL_RANK" not in os.environ and there > 1 and os.environ["WORLD_SIZE"] != "1":
        raise ParallelError(
            f"RANK and WORLD_SIZE are set without LOCAL_RANK, and this process sees {there} GPUs: all would take the "
            "first; set LOCAL_RANK to the number of the process on its machine, from 0, or start them with torchrun"
        )
    place = int(os.environ.get("LOCAL_RANK", "0"))
    if place >= there:
        raise ParallelError(f"process {place + 1} of this machine finds {there} GPUs; lower --nproc-per-node")
    torch.cuda.set_device(place)


def _speaks(store: Store) -> bool:
    """Whether this process was the first to fail."""
    try:
        with process.muted():  # torch writes a page of C++ where it raises this error
            return bool(store.add("failed", 1) == 1)
    except RuntimeError:  # the process that hosts the store has exited
        return False


# ---- agreements ----


def total(values: Sequence[float]) -> list[float]:
    """Each value summed over the processes, in fp64."""
    return _reduced(values, dist.ReduceOp.SUM)


def largest(values: Sequence[float]) -> list[float]:
    """The largest of each value among the processes."""
    return _reduced(values, dist.ReduceOp.MAX)


def _reduced(values: Sequence[float], op: dist.ReduceOp.RedOpType) -> list[float]:
    if size() == 1:
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, op)
    return cast(list[float], tensor.tolist())


def from_first(make: Callable[[], T]) -> T:
    """The first process's result of `make`, in every process. It has to be picklable."""
    if size() == 1:
        return make()
    box = [make() if is_first() else None]
    dist.broadcast_object_list(box, device=torch.device("cpu"))
    return cast(T, box[0])


def wait_for_first() -> None:
    """Block until the first process gets here."""
    from_first(bool)


def check_same(told: Mapping[str, object]) -> None:
    """Raises ParallelError in all processes if any has options or data that differ from the first process's."""
    first = from_first(lambda: dict(told))
    other = next((i for i, name in enumerate(first) if told.get(name) != first[name]), -1)
    (found,) = largest([other])
    if found < 0:
        return
    name = list(first)[int(found)]
    (last,) = largest([rank() if told.get(name) != first[name] else 0])
    box = [told.get(name)]
    dist.broadcast_object_list(box, int(last), device=torch.device("cpu"))
    raise ParallelError(
        f"the processes of this run differ in {name}: {box[0]!r:.60} in process {last + 1:.0f}, {first[name]!r:.60} "
        "in 1; start all with the same options, files and versions"
    )


def share(first: int, last: int) -> tuple[int, int]:
    """This process's part of a range. The sizes differ by 1 at most, and the union is the range."""
    n = last - first
    return first + n * rank() // size(), first + n * (rank() + 1) // size()


def dealt(n: int) -> Iterator[tuple[int, bool]]:
    """This process's indices among n. All processes get equally many: the last may be repeats, marked False.

    (All processes have to take part in each pass of a sharded model.)
    """
    for first in range(0, n, size()):
        yield min(first + rank(), n - 1), first + rank() < n


# ---- the model ----


def shard(model: Transformer, device: str) -> None:
    """FSDP2: from here on every process holds its rows of each parameter, gradient and optimizer state.

    The weights are those of the first process; the others may have theirs on the meta device. A layer is gathered in a
    process only while it computes. Master weights are gathered in fp32, so scales and codes are those of one process.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    weights = model.state_dict() if is_first() else {}
    model.to("meta")
    mesh = init_device_mesh(device, (size(),))
    for layer in (layer for stack in model.stacks for layer in stack.layers):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=device)
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # outputs are views; logits never change in place


def replicated(model: Transformer, device: str) -> nn.Module:
    """The model in DDP. Training steps call it, so that gradients are averaged over the processes."""
    gpu = [torch.cuda.current_device()] if device == "cuda" else None
    return nn.parallel.DistributedDataParallel(model, device_ids=gpu, gradient_as_bucket_view=True)


@contextlib.contextmanager
def gradients_kept(model: nn.Module, keep: bool) -> Iterator[None]:
    """A context in which, with `keep`, DDP gradients accumulate locally until the last micro-batch reduces them."""
    if keep and isinstance(model, nn.parallel.DistributedDataParallel):
        with model.no_sync():
            yield
    else:
        yield


def is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")  # a DTensor; importing its module takes a second


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor, gathered in every process; any other tensor unchanged."""
    gather: Any = getattr(tensor, "full_tensor", None)
    return cast(Tensor, gather()) if gather else tensor


def kept(tensor: Tensor) -> Tensor:
    """This process's part of a sharded tensor; any other tensor unchanged."""
    keep: Any = getattr(tensor, "to_local", None)
    return cast(Tensor, keep()) if keep else tensor


def own_rows(tensor: Tensor) -> Tensor:
    """This process's share of the rows of a tensor that is the same in all processes."""
    first, last = share(0, len(tensor))
    return tensor[first:last]


def like(tensor: Tensor, model: Tensor) -> Tensor:
    """`tensor`, which every process has whole, moved to the device of `model` and sharded like it."""
    tensor = tensor.to(model.device)
    if not is_sharded(model):
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(model, DTensor)
    return distribute_tensor(tensor, model.device_mesh, model.placements, src_data_rank=None)
