"""The container image for GPU jobs has its tools in the recorded versions, and no files of the build."""

import re

from gpukiln.verify.checks import check

RUNNER = ("runner",)
GIB = 1 << 30
PINNED = {"cmake": "cmake", "ninja": "ninja", "ccache": "ccache", "git": "git"}  # tool -> component
PRESENT = ("gcc", "g++", "python3", "tini")


def release(version: str) -> str:
    """CUDA's release as text, of the number that its runtime reports: 12010 is 12.1.

    >>> release("12010")
    '12.1'
    >>> release("12.8")
    Traceback (most recent call last):
        ...
    ValueError: invalid literal for int() with base 10: '12.8'
    """
    return f"{int(version) // 1000}.{int(version) % 1000 // 10}"


@check(
    id="hygiene.runner-user",
    title="Jobs run as a user without root privileges",
    layer="hygiene",
    profiles=RUNNER,
    needs=("record",),
    causes=("The Dockerfile has no USER, or sudo is configured without a password.",),
    fix="Set USER in the Dockerfile to the user of image.yaml, and configure no sudo for it.",
)
def test_user(facts):
    user, recorded = facts["runner"]["user"], facts.record["user"]
    # A container may run with --user and another id than the image's.
    identity = (user["uid"] != 0, user["name"])
    assert identity == (True, recorded), (
        f"processes run as {user['name']} (uid {user['uid']}), wanted {recorded}"
    )
    assert not user["root_without_password"], f"{user['name']} can become root with sudo, without a password"


@check(
    id="hygiene.runner-build-files",
    title="No cache, log or temporary file of the build is in the image",
    layer="hygiene",
    profiles=RUNNER,
    causes=("A RUN of the Dockerfile downloads files and does not remove them in the same RUN.",),
    fix="Remove the files in the RUN that creates them: a later RUN does not make the image smaller.",
)
def test_build_files(facts):
    files = facts["runner"]["build_files"]
    assert not files, f"found {', '.join(files[:5])}{' and more' if len(files) > 5 else ''}; wanted none"


@check(
    id="hygiene.runner-credentials",
    title="The image has no credential and no registration of a runner",
    layer="hygiene",
    profiles=RUNNER,
    causes=("A build argument or a file of the build machine was copied into a layer.",),
    fix="Remove it from the layer, build again, and revoke it: everybody who has the image can read it.",
)
def test_credentials(facts):
    paths = facts["runner"]["credentials"]
    assert not paths, f"found {', '.join(paths[:5])}; wanted none"


@check(
    id="hygiene.runner-writable",
    title="A job can't change hooks, programs and the record that the next job uses",
    layer="hygiene",
    profiles=RUNNER,
    causes=("A COPY with --chown, or chmod, made the runner's user their owner.",),
    fix="Make root their owner; the compiler cache must not be world-writable.",
)
def test_writable(facts):
    paths = facts["runner"]["writable"]
    assert not paths, f"the runner's user can write {', '.join(paths[:5])}; wanted none"


@check(
    id="hygiene.runner-size",
    title="The image is not larger than its budget",
    layer="hygiene",
    profiles=RUNNER,
    needs=("record",),
    causes=("A package has many dependencies, or a folder was copied twice.",),
    fix="`invoke docker.show` lists the layers by size; raise size_budget_gib in image.yaml if the size is "
    "intended.",
)
def test_size(facts):
    gib, budget = facts["runner"]["size"]["bytes"] / GIB, facts.record["size_budget_gib"]
    # A failed walk through the file system would pass as an empty image.
    assert gib > 0, "no file was counted"
    assert gib <= budget, f"its files have {gib:.2f} GiB, wanted at most {budget}"
    facts.note(f"{gib:.2f} GiB of {budget}")


@check(
    id="versions.runner-tools",
    title="The build tools are installed in the recorded versions",
    layer="versions",
    profiles=RUNNER,
    needs=("record",),
    causes=("Another tool of the same name comes first on PATH.",),
    fix="`type -a TOOL` in the container shows which file is run; build the image again.",
)
def test_tools(facts):
    tools, wrong = facts["runner"]["tools"], []
    for tool in (*PINNED, *PRESENT):
        if tools[tool]["rc"] != 0:
            wrong.append(f"{tool} --version exits {tools[tool]['rc']}: {tools[tool]['out']}")
    for tool, component in PINNED.items():
        recorded = facts.component(component).get("version")
        # 12.1 must not match 12.10, nor 2.1 match 12.1.
        if recorded and not re.search(rf"(?<![\d.]){re.escape(recorded)}(?![\d])", tools[tool]["out"]):
            wrong.append(f"{tool} says {tools[tool]['out']!r}, wanted {recorded}")
    assert not wrong, "; ".join(wrong)
    facts.note(", ".join(tools[tool]["out"] for tool in PINNED))


