"""The last step of `make demo`: text from the model that was just trained, and a summary.

Takes the packed file as its argument.
"""

import sys

from bitnet_runtime import Model

PROMPTS = (
    "class Reader:\n    def __init__(self, name):\n        self.name",
    "class Node:\n    def __init__(self, parent):\n        self.parent",
    "class Client:\n    def __init__(self, host, port):\n        self.host = host\n        self.port",
)
RULE = "-" * 72


def main(path: str) -> None:
    tokens, seconds = 0, 0.0
    with Model.load(path) as model:
        for prompt in PROMPTS:
            answer = model.generate(prompt, max_tokens=48, temperature=0.7, seed=0)
            tokens += answer.usage.completion_tokens
            seconds += answer.timings.generation_seconds
            print(f"\n{RULE}\n{prompt}{answer.text}")
        info = model.info
        fp16 = 2 * (info.ternary_weights + info.vocab_size * info.dim)
        print(
            f"\n{RULE}\nTrained here, exported, verified against PyTorch, run in C: {info.file_bytes / 1e6:.1f} MB "
            f"(fp16: {fp16 / 1e6:.1f} MB), {tokens / seconds:,.0f} tokens/s with {model.threads} threads ({model.isa})."
        )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("expected one argument, the packed file: python demo.py model.bitnet")
    main(sys.argv[1])
