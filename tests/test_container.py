"""The Containerfile: what it says can be done here is done, with this environment in place of its own."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

from runtime_models import small_model

ROOT = Path(__file__).parents[1]
LINES = re.sub(r"\\\n", "", (ROOT / "Containerfile").read_text()).splitlines()


def values(name: str) -> list[str]:
    """The values of all instructions with this name."""
    return [line.split(maxsplit=1)[1] for line in LINES if line.startswith(name)]


def here(words: list[str], port: int) -> list[str]:
    """A command of the container, with the programs beside this Python and another port."""
    program = str(Path(sys.executable).with_name(Path(words[0]).name))
    return [program, *(word.replace("8080", str(port)) for word in words[1:])]


def test_its_server_answers_its_question(tmp_path: Path) -> None:
    small_model(tmp_path).rename(tmp_path / "model.bitnet")
    (entry,), (model,), (health,) = values("ENTRYPOINT"), values("CMD"), values("HEALTHCHECK")
    command = [*here(json.loads(entry) + json.loads(model), 0), "--port", "0", "--threads", "1"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            port = next(int(line.rpartition(":")[2]) for line in process.stderr if "Listening on" in line)
            question = here(json.loads(health.removeprefix("CMD ")), port)
            assert subprocess.run(question).returncode == 0
        finally:
            process.terminate()
        assert process.wait(30) == 0
    assert subprocess.run(question, stderr=subprocess.DEVNULL).returncode == 1, "nobody listens any more"


def test_it_installs_what_there_is() -> None:
    words = shlex.split(next(line for line in values("RUN") if "pip install" in line))
    (extras,) = (word for word in words if word.startswith(".["))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras[2:-1].split(",")) <= set(project["optional-dependencies"])
    assert (ROOT / words[words.index("--constraint") + 1]).is_file()
    minor = int(re.findall(r"python:3\.(\d+)-slim", values("FROM")[0])[0])
    assert minor >= int(project["requires-python"].rpartition(".")[2]) and len(set(values("EXPOSE"))) == 1
