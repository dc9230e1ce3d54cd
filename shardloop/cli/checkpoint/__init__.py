"""`shardloop checkpoint`: what a checkpoint is, another form of it, and whether it is whole.

Floor 5. commands ──▶ `shardloop.convert` ──▶ words (tables), JSON
"""

from shardloop.cli.checkpoint.commands import run

__all__ = ["run"]
