"""``echelon verify``: compare training under the script's own plan with training in one process, step by step.

The command runs the script twice. In the first run (``VerifyRecorder``) the ranks train as usual and write their
batches, losses, full gradients and full weights to disk. In the second run (``VerifyReplayer``) one process is given
the initial weights of the ranks and, in each step, the merged batches of all replicas; it measures the difference from
the first run. Both runs stop after a number of steps, inside ``engine.step()``. For a custom training loop
(``engine.backward``, ``engine.update``), all batches and random numbers that the loop takes in are recorded, and the
one process is given them in the same order (``loop_events``, ``loop_replay``).
"""
