"""The algorithm of ppo_atari_snd.py and of its variant snd_paper.py against independent oracles in float64."""

import itertools

import numpy as np
import ppo_atari_snd
import pytest
import torch
import torch.nn.functional as F
from ppo_atari_snd import SND, TILES, Agent, Args, augment, contrastive

import conftest
from conftest import Games, num_weights, plain_gae, plain_standardised, random_episodes, spy_on

SHAPE, WARMUP, T, N = (4, 16, 16), 3, 8, 4
SMALL = dict(num_envs=N, num_steps=T, minibatch_size=16, update_epochs=1, warmup_steps=WARMUP, pairs=4)
SMALL |= dict(snd_features=8, eval_episodes=0, threads=1, device="cpu")
run = conftest.runner(ppo_atari_snd, SMALL)


def fake(shape=SHAPE, **options):
    return Games(random_episodes(N, ends=("terminated", "truncated", "life")), shape=shape, **options)


def test_networks_have_the_published_layers(variant):
    """Numbers of weights layer by layer at 32 x 32 (4 x 4 maps), and the scale of each layer at first."""
    paper = variant("snd_paper")
    agent = Agent((4, 32, 32), 18, Args())
    convs = 9 * (4 * 32 + 32 * 64 + 64 * 64 + 64 * 128) + 32 + 64 + 64 + 128
    assert num_weights(agent) == convs + 4 * 4 * 128 * 512 + 512 + 2 * (512 * 512 + 512) + 513 * (18 + 2)
    conftest.assert_initial(agent, dict(hidden_policy=0.01, hidden_value=0.1, policy=0.01, value=0.01))
    elu = 9 * (16 + 16 * 32 + 32 * 64 + 64 * 64) + 16 + 32 + 64 + 64 + 64 * 16 * 48 + 48
    relu = 9 * (32 + 32 * 64 + 64 * 64 + 64 * 128) + 32 + 64 + 64 + 128 + 128 * 16 * 48 + 48
    snd = SND((1, 32, 32), Args(snd_features=48))
    paper_snd = {kind: paper.SND((1, 32, 32), paper.Args(target=kind, snd_features=48)) for kind in ("v", "std", "vic")}
    nets = [(snd, elu, {}), (paper_snd["v"], elu, {}), (paper_snd["vic"], relu, dict(target=0.5))]
    for net, size, gains in [*nets, (paper_snd["std"], relu, dict(target=0.5, predictor=0.5))]:
        assert num_weights(net.target) == size and num_weights(net.predictor) == size + 2 * (48 * 48 + 48)
        both = torch.nn.ModuleDict({"target": net.target, "predictor": net.predictor})
        conftest.assert_initial(both, gains)
    std = paper_snd["std"]
    assert std.whole.weight.shape == (64, 48) and std.local.weight.shape == (64, 64)  # of the third convolution


def plain_agent(w, obs):
    x = obs.double() / 255
    for i, stride in ((0, 2), (2, 2), (4, 2), (6, 1)):
        x = F.relu(F.conv2d(x, w[f"trunk.{i}.weight"], w[f"trunk.{i}.bias"], stride, 1))
    x = F.relu(F.linear(x.flatten(1), w["trunk.9.weight"], w["trunk.9.bias"]))
    policy = F.relu(F.linear(x, w["hidden_policy.weight"], w["hidden_policy.bias"]))
    value = F.relu(F.linear(x, w["hidden_value.weight"], w["hidden_value.bias"]))
    return F.linear(policy, w["policy.weight"], w["policy.bias"]), F.linear(value, w["value.weight"], w["value.bias"])


def plain_snd(w, net, x, kind):
    """Features and the third convolution's maps, in float64."""
    activation, maps = F.relu if kind in ("std", "vic") else F.elu, []
    for i, stride in enumerate((2, 2, 2, 1)):
        x = activation(F.conv2d(x, w[f"{net}.{2 * i}.weight"], w[f"{net}.{2 * i}.bias"], stride, 1))
        maps.append(x)
    x = F.linear(x.flatten(1), w[f"{net}.9.weight"], w[f"{net}.9.bias"])
    for j in (11, 13) if net == "predictor" else ():
        x = F.linear(F.elu(x), w[f"{net}.{j}.weight"], w[f"{net}.{j}.bias"])
    return x, maps[2]


def plain_contrastive(a, b, far):
    loss = 0
    for x, y, label in zip(a, b, far.double(), strict=True):
        loss += (label - (x - y).square().mean()) ** 2 / len(a)
    return loss + (a.square().mean() + b.square().mean() - 200).clamp(min=0)


