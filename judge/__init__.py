"""The package name is reserved: the judge of the practice problems is not in this release yet."""
