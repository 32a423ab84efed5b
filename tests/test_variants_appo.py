"""benchmark/variants/appo_vtrace.py against independent oracles, and as a user runs it."""

import importlib
import json
import subprocess
import sys
import types

import numpy as np
import pytest
import torch

from conftest import ROOT, read
from test_appo_atari import compare_with_plain

FOLDER = ROOT / "benchmark" / "variants"


@pytest.fixture
def variant(monkeypatch):
    """The variant, imported anew with its script; other tests keep the script as it is."""
    before = sys.modules.pop("appo_atari")
    monkeypatch.syspath_prepend(FOLDER)
    yield importlib.import_module("appo_vtrace")
    del sys.modules["appo_vtrace"]
    sys.modules["appo_atari"] = before


def plain_vtrace(reward, value, ended, cut, rho, gamma):
    """Targets, advantages (T, N) by the definition's sums over each episode, O(T^2); value (T + 1, N)."""
    target, advantage, rho = value.copy(), np.zeros(reward.shape), np.minimum(rho, 1)
    for t, n in np.ndindex(*reward.shape):
        factor = 1.0
        for k in range(t, len(reward)):
            following = 0.0 if ended[k, n] else value[k + 1, n]
            target[t, n] += factor * rho[k, n] * (reward[k, n] + gamma * following - value[k, n])
            factor *= gamma * rho[k, n]
            if ended[k, n] or cut[k, n]:
                break
    for t, n in np.ndindex(*reward.shape):
        following = 0.0 if ended[t, n] else value[t + 1, n] if cut[t, n] else target[t + 1, n]
        advantage[t, n] = rho[t, n] * (reward[t, n] + gamma * following - value[t, n])
    return target[:-1], advantage


def test_vtrace_is_the_definitions_sums(variant):
    """With both kinds of ends at once too: a termination has no future value, each end cuts the trace."""
    rng = np.random.default_rng(0)
    reward, value, rho = rng.normal(size=(50, 6)), rng.normal(size=(51, 6)), rng.exponential(size=(50, 6))
    ended, cut = rng.random((2, 50, 6)) < 0.15
    columns = [torch.tensor(x, dtype=torch.float64) for x in (reward, value, ended, ended | cut, rho)]
    expected = plain_vtrace(reward, value, ended, cut, rho, 0.95)
    for got, plain in zip(variant.vtrace(*columns, 0.95), expected, strict=True):
        np.testing.assert_allclose(got, plain, rtol=1e-12, atol=1e-12)


def test_ratios_stay_within_their_limits(variant):
    """0.05, and then the smaller one of ratio and 1."""
    ones, returns = torch.ones(1, 2), types.SimpleNamespace(mean=0, std=1)
    rows = dict(
        obs=torch.zeros(2, 2, 1), action=torch.zeros(1, 2, dtype=torch.int64), logp=torch.tensor([[0.0, -40.0]])
    )
    rows |= dict(reward=ones, terminated=ones, done=ones)

    class Critic(torch.nn.Module):
        def forward(self, obs):  # log pi of action 0 is -20
            return torch.tensor([-20.0, 0.0]).expand(len(obs), 2), torch.zeros(len(obs))

    critic = Critic()
    critic.returns = returns
    _, advantage = variant.targets_of(critic, rows, variant.script.Args())
    assert advantage.flatten().tolist() == pytest.approx([0.05, 1])


@pytest.mark.usefixtures("in_float64")
def test_two_iterations_match_plain_float64(variant, tmp_path):
    """New targets in every minibatch; the returns' statistics learn from those of the first epoch."""
    compare_with_plain(variant.script, tmp_path, max_grad_norm=0, vtrace=plain_vtrace)


def test_runs_and_continues(tmp_path):
    """As typed, but small."""
    flags = "--num-envs 2 --num-groups 1 --num-steps 16 --minibatch-size 32 --num-minibatches 1 --threads 1"
    flags += " --sync --eval-episodes 1 --max-episode-steps 20 --noop-max 1 --run-name x --total-timesteps 32"
    for words in (flags.split(), ["--resume", "runs/x", "--total-timesteps", "64"]):
        command = [sys.executable, FOLDER / "appo_vtrace.py", *words]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
    assert [row["step"] for row in read(tmp_path / "runs" / "x")] == ["32", "64"]
    assert json.loads((tmp_path / "runs" / "x" / "eval.json").read_text())["step"] == 64