def plain_vicreg(a, b):
    n, d = a.shape
    loss = (a - b).square().sum() / (n * d)
    for z in (a, b):
        z = z - z.mean(0)
        covariance = z.T @ z / (n - 1)
        loss = loss + (1 - (covariance.diagonal() + 1e-4).sqrt()).clamp(min=0).sum() / d
        loss = loss + (covariance * (1 - torch.eye(d))).square().sum() / d / 25
    return loss


def plain_infonce(patches, whole, local, features):
    """A softmax over the next frames for every patch of every row; patches: (P, B, K)."""
    loss = -1e-4 * features.std(1).mean()
    for patch, following in zip(patches, local, strict=True):
        for asked in (whole, following):
            logits = patch @ asked.T
            right = (logits.exp().sum(1).log() - logits.diagonal()).mean()
            loss = loss + (right + 1e-4 * logits.square().sum().sqrt()) / len(patches)
    return loss


def test_target_losses_of_large_features(variant):
    """Above the std that vicreg wants and contrastive's limit of the norms; the update below stays under both."""
    torch.manual_seed(0)
    a, b = 14 * torch.randn(2, 9, 5).double()
    far = torch.rand(9) < 0.5
    assert (a**2).mean() + (b**2).mean() > 200
    assert contrastive(a, b, far).mean().item() == pytest.approx(plain_contrastive(a, b, far).item())
    assert variant("snd_paper").vicreg(a, b).item() == pytest.approx(plain_vicreg(a, b).item())


def test_tiles_hide_a_tenth_of_half_the_frames_and_noise_moves_half():
    """Shares, range and tile sizes, from many draws."""
    torch.manual_seed(0)
    hidden, noisy, sizes, noise = [], [], set(), []
    for _ in range(60):
        x = torch.full((64, 1, 48, 48), 5.0)
        y = augment(x, torch.tensor(TILES))
        dark = y.abs() <= 0.2
        assert ((y - 5).abs() <= 0.2).logical_or(dark).all()
        share = dark.float().mean((1, 2, 3))
        hidden.append(share)
        noise.append((y - 5)[y > 4])
        noisy += [(row.frac() != 0).any().item() for row in y]
        row = dark[share.argmax(), 0]  # runs of hidden pixels are multiples of the tile
        edges = (row[:, 1:] != row[:, :-1]).any(0).nonzero().flatten() + 1
        sizes.add(int(np.gcd.reduce(edges.numpy())) if len(edges) else 48)
    hidden, noise = torch.cat(hidden), torch.cat(noise)
    assert noise.mean().abs() < 0.001 and noise.min() < -0.199 and noise.max() > 0.199
    assert hidden.mean().item() == pytest.approx(0.05, abs=0.006)
    assert (hidden > 0).float().mean() == pytest.approx(0.5, abs=0.06)
    assert np.mean(noisy) == pytest.approx(0.5, abs=0.05) and {1, 2, 4, 8, 12, 16} <= sizes


# ---------------------------------------------------------------------------------------------------- one whole update


def plain_target_loss(kind, w, x, y, far):
    """Of pairs of preprocessed frames."""
    (a, maps), (b, next_maps) = (plain_snd(w, "target", z, kind) for z in (x, y))
    if kind == "v":
        return plain_contrastive(a, b, far)
    if kind == "vic":
        return plain_vicreg(a, b)
    patches, following = (z.flatten(2).permute(2, 0, 1) for z in (maps, next_maps))
    whole, local = F.linear(b, w["whole.weight"], w["whole.bias"]), following @ w["local.weight"].T + w["local.bias"]
    return plain_infonce(patches, whole, local, a)


