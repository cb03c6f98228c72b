"""From a request for GPUs to every machine that satisfies all of it, with where it can be had and for how much."""
