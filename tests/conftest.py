"""What every test needs."""

import signal

# A shell without job control starts background jobs with Ctrl-C ignored, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
