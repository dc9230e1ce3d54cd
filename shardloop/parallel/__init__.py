"""What runs in the worker processes: rank contexts, meshes, sharding of models. Floor 3."""
