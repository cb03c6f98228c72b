# A managed node group on the image that a channel points at. `terraform plan` shows a new version of the launch
# template whenever a release has moved the pointer, and `terraform apply` rolls the nodes.

data "aws_eks_cluster" "this" {
  name = var.cluster_name
}

data "aws_ssm_parameter" "image_id" {
  name = var.pointer
}

locals {
  # An image id is no secret; Terraform takes every parameter for one.
  image_id = nonsensitive(data.aws_ssm_parameter.image_id.value)

  # With an image of one's own EKS adds nothing to user data: all of it is here.
  user_data = templatefile("${path.module}/userdata.tftpl", {
    cluster_name          = var.cluster_name
    endpoint              = data.aws_eks_cluster.this.endpoint
    certificate_authority = data.aws_eks_cluster.this.certificate_authority[0].data
    service_cidr          = data.aws_eks_cluster.this.kubernetes_network_config[0].service_ipv4_cidr
  })
  subnet_ids = var.subnet_ids

  # What cluster-autoscaler has to know of a group that has no node yet.
  autoscaler_tags = {
    "k8s.io/cluster-autoscaler/enabled"                                           = "true"
    "k8s.io/cluster-autoscaler/CLUSTER"                                           = "owned"
    "k8s.io/cluster-autoscaler/node-template/label/nvidia.com/gpu.present"        = "true"
    "k8s.io/cluster-autoscaler/node-template/label/nvidia.com/gpu.product"        = "Tesla-T4"
    "k8s.io/cluster-autoscaler/node-template/label/k8s.amazonaws.com/accelerator" = "nvidia-t4"
    "k8s.io/cluster-autoscaler/node-template/taint/nvidia.com/gpu"                = "true:NoSchedule"
    "k8s.io/cluster-autoscaler/node-template/resources/nvidia.com/gpu"            = "1"
  }
}

# EKS refuses a template with a subnet, an instance profile or a shutdown behaviour.
resource "aws_launch_template" "gpu" {
  name_prefix = "${var.cluster_name}-gpu-"
  image_id    = local.image_id
  user_data   = base64encode(local.user_data)

  block_device_mappings {
    device_name = "/dev/xvda"
    ebs {
      volume_size           = var.volume_size_gib
      volume_type           = "gp3"
      encrypted             = true
      delete_on_termination = true
    }
  }

  metadata_options {
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  tag_specifications {
    resource_type = "instance"
    tags          = { Name = "${var.cluster_name}-gpu" }
  }
}

resource "aws_eks_node_group" "gpu" {
  cluster_name           = var.cluster_name
  node_group_name_prefix = "gpu-"
  node_role_arn          = var.node_role_arn
  subnet_ids             = local.subnet_ids
  instance_types         = ["g4dn.xlarge"]
  capacity_type          = "ON_DEMAND"

  # no ami_type, release_version or version: the image is the template's
  launch_template {
    id      = aws_launch_template.gpu.id
    version = aws_launch_template.gpu.latest_version
  }

  scaling_config {
    min_size     = 0
    desired_size = 0
    max_size     = 4
  }

  update_config {
    max_unavailable = 1
  }

  # EKS replaces a node whose GPUs its monitoring agent, or gpukiln's, calls broken.
  node_repair_config {
    enabled = true
  }

  labels = {
    "nvidia.com/gpu.present"        = "true"
    "nvidia.com/gpu.product"        = "Tesla-T4"
    "k8s.amazonaws.com/accelerator" = "nvidia-t4"
  }

  # The kubelet registers the taint too: this one comes after the node has joined.
  taint {
    key    = "nvidia.com/gpu"
    value  = "true"
    effect = "NO_SCHEDULE"
  }

  lifecycle {
    create_before_destroy = true
    # min_size is the schedule's, desired_size the autoscaler's
    ignore_changes = [scaling_config[0].desired_size]
  }
}

resource "aws_autoscaling_group_tag" "autoscaler" {
  for_each               = local.autoscaler_tags
  autoscaling_group_name = aws_eks_node_group.gpu.resources[0].autoscaling_groups[0].name

  tag {
    key                 = each.key
    value               = each.value
    propagate_at_launch = false
  }
}

output "image_id" {
  value = local.image_id
}
