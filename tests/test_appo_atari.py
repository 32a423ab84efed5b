"""The algorithm of appo_atari.py against independent oracles; its threads are tested in test_actors.py."""

import appo_atari
import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from appo_atari import Agent, Args, AtariEnvs, ppo_loss

import conftest
from conftest import FakeVecEnv, Snow, plain_gae, random_episodes, random_play, read

SHAPE = (2, 44, 44)
SMALL = dict(num_envs=4, num_groups=1, num_steps=16, minibatch_size=32, num_minibatches=2, update_epochs=1, sync=True)
SMALL |= dict(eval_episodes=0, threads=1, device="cpu")
run = conftest.runner(appo_atari, SMALL)


def fake(num_envs=4, cls=FakeVecEnv, **options):
    """Next-step episodes of one to six steps, with all kinds of ends."""
    episodes = random_episodes(num_envs, ends=("terminated", "truncated", "life"))
    return cls(episodes, shape=SHAPE, **options)


def test_ratios_stay_within_their_limits():
    """0.05 and 20, which are no clips: they stay with --clip 0, and --vf-clip 0 leaves values as they are."""
    logits = torch.tensor([[-20.0, 0.0], [-20.0, 0.0], [2.0, -2.0]])
    value = torch.tensor([0.0, 0.0, 0.5])
    rows = dict(obs=None, action=torch.zeros(3, dtype=torch.int64), logp=torch.tensor([0.0, -40.0, -2.0]))
    rows |= dict(advantage=torch.tensor([1.0, -1.0, 1.0]), value=torch.zeros(3), target=torch.ones(3))
    for clip, last, error in ((0, np.exp(2 - np.log1p(np.exp(-4))), 0.5), (0.1, 1.1, 0.9)):
        _, terms = ppo_loss(lambda obs: (logits, value), rows, 0, Args(clip=clip, vf_clip=clip))
        assert terms["loss/policy"].tolist() == pytest.approx([-0.05, 20, -last])
        assert terms["train/clip_frac"].any() == (clip > 0)
        assert terms["loss/value"].tolist() == pytest.approx([1, 1, error**2])


def test_initial_weights():
    """Orthogonal of gain 1 in all layers, heads included, and zero biases: as in Sample Factory."""
    parts = ("trunk", "hidden", "policy", "value")
    conftest.assert_initial(Agent((4, 44, 44), 6, Args()), dict.fromkeys(parts, 1.0))


@pytest.mark.filterwarnings("ignore:var")  # of no row
@pytest.mark.parametrize("limit, old", [(6, 8), (5, 8), (5, 16)])
def test_old_rows_are_masked(tmp_path, monkeypatch, limit, old):
    """Of 16 rows the first are five SGD steps old: they count with --max-policy-lag 6. Without a row nothing moves."""
    real, valid = appo_atari.play_rollout, []

    def play_rollout(group, actors, T):
        columns, *rest = real(group, actors, T)
        columns["version"][:old] -= 5
        kept = columns["valid"][old:] if limit == 5 else columns["valid"]
        valid.append(kept.sum().item() / (T * 4))
        return columns, *rest

    monkeypatch.setattr(appo_atari, "play_rollout", play_rollout)
    metrics, saved = run(tmp_path, [fake()], max_policy_lag=limit)
    assert metrics["train/valid_frac"] == pytest.approx(valid[0]) and metrics["async/policy_lag_max"] == 5
    torch.manual_seed(1)
    start = Agent(SHAPE, 4, Args()).policy.weight
    assert torch.equal(saved["agent"]["policy.weight"], start) == (old == 16)


def test_learns_the_rewarded_action(tmp_path):
    """On the fake env that pays for the action a frame tells: chance is 0.25, one action for two of four signs 0.5.

    How far an asynchronous run gets depends on how the machine shares its cores: the best 10 iterations count.
    """
    envs = [FakeVecEnv([[([0.0] * 8, "terminated")]] * 4, shape=(1, 36, 36), learn=True) for _ in range(2)]
    options = dict(num_envs=8, num_groups=2, num_steps=32, minibatch_size=128, num_minibatches=2, update_epochs=2)
    options |= dict(lr=(1e-3,), anneal_lr=False, gamma=0.5, ent_coef=(0.02,), sync=False, num_batches_to_accumulate=1)
    run(tmp_path, envs, 50, **options)
    returns = [float(row["episode/return"]) for row in read(tmp_path / "run")]
    assert max(np.mean(returns[i : i + 10]) for i in range(0, 50, 10)) > 0.65 * 8


def moments(rows):
    """Mean and std of rows and of one more, with mean 0 and variance 1; the variance is 1e-5 larger."""
    mean = rows.sum(0) / (len(rows) + 1)
    return mean, ((1 + rows.square().sum(0)) / (len(rows) + 1) - mean**2 + 1e-5).sqrt()


