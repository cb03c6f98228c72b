# GPU machines outside of EKS. The launch template names the parameter and not an image: machines that the group
# starts after a release have the new image, with no `terraform apply`. Those that run stay until an instance
# refresh: aws autoscaling start-instance-refresh --auto-scaling-group-name NAME
#
# Who launches needs ssm:GetParameters on the parameter.

terraform {
  required_version = ">= 1.5"
  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = ">= 5.0"
    }
  }
}

variable "pointer" {
  type        = string
  description = "The parameter that a release to the channel writes."
  default     = "/gpukiln/eks-gpu/1.34/stable/image_id"
}

variable "subnet_ids" {
  type        = list(string)
  description = "Subnets of the machines."
}

variable "security_group_ids" {
  type        = list(string)
  description = "Security groups of the machines."
}

resource "aws_launch_template" "gpu" {
  name_prefix            = "gpu-"
  image_id               = "resolve:ssm:${var.pointer}"
  instance_type          = "g4dn.xlarge"
  vpc_security_group_ids = var.security_group_ids

  metadata_options {
    http_tokens = "required"
  }
}

resource "aws_autoscaling_group" "gpu" {
  name_prefix         = "gpu-"
  min_size            = 0
  max_size            = 2
  vpc_zone_identifier = var.subnet_ids

  launch_template {
    id      = aws_launch_template.gpu.id
    version = aws_launch_template.gpu.latest_version
  }
}