@check(
    id="versions.runner-python",
    title="The Python packages can be imported, and their versions fit each other",
    layer="versions",
    profiles=RUNNER,
    causes=("A package was added without a new lock: scripts/lock.",),
    fix="`python3 -m pip check` in the container names the packages that conflict.",
)
def test_python(facts):
    packages = facts["runner"]["packages"]
    broken = [f"{name}: {error}" for name, error in packages["imports"].items() if error]
    assert packages["imports"], "no package was imported, wanted some"
    assert not broken, f"can't be imported: {'; '.join(broken)}"
    assert packages["check"]["rc"] == 0, f"`pip check` says {packages['check']['out'].strip()}"
    facts.note(f"{len(packages['installed'])} packages")


@check(
    id="versions.runner-cuda",
    title="CUDA's libraries load in the recorded version",
    layer="versions",
    profiles=RUNNER,
    needs=("record", "component:cuda"),
    causes=("A library is not on the linker's path: /etc/ld.so.conf.d/gpukiln-cuda.conf, ldconfig.",),
    fix="Check `ldconfig -p | grep cudart` in the container; build the image again.",
)
def test_cuda(facts):
    libraries, recorded = facts["runner"]["libraries"], facts.component("cuda")["version"]
    broken = [f"{n}: {libraries[n]['error']}" for n in ("cudart", "cublas") if libraries[n]["error"]]
    nvrtc = facts["runner"]["nvrtc"]
    # cuBLAS and cudart are loaded with the program, NVRTC compiles: each fails for its own reason.
    broken += [f"nvrtc: {nvrtc['error']}"] * bool(nvrtc["error"])
    assert not broken, "; ".join(broken)
    versions = {"cudart": release(libraries["cudart"]["version"]), "nvrtc": nvrtc["version"]}
    other = [f"{name} {version}" for name, version in versions.items() if version != recorded]
    assert not other, f"found {', '.join(other)}; wanted {recorded}"
    facts.note(f"CUDA {recorded}")


def assert_recorded_version(facts, component, title, major):
    """A library reports one number: its major version times `major`, its minor one times 100, its patch."""
    library, recorded = facts["runner"]["libraries"][component], facts.component(component)["version"]
    assert not library["error"], f"{title} can't be loaded: {library['error']}"
    number = library["version"]
    version = f"{number // major}.{number % major // 100}.{number % 100}"
    assert version == recorded, f"found {title} {version}, wanted {recorded}"
    facts.note(version)


@check(
    id="versions.runner-cudnn",
    title="cuDNN loads in the recorded version",
    layer="versions",
    profiles=RUNNER,
    needs=("record", "component:cudnn"),
    after=("versions.runner-cuda",),
    causes=("The library is built for another CUDA, or is not on the linker's path.",),
    fix="Check `ldconfig -p | grep cudnn` in the container; build the image again.",
)
def test_cudnn(facts):
    assert_recorded_version(facts, "cudnn", "cuDNN", 1000)


@check(
    id="versions.runner-nccl",
    title="NCCL loads in the recorded version",
    layer="versions",
    profiles=RUNNER,
    needs=("record", "component:nccl"),
    after=("versions.runner-cuda",),
    causes=("Its library is not on the linker's path.",),
    fix="Check `ldconfig -p | grep nccl` in the container; build the image again.",
)
def test_nccl(facts):
    assert_recorded_version(facts, "nccl", "NCCL", 10000)


