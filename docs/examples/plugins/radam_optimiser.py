"""An optimiser: any of torch's, here RAdam, which needs no warm-up.

``python train.py plugins=[radam_optimiser.py] optim=adamw optim.name=radam``
"""

import torch

from plugins import OPTIMISERS

OPTIMISERS["radam"] = torch.optim.RAdam
