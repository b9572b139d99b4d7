"""`python -m bitnet`, the same as the `bitnet` command: what torchrun starts."""

import sys

from bitnet_cli import main

if __name__ == "__main__":
    sys.exit(main())
