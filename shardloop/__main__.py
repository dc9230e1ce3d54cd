"""`python -m shardloop`: the same door as the `shardloop` command. Floor 5."""

import sys

from shardloop.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
