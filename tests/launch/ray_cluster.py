"""A Ray cluster on this machine, in a process of its own: does what it is told line by line, and ends with its input.

The head has no processor to give away, so that jobs run on the other nodes, which can be lost.
"""

import sys

from ray.cluster_utils import Cluster

SMALL = {"object_store_memory": 80 << 20, "include_dashboard": False, "include_log_monitor": False}
#: A node that refuses calls is known to be lost in 2 s in place of 15, one that is merely slow has as long as ever;
#: and no process is started before there is work for it.
QUICK = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 4,
    "enable_worker_prestart": False,
    "prestart_worker_first_driver": False,
}


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "_system_config": QUICK, **SMALL})
    nodes = {}
    for words in map(str.split, sys.stdin):
        if words[0] == "add":
            node = cluster.add_node(num_cpus=1, **SMALL)
            nodes[node.all_processes["raylet"][0].process.pid] = node
        else:
            cluster.remove_node(nodes.pop(int(words[1])), allow_graceful=False)
        print(cluster.address, flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
