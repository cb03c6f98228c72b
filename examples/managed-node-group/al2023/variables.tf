variable "cluster_name" {
  type        = string
  description = "The EKS cluster; it must exist."
  default     = "CLUSTER"
}

variable "subnet_ids" {
  type        = list(string)
  description = "Subnets of the nodes."
}

variable "node_role_arn" {
  type        = string
  description = "IAM role of the nodes."
}

variable "pointer" {
  type        = string
  description = "The parameter that a release to the channel writes."
  default     = "/gpukiln/eks-gpu/1.34/stable/image_id"
}

variable "volume_size_gib" {
  type        = number
  description = "Root volume; not below the image's own size."
  default     = 100
}
