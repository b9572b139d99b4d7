"""What `make demo` shows last: text of the model that was just trained, and what was proven on the way.

    python python_bindings/examples/demo.py model.bitnet
"""

import sys

from bitnet_runtime import Model

PROMPTS = (
    "class Reader:\n    def __init__(self, name):\n",
    "def read(self, size):\n    if size",
    "import os\nimport sys\n\ndef main(",
)


def main(path: str) -> None:
    tokens, seconds = 0, 0.0
    with Model.load(path) as model:
        for prompt in PROMPTS:
            print(f"\n--- {prompt!r} goes on:\n\n{prompt}", end="")
            with model.stream(prompt, max_tokens=80, temperature=0.6, seed=1) as stream:
                for piece in stream:
                    print(piece.text, end="", flush=True)
            timings = stream.result().timings
            tokens, seconds = tokens + timings.generated_n, seconds + timings.generation_s
            print()
        print(model)


if __name__ == "__main__":
    main(*sys.argv[1:])
