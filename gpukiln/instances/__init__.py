"""EC2 instances that gpukiln creates: launch, SSH access, deadline, console, and removal of orphans.

Central values: `launch.LaunchedMachine` and `launch.LaunchRefusal`, `access.SshAccess`, `orphans.Orphan`.
Modules: `launch` tries types and zones in order; `access` makes key and security group, waits for SSH and
removes both; `deadline` is the user data that powers a machine off; `console` recognises a boot that stopped;
`orphans` finds and removes what builds left; `tags` has EC2's forms of tags; `rehearsal` is a NodeConfig for
machines without a cluster.
"""
