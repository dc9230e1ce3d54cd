"""The `shardloop` command. Floor 5."""
