"""Copies of the training state in the memory of the hosts' launchers, so that a fault costs a step, not a checkpoint.

bank        a memory file with two slots, so that one copy is whole while the next is written
server      keeps banks in the launcher, and gives out what they hold; companion: how the launcher runs it
pieces      which rank of those that hold a tensor copies it, and what must go to another host
sources     where a rank's tensors lie, found once and looked at again every step
copies      a rank's side: writes its copy after a step, and sends what only its host has to the next
remembered  the newest complete set of copies, read as if it were a checkpoint
"""
