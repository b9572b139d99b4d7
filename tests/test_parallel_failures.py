"""Two processes of one run that fail together: bad numbers, full disks, refusals, and those that do not meet."""

from __future__ import annotations

import itertools
import os
import re
import resource
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import bitnet_cli
from bitnet import fit
from bitnet.model import parallel
from bitnet.train import loop, manifest, objectives, passes, saving, source_model
from bitnet_export.convert import masters
from in_two_processes import (
    MODEL,
    TINY,
    Process,
    finish,
    free_port,
    in_group,
    processes,
    run_pair,
    some_text,
    start,
    start_at,
    steps,
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return some_text(tmp_path_factory.mktemp("text"))


def poisoned(argv: list[str]) -> int:
    """A run whose second process finds a NaN in its part of the sixth step."""
    loss_terms = passes.loss_terms

    def poison(run: loop.Run, *batch: Any) -> Any:
        bad = parallel.rank() == 1 and run.state["step"] == 5
        return {name: term * (float("nan") if bad else 1) for name, term in loss_terms(run, *batch).items()}

    passes.loss_terms = poison
    return bitnet_cli.main(argv)


def poisoned_while_it_saves(argv: list[str]) -> int:
    """The same, and the first process is still writing the checkpoint of the fourth step."""
    write = saving.write

    def slow(run: Path, snapshot: saving.Snapshot) -> Path:
        time.sleep(1 if snapshot.step == 4 else 0)
        return write(run, snapshot)

    saving.write = slow
    return poisoned(argv)


def on_a_full_disk(argv: list[str]) -> int:
    """A run that cannot write more than 20,000 bytes of a file when it saves step 4."""
    write = saving.write

    def full(run: Path, snapshot: saving.Snapshot) -> Path:
        if snapshot.step == 4:
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        return write(run, snapshot)

    saving.write = full
    return bitnet_cli.main(argv)


def test_a_full_disk_stops_both(text: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    argv = [*TINY, "--data", text, "--parallel", "fsdp"]
    codes, errors = run_pair(run, *argv, work=on_a_full_disk)
    assert codes == [1, 1] and errors.count("bitnet: error:") == 1 and "Traceback" not in errors
    assert "cannot be written at step 4: File too large" in errors
    assert "step-000000 is the last good checkpoint, from which --resume continues" in errors
    assert not manifest.damage(run / "step-000000") and [file.name for file in run.glob(".*")] == [".errors"]


def without_memory(argv: list[str]) -> int:
    """A run whose second process finds no memory for its third step."""
    loss_terms = passes.loss_terms

    def full(run: loop.Run, *batch: Any) -> Any:
        if parallel.rank() == 1 and run.state["step"] == 2:
            torch.empty(1 << 60, dtype=torch.uint8)
        return loss_terms(run, *batch)

    passes.loss_terms = full
    return bitnet_cli.main(argv)


def test_memory_that_runs_out_in_one_process_stops_both(text: str, tmp_path: Path) -> None:
    codes, errors = run_pair(tmp_path / "run", *TINY, "--data", text, work=without_memory)
    assert codes == [1, 1] and errors.count("bitnet: error:") == 1 and "Traceback" not in errors
    assert "error: memory ran out in process 2; lower --batch or --context, or take a smaller model" in errors


def test_nan_in_one_process_stops_both(text: str, tmp_path: Path) -> None:
    codes, errors = run_pair(tmp_path / "run", *TINY, "--data", text, work=poisoned_while_it_saves)
    assert codes == [1, 1] and errors.count("bitnet: error:") == 1 and "Traceback" not in errors
    assert "loss is nan" in errors and "at step 6" in errors and "step-000004 is the last good checkpoint" in errors


def test_nan_in_one_process_can_be_skipped(text: str, tmp_path: Path) -> None:
    codes, errors = run_pair(tmp_path / "run", *TINY, "--data", text, "--on-bad-step", "skip", work=poisoned)
    assert codes == [0, 0] and errors.count("at step 6; skipped") == 1
    assert len(steps(tmp_path / "run")) == 7


def measured_otherwise(argv: list[str]) -> int:
    """A run whose second process finds each evaluation better than the one before, and whose first one worse."""
    evaluate, losses = objectives.evaluate, itertools.count(9, -1 if os.environ["RANK"] == "1" else 1)

    def found(*args: Any) -> Any:
        return replace(evaluate(*args), nats_per_pair=float(next(losses)))

    objectives.evaluate = found
    return bitnet_cli.main(argv)


def test_an_evaluation_decides_the_same_in_both(text: str, tmp_path: Path) -> None:
    """Each process measures pairs by itself, on another kind of processor with other last bits."""
    argv = [*TINY, "--data", text, "--objective", "contrastive", "--set", "has_head=no", "--set", "pooling=mean"]
    argv += ["--batch-tokens", "512", "--validation", "0.3", "--eval-every", "1", "--patience", "2", "--keep-best"]
    codes, errors = run_pair(tmp_path / "run", *argv, work=measured_otherwise)
    assert codes == [0, 0], errors
    assert "2 evaluations without a better one: the run ends at step 3" in errors


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--batch-tokens", "160"],
            "an optimizer step has 160 tokens, expected a multiple of 64: sequences of 32 tokens, dealt out to "
            "2 processes; change --batch-tokens",
        ),
        (["--data", "nowhere"], "no file, folder or glob matches 'nowhere'"),
        (
            ["--preset", "siglip-tiny", "--objective", "contrastive", "--parallel", "fsdp"],
            "--parallel fsdp cannot shard two stacks whose vectors are compared; take ddp",
        ),
        (
            ["--draft", "--parallel", "fsdp"],
            "--parallel fsdp cannot shard a model with a draft; take ddp, or --no-draft",
        ),
    ],
)
def test_refusals_are_one_line(argv: list[str], message: str, text: str, tmp_path: Path) -> None:
    codes, errors = run_pair(tmp_path / "run", *TINY, "--data", text, *argv)
    assert codes == [1, 1]
    assert re.findall("bitnet: error: .*", errors) == [f"bitnet: error: {message}"] and "Traceback" not in errors


