"""The `bitnet` command: what training, export and the engine do, as verbs. Nothing below imports it.

A verb is a module in `verbs`, named as it is typed, and a line of the table in `table.py`.
"""

from bitnet_cli.signals import at_once

with at_once():
    from bitnet_cli.command import main

__all__ = ["main"]
