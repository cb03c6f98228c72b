"""Node pools on the image that a channel points at, for whoever starts the nodes."""
