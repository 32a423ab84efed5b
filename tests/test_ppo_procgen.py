"""The algorithm of ppo_procgen.py against independent oracles, most of them in float64."""

import math
from dataclasses import replace

import numpy as np
import ppo_procgen
import pytest
import torch
import tyro
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from ppo_procgen import (
    Agent,
    Args,
    RewardNormalizer,
    UsageError,
    evaluate,
    gae,
    next_kl_coef,
    play,
    ppo_terms,
    sample,
    schedule,
    standardize,
    train,
)

from conftest import SAME_STEP, FakeVecEnv, Snow, impala_network, random_episodes, read

SHAPE = (3, 16, 16)
SMALL = dict(num_envs=4, num_steps=16, minibatch_size=64, update_epochs=1, channels=(4, 4, 4), device="cpu")
SMALL |= dict(eval_episodes=0, quiet=True, torch_threads=1)
OPENAI = tyro.cli(  # OpenAI's train-procgen, easy, as in benchmark/run.py
    Args,
    args=(
        "--num-levels 200 --total-timesteps 25000000 --num-envs 64 --num-steps 256 --minibatch-size 2048 --reshuffle "
        "--stack none --channels 16 32 32 --pool flatten --input-shift 0 --ortho-heads --norm-reward 0.99 "
        "--norm-adv minibatch --gamma 0.999 --gae-lambda 0.95 --vf-clip 0.2 --vf-coef 0.25 --kl-coef 0 --lr 5e-4 "
        "--adam-eps 1e-5 --max-grad-norm 0.5"
    ).split(),
)


def network(shape=SHAPE, num_actions=4, **changes):
    return Agent(shape, num_actions, Args(**{"channels": (4, 4, 4)} | changes))


def fake():
    """Same-step episodes of one to six steps; a truncation counts as an end."""
    return FakeVecEnv(random_episodes(4), SAME_STEP)


def run(tmp_path, envs, iterations=1, name="run", **changes):
    """Train -> the last metrics, the checkpoint."""
    args = Args(**(SMALL | dict(run_dir=str(tmp_path), run_name=name) | changes))
    args.total_timesteps = iterations * args.num_envs * args.num_steps
    metrics = train(args, envs)
    return metrics, torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)


# ------------------------------------------------------------------------------------------------------------- maths


def plain_gae(reward, value, done, gamma, lam):
    """A_t = sum over the rest of the game of (gamma lam)^(k - t) delta_k, by the definition's double sum in float64."""
    T, N = reward.shape
    advantage = np.zeros((T, N))
    for n in range(N):
        for t in range(T):
            for k in range(t, T):
                following = 0.0 if done[k, n] else value[k + 1, n]
                delta = reward[k, n] + gamma * following - value[k, n]
                advantage[t, n] += (gamma * lam) ** (k - t) * delta
                if done[k, n]:
                    break
    return advantage


def test_gae_equals_per_episode_reference():
    """Random ends: the recursion equals every episode's own GAE; the rollout's last row bootstraps from V(obs_T)."""
    rng = np.random.default_rng(0)
    reward, value, done = rng.normal(size=(40, 5)), rng.normal(size=(41, 5)), rng.random((40, 5)) < 0.2
    got = gae(*(torch.tensor(x, dtype=torch.float64) for x in (reward, value, done)), 0.97, 0.9)
    np.testing.assert_allclose(got, plain_gae(reward, value, done, 0.97, 0.9), rtol=1e-12, atol=1e-12)


