"""The algorithm of ppo_procgen.py against independent oracles, most of them in float64."""

import math
import tomllib
from dataclasses import replace

import numpy as np
import ppo_procgen
import pytest
import torch
import tyro
from ppo_procgen import Agent, Args, evaluate, sample, schedule, standardize, train

import conftest
from conftest import ROOT, SAME_STEP, FakeVecEnv, Snow, giving, impala_network, random_episodes

SHAPE = (3, 16, 16)
SMALL = dict(num_envs=4, num_steps=16, minibatch_size=64, update_epochs=1, channels=(4, 4, 4), device="cpu")
SMALL |= dict(eval_episodes=0, threads=1)
run = conftest.runner(ppo_procgen, SMALL)
OPENAI = Args(**ppo_procgen.OPENAI)


def network(shape=SHAPE, num_actions=4, **changes):
    return Agent(shape, num_actions, Args(**{"channels": (4, 4, 4)} | changes))


def fake():
    return FakeVecEnv(random_episodes(4), SAME_STEP)


def test_the_weight_of_the_kl_follows_its_target(tmp_path):
    """RLlib's rule: larger above twice the target, smaller below half of it."""
    kl = run(tmp_path, fake(), name="kl", update_epochs=3)[0]["train/kl"]
    assert kl > 0
    for share, factor in {0.49: 1.5, 0.51: 1, 1.9: 1, 2.1: 0.5}.items():
        _, saved = run(tmp_path, fake(), name=str(share), update_epochs=3, kl_target=kl * share)
        assert saved["kl_coef"] == pytest.approx(0.2 * factor)


def test_advantages_without_spread_are_not_blown_up():
    """The std that divides is at least 1e-4, as in RLlib."""
    assert 0 < standardize(1e-9 * torch.arange(64.0)).abs().max() < 1e-3


def test_lr_schedule():
    for step, rate in {0: 1e-4, 250_000: 4.5e-4, 1_000_000: 1e-4, 3_500_000: 1.25e-4, 99e6: 3e-5}.items():
        assert schedule(step, Args().lr) == pytest.approx(rate)
    assert schedule(10**9, Args(lr=5e-4).lr) == 5e-4
    for wrong in ((1, 2, 3), (5, 1e-4, 2, 1e-3), (1, 1e-4, 1, 2e-4), ()):
        with pytest.raises(ValueError, match="lr"):
            Args(lr=wrong)


def test_sample_follows_softmax():
    logits = torch.tensor([0.0, 1.0, -2.0, 0.5])
    drawn = sample(logits.expand(200_000, 4), torch.Generator().manual_seed(1))
    frequency = torch.bincount(drawn, minlength=4) / len(drawn)
    error = (frequency - logits.softmax(0)) / (logits.softmax(0) / len(drawn)).sqrt()
    assert error.abs().max() < 5


def plain_normalizer(reward, done, gamma):
    """VecNormalize with all returns in a list, after 1e-4 of a return of mean 0 and variance 1."""
    running, seen, normalized = np.zeros(reward.shape[1]), [], np.zeros(reward.shape)
    for t in range(len(reward)):
        running = gamma * running + reward[t]
        seen.extend(running)
        normalized[t] = np.clip(reward[t] / np.sqrt(conftest.plain_deviation(seen) ** 2 + 1e-8), -10, 10)
        running = np.where(done[t], 0, running)
    return normalized


def test_normalized_rewards_are_clipped():
    """The rest of the normalizer is in OpenAI's whole update below."""
    normalizer = ppo_procgen.RewardNormalizer(0.9, 1)
    got = [normalizer(torch.tensor([reward]), torch.zeros(1)).item() for reward in (*200 * [1.0], 1e6, -1e9)]
    assert got[-2:] == [10, -10]


def test_network_size_and_layout():
    """The reference's number of weights; Keras' Glorot; OpenAI's has 3 input channels and orthogonal heads."""
    agent = network((6, 64, 64), 15, channels=(32, 64, 64))
    flattened = network((6, 64, 64), 15, channels=(32, 64, 64), pool="flatten")
    openai = Agent((3, 64, 64), 15, OPENAI)
    assert [conftest.num_weights(net) for net in (agent, flattened, openai)] == [410_352, 1_442_544, 626_256]
    for module in agent.modules():
        if isinstance(module, torch.nn.Conv2d | torch.nn.Linear):
            fans = module.weight[0].numel() + module.weight[:, 0].numel()
            assert module.weight.abs().max() <= math.sqrt(6 / fans) and not module.bias.any()
            if module.weight.numel() > 2000:
                assert module.weight.std().item() == pytest.approx(math.sqrt(2 / fans), rel=0.1)
    conftest.assert_initial(openai.policy, dict(weight=0.01))
    conftest.assert_initial(openai.value, dict(weight=1))


