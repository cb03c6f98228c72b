"""A Kubernetes cluster on this computer: a real control plane on loopback, and virtual machines as its nodes.

`programs` finds the programs, `control_plane` runs them as children of the embedded cloud's server,
`certificates` signs for them, `node` prepares a machine's disk, `image` makes the image of its pods, and
`relay` connects the API server with kubelets and back. The name of its context is `rehearsal`.
"""
