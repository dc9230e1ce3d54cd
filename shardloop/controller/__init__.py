"""The single controller: worker groups, rollouts, the loop, runs and their reports. Floor 4."""
