import os
import signal
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
torch.set_num_threads(1)  # the models are tiny: threads would only wait for one another
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="nanograft-cache-")  # what rounds cost here is nobody else's business

# a suite started in the background inherits an ignored Ctrl-C, and so would the processes that tests interrupt
signal.signal(signal.SIGINT, signal.default_int_handler)
