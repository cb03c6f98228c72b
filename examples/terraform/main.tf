# A managed node group on the image that a channel points at. `terraform plan` shows a new launch template version
# whenever a release has moved the pointer, and `terraform apply` rolls the nodes.

data "aws_eks_cluster" "this" {
  name = var.cluster_name
}

data "aws_ssm_parameter" "image_id" {
  name = "/gpukiln/${var.image}/${data.aws_eks_cluster.this.version}/${var.channel}/image_id"
}

locals {
  # An image id is no secret; Terraform takes every parameter for one.
  image_id    = nonsensitive(data.aws_ssm_parameter.image_id.value)
  root_device = { al2023 = "/dev/xvda", ubuntu = "/dev/sda1" }
  taint       = "nvidia.com/gpu=true:NoSchedule"

  # With an image of one's own EKS adds nothing to user data: all of it is here.
  user_data = {
    al2023 = templatefile("${path.module}/userdata-al2023.tftpl", {
      cluster_name          = var.cluster_name
      endpoint              = data.aws_eks_cluster.this.endpoint
      certificate_authority = data.aws_eks_cluster.this.certificate_authority[0].data
      service_cidr          = data.aws_eks_cluster.this.kubernetes_network_config[0].service_ipv4_cidr
      taint                 = local.taint
    })
    ubuntu = templatefile("${path.module}/userdata-ubuntu.tftpl", {
      cluster_name = var.cluster_name
      dns_ip       = cidrhost(data.aws_eks_cluster.this.kubernetes_network_config[0].service_ipv4_cidr, 10)
      taint        = local.taint
    })
  }
}

# EKS refuses a template with a subnet, an instance profile or a shutdown behaviour.
resource "aws_launch_template" "gpu" {
  name_prefix = "${var.cluster_name}-gpu-"
  image_id    = local.image_id
  user_data   = base64encode(local.user_data[var.family])

  block_device_mappings {
    device_name = local.root_device[var.family]
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
  subnet_ids             = var.subnet_ids
  instance_types         = var.instance_types

  # no ami_type, release_version or version: the image is the template's
  launch_template {
    id      = aws_launch_template.gpu.id
    version = aws_launch_template.gpu.latest_version
  }

  scaling_config {
    min_size     = 0
    desired_size = 1
    max_size     = 4
  }

  update_config {
    max_unavailable = 1
  }

  # The kubelet registers the taint too: this one comes after the node has joined.
  taint {
    key    = "nvidia.com/gpu"
    value  = "true"
    effect = "NO_SCHEDULE"
  }

  lifecycle {
    create_before_destroy = true
    ignore_changes        = [scaling_config[0].desired_size]
  }
}

output "image_id" {
  value = local.image_id
}
