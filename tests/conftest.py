"""What every test needs."""

import os
import signal

# Several processes test at a time: one thread of torch each. The models are too small for more.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell without job control starts background jobs with Ctrl-C ignored, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