def test_ppo_terms_by_hand():
    """Two actions: inside the clip range, above and below it, with both signs; the larger of two value errors."""
    old, clip = 0.5, 0.2
    rows = dict(action=torch.tensor([0]), logits=torch.zeros(1, 2))
    rows |= dict(target=torch.tensor([3.0]), value=torch.tensor([2.0]))
    for p, advantage, surrogate in ((0.55, 2, 1.1 * 2), (0.7, 2, 1.2 * 2), (0.7, -2, -1.4 * 2), (0.3, -2, -0.8 * 2)):
        rows["advantage"] = torch.tensor([float(advantage)])
        logits = torch.tensor([[math.log(p), math.log(1 - p)]])
        terms = {k: x.item() for k, x in ppo_terms(logits, torch.tensor([1.0]), rows, clip, 0.25).items()}
        assert terms["policy"] == pytest.approx(-surrogate, rel=1e-5)
        assert terms["value"] == pytest.approx(4) and terms["clip_frac"] == (abs(p / old - 1) > clip)
        exact = old * math.log(old / p) + (1 - old) * math.log((1 - old) / (1 - p))
        assert terms["kl"] == pytest.approx(exact, rel=1e-4, abs=1e-7)
    assert ppo_terms(logits, torch.tensor([9.0]), rows, clip, 0.25)["value"].item() == pytest.approx(36)


def test_next_kl_coef():
    assert next_kl_coef(0.2, 0.021, 0.01) == pytest.approx(0.3)
    assert next_kl_coef(0.2, 0.0049, 0.01) == pytest.approx(0.1)
    assert next_kl_coef(0.2, 0.01, 0.01) == next_kl_coef(0.2, 0.02, 0.01) == next_kl_coef(0.2, 0.005, 0.01) == 0.2


def test_advantages_without_spread_are_not_blown_up():
    """The deviation that divides is at least 1e-4, as in RLlib."""
    assert 0 < standardize(1e-9 * torch.arange(64.0)).abs().max() < 1e-3


def test_lr_schedule():
    table = {0: 1e-4, 250_000: 4.5e-4, 500_000: 8e-4, 1_000_000: 1e-4, 3_500_000: 1.25e-4, 8e6: 3e-5, 99e6: 3e-5}
    for step, rate in table.items():
        assert schedule(step, Args().lr) == pytest.approx(rate)
    assert schedule(0, (5e-4,)) == schedule(10**9, (5e-4,)) == 5e-4
    for wrong in ((1, 2, 3), (5, 1e-4, 2, 1e-3), (1, 1e-4, 1, 2e-4), ()):
        with pytest.raises(UsageError, match="--lr"):
            schedule(0, wrong)


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
        count = len(seen) + 1e-4
        variance = (1e-4 + np.square(seen).sum()) / count - (sum(seen) / count) ** 2
        normalized[t] = np.clip(reward[t] / np.sqrt(variance + 1e-8), -10, 10)
        running = np.where(done[t], 0, running)
    return normalized


def test_return_normaliser_matches_numpy_loop():
    """Divide by the deviation of everything seen so far, this step included, and clip."""
    rng = np.random.default_rng(0)
    reward, done = rng.normal(2, 5, (200, 3)), rng.random((200, 3)) < 0.1
    reward[150:] *= 100
    normalizer = RewardNormalizer(0.9, 3)
    got = np.stack([normalizer(*row) for row in zip(reward, done, strict=True)])
    np.testing.assert_allclose(got, plain_normalizer(reward, done, 0.9), rtol=1e-8)
    assert got.max() == 10 and got.min() == -10


# ----------------------------------------------------------------------------------------------------------- network


def test_network_size_and_layout():
    """As many weights as the reference; Keras' Glorot; OpenAI's has 3 input channels and orthogonal heads."""
    agent = network((6, 64, 64), 15, channels=(32, 64, 64))
    flattened = network((6, 64, 64), 15, channels=(32, 64, 64), pool="flatten")
    openai = Agent((3, 64, 64), 15, OPENAI)
    sizes = [sum(weight.numel() for weight in net.parameters()) for net in (agent, flattened, openai)]
    assert sizes == [410_352, 1_442_544, 626_256]
    for module in agent.modules():
        if isinstance(module, torch.nn.Conv2d | torch.nn.Linear):
            fans = module.weight[0].numel() + module.weight[:, 0].numel()
            assert module.weight.abs().max() <= math.sqrt(6 / fans) and not module.bias.any()
            if module.weight.numel() > 2000:
                assert module.weight.std().item() == pytest.approx(math.sqrt(2 / fans), rel=0.1)
    for head, gain in ((openai.policy, 0.01), (openai.value, 1)):
        gram = head.weight @ head.weight.T
        torch.testing.assert_close(gram, gain**2 * torch.eye(len(gram)), rtol=1e-4, atol=1e-6)
        assert not head.bias.any()


