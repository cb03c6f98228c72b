"""From a request for GPUs to every machine that satisfies all of it: where, for how much, and what runs."""
