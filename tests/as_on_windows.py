"""pytest without the signals and modules that Windows lacks."""
import signal
import sys

import pytest

if __name__ == "__main__":
    del signal.SIGHUP
    sys.modules |= dict.fromkeys(["fcntl", "termios", "pty"])
    sys.exit(pytest.main(sys.argv[1:]))
