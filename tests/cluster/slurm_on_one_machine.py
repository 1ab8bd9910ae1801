"""A real Slurm on one machine, for tests and rehearsals: munge, slurmctld, two GPU nodes and an NPU node. No systemd.

    python tests/cluster/slurm_on_one_machine.py start     # needs root, slurm-wlm and munge
    python tests/cluster/slurm_on_one_machine.py stop

The devices are fakes: character devices that do nothing, so that Slurm hands out ids and jobs compute on the CPU. The
nodes have more CPUs and memory than the machine on paper. Partitions: `gpu` (gpu01 and gpu02, gres gpu:a100:8 each),
`npu` (npu01, gres npu:910c:8) and `cpu` (all). The configuration goes to Slurm's default path, because jobs of
Snakemake's executor lose SLURM_CONF; a configuration that this script has not written is never touched.
"""

import argparse
import os
import pwd
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

CONFIGURATION = Path("/etc/slurm")
STATE = Path("/var/tmp/slurm-on-one-machine")
MARK = "# Written by slurm_on_one_machine.py for tests; `stop` removes it."
NODES = {"gpu01": ("gpu", "a100", 17003), "gpu02": ("gpu", "a100", 17005), "npu01": ("npu", "910c", 17004)}
DEVICES_PER_NODE = 8
CPUS_PER_NODE = 64
MEMORY_MB = 1_000_000

SLURM_CONF = f"""{MARK}
ClusterName=onemachine
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=17002
SlurmUser=root
AuthType=auth/munge
AuthInfo=cred_expire=40
StateSaveLocation={STATE}/state
SlurmdSpoolDir={STATE}/%n
SlurmctldPidFile={STATE}/slurmctld.pid
SlurmdPidFile={STATE}/%n.pid
SlurmctldLogFile={STATE}/slurmctld.log
SlurmdLogFile={STATE}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
GresTypes=gpu,npu
MinJobAge=900
ReturnToService=2
SlurmdTimeout=20
KillWait=20
MessageTimeout=30
SchedulerParameters=sched_interval=2,batch_sched_delay=0,sched_min_interval=100000
"""


def configuration() -> tuple[str, str]:
    """Return slurm.conf and gres.conf."""
    slurm, gres = [SLURM_CONF.rstrip()], [MARK, "AutoDetect=off"]
    for node, (kind, model, port) in NODES.items():
        slurm.append(
            f"NodeName={node} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs={CPUS_PER_NODE} "
            f"RealMemory={MEMORY_MB} Gres={kind}:{model}:{DEVICES_PER_NODE} State=UNKNOWN"
        )
        files = f"{STATE}/devices/{kind}[0-{DEVICES_PER_NODE - 1}]"
        gres.append(f"NodeName={node} Name={kind} Type={model} File={files}")
    partitions = {kind: [node for node in NODES if NODES[node][0] == kind] for kind in ("gpu", "npu")}
    for name, nodes in {**partitions, "cpu": list(NODES)}.items():
        slurm.append(f"PartitionName={name} Nodes={','.join(nodes)} MaxTime=INFINITE State=UP")
    return "\n".join(slurm) + "\n", "\n".join(gres) + "\n"


