"""Facts as data, typed loaders for them, and the rules of what can work with what.

Values: `InstanceType` and `Gpu` (data/gpu_instances.yaml, data/nvidia_matrix.yaml), `Branch` of the driver,
`Component` (components.yaml), `Base` (ami/bases.yaml); a rule returns `Finding`s.

    load          reads YAML with limits and errors that name file and line
    gpus, boards, gpu_names
                  GPUs and their architectures; boards as NVML describes them; every name of a GPU
    instance_types, offerings, quotas, prices, regions
                  EC2: types with accelerators, zones that have them, quotas, prices by day, regions
    drivers, cuda, container_toolkit, kubernetes, workloads, xid
                  NVIDIA's branches and bulletins, toolkits, advisories; EKS's support; needs of programs;
                  Xids
    components, bases, driver_bases, images, containers, architectures
                  what images are made of, and what they are built from
    compat        the rules: an error can never work, a warning works today
    permissions   calls of AWS's API by job, from which cloud.policy makes IAM policies
    roles         the roles' variables, for docs/roles.md
    shipped       the part of it that machines get, gpukiln/gpus/facts.json
"""
