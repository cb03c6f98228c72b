"""GPU jobs: options become a checked job, and the job becomes manifests.

The central values are `JobOptions` (options.py: what the user writes), `GpuJob` (job.py: the checked job)
and `JobEnd` (state.py: how a Job ended).

options     the options of k8s.job and of `gpu_job`
values      reads single values of options
request     reads and checks all options
job         the checked job
notes       consequences that the user should know
choice      which nodes and instance types can run the job
render      the Job and its Service as manifests
admission   adapts the job to the Pod Security level of its namespace
state       status of a Job and its pods
submission  the record by which an interrupted command finds its Job again
document    the JSON document of k8s.job
"""
