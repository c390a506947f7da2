"""The program of the engine's process, which signals make crash inside native code.

SIGUSR1 has C's `abort` called, SIGUSR2 has C read memory at address 0: with the interpreter's lock
held and the engine's threads at work, as a broken library would do it.
"""

import ctypes
import signal
import sys

from engine.hosts.process import program

if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, lambda *_: ctypes.CDLL(None).abort())
    signal.signal(signal.SIGUSR2, lambda *_: ctypes.string_at(0))
    sys.exit(program.main())
