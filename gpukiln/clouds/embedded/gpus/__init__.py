"""GPUs that don't exist: what stands for NVIDIA's library and programs on a machine of the embedded cloud."""
