"""``echelon verify``: the script's own plan against one process, step by step, and where they part.

The command runs the script twice. In the first run (``Recorder``) the ranks train as they always do and write down
their batches, losses, whole gradients and whole weights. In the second (``Replayer``) one process is given the weights
they began with and, in each step, their batches put together; it measures how far it comes out elsewhere. Both stop
after some steps, inside ``engine.step()``. Of a loop of one's own (``engine.backward``, ``engine.update``) all that it
takes in is written down, and given to the one process in the same order (``events``, ``follow``).
"""
