"""Where packages come from: what a source has, whether it can be reached, a file system made of it."""
