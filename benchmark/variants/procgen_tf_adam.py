"""ppo_procgen.py with TensorFlow's Adam, which adds epsilon before the bias correction.

    python benchmark/variants/procgen_tf_adam.py --env-id jumper --adam-eps 1e-5

Kingma and Ba 2015, arXiv:1412.6980, section 2 (end): with "epsilon hat" the step is
lr * sqrt(1 - beta2^t) / (1 - beta1^t) * m / (sqrt(v) + epsilon). PyTorch divides by
sqrt(v / (1 - beta2^t)) + epsilon instead. The two are equal if PyTorch's epsilon is
epsilon / sqrt(1 - beta2^t): 32 times as large in the first step, equal after some thousand.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import ppo_procgen as script

Args = script.Args


class TensorFlowAdam(torch.optim.Adam):
    def __init__(self, parameters, eps: float, fused: bool):
        super().__init__(parameters, eps=eps, fused=fused)
        self.tensorflow_eps = eps

    def step(self):
        """Step t (from 1), with the epsilon that makes PyTorch's update TensorFlow's."""
        for group in self.param_groups:
            state = self.state.get(group["params"][0], {})
            t = float(state.get("step", 0)) + 1
            group["eps"] = self.tensorflow_eps / (1 - group["betas"][1] ** t) ** 0.5
        super().step()


script.torch.optim.Adam = TensorFlowAdam
script.SCRIPT = "procgen_tf_adam"
script.__doc__ = __doc__

if __name__ == "__main__":
    sys.exit(script.main())
