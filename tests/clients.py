"""`make clients`: serve small models, and run `client_checks.py` against them in the environment of the clients; then
schemathesis, with requests that it generates from /openapi.json."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from servers import served
from tool_models import CALL, calling_model

ANSWERS = {"one": "Let me see.\n" + CALL, "text": "Nothing to call < here."}

# A schema cannot express everything that makes a request valid, such as the size of the context, so valid ones may be
# refused. And null counts as absent, also for an unknown name.
RANDOM = ["--phases", "coverage,fuzzing", "--max-examples", "25", "--seed", "1", "--exclude-checks",
          "positive_data_acceptance,negative_data_rejection"]  # fmt: skip

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        paths = [calling_model(Path(folder) / f"{name}.bitnet", answer) for name, answer in ANSWERS.items()]
        with served(*paths) as serving:
            checks = Path(__file__).with_name("client_checks.py")
            quiet = {"DO_NOT_TRACK": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONWARNINGS": "ignore"}
            done = subprocess.run([sys.argv[1], checks, serving.address], env=os.environ | quiet)
            schemathesis = [
                Path(sys.argv[1]).absolute().with_name("schemathesis"),
                "run",
                f"{serving.address}/openapi.json",
            ]
            random = done.returncode or subprocess.run([*schemathesis, *RANDOM], cwd=folder).returncode
    sys.exit(random)