# ------------------------------------------------------------------------------------------------------ whole updates

OWN = Args(lr=(0, 3e-2, 64, 6e-2), ent_coef=(0, 0.05, 128, 0.01), adam_eps=0.1, vf_clip=0.05, clip=0.02, kl_target=1e-9)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("openai", [False, True])
def test_two_iterations_match_plain_float64(tmp_path, monkeypatch, openai):
    """Rewards, advantages, minibatches, losses, clipping and Adam, from frames, actions and permutations alone.

    With OpenAI's flags, but without clips of ratios and values.
    """
    T, N, size, metric = 16, 4, 24, {}  # of the 64 rows 16 are unused
    args, lrs, ent_coefs = (OPENAI, (3e-2, 3e-2), (0.01, 0.01)) if openai else (OWN, (3e-2, 6e-2), (0.05, 0.03))
    small = SMALL | dict(minibatch_size=size, update_epochs=3, total_timesteps=2 * T * N, run_dir=str(tmp_path))
    small |= dict(lr=(3e-2,), adam_eps=0.01, max_grad_norm=0.2, micro_batch=7, clip=0, vf_clip=0) if openai else {}
    args = replace(args, **small, run_name="run")
    clip, vf_clip = args.clip or np.inf, args.vf_clip or np.inf
    permutations, kinds = [], set()
    conftest.spy_on(monkeypatch, torch, "randperm", lambda result, *x: permutations.append(result))
    conftest.spy_on(monkeypatch, Agent, "forward", lambda result, agent, obs: kinds.add(obs.dtype))
    envs = Snow(random_episodes(N), SAME_STEP)
    metrics = train(args, giving(envs))
    assert kinds == {torch.uint8}
    torch.manual_seed(args.seed)
    weights = dict(Agent(SHAPE, 4, args).named_parameters())
    adam = torch.optim.Adam(weights.values(), eps=args.adam_eps)
    reward, ended, cut, _ = (np.stack(column) for column in zip(*envs.log, strict=True))
    reward, done, order, kl_coef = reward.astype(np.float64), ended | cut, iter(permutations), args.kl_coef
    if openai:
        reward = plain_normalizer(reward, done, 0.99)
    for i in range(2):
        now = slice(i * T, (i + 1) * T)
        obs = torch.from_numpy(np.concatenate(envs.seen[i * T : (i + 1) * T + 1]))
        action = torch.from_numpy(np.concatenate(envs.actions[now]))
        with torch.no_grad():
            logits, value = impala_network(weights, obs, args.input_shift, args.pool)
        old_logp, old_value = logits.log_softmax(-1), value[: T * N]
        columns = reward[now], value.view(T + 1, N).numpy(), done[now], done[now]
        advantage = conftest.plain_gae(*columns, args.gamma, args.gae_lambda)
        advantage = torch.from_numpy(advantage).flatten()
        target = advantage + old_value
        metric["train/explained_variance"] = 1 - (advantage.var() / target.var()).item()
        if args.norm_adv == "rollout":
            advantage = (advantage - advantage.mean()) / advantage.std(correction=0)
        adam.param_groups[0]["lr"] = lrs[i]
        metric["train/kl_coef"] = kl_coef
        terms = []
        for epoch in range(3):
            if epoch == 0 or openai:
                permutation = next(order)
            for m in next(order).tolist():
                rows = permutation[m * size : (m + 1) * size]
                better = advantage[rows]
                if args.norm_adv == "minibatch":
                    better = (better - better.mean()) / better.std(correction=0)
                logits, value = impala_network(weights, obs[rows], args.input_shift, args.pool)
                logp, old = logits.log_softmax(-1), old_logp[rows]
                near = old_value[rows] + (value - old_value[rows]).clamp(-vf_clip, vf_clip)
                error = torch.maximum((value - target[rows]).square(), (near - target[rows]).square())
                old_action_logp = old.gather(1, action[rows, None])[:, 0]
                parts = action[rows], better, old_action_logp, 1 - clip, 1 + clip
                policy, error, entropy, *others = conftest.plain_ppo(logits, error, *parts)
                kl = (old.exp() * (old - logp)).sum(1).mean()
                loss = policy + args.vf_coef * error + kl_coef * kl - ent_coefs[i] * entropy
                norm = conftest.plain_step(adam, loss, weights.values(), args.max_grad_norm)
                terms.append([x.item() for x in (policy, error, entropy, *others, norm, kl)])
        kl_coef *= 1.5  # any KL is more than twice the target
    metric |= dict(zip(conftest.LOSSES, np.mean(terms, 0), strict=False))
    metric |= {"train/kl": np.mean(terms[-2:], 0)[-1], "train/lr": lrs[1]}
    assert next(order, None) is None
    assert max(norm for *_, norm, _ in terms) > 0.2 if openai else 0 < metric["train/clip_frac"] < 1  # it was felt
    for name, expected in metric.items():
        assert metrics[name] == pytest.approx(expected, rel=1e-9), name
    saved = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert saved["kl_coef"] == pytest.approx(kl_coef)
    for name, weight in weights.items():
        torch.testing.assert_close(saved["agent"][name].double(), weight.detach(), rtol=1e-9, atol=1e-12, msg=name)


