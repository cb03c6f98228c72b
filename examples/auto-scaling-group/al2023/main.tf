# GPU machines that join an EKS cluster by themselves. The launch template names the parameter and not an image:
# machines that the group starts after a release have the new image, with no `terraform apply`. Those that run
# stay until an instance refresh:
# aws autoscaling start-instance-refresh --auto-scaling-group-name "$(terraform output -raw group_name)"
#
# Who launches needs ssm:GetParameters on the parameter.

data "aws_eks_cluster" "this" {
  name = var.cluster_name
}

data "aws_iam_instance_profile" "nodes" {
  name = var.instance_profile
}

locals {
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

# Lets machines with the role join.
resource "aws_eks_access_entry" "nodes" {
  cluster_name  = var.cluster_name
  principal_arn = data.aws_iam_instance_profile.nodes.role_arn
  type          = "EC2_LINUX"
}

resource "aws_launch_template" "gpu" {
  name_prefix            = "${var.cluster_name}-gpu-"
  image_id               = "resolve:ssm:${var.pointer}"
  instance_type          = "g4dn.xlarge"
  user_data              = base64encode(local.user_data)
  vpc_security_group_ids = [data.aws_eks_cluster.this.vpc_config[0].cluster_security_group_id]

  iam_instance_profile {
    name = var.instance_profile
  }

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

resource "aws_autoscaling_group" "gpu" {
  name_prefix         = "${var.cluster_name}-gpu-"
  min_size            = 0
  max_size            = 2
  vpc_zone_identifier = local.subnet_ids

  launch_template {
    id      = aws_launch_template.gpu.id
    version = aws_launch_template.gpu.latest_version
  }

  tag {
    key                 = "kubernetes.io/cluster/${var.cluster_name}"
    value               = "owned"
    propagate_at_launch = true
  }

  dynamic "tag" {
    for_each = local.autoscaler_tags
    content {
      key                 = tag.key
      value               = tag.value
      propagate_at_launch = false
    }
  }

  lifecycle {
    ignore_changes = [desired_capacity, min_size]
  }

  depends_on = [aws_eks_access_entry.nodes]
}

# Working hours, mon-fri 08:00-18:00 Europe/Berlin: so many nodes wait for work.
# After them cluster-autoscaler takes away those that have none.
resource "aws_autoscaling_schedule" "begin" {
  scheduled_action_name  = "working-hours-begin"
  autoscaling_group_name = aws_autoscaling_group.gpu.name
  recurrence             = "0 8 * * 1-5"
  time_zone              = "Europe/Berlin"
  min_size               = 1
  max_size               = 2
  desired_capacity       = -1
}

resource "aws_autoscaling_schedule" "end" {
  scheduled_action_name  = "working-hours-end"
  autoscaling_group_name = aws_autoscaling_group.gpu.name
  recurrence             = "0 18 * * 1-5"
  time_zone              = "Europe/Berlin"
  min_size               = 0
  max_size               = 2
  desired_capacity       = -1
}

output "group_name" {
  value = aws_autoscaling_group.gpu.name
}
