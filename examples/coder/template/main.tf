# A Coder template: a GPU workspace of gpukiln's. Where Coder's provisioner runs there have to be gpukiln (its
# folder is var.gpukiln) and Terraform's AWS credentials.

terraform {
  required_version = ">= 1.5"
  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = ">= 6.0"
    }
    coder = {
      source = "coder/coder"
    }
    external = {
      source = "hashicorp/external"
    }
  }
}

variable "gpukiln" {
  type        = string
  description = "The folder with gpukiln on the machine of the provisioner."
}

variable "region" {
  type        = string
  description = "Where the workspaces are."
  default     = "us-west-2"
}

variable "image_id" {
  type        = string
  description = "The image that was verified and released: `invoke offer.list --image auto` says which."
}

variable "subnet_ids" {
  type        = list(string)
  description = "One a zone. Empty: the default VPC's."
  default     = []
}

provider "aws" {
  region = var.region
}

data "coder_workspace" "me" {}
data "coder_workspace_owner" "me" {}

data "coder_parameter" "gpu" {
  name         = "gpu"
  display_name = "GPU"
  default      = "T4"
  mutable      = false
  option {
    name  = "T4, 16 GB"
    value = "T4"
  }
  option {
    name  = "A10G, 24 GB"
    value = "A10G"
  }
  option {
    name  = "L4, 24 GB"
    value = "L4"
  }
}

data "coder_parameter" "home" {
  name         = "home"
  display_name = "Home, GiB"
  type         = "number"
  default      = "100"
  mutable      = true
  validation {
    min       = 10
    max       = 4000
    monotonic = "increasing" # a volume never shrinks
  }
}

# The agent shows by its instance's identity document who it is, so that no token is in the user data.
resource "coder_agent" "main" {
  os   = "linux"
  arch = "amd64"
  auth = "aws-instance-identity"
}

locals {
  contract = {
    # Two people may give one name.
    workspace_name = trimsuffix(substr("${data.coder_workspace_owner.me.name}-${data.coder_workspace.me.name}", 0, 32), "-")
    owner          = data.coder_workspace_owner.me.name
    region         = var.region
    image_id       = var.image_id
    subnet_ids     = var.subnet_ids
    idle_minutes   = 60
    compute_profile = {
      gpu_type  = data.coder_parameter.gpu.value
      gpu_count = 1
      cpu       = 4
      memory    = "16Gi"
      storage   = "${data.coder_parameter.home.value}Gi"
    }
    # It runs as long as the machine does, and the boot waits for the script's end.
    agent_init_script = <<-EOT
      echo ${base64encode(coder_agent.main.init_script)} | base64 -d > "$HOME/.coder-agent"
      setsid --fork bash "$HOME/.coder-agent" > "$HOME/.coder-agent.log" 2>&1 < /dev/null
    EOT
  }
}

# Chooses the machine, by the same rules as `invoke workspace.up`, and writes down what there is to make.
data "external" "rendered" {
  program = ["python3", "${path.module}/render.py"]
  query = {
    gpukiln  = var.gpukiln
    contract = jsonencode(local.contract)
    folder   = abspath(path.root)
  }
}

module "workspace" {
  source   = "./workspace" # a copy of examples/coder: versions.tf, variables.tf, main.tf, outputs.tf
  rendered = data.external.rendered.result.rendered
  running  = data.coder_workspace.me.transition == "start"

  workspace_name    = local.contract.workspace_name
  owner             = local.contract.owner
  region            = local.contract.region
  image_id          = local.contract.image_id
  subnet_ids        = local.contract.subnet_ids
  idle_minutes      = local.contract.idle_minutes
  compute_profile   = local.contract.compute_profile
  agent_init_script = local.contract.agent_init_script
}

output "workspace" {
  value = module.workspace
}
