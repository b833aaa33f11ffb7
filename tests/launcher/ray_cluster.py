"""A Ray cluster on this machine, in a process of its own: does what it is told line by line, and ends with its input.

The head has no processor to give away, so that jobs run on the other nodes, which can be lost. Each node is a real one,
but for the two Python processes that serve its dashboard and prepare environments for its jobs, which no test needs
and which take longer to start than all the rest: stand-ins write down, as they would, that no agent is there.
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

SMALL = {"object_store_memory": 80 << 20, "include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
#: A node that refuses calls is known to be lost in 2 s in place of 15, one that is merely slow has as long as ever;
#: and no process is started before there is work for it.
QUICK = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 4,
    "enable_worker_prestart": False,
    "prestart_worker_first_driver": False,
}
#: Files that a node waits for from either of them.
AGENTS = {
    "--dashboard_agent_command=": ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port"),
    "--runtime_env_agent_command=": ("runtime_env_agent_port",),
}


def main() -> None:
    from ray._private import node, services
    from ray.cluster_utils import Cluster

    start = services.start_ray_process
    services.start_ray_process = lambda command, *args, **named: start(without_agents(command), *args, **named)
    node.Node.start_api_server = lambda *args, **named: None
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "_system_config": QUICK, **SMALL})
    nodes = {}
    for words in map(str.split, sys.stdin):
        if words[0] == "add":
            added = cluster.add_node(num_cpus=1, **SMALL)
            nodes[added.all_processes["raylet"][0].process.pid] = added
        else:
            cluster.remove_node(nodes.pop(int(words[1])), allow_graceful=False)
        print(cluster.address, cluster.head_node.get_session_dir_path(), flush=True)
    cluster.shutdown()


def without_agents(command: list[str]) -> list[str]:
    """The command of a node, with a stand-in in the place of each agent."""
    return [
        next((name + stand_in(word, AGENTS[name]) for name in AGENTS if word.startswith(name)), word)
        for word in command
    ]


def stand_in(agent: str, ports: tuple[str, ...]) -> str:
    directory, node = (re.search(rf"--{name}=(\S+)", agent)[1] for name in ("session-dir", "node-id"))
    return subprocess.list2cmdline([sys.executable, "-IS", __file__, directory, node, *ports])


def be_a_stand_in(directory: str, node: str, *ports: str) -> None:
    """For as long as its node lives."""
    parent = os.getppid()
    for port in ports:
        part = Path(directory, f".{port}_{node}")
        part.write_text("-1")
        part.rename(Path(directory, f"{port}_{node}"))
    while os.getppid() == parent:
        time.sleep(0.5)


if __name__ == "__main__":
    be_a_stand_in(*sys.argv[1:]) if sys.argv[1:] else main()