def told_otherwise(argv: list[str]) -> int:
    """A run whose second process has another context."""
    return bitnet_cli.main([*argv, "--set", "max_context=64"] if os.environ["RANK"] == "1" else argv)


def test_processes_that_are_told_different_things(text: str, tmp_path: Path) -> None:
    codes, errors = run_pair(tmp_path / "run", *TINY, "--data", text, work=told_otherwise)
    assert codes == [1, 1] and errors.count("bitnet: error:") == 1 and "Traceback" not in errors
    assert "differ in max_context of the model: 64 in process 2, 32 in 1; start all with the same options," in errors


def of_another_torch(argv: list[str]) -> int:
    """A run whose second process has an older torch."""
    if os.environ["RANK"] == "1":
        torch.__version__ = torch.torch_version.TorchVersion("1.13.1+cpu")
    return bitnet_cli.main(argv)


def test_processes_of_different_versions(text: str, tmp_path: Path) -> None:
    codes, errors = run_pair(tmp_path / "run", *TINY, "--data", text, work=of_another_torch)
    ours = torch.__version__.partition("+")[0]
    assert codes == [1, 1] and errors.count("bitnet: error:") == 1 and "Traceback" not in errors
    assert f"differ in the version of torch: '1.13.1' in process 2, '{ours}' in 1; start all" in errors


def of_another_teacher(argv: list[str]) -> int:
    """A run whose second process, perhaps on another machine, finds other weights at its teacher's path."""
    if os.environ["RANK"] == "1":
        read = masters.read_start

        def changed(path: str) -> source_model.Start:
            found = read(path)
            return replace(found, weights={name: tensor + 1e-3 for name, tensor in found.weights.items()})

        masters.read_start = changed
    return bitnet_cli.main(argv)


def test_processes_with_different_teachers(text: str, tmp_path: Path) -> None:
    assert bitnet_cli.main(["train", *TINY, "--steps", "1", "--data", text, "--out", str(tmp_path / "source")]) == 0
    words = ["finetune", str(tmp_path / "source"), "--distill", "0.5", "--steps", "1", "--threads", "1"]
    pair = start(tmp_path / "run", of_another_teacher, [*words, "--out", str(tmp_path / "run")])
    assert finish(pair) == [1, 1]
    errors = (tmp_path / "run" / ".errors").read_text()
    assert errors.count("bitnet: error:") == 1 and "Traceback" not in errors
    assert "the processes of this run differ in the teacher: " in errors


def outlives_the_store(argv: list[str]) -> int:
    """Of two processes the first, which hosts the store, is gone as soon as both are there; the second notices."""
    with parallel.joined():
        torch.distributed.barrier()  # the second may still be about to meet the first, which would be another error
        if os.environ["RANK"] == "0":
            os._exit(3)
        parallel.wait_for_first()
    return 0


def test_a_process_that_outlives_the_first_ends_without_a_word(tmp_path: Path) -> None:
    codes, errors = run_pair(tmp_path / "run", work=outlives_the_store)
    assert (codes, errors) == ([3, 1], "")


def alone(text: str, folder: Path, port: int) -> Process:
    """The first process of a pair, whose second never comes."""
    argv = ["train", "--out", str(folder / "run"), *TINY, "--data", text]
    process = processes.Process(target=in_group, args=(0, port, folder / ".errors", bitnet_cli.main, argv))
    process.start()
    return process


