"""From an offer to a machine on which somebody works: launched, watched, removed, its home kept.

Values: the `Workspace` contract, which Coder templates name too; `WorkspaceSpec`, the contract with its
machine as a `Request` of offers and the options of the command; `WorkspacePlan`, the machines in order with
image and services; `ExistingWorkspace`, what the tags in the cloud say of a workspace.

The cloud is the truth: a workspace is read from tags alone, and nothing is decided by what this computer
remembers.

    contract      the contract and the outputs, as validated models; tags of a workspace's parts
    spec          reads a contract from a file, options and single fields, once
    plan          machine, image and services; whether an existing machine satisfies the request
    provision     `workspace.up`: plan, consent, network, role, key, machine, home, boot, health; or rolls
                  back
    lifecycle     finds workspaces by their tags; starts, stops and removes them
    iam, network, volumes
                  the role, the security group and the key, the home volume: requests for boto3 and Terraform
    agent         runs on the machine: stages of a boot, idle rule, spot watcher; standard library, Python 3.9
    userdata      brings the agent and its configuration to the machine
    services      services/*.yaml as a Compose file
    reach         SSH or Session Manager; health by the verification suite
    render        the same workspace as files for Compose, cloud-init and Terraform
    ssh_config    `ssh NAME` by an entry for OpenSSH
    local_state, usage
                  what this computer saw: regions, running times, hours and money by owner
    view          workspaces for people, and the documents that commands print

A new stage of a boot is a method of `agent.Boot`; a new field of the contract is one of `Workspace`.
tests/unit/test_workspace_up.py lets every call of the cloud fail once.
"""
