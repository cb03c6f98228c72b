variable "cluster_name" {
  type        = string
  description = "The EKS cluster; it must exist."
}

variable "node_role_arn" {
  type        = string
  description = "IAM role of the nodes."
}

variable "subnet_ids" {
  type        = list(string)
  description = "Subnets of the nodes."
}

variable "image" {
  type        = string
  description = "Name of gpukiln's image: a folder of ami/."
  default     = "eks-gpu"
}

variable "channel" {
  type        = string
  description = "The channel that the image was released to."
  default     = "stable"
}

variable "family" {
  type        = string
  description = "What the image was built on: al2023 (nodeadm) or ubuntu (bootstrap.sh)."
  default     = "ubuntu"
  validation {
    condition     = contains(["al2023", "ubuntu"], var.family)
    error_message = "The family is al2023 or ubuntu."
  }
}

variable "instance_types" {
  type        = list(string)
  description = "GPU machines that the image was proven on."
  default     = ["g4dn.xlarge"]
}

variable "volume_size_gib" {
  type        = number
  description = "Root volume; not below the image's own size."
  default     = 100
}
