"""What `reshard.verify` checks, in rooms that share no code with the planner. Floor 1.

declared   what the cuts of a layout declare, read from their strips
layouts    ranks, meshes, cuts and names of one layout
rows       whole sides, joins, lost ranks
joins      tables, cover, holders and turns of one block of dims
cover      do boxes make up other boxes, each element exactly once
living     a living holder for everything, when source ranks are lost
"""
