"""GPU jobs: options become a checked job, and the job becomes manifests.

The central values are `JobOptions` (options.py: what the user writes), `GpuJob` (request.py: the checked job)
and `JobEnd` (state.py: how a Job ended).

options     the options of k8s.job and of `gpu_job`
request     reads and checks the options
choice      which nodes and instance types can run the job
render      the Job and its Service as manifests
admission   adapts the job to the Pod Security level of its namespace
state       status of a Job and its pods
submission  the record by which an interrupted command finds its Job again
document    the JSON document of k8s.job
"""
