"""Live nodes: converge them with the roles that bake images, and report how they drifted.

Values: `PlaybookRequest`, what to run and on which hosts; `RunResult`, what happened on each host;
`NodeRun`, the folder of a run, which is held by a lock while a process works in it.

    playbook      runs a playbook through Ansible Runner; reads and checks inventories
    results       makes a `RunResult` of Ansible's events
    apt_lock      names the process that holds a lock of apt or dpkg
    runs          folders of runs: created, resumed, listed, removed
    hosts, verify which machines to verify, and the verification of many at once
    gpus          gpukiln-gpu on other machines: all for their answers, one with this terminal
    scenarios     Molecule's scenarios of the roles
    collection    the roles as the Ansible collection gpukiln.node
    view          results for people
    passthrough/  GPUs of a Proxmox VE host for its VMs
"""
