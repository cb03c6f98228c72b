# The GPU node image, for EC2 and for the embedded cloud, with Packer 1.6.6 and newer. Every value comes from
# gpukiln's plan (`invoke ami.build`), which reads components.yaml and ami/bases.yaml. Newer Packer needs the
# plugins that plugins/plugins.pkr.hcl names; 1.6.6 has them built in and must not see that file.

variable "region" {
  type = string
}

variable "source_ami" {
  type = string
}

variable "ami_name" {
  type = string
}

variable "instance_type" {
  type = string
}

variable "ssh_username" {
  type = string
}

variable "ssh_keypair_name" {
  type        = string
  description = "Key pair and security group are the build's: Packer 1.6.6 leaves its own behind when killed."
}

variable "ssh_private_key_file" {
  type = string
}

variable "security_group_id" {
  type = string
}

variable "root_device" {
  type = string
}

variable "volume_size_gib" {
  type = number
}

variable "encrypted" {
  type    = bool
  default = true
}

variable "tags" {
  type        = map(string)
  description = "On the AMI and its snapshot: image, digest, versions, commit."
}

variable "run_tags" {
  type        = map(string)
  description = "On what exists only while building: instance and volume."
}

variable "user_data" {
  type        = string
  description = "Makes the machine end at its deadline, even when nobody is left to terminate it."
}

variable "playbook" {
  type = string
}

variable "extra_vars_file" {
  type        = string
  description = "JSON file with the plan, for Ansible."
}

variable "manifest" {
  type        = string
  description = "File that Packer writes the AMI's id to."
}

# What differs between clouds: how the endpoint and the machine are reached.

variable "ec2_endpoint" {
  type    = string
  default = ""
}

variable "skip_aws_checks" {
  type    = bool
  default = false
}

variable "ssh_interface" {
  type    = string
  default = ""
}

variable "ssh_port" {
  type    = number
  default = 22
}

variable "subnet_id" {
  type    = string
  default = ""
}

variable "poll_delay_s" {
  type    = number
  default = 15
}

variable "poll_attempts" {
  type    = number
  default = 240
}

source "amazon-ebs" "node" {
  region                     = var.region
  custom_endpoint_ec2        = var.ec2_endpoint
  skip_region_validation     = var.skip_aws_checks
  skip_credential_validation = var.skip_aws_checks
  skip_metadata_api_check    = var.skip_aws_checks
  source_ami                 = var.source_ami
  instance_type              = var.instance_type
  subnet_id                  = var.subnet_id
  security_group_id          = var.security_group_id
  ami_name                   = var.ami_name
  ami_virtualization_type    = "hvm"
  ena_support                = true
  tags                       = var.tags
  snapshot_tags              = var.tags
  run_tags                   = var.run_tags
  run_volume_tags            = var.run_tags
  communicator               = "ssh"
  ssh_username               = var.ssh_username
  ssh_keypair_name           = var.ssh_keypair_name
  ssh_private_key_file       = var.ssh_private_key_file
  ssh_interface              = var.ssh_interface
  ssh_port                   = var.ssh_port
  ssh_timeout                = "10m"
  shutdown_behavior          = "terminate"
  user_data                  = var.user_data

  launch_block_device_mappings {
    device_name           = var.root_device
    volume_type           = "gp3"
    volume_size           = var.volume_size_gib
    iops                  = 3000
    throughput            = 250
    encrypted             = var.encrypted
    delete_on_termination = true
  }

  aws_polling {
    delay_seconds = var.poll_delay_s
    max_attempts  = var.poll_attempts
  }
}

build {
  sources = ["source.amazon-ebs.node"]

  provisioner "ansible" {
    playbook_file = var.playbook
    user          = var.ssh_username
    use_proxy     = false
    extra_arguments = [
      "--extra-vars", "@${var.extra_vars_file}",
    ]
    ansible_env_vars = [
      "ANSIBLE_HOST_KEY_CHECKING=False",
      "ANSIBLE_NOCOLOR=True",
    ]
  }

  post-processor "manifest" {
    output     = var.manifest
    strip_path = true
  }
}