def why_not() -> str | None:
    """Return why a cluster cannot be started here; None if it can."""
    missing = [name for name in ("munged", "slurmctld", "slurmd", "srun") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not found (Debian and Ubuntu: apt-get install slurm-wlm munge)"
    if os.geteuid() != 0:
        return "not root"
    existing = CONFIGURATION / "slurm.conf"
    if existing.exists() and MARK not in existing.read_text(encoding="utf-8"):
        return f"{existing} is somebody's own"
    return None


def start() -> None:
    """Write the configuration and start every daemon; return when all nodes are idle."""
    reason = why_not()
    if reason is not None:
        sys.exit(f"no Slurm on this machine: {reason}")
    stop()
    STATE.mkdir(mode=0o755)
    for folder in ("state", "devices", *NODES):
        (STATE / folder).mkdir()
    for kind in sorted({kind for kind, _, _ in NODES.values()}):
        for index in range(DEVICES_PER_NODE):  # as /dev/null
            os.mknod(STATE / "devices" / f"{kind}{index}", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    CONFIGURATION.mkdir(exist_ok=True)
    for name, text in zip(("slurm.conf", "gres.conf"), configuration(), strict=True):
        (CONFIGURATION / name).write_text(text, encoding="utf-8")
    start_munge()
    start_controller()
    for node in NODES:
        start_node(node)
    wait_until_idle()


def start_munge() -> None:
    """Start munged as its own user, unless one runs already."""
    if subprocess.run(["munge", "-n"], capture_output=True, check=False).returncode == 0:
        return
    user = pwd.getpwnam("munge")
    for folder in ("/run/munge", "/var/log/munge", "/var/lib/munge"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        os.chown(folder, user.pw_uid, user.pw_gid)
    os.chmod("/run/munge", 0o755)  # clients of every user reach the socket in it
    subprocess.run(["runuser", "-u", "munge", "--", "munged", "--pid-file=/run/munge/munged.pid"], check=True)
    (STATE / "munge.mine").touch()


def start_controller() -> None:
    """Start slurmctld; it takes up the state that an earlier one left."""
    subprocess.run(["slurmctld"], check=True)


def start_node(node: str) -> None:
    """Start the slurmd of a node."""
    subprocess.run(["slurmd", "-N", node], check=True)


def kill(daemon: str, how: signal.Signals = signal.SIGTERM) -> None:
    """End slurmctld or the slurmd of a node (by the node's name), and wait until it is gone."""
    end(STATE / f"{daemon}.pid", "slurmctld" if daemon == "slurmctld" else "slurmd", how)


def end(pid_file: Path, program: str, how: signal.Signals = signal.SIGTERM) -> None:
    """End the process whose number `pid_file` holds, wait until it is gone, and remove the file.

    The file of a machine that went down, or of a copied disk, names a process that is gone or by now another program:
    nothing but `program` is ever signalled.
    """
    try:
        pid = int(pid_file.read_text(encoding="utf-8"))
        ours = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip() == program
        if ours:
            os.kill(pid, how)
    except (FileNotFoundError, ProcessLookupError):
        ours = False
    deadline = time.monotonic() + 20
    while ours and Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    pid_file.unlink(missing_ok=True)


def wait_until_idle(seconds: float = 60) -> None:
    """Wait until all nodes take jobs; end with the controller's words if they do not."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        shown = subprocess.run(["sinfo", "-h", "-N", "-o", "%N %T"], capture_output=True, text=True, check=False).stdout
        if {line for line in shown.splitlines() if line} == {f"{node} idle" for node in NODES}:
            return
        time.sleep(0.5)
    log = (STATE / "slurmctld.log").read_text(encoding="utf-8")[-2000:]
    sys.exit(f"the nodes did not come up in {seconds:.0f} s:\n{shown}\n{log}")


def stop() -> None:
    """Cancel all jobs, end what `start` started, and remove what it wrote."""
    if not STATE.exists():
        return
    if subprocess.run(["scontrol", "ping"], capture_output=True, check=False).returncode == 0:
        subprocess.run(["scancel", "--user=root"], capture_output=True, check=False, timeout=60)
        time.sleep(1)
    for node in NODES:
        kill(node)
    kill("slurmctld")
    if (STATE / "munge.mine").exists():
        end(Path("/run/munge/munged.pid"), "munged")
    for name in ("slurm.conf", "gres.conf"):
        path = CONFIGURATION / name
        if path.exists() and MARK in path.read_text(encoding="utf-8"):
            path.unlink()
    shutil.rmtree(STATE)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("start", help="start the cluster; one that runs is replaced")
    actions.add_parser("stop", help="end it and remove every trace")
    actions.add_parser("why-not", help="print why it cannot be started here, if so")
    for verb in ("kill", "revive"):
        one = actions.add_parser(verb, help=f"{verb} a daemon as a fault would")
        one.add_argument("daemon", choices=["slurmctld", *NODES])
    requested = parser.parse_args()
    if requested.action == "start":
        start()
    elif requested.action == "stop":
        stop()
    elif requested.action == "why-not":
        print(why_not() or "")  # noqa: T201
    elif requested.action == "kill":
        kill(requested.daemon, signal.SIGKILL)
    elif requested.daemon == "slurmctld":
        start_controller()
    else:
        start_node(requested.daemon)
