"""The remote end of an ssh connection: starts a launcher, forwards signals to it, and ends it with the connection.

ssh sends the text of this file first, so the host needs nothing of Echelon for it, and it imports the standard library
only. Then one line of JSON says what to start; the secret is sent in it, because every user of a host can read command
lines. Each further line is the name of a signal. The end of the input means that the local command has ended.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
from types import FrameType

#: The first line of stderr after a launcher was started: ssh and the shell have succeeded.
HAIL = "echelon-far: started"


def main() -> None:
    order = json.loads(sys.stdin.buffer.readline())
    try:
        os.chdir(order["directory"])
    except OSError as error:
        sys.exit(f"the directory {order['directory']} cannot be entered there: {error.strerror}")
    launcher = subprocess.Popen(
        order["argv"],
        env=os.environ | order["environment"],
        stdin=subprocess.DEVNULL,
        preexec_fn=lambda: _end_with_us(order["patience"]),  # noqa: PLW1509 - there are no other threads yet
    )
    if order["hail"]:
        print(HAIL, file=sys.stderr, flush=True)
    _hand_on_our_own_signals(launcher)
    threading.Thread(target=_handle_signal, args=(launcher, order["patience"]), daemon=True).start()
    code = launcher.wait()
    sys.stderr.flush()
    os._exit(code if code >= 0 else 128 - code)  # because the thread still waits for input


def _hand_on_our_own_signals(launcher: subprocess.Popen[bytes]) -> None:
    def hand_on(number: int, frame: FrameType | None) -> None:
        launcher.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, hand_on)


def _end_with_us(patience: float) -> None:
    """Have the kernel end the launcher if this process is killed."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM if patience else signal.SIGKILL)


def _handle_signal(launcher: subprocess.Popen[bytes], patience: float) -> None:
    """Forward signals until the end of the input, then end the launcher.

    Without patience the launcher is killed, so that other hosts see it as lost and not as leaving.
    """
    for line in sys.stdin.buffer:
        launcher.send_signal(signal.Signals[line.decode().strip()])
    if not patience:
        launcher.kill()
    launcher.terminate()
    try:
        launcher.wait(patience)
    except subprocess.TimeoutExpired:
        launcher.kill()


if __name__ == "__main__":
    main()