def test_a_port_that_is_taken(text: str, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert finish([alone(text, tmp_path, port)]) == [1]
    errors = (tmp_path / ".errors").read_text()
    assert f"bitnet: error: this process did not meet the others of its run at 127.0.0.1:{port}: " in errors
    assert "Traceback" not in errors


def test_a_process_that_waits_for_others_can_be_stopped(text: str, tmp_path: Path) -> None:
    port = free_port()
    process = alone(text, tmp_path, port)
    deadline = time.monotonic() + 90
    with socket.socket() as waiting:
        while waiting.connect_ex(("127.0.0.1", port)):
            assert process.is_alive() and time.monotonic() < deadline
            time.sleep(0.05)
    assert process.pid
    os.kill(process.pid, signal.SIGTERM)
    assert finish([process]) == [143]


def one_after_the_other(argv: list[str]) -> int:
    first = bitnet_cli.main(argv)
    return first or bitnet_cli.main([*argv[:2], argv[2] + "-next", *argv[3:]])


def test_two_runs_of_the_same_processes(text: str, tmp_path: Path) -> None:
    codes, errors = run_pair(tmp_path / "run", *TINY, "--data", text, work=one_after_the_other)
    assert codes == [0, 0], errors
    assert steps(tmp_path / "run")[-1]["loss"] == steps(tmp_path / "run-next")[-1]["loss"]


def fitted(argv: list[str]) -> int:
    shape = dict(word.split("=") for word in MODEL)
    outcome = fit(data=argv[-1], out=argv[2], steps=2, threads=1, batch=2, model={k: int(v) for k, v in shape.items()})
    return outcome.reached["step"]


def test_each_process_knows_how_far_a_run_came(text: str, tmp_path: Path) -> None:
    codes, errors = run_pair(tmp_path / "run", text, work=fitted)
    assert codes == [2, 2], errors


def again_after_a_failure(argv: list[str]) -> int:
    failed = bitnet_cli.main([*argv, "--data", "nowhere"])
    return bitnet_cli.main(argv) if failed == 1 else 2


def test_a_run_of_the_same_processes_after_one_that_failed(text: str, tmp_path: Path) -> None:
    codes, errors = run_pair(tmp_path / "run", *TINY, "--data", text, work=again_after_a_failure)
    assert codes == [0, 0], errors
    assert re.findall("bitnet: error: .*", errors) == ["bitnet: error: no file, folder or glob matches 'nowhere'"]
    assert len(steps(tmp_path / "run")) == 8


def test_tokens_of_a_step_are_whole_sequences(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        bitnet_cli.main(["train", *TINY, "--data", text, "--batch-tokens", "100", "--out", str(tmp_path / "run")]) == 1
    )
    assert "an optimizer step has 100 tokens, expected a multiple of 32" in capsys.readouterr().err


def test_shares_are_the_whole() -> None:
    for n in range(20):
        for size in (1, 2, 3, 7):
            edges = []
            for rank in range(size):
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(parallel, "rank", lambda rank=rank: rank)
                    patch.setattr(parallel, "size", lambda size=size: size)
                    edges.append(parallel.share(5, 5 + n))
            assert edges[0][0] == 5 and edges[-1][1] == 5 + n
            assert all(a[1] == b[0] for a, b in itertools.pairwise(edges))
            assert max(b - a for a, b in edges) - min(b - a for a, b in edges) <= 1


def test_each_process_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler may set RANK and WORLD_SIZE alone, and show each process all GPUs or only its own."""
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for there, place in ((2, "1"), (1, None), (2, None)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda there=there: there)
        monkeypatch.setenv("LOCAL_RANK", place) if place else monkeypatch.delenv("LOCAL_RANK", raising=False)
        if (there, place) == (2, None):
            with pytest.raises(parallel.ParallelError, match="without LOCAL_RANK, and this process sees 2 GPUs"):
                parallel.take_gpu()
        else:
            parallel.take_gpu()
    assert taken == [1, 0]


# ---- torchrun's store ----


def at_torchruns_store(argv: list[str]) -> int:
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    return bitnet_cli.main(argv)


def test_processes_that_are_started_again_meet_and_say_why_they_fail(tmp_path: Path) -> None:
    """torchrun keeps its store, with all that the processes before them have left in it."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    argv = ["train", "--out", str(tmp_path / "run"), *TINY, "--data", "nowhere"]
    for _ in range(2):
        assert finish(start_at(store.port, tmp_path, at_torchruns_store, argv)) == [1, 1]
    errors = re.findall("bitnet: error: .*", (tmp_path / ".errors").read_text())
    assert errors == ["bitnet: error: no file, folder or glob matches 'nowhere'"] * 2
