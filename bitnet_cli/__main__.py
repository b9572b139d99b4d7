"""`python -m bitnet_cli`, the same as the `bitnet` command."""

import sys

from bitnet_cli.command import main

if __name__ == "__main__":
    sys.exit(main())
