"""Several processes, one run: what torchrun starts, with DDP or FSDP2.

docs/several-machines.md says what stays the same.

Each function also serves a run of one process, where it changes nothing. Collective ones have to be called by all
processes; what decides how a run goes on (losses, signals, clocks) passes through `total`, `largest` or `from_first`,
so that all processes decide alike and none waits for another that has left.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import itertools
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from bitnet.model.transformer import Transformer

T = TypeVar("T")

PATIENCE = datetime.timedelta(days=1)
"""How long processes wait for the first to read the text. That one has died is noticed by torchrun, not by this."""


_JOINED = itertools.count()
"""Times that this process joined others."""


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
    """Where processes find each other, the number of this one, and how many there are: once, as the first keeps it."""
    return cast(tuple[Store, int, int], next(rendezvous("env://")))


@contextlib.contextmanager
def joined() -> Iterator[None]:
    """Inside, the processes that were started together know each other: by gloo, and on CUDA devices by NCCL.

    When several fail, the first to do so says why, the others exit in silence with code 1.
    """
    if not launched():
        yield
        return
    kept, number, count = _met()
    store = PrefixStore(f"bitnet-{next(_JOINED)}", kept)  # the time before has left what it wrote
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=number, world_size=count, timeout=PATIENCE)
    try:
        yield
    except Exception as error:
        if not _speaks(store):
            sys.exit(1)
        if isinstance(error, RuntimeError) and "onnection" in str(error):  # gloo has no exception of its own
            raise ParallelError("another process of this run ended without a word; perhaps memory ran out") from None
        raise
    gc.collect()  # models of DDP are in cycles and hold the group, whose threads must not outlive Python
    dist.destroy_process_group()


def take_gpu() -> None:
    """Make "cuda" mean another device in each process of a machine."""
    place, there = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if place >= there:
        raise ParallelError(f"process {place + 1} of this machine finds {there} GPUs; lower --nproc-per-node")
    torch.cuda.set_device(place)


def _speaks(store: Store) -> bool:
    """Whether this process is the first that failed."""
    try:
        return bool(store.add("failed", 1) == 1)
    except RuntimeError:  # the process that kept the store has left
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
    """What `make` returns in the first process, in every process. It has to be something that can be pickled."""
    if size() == 1:
        return make()
    box = [make() if is_first() else None]
    dist.broadcast_object_list(box, device=torch.device("cpu"))
    return cast(T, box[0])


def wait_for_first() -> None:
    """Until the first process gets here."""
    from_first(bool)


def check_same(told: Mapping[str, object]) -> None:
    """Raises ParallelError, in all processes: one was told, or read, something else than the first."""
    first = from_first(lambda: dict(told))
    other = next((i for i, name in enumerate(first) if told.get(name) != first[name]), -1)
    (found,) = largest([other])
    if found < 0:
        return
    name = list(first)[int(found)]
    mine = (
        "" if told[name] == first[name] else f": {told[name]!r:.60} in process {rank() + 1}, {first[name]!r:.60} in 1"
    )
    raise ParallelError(f"the processes of this run differ in {name}{mine}; start all with the same options and files")


def share(first: int, last: int) -> tuple[int, int]:
    """The part of a range that is for this process. The parts differ by 1 at most, and the union is the range."""
    n = last - first
    return first + n * rank() // size(), first + n * (rank() + 1) // size()


def dealt(n: int) -> Iterator[tuple[int, bool]]:
    """Which of n things are for this process. Each gets as many: the last may be repeats, marked False.

    (A sharded model computes in all processes or in none.)
    """
    for first in range(0, n, size()):
        yield min(first + rank(), n - 1), first + rank() < n


# ---- the model ----


def shard(model: Transformer, device: str) -> None:
    """FSDP2: from here on every process keeps its rows of each parameter, of its gradient, and of its moments.

    The weights are those of the first process; those of the others may be on the meta device. A layer is whole in a
    process only while it computes. Masters are gathered in fp32, so that scales and codes are those of one process.
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
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # it returns a view; nobody changes logits in place


def replicated(model: Transformer, device: str) -> nn.Module:
    """DDP around the model: what a training step calls, so that gradients are averaged over the processes."""
    gpu = [torch.cuda.current_device()] if device == "cuda" else None
    return nn.parallel.DistributedDataParallel(model, device_ids=gpu, gradient_as_bucket_view=True)


@contextlib.contextmanager
def gradients_kept(model: nn.Module, keep: bool) -> Iterator[None]:
    """Inside, gradients of a replicated model stay in their process if `keep`: they travel with the last ones."""
    if keep and isinstance(model, nn.parallel.DistributedDataParallel):
        with model.no_sync():
            yield
    else:
        yield


def is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")  # a DTensor, whose module takes a second to import


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor put together, in every process; any other as it is."""
    gather: Any = getattr(tensor, "full_tensor", None)
    return cast(Tensor, gather()) if gather else tensor


def kept(tensor: Tensor) -> Tensor:
    """What this process has of a sharded tensor; any other as it is."""
    keep: Any = getattr(tensor, "to_local", None)
    return cast(Tensor, keep()) if keep else tensor


def own_rows(tensor: Tensor) -> Tensor:
    """The rows, of a tensor that is the same everywhere, which are for this process to look at."""
    first, last = share(0, len(tensor))
    return tensor[first:last]


def like(tensor: Tensor, model: Tensor) -> Tensor:
    """`tensor`, whole in every process, on the device of `model` and sharded as it."""
    tensor = tensor.to(model.device)
    if not is_sharded(model):
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(model, DTensor)
    return distribute_tensor(tensor, model.device_mesh, model.placements, src_data_rank=None)