class Plain:
    """The network in float64, and all frames and returns of which its normalizers know."""

    def __init__(self):
        torch.manual_seed(1)
        named = Agent(SHAPE, 4, Args()).named_parameters()
        self.w = {name: x.detach().double().requires_grad_() for name, x in named}
        self.frames, self.returns = torch.zeros(0, *SHAPE).double(), torch.zeros(0).double()

    def __call__(self, obs):
        """uint8 (B, ...) -> logits, normalized values."""
        (mean, std), w = moments(self.frames), self.w
        x = ((obs.double() / 255 - mean) / std).clamp(-5, 5)
        for i, stride in ((0, 4), (2, 2), (4, 1)):
            x = F.relu(F.conv2d(x, w[f"trunk.{i}.weight"], w[f"trunk.{i}.bias"], stride))
        x = F.relu(F.linear(x.permute(0, 2, 3, 1).flatten(1), w["hidden.weight"], w["hidden.bias"]))
        return F.linear(x, w["policy.weight"], w["policy.bias"]), F.linear(x, w["value.weight"], w["value.bias"])[:, 0]

    def in_rewards(self, value):
        mean, std = moments(self.returns)
        return value.detach().clamp(-5, 5) * std + mean


@pytest.mark.usefixtures("in_float64")
def test_two_iterations_match_plain_float64(tmp_path):
    """Rollout, statistics, targets, losses, Adam, from frames and actions alone, with dummy rows and all ends."""
    compare_with_plain(appo_atari, tmp_path, max_grad_norm=0.3)


def compare_with_plain(module, tmp_path, max_grad_norm, vtrace=None):
    """Two iterations of `module`; vtrace: the function that gives targets and advantages of its minibatches."""
    envs = fake(cls=Snow, dummy_reward=7.0)
    args = dict(max_grad_norm=max_grad_norm, update_epochs=2, adam_eps=1e-3, vf_clip=0.05, lr=(1e-3,))
    args |= dict(ent_coef=(0, 0.02, 128, 0.01), micro_batch=12, clip=0.02)
    metrics, saved = conftest.runner(module, SMALL)(tmp_path, [envs], 2, **args)
    plain, gamma = Plain(), 0.99
    adam = torch.optim.Adam(plain.w.values(), eps=1e-3)
    for first, lr, ent_coef in ((0, 1e-3, 0.02), (16, 0.5e-3, 0.015)):
        seen = torch.from_numpy(np.stack(envs.seen[first : first + 17]))  # (T + 1, N, ...)
        action = torch.from_numpy(np.stack(envs.actions[first : first + 16]))
        reward, ended, cut, dummy = (np.stack(x) for x in zip(*envs.log[first : first + 16], strict=True))
        logits, predicted = (x.detach() for x in plain(seen[:16].flatten(0, 1)))
        logp = logits.log_softmax(-1).gather(-1, action.view(-1, 1)).view(16, 4)
        value = plain.in_rewards(predicted)
        predicted = predicted.view(16, 4)
        plain.frames = torch.cat([plain.frames, seen[:16].flatten(0, 1).double() / 255])
        value = torch.cat([value, plain.in_rewards(plain(seen[16])[1])]).view(17, 4).numpy()
        advantage = torch.from_numpy(plain_gae(reward, value, ended, cut, gamma, 0.95))
        target = advantage + value[:16]
        kept = torch.from_numpy(~dummy)
        explained = 1 - (advantage[kept].var() / target[kept].var()).item()  # of GAE's targets, V-trace or not
        if not vtrace:
            plain.returns = torch.cat([plain.returns, target[kept]])
        adam.param_groups[0]["lr"] = lr
        losses = []
        for epoch in range(2):
            goals = []
            for some in (slice(0, 2), slice(2, 4)):
                keep, better, goal = kept[:, some], advantage[:, some], target[:, some]
                if vtrace:
                    new_logits, now = plain(seen[:, some].flatten(0, 1))
                    new_logp = new_logits[:32].detach().log_softmax(-1).gather(-1, action[:, some].reshape(-1, 1))
                    rho = (new_logp.view(16, 2) - logp[:, some]).exp().clamp(0.05, 20).numpy()
                    now = plain.in_rewards(now).view(17, 2).numpy()
                    rows = (reward[:, some], now, ended[:, some], cut[:, some])
                    goal, better = map(torch.from_numpy, vtrace(*rows, rho, gamma))
                    goals.append(goal[keep])
                mean, std = moments(plain.returns)
                better, goal, old = better[keep], ((goal[keep] - mean) / std).clamp(-5, 5), predicted[:, some][keep]
                better = (better - better.mean()) / better.std(correction=0)
                new_logits, new_value = plain(seen[:16, some][keep])
                near = old + (new_value - old).clamp(-0.05, 0.05)
                value_error = torch.max((new_value - goal) ** 2, (near - goal) ** 2)
                parts = action[:, some][keep], better, logp[:, some][keep], 1 / 1.02, 1.02
                policy, value_loss, entropy, *others = conftest.plain_ppo(new_logits, value_error, *parts)
                loss = policy + 0.5 * value_loss - ent_coef * entropy
                norm = conftest.plain_step(adam, loss, plain.w.values(), max_grad_norm)
                losses.append([x.item() for x in (policy, value_loss, entropy, *others, norm)])
            if vtrace and epoch == 0:
                plain.returns = torch.cat([plain.returns, *goals])
    assert max(outside for *_, outside, _ in losses) > 0
    np.testing.assert_allclose([metrics[name] for name in conftest.LOSSES], np.mean(losses, 0), rtol=1e-9)
    assert metrics["train/explained_variance"] == pytest.approx(explained, rel=1e-9)
    assert metrics["train/valid_frac"] == pytest.approx(1 - dummy.mean())
    assert metrics["train/lr"] == pytest.approx(lr)
    learned = [saved["agent"]["returns.mean"].item(), saved["agent"]["returns.std"].item()]
    assert learned == pytest.approx([x.item() for x in moments(plain.returns)], rel=1e-9)
    np.testing.assert_allclose(saved["agent"]["frames.sums"][0], len(plain.frames) + 1)
    for name, x in plain.w.items():
        torch.testing.assert_close(saved["agent"][name].double(), x.detach(), rtol=1e-9, atol=1e-12, msg=name)


