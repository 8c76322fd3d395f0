import os
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
torch.set_num_threads(1)  # the models are tiny: threads would only wait for one another
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="nanograft-cache-")  # what rounds cost here is nobody else's business
