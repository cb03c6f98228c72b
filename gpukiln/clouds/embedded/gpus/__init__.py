"""Simulated GPUs of the embedded cloud's machines: a double of NVML, what it tells, and how that is changed."""
