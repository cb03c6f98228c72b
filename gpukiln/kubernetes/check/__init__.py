"""What is wrong in manifests, values, scripts and documents about GPUs on Kubernetes, told beforehand."""
