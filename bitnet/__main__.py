"""`python -m bitnet`, the same as the `bitnet` command."""

import sys

from bitnet.cli import main

if __name__ == "__main__":
    sys.exit(main())