CASES = {  # of the script; of the variant
    "gray": dict(max_grad_norm=0, pairs=40),
    "rgb": dict(micro_batch=7, predictor_share=0.5, pairs=40, frame_channels=3),
    "paper-v": dict(target="v", predictor_share=0.5, pairs=9, eta=2.6),
    "paper-std": dict(target="std", micro_batch=7, eta=420),
    "paper-vic": dict(target="vic", predictor_share=0.5, eta=60, ext_coef=0, clip=1e-4, max_grad_norm=0),
}


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("name", CASES)
def test_update_equals_float64_reference(tmp_path, monkeypatch, variant, name):
    """Two iterations with terminations, truncations, lost lives and dummy rows, recomputed in float64 from the frames.

    Compared: weights of policy, predictor and target, frame statistics, metrics. Augmentation is a mirror here, which
    is vertical or horizontal in turn: each frame of a pair has its own.
    """
    changes, is_paper, module = CASES[name], name.startswith("paper"), ppo_atari_snd
    if is_paper:
        paper = variant("snd_paper")
        module = paper.script
        monkeypatch.setitem(paper.GAINS, "std", (1.2, 1.2))  # larger features
        monkeypatch.setitem(paper.GAINS, "vic", (1.2, 2**0.5))
    Agent, SND, run = module.Agent, module.SND, conftest.runner(module, SMALL)
    shape, C = ((6, 16, 20), 3) if name == "rgb" else (SHAPE, 1)
    mirrors = itertools.cycle([3, 2])
    drawn = {"rand": [], "randint": [], "randperm": []}
    conftest.larger(monkeypatch, Agent, "hidden_policy", "policy", "value")
    with monkeypatch.context() as patch:
        for name, draws in drawn.items():
            spy_on(patch, torch, name, lambda result, *x, draws=draws: draws.append(result))
        patch.setattr(module, "augment", lambda x, tiles: x.flip(next(mirrors)))
        envs = fake(shape, dummy_reward=100.0)
        options = dict(update_epochs=2, lr=(1e-3,), adam_eps=0.01, clip=1e-3, vf_coef=0.7, gamma=0.95, gamma_int=0.9)
        options |= dict(max_grad_norm=0.05, eta=1.9, ent_coef=(3.0,), int_coef=0.8) | changes
        metrics, saved = run(tmp_path, envs, iterations=2, **options)
    args = module.Args(**(SMALL | options))
    kind = args.target if is_paper else "v"
    torch.manual_seed(1)
    start, networks = Agent(shape, 4, args).state_dict(), SND((C, *shape[1:]), args).state_dict()
    w = {name: x.clone().requires_grad_() for name, x in start.items()}
    r = {name: x.clone().requires_grad_() for name, x in networks.items() if not name.startswith("frames")}
    optimizer = torch.optim.Adam([*w.values(), *r.values()], lr=1e-3, eps=0.01)
    orders = [x for x in drawn["randint"] if x.shape == (2 * T * N,)]
    orders = orders or [x.repeat(2) for x in drawn["randperm"]]
    ints = [x for x in drawn["randint"] if x.shape == (2, args.pairs)]
    for draws in (orders, ints):
        assert not draws or torch.cat([x.flatten() for x in draws]).max() == T * N - 1
    rands, orders, ints, drawn_twice = iter(drawn["rand"]), iter(orders), iter(ints), 0
    in_use = torch.tensor([args.ext_coef > 0, True])
    shown = [frame[:, -C:].astype(float) for frame in envs.seen[1 : WARMUP + 1]]  # all that the statistics saw

    def prepare(frames):
        return frames.double() / 255 if is_paper else plain_standardised(frames, shown, 1)

    for rollout in range(2):
        first = WARMUP + rollout * T  # of the actions; one more of the frames, for the reset after the warm-up
        obs = torch.from_numpy(np.stack(envs.seen[first + 1 : first + T + 2])).flatten(0, 1)
        action = torch.from_numpy(np.concatenate(envs.actions[first : first + T])).long()
        reward, ended, cut, over = (np.stack(x) for x in zip(*envs.log[first : first + T], strict=True))
        valid, newest = torch.from_numpy(~over).flatten(), obs[:, -C:]
        with torch.no_grad():
            logits, values = (x.view(T + 1, N, -1) for x in plain_agent(w, obs))
            x = prepare(newest[:-N])
            raw = (plain_snd(r, "predictor", x, kind)[0] - plain_snd(r, "target", x, kind)[0]).square().mean(1)
            raw = raw.view(T, N).numpy()
        bonus = np.minimum(args.eta * raw, 1)
        shown.append(newest[:-N].numpy().astype(float))
        x = prepare(newest)
        ext = plain_gae(reward, values[..., 0].numpy(), ended, cut, args.gamma, args.gae_lambda)
        internal = plain_gae(bonus, values[..., 1].numpy(), ended, cut, args.gamma_int, args.gae_lambda)
        advantage = torch.from_numpy(args.ext_coef * ext + 0.8 * internal).flatten()
        goals = (torch.from_numpy(np.stack([ext, internal], -1)) + values[:T]).flatten(0, 1)
        logp = logits[:T].log_softmax(-1).flatten(0, 1).gather(-1, action[:, None])[:, 0]
        order, losses, novelty = next(orders), [], []
        for rows in order.split(args.minibatch_size):
            keep = rows[valid[rows]]
            now, value = plain_agent(w, obs[keep])
            value_error = ((value - goals[keep]).square() * in_use).sum(1) / 2
            parts = now, value_error, action[keep], advantage[keep], logp[keep]
            terms = conftest.plain_ppo(*parts, 1 - args.clip, 1 + args.clip)
            loss = terms[0] + 0.7 * terms[1] - 3 * terms[2]
            norm = conftest.plain_step(optimizer, loss, w.values(), args.max_grad_norm)
            losses.append([x.item() for x in (*terms, norm)])
        for rows in (torch.arange(T * N) if is_paper else order).split(args.minibatch_size):
            mask = (next(rands) < (args.predictor_share or 1)).double()
            error = plain_snd(r, "predictor", x[rows], kind)[0] - plain_snd(r, "target", x[rows], kind)[0].detach()
            predictor = (error**2 * mask).sum() / (1 if kind == "std" else mask.sum())
            one = rows[valid[rows]]  # the next frame of a dummy row is another episode's
            other = one + N
            if kind == "v":
                one, other = next(ints)
                same = next(rands) < 0.5
                drawn_twice += (one == other)[~same].sum()  # a pair of one row is never far
                other = torch.where(same, one, other)
            first, second = (x[one].flip(3), x[other].flip(2)) if kind == "v" else (x[one], x[other])
            goal = plain_target_loss(kind, r, first, second, one != other)
            conftest.plain_step(optimizer, predictor + goal, r.values())
            novelty.append([predictor.item(), goal.item()])
    assert not any(list(rest) for rest in (rands, ints, orders)) and (drawn_twice or is_paper)
    assert 0.02 < (bonus == 1).mean() < 0.98  # the limit was felt
    conftest.assert_metrics(metrics, losses, (ext, internal), goals.view(T, N, 2).numpy(), ~over, raw, bonus)
    assert metrics["ext/reward"] == pytest.approx(reward[~over].mean(), rel=1e-6)  # a float32 reward
    predictor, goal = np.mean(novelty, axis=0)
    assert metrics["loss/predictor"] == pytest.approx(predictor, rel=1e-9)
    assert metrics["loss/target"] == pytest.approx(goal, rel=1e-9)
    np.testing.assert_allclose(saved["snd"]["frames.sums"][1], np.concatenate(shown).sum(0), rtol=1e-9)
    mean, std = (saved["snd"][f"frames.{name}"] for name in ("mean", "std"))
    np.testing.assert_allclose(mean, np.concatenate(shown).mean(0), rtol=1e-9, atol=1e-3)
    np.testing.assert_allclose(std, conftest.plain_deviation(np.concatenate(shown)), rtol=1e-9)
    conftest.assert_learned(start, w, saved["agent"])
    conftest.assert_learned(networks, r, saved["snd"])