def test_network_equals_plain_float64():
    """Flattened, as OpenAI's; the default's average is in the whole update below."""
    agent = network((6, 64, 64), 15, channels=(4, 8, 8), pool="flatten", input_shift=0)
    obs = torch.randint(0, 256, (3, 6, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    weights = {name: weight.double() for name, weight in agent.state_dict().items()}
    for ours, plain in zip(agent(obs), impala_network(weights, obs, 0, "flatten"), strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), plain, rtol=1e-4, atol=1e-5)


def test_heads_stay_float32_under_bf16():
    """bfloat16 knows two numbers near these values."""
    agent = network()
    agent.value.bias.data += 29.8
    with torch.autocast("cpu", torch.bfloat16):
        logits, value = agent(torch.randint(0, 255, (64, *SHAPE), dtype=torch.uint8))
    assert logits.dtype == value.dtype == torch.float32 and len(value.unique()) > 32


# ------------------------------------------------------------------------------------------------------ whole updates

OWN = Args(lr=(0, 3e-2, 64, 6e-2), ent_coef=(0, 0.05, 128, 0.01), adam_eps=0.1, vf_clip=0.05, clip=0.02, kl_target=1e-9)


@pytest.mark.parametrize("openai", [False, True])
def test_two_iterations_match_plain_float64(tmp_path, monkeypatch, openai):
    """Rewards, advantages, minibatches, losses, clipping and Adam, from frames, actions and permutations alone."""
    T, N, size, metric = 16, 4, 24, {}  # of the 64 rows 16 are unused
    args, lrs, ent_coefs = (OPENAI, (3e-3, 3e-3), (0.01, 0.01)) if openai else (OWN, (3e-2, 6e-2), (0.05, 0.03))
    small = SMALL | dict(minibatch_size=size, update_epochs=3, total_timesteps=2 * T * N, run_dir=str(tmp_path))
    args = replace(args, **small, run_name="run", **dict(lr=(3e-3,), micro_batch=7) if openai else {})
    permutations, randperm = [], torch.randperm
    monkeypatch.setattr(torch, "randperm", lambda *a, **k: permutations.append(randperm(*a, **k)) or permutations[-1])

    def forward(agent, obs):
        assert obs.dtype == torch.uint8 and not obs.requires_grad
        return impala_network(dict(agent.named_parameters()), obs, args.input_shift, args.pool)

    envs = Snow(random_episodes(N), SAME_STEP)
    if openai:  # all in float64, or Adam's small epsilon would blow rounding up
        monkeypatch.setattr(Agent, "forward", forward)
        torch.set_default_dtype(torch.float64)
    try:
        metrics = train(args, envs)
        torch.manual_seed(args.seed)
        start = Agent(SHAPE, 4, args).state_dict()
    finally:
        torch.set_default_dtype(torch.float32)
    weights = {name: weight.double().requires_grad_() for name, weight in start.items()}
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
        advantage = plain_gae(reward[now], value.view(T + 1, N).numpy(), done[now], args.gamma, args.gae_lambda)
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
                log_ratio = (logp - old).gather(1, action[rows, None])[:, 0]
                ratio = log_ratio.exp()
                policy = -torch.minimum(ratio * better, ratio.clamp(1 - args.clip, 1 + args.clip) * better).mean()
                near = old_value[rows] + (value - old_value[rows]).clamp(-args.vf_clip, args.vf_clip)
                error = torch.maximum((value - target[rows]).square(), (near - target[rows]).square()).mean()
                entropy = -(logp.exp() * logp).sum(1).mean()
                kl = (old.exp() * (old - logp)).sum(1).mean()
                adam.zero_grad()
                (policy + args.vf_coef * error + kl_coef * kl - ent_coefs[i] * entropy).backward()
                norm = torch.stack([weight.grad.norm() for weight in weights.values()]).norm()
                for weight in weights.values():
                    weight.grad *= min(1, 0.5 / norm) if openai else 1
                adam.step()
                outside = ((ratio - 1).abs() > args.clip).double().mean()
                others = (ratio - 1 - log_ratio).mean(), outside, norm, kl
                terms.append([x.item() for x in (policy, error, entropy, *others)])
        kl_coef *= 1.5  # any KL is more than twice the target
    names = "loss/policy loss/value loss/entropy train/approx_kl train/clip_frac train/grad_norm".split()
    metric |= dict(zip(names, np.mean(terms, 0), strict=False))
    metric |= {"train/kl": np.mean(terms[-2:], 0)[-1], "train/lr": lrs[1], "train/ent_coef": ent_coefs[1]}
    assert next(order, None) is None
    felt = max(norm for *_, norm, _ in terms) > 0.5 if openai else 0 < metric["train/clip_frac"] < 1
    assert felt  # the clipping
    rtol = 1e-4 if openai else 1e-3
    for name, expected in metric.items():
        assert metrics[name] == pytest.approx(expected, rel=rtol, abs=1e-6), name
    saved = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert saved["kl_coef"] == pytest.approx(kl_coef)
    for name, weight in weights.items():
        torch.testing.assert_close(saved["agent"][name].double(), weight.detach(), rtol=rtol, atol=1e-5, msg=name)


def test_defaults_match_reference_table():
    """The final configuration of the competition entry."""
    args, expected = Args(), dict(num_envs=48, num_steps=200, minibatch_size=1024, update_epochs=3, gamma=0.99)
    expected |= dict(gae_lambda=0.9, clip=0.2, vf_clip=30, vf_coef=0.5, kl_coef=0.2, kl_target=0.01, ent_coef=(0.01,))
    expected |= dict(norm_reward=0, reshuffle=False, norm_adv="rollout", input_shift=128, ortho_heads=False)
    expected |= dict(max_grad_norm=0, adam_eps=1e-8, channels=(32, 64, 64), pool="avg", stack="gap", num_levels=0)
    expected |= dict(start_level=0, distribution_mode="easy", total_timesteps=8_000_000)
    assert {name: getattr(args, name) for name in expected} == expected


def test_resume_keeps_the_sums_of_returns_and_the_weight_of_the_kl(tmp_path):
    """What only this script has; --adam-eps and --kl-coef 0 may be given anew."""
    run(tmp_path, fake(), norm_reward=0.99)
    for iterations, kl_coef, expected in ((2, 0.2, 0.05), (3, 0, 0)):  # one pass sees no KL: half the weight
        options = dict(norm_reward=0.99, resume=str(tmp_path / "run"), kl_coef=kl_coef, adam_eps=1e-3)
        saved = run(tmp_path, fake(), iterations, **options)[1]
        assert saved["kl_coef"] == pytest.approx(expected)
        assert saved["normalizer"][0].item() == pytest.approx(64 * iterations, rel=1e-5)
        assert saved["optimizer"]["param_groups"][0]["eps"] == 1e-3


# ------------------------------------------------------------------------------------------------- games and metrics


def test_metrics_over_all_ended_games(tmp_path):
    """episode/* are means over every end of the iteration, also of several at once; with none they are empty."""
    script = [[(np.float32([1, 2]), "terminated")], [(np.float32([0, 0, 6, 0]), "truncated")]] * 2
    metrics, _ = run(tmp_path, FakeVecEnv(script, SAME_STEP))
    assert metrics["episode/count"] == 2 * 8 + 2 * 4
    assert metrics["episode/return"] == (16 * 3 + 8 * 6) / 24 and metrics["episode/length"] == 64 / 24
    script = [[(np.zeros(99, np.float32), "terminated")]] * 4
    run(tmp_path, FakeVecEnv(script, SAME_STEP), name="none")
    (row,) = read(tmp_path / "none")
    assert row["episode/count"] == "0" and row["episode/return"] == row["episode/length"] == ""


def test_learns_the_rewarded_action(tmp_path):
    """A task that a random policy scores 0.25 on; a wrong sign, mask or shift keeps it there."""
    envs = FakeVecEnv([[(np.zeros(9, np.float32), "terminated")]] * 8, SAME_STEP, shape=(3, 8, 8), learn=True)
    options = dict(num_envs=8, num_steps=32, minibatch_size=64, update_epochs=4, lr=(2e-3,), gamma=0.5)
    metrics, _ = run(tmp_path, envs, iterations=12, channels=(8, 8, 8), pool="flatten", **options)
    assert metrics["episode/return"] / 9 > 0.8


# --------------------------------------------------------------------------------------------------------- evaluation


class Constant(torch.nn.Module):
    """Always the same logits, of which action 1 has the largest."""

    def __init__(self):
        super().__init__()
        self.logits = torch.nn.Parameter(torch.tensor([0.0, 0.1, 0.0, 0.0]))

    def forward(self, obs):
        return self.logits.expand(len(obs), -1), torch.zeros(len(obs))


def test_play_plays_the_same_number_of_games_everywhere():
    """Short games do not crowd out long ones: the true mean of these two envs is (1 + 20) / 2."""
    script = [[(np.float32([1]), "terminated")], [(np.ones(20, np.float32), "truncated")]]
    returns, lengths = play(Constant(), RecordEpisodeStatistics(FakeVecEnv(script, SAME_STEP)), 3, seed=0)
    assert sorted(returns) == sorted(lengths) == [1, 1, 1, 20, 20, 20]


def test_play_greedy_and_sampled():
    """Greedy takes the likeliest action; one seed draws the same actions again and leaves PyTorch's state alone."""
    before, actions = torch.get_rng_state(), []
    for greedy in (True, False, False):
        envs = FakeVecEnv([[(np.zeros(50, np.float32), "terminated")]], SAME_STEP)
        play(Constant(), RecordEpisodeStatistics(envs), 1, seed=0, greedy=greedy)
        actions.append(np.concatenate(envs.actions).tolist())
    assert set(actions[0]) == {1} and set(actions[1]) == {0, 1, 2, 3} and actions[1] == actions[2]
    assert torch.equal(before, torch.get_rng_state())


def test_splits(monkeypatch):
    """Both splits with limited levels, one without; seeds of their own; standard errors of the mean."""
    made, seeds = [], []
    nothing = type("Nothing", (), {"close": lambda self: None})()
    monkeypatch.setattr(ppo_procgen, "make_envs", lambda args, n, stream: made.append((stream, n)) or nothing)
    games = [10.0, 20.0, 30.0], [1, 2, 3]
    monkeypatch.setattr(ppo_procgen, "play", lambda agent, envs, count, seed, *rest: seeds.append(seed) or games)
    splits = evaluate(None, Args(num_levels=5, eval_episodes=100))
    assert made == [("train", 50), ("test", 50)]
    assert splits["test"]["mean"] == 20 and splits["test"]["stderr"] == pytest.approx(10 / math.sqrt(3))
    assert list(evaluate(None, Args(eval_episodes=3, seed=2))) == ["test"] and made[2] == ("test", 3)
    assert len({*seeds, 1, 2}) == 5


@pytest.mark.slow
def test_learns_a_real_game(tmp_path):
    """One level of starpilot, narrow network, 61,440 steps: random play 0.3 +- 0.04, trained 5.8 +- 0.2, 100 s."""
    options = dict(env_id="starpilot", num_levels=1, stack="none", channels=(8, 16, 16), num_envs=32, num_steps=64)
    options |= dict(minibatch_size=512, total_timesteps=61_440, lr=(1e-3,), eval_episodes=100, quiet=True)
    args, threshold = Args(**options, run_dir=str(tmp_path), run_name="run"), 3.0
    random_play = evaluate(network((3, 64, 64), 15, channels=(8, 16, 16)), args)["train"]
    assert random_play["mean"] + 5 * random_play["stderr"] < threshold
    split = train(args)["eval"]["splits"]["train"]
    assert split["mean"] - 2 * split["stderr"] > threshold
