# Only for Packer 1.7 and newer, where provisioners are plugins; gpukiln copies this file next to the template when it
# finds such a Packer.
packer {
  required_plugins {
    ansible = {
      source  = "github.com/hashicorp/ansible"
      version = ">= 1.1.2, < 2.0.0"
    }
  }
}