@pytest.mark.parametrize("target", ["std", "vic"])
def test_minibatches_without_consecutive_frames_have_a_loss(tmp_path, variant, target):
    """Episodes of one step make each second row a dummy: its minibatch has no pair of one episode."""
    envs = Games([[([1.0], "terminated")]] * N, shape=SHAPE)
    metrics, _ = conftest.runner(variant("snd_paper").script, SMALL)(tmp_path, envs, target=target, minibatch_size=N)
    assert np.isfinite(metrics["loss/target"])


def test_bonus_without_a_limit(tmp_path):
    """--int-clip 0 turns it off."""
    metrics, _ = run(tmp_path, fake(), int_clip=0, eta=100.0)
    assert metrics["int/reward"] == pytest.approx(100 * metrics["int/reward_raw"]) and metrics["int/reward"] > 1


@pytest.mark.slow
def test_it_learns_the_games_rewards_and_its_bonus_falls(tmp_path):
    """Reward 1 for the action that the frame shows, one in four by chance, bonus and all: no term is upside down."""
    envs = Games([[([0.0] * 20, "terminated")]] * 8, shape=SHAPE, learn=True)
    flags = dict(num_envs=8, num_steps=32, minibatch_size=64, update_epochs=4, lr=(3e-4,), gamma=0.5, eta=0.01)
    run(tmp_path, envs, 50, **flags)
    rewards = np.stack([reward for reward, *_ in envs.log])
    assert rewards[:200].mean() < 0.4 and rewards[-640:].mean() > 0.6  # 0.75 to 0.95 with seeds 1 to 12
    rows = conftest.rows(tmp_path / "run")
    bonus, target = ([float(row[name]) for row in rows] for name in ("int/reward_raw", "loss/target"))
    assert bonus[-1] < 0.5 * bonus[0]
    assert np.mean(target[20:]) < 0.95 * np.mean(target[:10])  # 0.62 to 0.88 of it
