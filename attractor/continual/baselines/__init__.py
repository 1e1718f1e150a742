"""The controls: other ways to learn a new domain, all with the same few methods.

>>> import itertools
>>> import numpy as np
>>> from attractor.config import GPTConfig
>>> from attractor.continual.baselines import EWC
>>> from attractor.data import Batches
>>> from attractor.model import GPT
>>> model = GPT(GPTConfig(vocab_size=10, context=8, num_layers=1, num_heads=1, dim=16))
>>> old = Batches(np.arange(100) % 7, batch_size=4, context=8, seed=0)
>>> new = Batches(np.arange(100) % 10, batch_size=4, context=8, seed=0)
>>> method = EWC(model, anchor=itertools.islice(old, 5), strength=100.0, learning_rate=1e-3)
>>> for inputs, targets in itertools.islice(new, 20):
...     loss = method.step(inputs, targets)  # nats per token, before the step
>>> model = method.finish()
"""

from attractor.continual.baselines.baseline import Baseline
from attractor.continual.baselines.ewc import EWC
from attractor.continual.baselines.fine_tune import FineTune
from attractor.continual.baselines.gem import AGEM, GEM
from attractor.continual.baselines.lora import LoRA
from attractor.continual.baselines.replay import Replay

__all__ = ["AGEM", "EWC", "GEM", "Baseline", "FineTune", "LoRA", "Replay"]
