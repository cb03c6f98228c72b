"""Node pools on the image of a channel, for Karpenter, EKS managed node groups and Auto Scaling groups.

The central values are `NodeGroup` (group.py: the input of every renderer) and `Nodes` (render.py: the
document of `k8s.nodes --json`).

group         reads and checks what was requested
hours         working hours, in a time zone and in UTC
render        chooses the renderer, and adds notes
karpenter     EC2NodeClass and NodePools
terraform     managed node group or Auto Scaling group, from the templates in terraform/
userdata      what a node runs before its first pod
placeholders  pods that keep nodes running in working hours
image_trust   the image that a channel points at, and whether a trusted key signed it
changes       what a rendering changes for a running pool; karpenter_changes and terraform_changes find it
"""
