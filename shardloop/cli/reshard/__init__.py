"""`shardloop reshard`: plans between layouts as tables, JSON and pictures. Floor 5.

commands ──▶ request (options -> plan, proof, cost) ──▶ facts ──▶ table
         └─▶ tensor_map ──▶ picture                        └───▶ JSON
"""

from shardloop.cli.reshard.commands import run

__all__ = ["run"]