@check(
    id="versions.actions-runner",
    title="The actions runner starts in the recorded version, from the path that the ARC chart uses",
    layer="versions",
    profiles=RUNNER,
    needs=("record", "component:actions_runner"),
    causes=("Its tree is not in the home folder, or libicu is missing.",),
    fix="`ldd ~/bin/libcoreclr.so` names missing libraries; the chart starts /home/runner/run.sh.",
)
def test_actions_runner(facts):
    runner, recorded = facts["runner"]["actions_runner"], facts.component("actions_runner")["version"]
    assert runner["present"], "run.sh is not in the runner's home, wanted it there"
    assert (runner["rc"], runner["version"]) == (0, recorded), (
        f"Runner.Listener --version exits {runner['rc']}: {runner['version']}; wanted {recorded}"
    )
    facts.note(runner["version"])


@check(
    id="runtime.runner-init",
    title="Process 1 forwards signals and reaps the orphaned processes of jobs",
    layer="runtime",
    profiles=RUNNER,
    needs=("entrypoint",),
    causes=("ENTRYPOINT is not tini.",),
    fix='ENTRYPOINT ["/usr/bin/tini", "--"] in the Dockerfile.',
)
def test_init(facts):
    command = facts["runner"]["process_1"]
    assert command.startswith("/usr/bin/tini"), f"process 1 is `{command}`, wanted /usr/bin/tini"


@check(
    id="runtime.ccache",
    title="The compiler cache works across two builds",
    layer="runtime",
    profiles=RUNNER,
    causes=("CCACHE_DIR is not writable for the runner's user, or another user owns its volume.",),
    fix="Check `ccache --show-stats --verbose` in the container; the runner's user must own the folder.",
)
def test_ccache(facts):
    ccache = facts["runner"]["ccache"]
    # --zero-stats, then two builds of the same file: the second must be a hit.
    assert not any(ccache["rc"]), f"ccache and the compiler exit {ccache['rc']}, wanted 0"
    assert (ccache["misses"], ccache["hits"]) == (1, 1), (
        f"two builds of one file gave {ccache['misses']} misses and {ccache['hits']} hits, wanted 1 and 1"
    )


@check(
    id="runtime.job-hooks",
    title="The job hooks are set, and succeed",
    layer="runtime",
    profiles=RUNNER,
    causes=(
        "ACTIONS_RUNNER_HOOK_JOB_STARTED or _COMPLETED is not set, or a tool that they call is missing.",
    ),
    fix="Run the hook in the container: `bash -e $ACTIONS_RUNNER_HOOK_JOB_STARTED`.",
)
def test_hooks(facts):
    for name, hook in facts["runner"]["hooks"].items():
        assert hook["path"], f"{name} is not set, wanted a script"
        assert hook["rc"] == 0, f"{hook['path']} exits {hook['rc']}: {hook['out'].strip()}"
        # A hook that is an empty file succeeds too.
        assert "gpukiln:" in hook["out"], f"{hook['path']} prints nothing, wanted its result"


@check(
    id="compute.runner-nvrtc",
    title="NVRTC compiles a kernel, and ptxas assembles it",
    layer="compute",
    profiles=RUNNER,
    needs=("component:cuda",),
    after=("versions.runner-cuda",),
    causes=("libnvrtc-builtins is not installed with NVRTC, or ptxas belongs to another CUDA.",),
    fix="`ptxas --version` and `ldconfig -p | grep nvrtc` in the container must say the same version.",
)
def test_nvrtc(facts):
    ptxas = facts["runner"]["ptxas"]
    assert ptxas["rc"] == 0, f"ptxas exits {ptxas['rc']}: {ptxas['out']}"
    assert ptxas["cubin"], "ptxas wrote no program with the kernel"


@check(
    id="compute.runner-nvcc",
    title="nvcc compiles and links a program",
    layer="compute",
    profiles=RUNNER,
    needs=("record", "component:cuda_nvcc"),
    causes=("There is no host compiler, or it is too new for this CUDA.",),
    fix="`nvcc -v` shows which host compiler it calls; CUDA's installation guide lists the supported ones.",
)
def test_nvcc(facts):
    nvcc, tool = facts["runner"]["nvcc"], facts["runner"]["tools"]["nvcc"]
    recorded = facts.component("cuda_nvcc")["version"]
    # nvcc of another CUDA may come first on PATH.
    assert f"release {recorded}" in tool["out"], f"nvcc says {tool['out']!r}, wanted release {recorded}"
    assert nvcc["rc"] == 0, f"nvcc exits {nvcc['rc']}: {nvcc['out']}"
    assert nvcc["program"], "nvcc wrote no program"
