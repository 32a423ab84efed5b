"""The algorithm of impala_procgen.py against independent oracles in float64."""

import random

import impala_procgen
import numpy as np
import pytest
import torch
from impala_procgen import Agent, Args

import conftest
from conftest import SAME_STEP, FakeVecEnv, Snow, impala_network, random_episodes, read

SHAPE = (3, 16, 16)
SMALL = dict(num_envs=4, num_groups=1, num_steps=16, minibatch_size=64, update_epochs=1, channels=(4, 4, 4), sync=True)
SMALL |= dict(replay_slots=0, replay_proportion=0, eval_episodes=0, threads=1, device="cpu")
run = conftest.runner(impala_procgen, SMALL)


def fake(num_envs=4, seed=0, cls=FakeVecEnv):
    """Same-step episodes of one to six steps; a truncation counts as an end."""
    return cls(random_episodes(num_envs, seed), SAME_STEP, shape=SHAPE)


def plain_vtrace(reward, value, ended, cut, rho, gamma, lam=1):
    """Targets, advantages (T, N) by the definition's sums over each episode, O(T^2); value (T + 1, N)."""
    target, advantage, rho = value.copy(), np.zeros(reward.shape), np.minimum(rho, 1)
    for t, n in np.ndindex(*reward.shape):
        factor = 1.0
        for k in range(t, len(reward)):
            following = 0.0 if ended[k, n] else value[k + 1, n]
            target[t, n] += factor * rho[k, n] * (reward[k, n] + gamma * following - value[k, n])
            factor *= gamma * lam * rho[k, n]
            if ended[k, n] or cut[k, n]:
                break
    for t, n in np.ndindex(*reward.shape):
        following = 0.0 if ended[t, n] else value[t + 1, n] if cut[t, n] else target[t + 1, n]
        advantage[t, n] = rho[t, n] * (reward[t, n] + gamma * following - value[t, n])
    return target[:-1], advantage


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("replay", [0, 1])
def test_two_iterations_match_plain_float64(replay, tmp_path, monkeypatch):
    """V-trace in every pass, *summed* losses as in the reference, clip, Adam, from both groups' frames and actions.

    With replay the second iteration also trains twice on the first one's batch, against the policy that played it.
    """

    class Oldest(random.Random):
        def choice(self, ring):
            return ring[0]

    monkeypatch.setattr(impala_procgen.random, "Random", Oldest)
    groups = [fake(2, seed, Snow) for seed in (0, 1)]
    args = dict(update_epochs=2, max_grad_norm=3.0 / 64, adam_eps=0.5 / 64, gamma=0.9, num_groups=2, micro_batch=50)
    args |= dict(lr=(0, 1e-2, 64, 2e-2), vtrace_lambda=0.8, vf_coef=0.4, ent_coef=(0, 0.02, 128, 0.04))
    metrics, saved = run(tmp_path, groups, 2, **args, replay_slots=2 * replay, replay_proportion=replay)
    torch.manual_seed(1)
    w = dict(Agent(SHAPE, 4, Args(channels=(4, 4, 4))).named_parameters())
    optimizer = torch.optim.Adam(w.values(), eps=0.5)
    norms, played, mu = [], [], []
    for i, (lr, ent_coef) in enumerate([(1e-2, 0.02), (2e-2, 0.03)]):
        optimizer.param_groups[0]["lr"] = lr
        t = 16 * i
        obs = torch.from_numpy(np.concatenate([np.stack(group.seen[t : t + 17]) for group in groups], 1))
        action = torch.from_numpy(np.concatenate([np.stack(group.actions[t : t + 16]) for group in groups], 1))
        log = np.concatenate([np.stack(group.log[t : t + 16]) for group in groups], 2)
        played.append((obs, action, log[:, 0], (log[:, 1] + log[:, 2]).astype(bool)))
        losses, replay_rho = [], []
        for p, b in enumerate([i, i] + [0, 0] * replay):  # which batch a pass trains on
            obs, action, reward, done = played[b]
            logits, value = impala_network(w, obs.flatten(0, 1))
            logp, value = logits.view(17, 4, 4)[:16].log_softmax(-1), value.view(17, 4)
            action_logp = logp.gather(-1, action[..., None])[..., 0]
            if p == 0:
                mu.append(action_logp.detach())  # of acting: the weights before the first pass
            ratio = (action_logp.detach() - mu[b]).exp()
            critic = value.detach().numpy()  # truncations count as ends
            targets = plain_vtrace(reward, critic, done, done, ratio.numpy(), 0.9, 0.8)
            vs, advantage = map(torch.from_numpy, targets)
            if p == 0:
                explained = 1 - ((vs - value[:16].detach()).var() / vs.var()).item()
            sums = [-(action_logp * advantage).sum(), ((value[:16] - vs) ** 2).sum() / 2, -(logp.exp() * logp).sum()]
            optimizer.zero_grad()
            (sums[0] + 0.4 * sums[1] - ent_coef * sums[2]).backward()
            norms.append(sum(x.grad.square().sum().item() for x in w.values()) ** 0.5)
            scale = min(1, 3 / (norms[-1] + 64e-6))  # PyTorch adds 1e-6 to the norm, which the script takes of means
            for x in w.values():
                x.grad *= scale
            optimizer.step()
            if p < 2:
                kl = (ratio - 1 - ratio.log()).mean().item()
                losses.append([x.item() / 64 for x in sums] + [kl, norms[-1] / 64])
            else:
                replay_rho.append(ratio.clamp(max=1).mean().item())
    assert max(norms) > 3 and explained > 5e-4  # else they were not tested
    columns = ("loss/policy", "loss/value", "loss/entropy", "train/approx_kl", "train/grad_norm")
    np.testing.assert_allclose([metrics[x] for x in columns], np.mean(losses, 0), rtol=1e-9)
    assert metrics["train/explained_variance"] == pytest.approx(explained, rel=1e-9)
    assert metrics["train/lr"] == pytest.approx(2e-2)
    assert not replay or replay_rho[0] < 0.999  # else V-trace would not matter
    for key, x in w.items():
        torch.testing.assert_close(saved["agent"][key].double(), x.detach(), rtol=1e-9, atol=1e-12, msg=key)


