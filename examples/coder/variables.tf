# The contract's inputs (docs/schemas/workspace.json, Workspace), by their names and with their defaults. What
# each of them means was decided when the file was rendered: here they are only compared with it.

variable "workspace_name" {
  type        = string
  description = "Small letters, digits and -, at most 32."
}

variable "owner" {
  type        = string
  description = "Who works on it: tags, limits and costs are by owner."
}

variable "region" {
  type        = string
  description = "The provider's region has to be the same."
}

variable "compute_profile" {
  type = object({
    cpu       = optional(number, 0)
    memory    = optional(string)
    storage   = optional(string)
    gpu_count = optional(number, 1)
    gpu_type  = optional(string, "")
  })
  description = "What the machine has to have; the storage is the home's."
  default     = {}
}

variable "capabilities" {
  type = object({
    persistent_home = optional(bool, true)
    network_egress  = optional(string, "https-only")
    identity_mode   = optional(string, "iam")
    gpu_support     = optional(bool, true)
    artifact_cache  = optional(string, "")
    secrets         = optional(map(string), {})
    gui_vnc         = optional(bool, false)
    gui_rdp         = optional(bool, false)
  })
  description = "What the workspace can do. Secrets are references, never the secrets themselves."
  default     = {}
}

variable "toolchain_template" {
  type = object({
    name    = string
    version = string
  })
  description = "The toolchain template that the Coder workspace names."
  default     = null
}

variable "image_id" {
  type        = string
  description = "The image that the file was rendered for."
  default     = null
}

variable "instance_types" {
  type        = list(string)
  description = "Only these, of what the profile allows. Empty: any."
  default     = []
}

variable "vpc_id" {
  type        = string
  description = "Null: that of the subnets, else the default VPC."
  default     = null
}

variable "subnet_ids" {
  type        = list(string)
  description = "One a zone. Empty: the VPC's."
  default     = []
}

variable "instance_profile_name" {
  type        = string
  description = "Null: one of its own, with the least rights."
  default     = null
}

variable "agent_init_script" {
  type        = string
  description = "Run at the end of the boot, as the workspace's user."
  default     = ""
}

variable "ssh_from" {
  type        = string
  description = "CIDR that reaches port 22. Empty: nobody."
  default     = ""
}

variable "services" {
  type        = list(string)
  description = "Names of services/*.yaml."
  default     = []
}

variable "spot" {
  type        = bool
  description = "Whether EC2 may take the machine away, for a lower price."
  default     = false
}

variable "idle_minutes" {
  type        = number
  description = "Nobody there for so long: the machine stops itself. 0: never."
  default     = 0
}

# What Terraform alone needs.

variable "rendered" {
  type        = string
  description = "The file that `invoke workspace.render --to tfvars` wrote for these inputs."
}

variable "running" {
  type        = bool
  description = "Whether there is a machine; the home is there either way."
  default     = true
}

variable "offer" {
  type        = number
  description = "Which of the rendered offers, counted from 0: Terraform can't try the next by itself."
  default     = 0
}

variable "subnet" {
  type        = number
  description = "Which of the subnets, counted from 0. The home pins its zone."
  default     = 0
}
