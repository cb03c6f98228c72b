"""GPU nodes and GPU jobs on Kubernetes: rendered, checked before they are applied, proven on a cluster."""