def test_replay_ring_and_proportion(tmp_path, monkeypatch):
    """First in, first out, any slot is drawn; 1.5 replayed batches a new one on the average, always 1 or 2."""
    ages, counts, learn = [], [], impala_procgen.learn

    class Spy(random.Random):
        def choice(self, ring):
            versions = [int(batch["version"][0, 0]) for batch in ring]  # one SGD step a batch, new or replayed
            assert versions == sorted(set(versions)) and 1 <= len(ring) <= 3
            assert versions[-1] - versions[0] <= 6  # at most 3 SGD steps a slot
            batch = super().choice(ring)
            ages.append(versions[::-1].index(int(batch["version"][0, 0])))
            return batch

    def count(agent, optimizer, actors, batches, *rest):
        counts.append(len(batches) - 1)
        return learn(agent, optimizer, actors, batches, *rest)

    monkeypatch.setattr(impala_procgen.random, "Random", Spy)
    monkeypatch.setattr(impala_procgen, "learn", count)
    run(tmp_path, [fake()], 60, replay_slots=3, replay_proportion=1.5, num_steps=2, minibatch_size=8)
    assert set(counts) == {1, 2} and 1.3 < np.mean(counts) < 1.7
    assert min(np.bincount(ages, minlength=3)) > 15  # of about 90


def test_learns_the_rewarded_action(tmp_path):
    """On the fake env that pays for the action a frame tells: chance is 0.25."""
    envs = [FakeVecEnv([[([0.0] * 8, "terminated")]] * 8, SAME_STEP, shape=(3, 8, 8), learn=True)]
    options = dict(num_envs=8, minibatch_size=128, update_epochs=2, lr=4e-3, gamma=0.5, max_grad_norm=0)
    run(tmp_path, envs, 40, ent_coef=0.02, **options)
    returns = [float(row["episode/return"]) for row in read(tmp_path / "run")]
    assert np.mean(returns[-10:]) > 0.8 * 8
