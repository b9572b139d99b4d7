"""Tasks of lm-evaluation-harness, run by the engine: `bitnet eval MODEL --tasks …`.

    python -m bitnet.harness run --model bitnet --model_args path=model.bitnet --tasks arc_easy

is the harness's own command, which then knows the engine (`bitnet.evaluate.engine_lm`).
"""

from __future__ import annotations

import contextlib
import difflib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lm_eval import evaluator
from lm_eval.tasks import TaskManager
from lm_eval.utils import make_table

from bitnet.evaluate.engine_lm import EngineLM
from bitnet_runtime import Model
from bitnet_runtime.terminal import say

YAML = (".yaml", ".yml")


def tasks_of(names: Sequence[str]) -> TaskManager:
    """The harness's tasks, and those of files. names: tasks, groups, or YAML files that define a task.

    Raises ValueError if there is no such task.
    """
    if not all(map(str.strip, names)):
        raise ValueError(f"--tasks {','.join(names)} has an empty name; expected names separated by single commas")
    files = [Path(name) for name in names if name.endswith(YAML)]
    if named := len(files) < len(names):
        say("reading the list of all tasks of lm-evaluation-harness, which takes half a minute …")
    with contextlib.redirect_stdout(sys.stderr):
        manager = TaskManager(include_defaults=named)  # 14,000
        check_names(names, manager.all_tasks)
        for file in files:
            _check_file(file, manager)
    return manager


def report(
    model: Model,
    names: Sequence[str],
    fewshot: int | None,
    limit: int,
    chat: bool,
    between: Callable[[], None] = lambda: None,
    adapter: str | None = None,
    manager: TaskManager | None = None,
) -> tuple[dict[str, Any], str]:
    """The output of `bitnet eval --tasks`: the harness's figures by task, and its table.

    names: as of `tasks_of`, whose result is `manager`, if it was asked. between, adapter: as in EngineLM.
    """
    if chat and not model.has_template:
        raise ValueError(f"{model.path.name} has no chat template; leave --chat out")
    manager = manager or tasks_of(names)
    # Of what is not shown: git's error outside of a repository would be, and pip, gcc and others take seconds.
    evaluator.get_git_commit_hash, evaluator.add_env_info = lambda: None, lambda found: None
    with contextlib.redirect_stdout(sys.stderr):  # progress messages of the harness are not the result
        found = evaluator.simple_evaluate(
            EngineLM(model, between=between, adapter=adapter),
            tasks=list(names),
            num_fewshot=fewshot,
            limit=limit or None,
            apply_chat_template=chat,
            task_manager=manager,
            log_samples=False,
        )
    assert found is not None  # one process
    table = make_table(found) + (f"\n{make_table(found, 'groups')}" if found.get("groups") else "")
    kept = ("results", "groups", "n-shot", "n-samples", "versions", "higher_is_better")
    return {name: found[name] for name in kept if name in found}, table


def _check_file(file: Path, manager: TaskManager) -> None:
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist, expected a file that defines a task")
    try:
        manager.load([str(file)])
    except (OSError, ValueError):
        raise
    except Exception as error:  # YAML errors, and whatever a missing or wrong entry causes
        raise ValueError(f"{file} does not define a task: {type(error).__name__}: {error}") from error


def check_names(names: Sequence[str], known: Sequence[str]) -> None:
    """Raises ValueError for a name that is neither a file nor known, with the closest known ones."""
    for name in names:
        if not name.endswith(YAML) and name not in known:
            near = difflib.get_close_matches(name, known, 3)
            hint = f", did you mean {' or '.join(near)}?" if near else "; `lm_eval ls tasks` lists them"
            raise ValueError(f"the harness has no task {name!r}{hint}")


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
