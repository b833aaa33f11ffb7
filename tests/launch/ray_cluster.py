"""A Ray cluster on this machine, in a process of its own: does what it is told line by line, and ends with its input.

The head has no processor to give away, so that jobs run on the other nodes, which can be lost.
"""

import sys

from ray.cluster_utils import Cluster

SMALL = {"object_store_memory": 80 << 20, "include_dashboard": False}


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **SMALL})
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