def test_flags_given_at_a_resume_win(tmp_path):
    """A new --kl-coef; an adapted weight continues otherwise."""
    _, saved = run(tmp_path, fake())
    for kl_coef, expected in (0.2, saved["kl_coef"] / 2), (0, 0):
        loaded = ppo_procgen.load(str(tmp_path / "run"))
        args = Args(**loaded["args"] | dict(kl_coef=kl_coef, kl_target=1e9, total_timesteps=128))
        train(args, giving(fake()), loaded)
        assert torch.load(tmp_path / "run" / "checkpoint.pt")["kl_coef"] == expected
        torch.save(saved, tmp_path / "run" / "checkpoint.pt")


def test_preset():
    """--preset openai: the flags that the committed results name; those given win; --resume excludes it."""
    flags = tomllib.loads((ROOT / "benchmark/suites.toml").read_text())["flags"]["OPENAI"]
    assert replace(OPENAI, total_timesteps=8_000_000) == tyro.cli(Args, args=flags.split())
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ppo_procgen, "train", lambda args, *rest: seen.append(args))
        assert ppo_procgen.main("--preset openai --num-levels 200 --gamma 0.5".split()) == 0
    assert seen == [replace(OPENAI, num_levels=200, gamma=0.5)]


def test_metrics_over_all_ended_games(tmp_path):
    """episode/* are means over every end of the iteration, also of several at once."""
    script = [[(np.float32([1, 2]), "terminated")], [(np.float32([0, 0, 6, 0]), "truncated")]] * 2
    metrics, _ = run(tmp_path, FakeVecEnv(script, SAME_STEP))
    assert metrics["episode/count"] == 2 * 8 + 2 * 4
    assert metrics["episode/return"] == (16 * 3 + 8 * 6) / 24 and metrics["episode/length"] == 64 / 24


def test_learns_the_rewarded_action(tmp_path):
    """A task that a random policy scores 0.25 on; a wrong sign, mask or shift keeps it there."""
    envs = FakeVecEnv([[(np.zeros(9, np.float32), "terminated")]] * 8, SAME_STEP, shape=(3, 8, 8), learn=True)
    options = dict(num_envs=8, num_steps=32, minibatch_size=64, update_epochs=4, lr=(2e-3,), gamma=0.5)
    metrics, _ = run(tmp_path, envs, iterations=12, channels=(8, 8, 8), pool="flatten", **options)
    assert metrics["episode/return"] / 9 > 0.8


def test_splits(monkeypatch):
    """Both splits with limited levels, one without; different seeds; standard errors of the mean."""
    made, seeds = [], []

    def make_envs(args, num_envs, seed, test=False):
        made.append((test, num_envs))
        seeds.append(seed)
        return fake()

    episodes = [(0, 10.0, 1), (1, 20.0, 2), (2, 30.0, 3)]
    monkeypatch.setattr(ppo_procgen, "play", lambda agent, envs, count, seed: seeds.append(seed) or episodes)
    splits = evaluate(None, Args(num_levels=5, eval_episodes=100), make_envs)
    assert made == [(False, 50), (True, 50)] and list(splits) == ["train", "test"]
    assert splits["test"]["mean"] == 20 and splits["test"]["stderr"] == pytest.approx(10 / math.sqrt(3))
    assert list(evaluate(None, Args(eval_episodes=3, seed=2), make_envs)) == ["test"] and made[2] == (True, 3)
    assert len({*seeds, 1, 2}) == 8
