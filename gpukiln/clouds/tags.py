"""The name of every tag that gpukiln writes, each with one meaning.

`workspaces/agent.py` repeats those that a machine writes, because it runs there without gpukiln.
"""

# On resources that exist only while a build runs.
BUILD_TAG = "gpukiln:build"
PURPOSE_TAG = "gpukiln:purpose"  # bake or verify
DEADLINE_TAG = "gpukiln:deadline"  # ISO 8601
CANARY_TAG, CLUSTER_TAG = "gpukiln:canary", "gpukiln:cluster"
"""On the machine of a canary: the value of its Node's label, and the context of the cluster that it joins."""
OWNER_TAG = "gpukiln:owner"  # of a build's and of a workspace's resources, and of imported images

# On instances of the embedded cloud.
MACHINE_TAG = "gpukiln:machine"  # a `Kind` of `clouds/embedded/machine.py`
GPUS_TAG, SIMULATED = "gpukiln:gpus", "simulated"  # the machine gets simulated GPUs

# On AMIs, and most of them on their snapshots.
RECIPE_TAG = "gpukiln:recipe"
"""The folder of ami/, on every AMI and snapshot that gpukiln created, stages and unverified images included.
gpukiln finds and removes them by this tag. An image that may be launched has `gpukiln:image`, see
pipeline/verdict_tags.py."""
BUILD_ID_TAG = "gpukiln:build-id"  # on the image and the snapshot that a build made; it outlives the build
DIGEST_TAG = "gpukiln:digest"  # of the plan
# The value is on images of existing accounts and in their IAM conditions, so it stays as it is.
IMAGE_TAG, NOT_VERIFIED = "gpukiln:image", "not-proven"
VERDICT_TAG, PASSED = "gpukiln:verdict", "passed"
CLUSTER_VERDICT_TAG = "gpukiln:cluster-verdict"  # the instance type and the Kubernetes version follow
VERIFIED_TAG = "gpukiln:verified-at"
NOT_RUN_TAG = "gpukiln:not-run"  # the checks that its release excused
TYPES_TAG = "gpukiln:instance-types"
DRIVER_TAG = "gpukiln:driver"  # the driver's version, of an image and of a workspace's machine
MODULES_TAG = "gpukiln:modules"  # open or proprietary
CUDA_TAG = "gpukiln:cuda"
KUBERNETES_TAG = "gpukiln:kubernetes"
TOOLKIT_TAG = "gpukiln:toolkit"
DESKTOP_TAG = "gpukiln:kasmvnc"  # its version; absent: the image has no desktop for the browser
BASE_TAG = "gpukiln:base"  # name and id
KERNEL_TAG = "gpukiln:kernel"
COMMIT_TAG = "gpukiln:commit"
IMPORT_TAG = "gpukiln:import"
"""On an image that `ami.import` made, and on its snapshot: the SHA-256 of the imported file."""
TRUST_TAG, TRUSTED = "gpukiln:trust", "yes"
"""On the same two: the embedded cloud may start it as a container (`clouds/embedded/snapshot_blocks.py`)."""
SBOM_TAG, STATEMENT_TAG, SIGNING_KEY_TAG = ATTESTED_TAGS = (
    "gpukiln:sbom-digest",
    "gpukiln:provenance-digest",
    "gpukiln:provenance-key",
)
SOURCE_TAG = "gpukiln:source-image"  # on a copy: the image that was copied
ENCRYPTION_TAG = "gpukiln:encryption"  # none, default, or the key that was requested for the copy
PRUNING_TAG = "gpukiln:pruning"  # on a snapshot: the image that it belonged to

# on the AMI and the snapshot of a stage of a bake
BAKED_STAGE_TAG = "gpukiln:stage-name"
STAGE_KEY_TAG, STAGE_BUILD_TAG = "gpukiln:stage-key", "gpukiln:stage-build"

# Earlier versions of gpukiln wrote these two names, each with two meanings. They are read, not written.
OLD_BAKED_STAGE_TAG = "gpukiln:stage"  # on an AMI or a snapshot, as BAKED_STAGE_TAG
OLD_LAST_MACHINE_TAG = "gpukiln:machine"  # on a security group, as LAST_MACHINE_TAG

# on the parameter of a channel, with IMAGE_TAG
CHANNEL_TAG = "gpukiln:channel"

# On the resources of a workspace.
WORKSPACE_TAG = "gpukiln:workspace"
PART_TAG = "gpukiln:part"  # machine, home, network, rights, key
LAST_MACHINE_TAG = "gpukiln:last-machine"  # on its security group: the id of its last machine
MANAGED_TAG, MANAGED = "gpukiln:managed-by", "gpukiln"
# The machine writes these about itself; its role allows it to write no other tag.
STAGE_TAG = "gpukiln:stage"  # of its boot
HEALTH_TAG, BUSY_TAG = "gpukiln:health", "gpukiln:busy"
OWN_TAGS = (STAGE_TAG, HEALTH_TAG, BUSY_TAG, DRIVER_TAG)
# `workspace.up` writes these on the machine.
HOME_TAG = "gpukiln:home"  # the volume's id, which the machine reads from its metadata
USER_TAG, SSH_USER_TAG = "gpukiln:user", "gpukiln:ssh-user"
REACH_TAG, BY_SESSION_MANAGER = "gpukiln:reach", "session-manager"
PLAN_TAG, PRICE_TAG = "gpukiln:plan", "gpukiln:usd-hour"
IMAGE_DIGEST_TAG, IMAGE_VERDICT_TAG = "gpukiln:image-digest", "gpukiln:image-verdict"
OPTIONS_TAG = "gpukiln:asked"  # the options that the machine was started with, see workspaces/differs.py
NO_GPUS = "gpu_support="  # an entry of OPTIONS_TAG: no GPU was requested
