"""Simulated GPUs of the embedded cloud's machines: a double of NVML, what it tells, how that is changed."""
