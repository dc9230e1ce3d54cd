"""shardloop: distributed RL for language models, whose plumbing is proved before it runs.

Importing the package is light: torch and transformers are loaded by the rooms that need them.
"""

__version__ = "0.1.0"
