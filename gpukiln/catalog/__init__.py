"""Facts as data, typed loaders for them, and the rules of what can work with what."""
