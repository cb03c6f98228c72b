"""What `ansible-doc` shows of the action `decide`, which runs where Ansible does and has no module."""

DOCUMENTATION = """
module: decide
short_description: Looks at a node and decides what a role has to do there
description:
  - A task of a role. It has the node looked at as the role's C(decide.py) asks, and returns the plan that
    this makes of the answers.
  - In check mode the plan is what is shown as the difference, and C(act) is false.
  - A plan that refuses fails the task with its reason.
options:
  step:
    description: "Which functions of C(decide.py): C(look_STEP) and C(decide_STEP); without it C(look) and
      C(decide)."
    type: str
  known:
    description: What an earlier C(decide) of the role returned; the node is not asked again while no role
      acted on it.
    type: dict
author: [The authors of gpukiln (!UNKNOWN)]
"""

EXAMPLES = """
- name: Decide whether it is missing
  decide:
  register: nvtop_plan
  diff: true

- name: Install it
  ansible.builtin.package:
    name: "{{ nvtop_plan.packages }}"
  when: nvtop_plan.act
"""

RETURN = """
act: {description: Whether there is anything to do., returned: success, type: bool}
acted: {description: How many plans were acted on before this one., returned: success, type: int}
do: {description: "What the role's tasks need to know; C(decide.py) says what.", returned: always, type: dict}
looks: {description: How often the node was asked., returned: success, type: int}
node: {description: "The answers of the node, without the text of files.", returned: success, type: dict}
"""
