"""What a cluster with GPU nodes runs beside the work: values for charts of others, and manifests of ours.

Each module but `settings` and `helm` is one add-on: `files(settings)` gives its files by their path, and
`install(settings)` the shell commands that install them, in their folder. Nothing here asks a cluster.
"""