def test_a_game_that_ends_in_the_noops_after_a_lost_life():
    """EnvPool starts the next game silently; each game is reported, and returns are not added up."""
    args = Args(env_id="RoadRunner", noop_max=30, repeat_action_probability=0.25, fire_reset=False, threads=1)
    envs = appo_atari.make_envs(args, 8, seed=1)
    unseen, lives = 0, np.zeros(8)
    for step, (*_, info, valid) in enumerate(random_play(envs, 1000)):
        risen = (info["lives"] > lives) & (lives > 0)
        lives = info["lives"]
        assert info["_episode"][risen].all()
        assert not envs.lengths[risen].any()
        unseen += (risen & ~valid).sum()
        if unseen and step >= 150:
            return
    raise AssertionError("no game ended so")


class ScriptedPool:
    """EnvPool as far as AtariEnvs looks at it: one environment, rows (reward, done, cut, game over, lives)."""

    observation_space, action_space = gym.spaces.Box(0, 255, (4, 8, 8), np.uint8), gym.spaces.Discrete(2)

    def __init__(self, rows):
        self.rows = iter(rows)

    def reset(self):
        return np.zeros((1, 4, 8, 8), np.uint8), {}

    def step(self, actions):
        reward, done, cut, over, lives = (np.array([x]) for x in next(self.rows))
        info = {"reward": reward, "terminated": over, "lives": lives}
        return self.reset()[0], np.sign(reward), (done > 0) & (cut == 0), cut > 0, info


ROWS = [
    (1, 0, 0, 0, 2),
    (2, 1, 0, 0, 1),  # a lost life
    (9, 0, 0, 0, 2),  # its no-ops ended the game: a new one, whose first row is no transition
    (4, 1, 0, 0, 1),  # a lost life
    (9, 0, 0, 1, 0),  # FIRE after the no-ops ended the game, which EnvPool says one step late
    (8, 1, 0, 1, 0),
    (9, 0, 0, 0, 2),  # reset
    (16, 1, 1, 0, 2),  # the time limit
    (9, 0, 0, 0, 3),  # reset
    (0, 0, 0, 0, 4),  # a bonus life
    (32, 1, 1, 1, 0),  # over at the very limit: no future value
]


def test_ends_of_games_of_a_scripted_pool():
    """Reported: whole games only, each once, also where EnvPool ends one unseen, late, or at the time limit."""
    envs = AtariEnvs(ScriptedPool(ROWS), 1)
    envs.reset()
    reported, terminated = [], []
    for _ in ROWS:
        _, _, ended, _, info = envs.step(None)
        terminated += ended.tolist()
        reported.append(appo_atari.ended_episodes(info))
    expected = [[]] * len(ROWS)
    for row, total, length in ((2, 3, 2), (5, 12, 2), (7, 16, 1), (10, 32, 2)):
        expected[row] = [(0, total, length)]
    assert reported == expected
    assert np.flatnonzero(terminated).tolist() == [1, 3, 5, 10]
    envs.lengths += 1
    envs.reset()
    assert not envs.lengths.any()
