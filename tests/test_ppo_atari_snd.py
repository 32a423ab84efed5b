"""The algorithm of ppo_atari_snd.py against independent oracles; test_ppo_atari_rnd.py tests what the two share."""

import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import NEXT_STEP, ROOT, SAME_STEP, FakeVecEnv, random_episodes
from test_ppo_atari_rnd import standardised, streams

import ppo_atari_rnd
import ppo_atari_snd
from ppo_atari_snd import SND, Agent, Args, contrastive, distort, effective_rank, infonce, vicreg

SHAPE, SMALL = (4, 44, 44), dict(num_envs=4, num_steps=16, minibatch_size=32, update_epochs=1, warmup_steps=3)
SMALL |= dict(snd_features=8, eval_episodes=0, quiet=True, torch_threads=1, device="cpu")


def run(tmp_path, envs, iterations=1, name="run", module=ppo_atari_snd, **changes):
    args = module.Args(**(SMALL | dict(run_dir=str(tmp_path), run_name=name) | changes))
    args.total_timesteps = iterations * args.batch_size
    metrics = module.train(args, envs)
    return metrics, torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)


def fake(autoreset=NEXT_STEP, ends=("terminated", "truncated", "life"), cls=FakeVecEnv, **options):
    return cls(random_episodes(4, ends=ends), autoreset, shape=SHAPE, **options)


# ------------------------------------------------------------------------------------------------------------- maths


def test_defaults_match_reference_table():
    """michalnand's run cnd_21, the paper's SND-V."""
    expected = dict(num_envs=128, num_steps=128, minibatch_size=512, update_epochs=4, gamma=0.998, gamma_int=0.99)
    expected |= dict(gae_lambda=0.95, clip=0.1, vf_coef=1, ent_coef=0.001, ext_coef=2, int_coef=1, lr=("1e-4",))
    expected |= dict(max_grad_norm=0.5, repeat_action_probability=0.25, frame_skip=4, max_episode_steps=4500)
    expected |= dict(frame_size=96, stack=4, int_episodic=True, bonus_on="current", int_clip=1, eta=0.5, target="v")
    expected |= dict(snd_preprocess="std", predictor_share=0, predictor_sum=False, snd_net="elu4", snd_features=512)
    expected |= dict(motivation_passes="per-minibatch", snd_augment="tiles", minibatches="drawn", noop_max=30)
    expected |= dict(target_gain=2**0.5, predictor_gain=2**0.5, pairs=0, iterations=7812, env_id="MontezumaRevenge")
    assert {name: getattr(Args(), name) for name in expected} == expected


def weights(module):
    return sum(w.numel() for w in module.parameters())


def test_network_sizes():
    """Layer by layer: policy C at 96 x 96, and the networks of each target."""
    agent = Agent((4, 96, 96), 18)
    convs = 9 * (4 * 32 + 32 * 64 + 64 * 64 + 64 * 128) + 32 + 64 + 64 + 128
    assert weights(agent) == convs + 12 * 12 * 128 * 512 + 512 + 2 * (512 * 512 + 512) + 513 * (18 + 2)
    head = 2 * (512 * 512 + 512)  # the predictor's two further layers
    sizes = dict(
        elu4=9 * (16 + 16 * 32 + 32 * 64 + 64 * 64) + 16 + 32 + 64 + 64 + 64 * 144 * 512 + 512,
        relu4=9 * (32 + 32 * 64 + 64 * 64 + 64 * 128) + 32 + 64 + 64 + 128 + 128 * 144 * 512 + 512,
        elu=64 * 32 + 32 + 9 * 32 * 64 + 64 + 9 * 64 * 64 + 64 + 64 * 144 * 512 + 512,
    )
    for name, size in sizes.items():
        snd = SND(96, Args(snd_net=name, target_gain=0.5))
        assert (weights(snd.target), weights(snd.predictor)) == (size, size + head), name
        kinds = [type(part).__name__ for part in snd.target]
        assert kinds.count("ReLU" if name == "relu4" else "ELU") == kinds.count("Conv2d") == (3 if name == "elu" else 4)
        parts = [(part, gain) for net, gain in ((snd.target, 0.5), (snd.predictor, 2**0.5)) for part in net]
        for rows, gain in ((part.weight.flatten(1), gain) for part, gain in parts if hasattr(part, "weight")):
            gram = rows @ rows.T if len(rows) <= rows.shape[1] else rows.T @ rows
            torch.testing.assert_close(gram, gain**2 * torch.eye(len(gram)), rtol=1e-3, atol=1e-4)
    std = SND(96, Args(target="std", snd_net="relu4", target_gain=0.5))
    torch.testing.assert_close(std.whole.weight @ std.whole.weight.T, 0.25 * torch.eye(64), rtol=1e-3, atol=1e-4)
    assert std.target[:6](torch.zeros(1, 1, 96, 96)).shape == (1, 64, 12, 12)
    assert std.whole.weight.shape == (64, 512) and std.local.weight.shape == (64, 64)
    for part, gain in (
        (agent.hidden_policy, 0.01),
        (agent.hidden_value, 0.1),
        (agent.policy, 0.01),
        (agent.value, 0.01),
    ):
        rows = part.weight
        torch.testing.assert_close(rows @ rows.T, gain**2 * torch.eye(len(rows)), rtol=1e-3, atol=1e-6)


def plain_agent(w, obs):
    x = obs.double() / 255
    for i, stride in ((0, 2), (2, 2), (4, 2), (6, 1)):
        x = F.relu(F.conv2d(x, w[f"trunk.{i}.weight"], w[f"trunk.{i}.bias"], stride, 1))
    x = F.relu(F.linear(x.flatten(1), w["trunk.9.weight"], w["trunk.9.bias"]))
    policy = F.relu(F.linear(x, w["hidden_policy.weight"], w["hidden_policy.bias"]))
    value = F.relu(F.linear(x, w["hidden_value.weight"], w["hidden_value.bias"]))
    return F.linear(policy, w["policy.weight"], w["policy.bias"]), F.linear(value, w["value.weight"], w["value.bias"])


def plain_snd(w, net, x, kind="elu4"):
    """Features and the third convolution's maps, in float64."""
    shapes = dict(elu4=((2, 1), (2, 1), (2, 1), (1, 1)), relu4=((2, 1), (2, 1), (2, 1), (1, 1)))
    shapes["elu"] = ((4, 2), (2, 1), (1, 1))
    activation = F.relu if kind == "relu4" else F.elu
    maps = None
    for i, (stride, padding) in enumerate(shapes[kind]):
        x = activation(F.conv2d(x, w[f"{net}.{2 * i}.weight"], w[f"{net}.{2 * i}.bias"], stride, padding))
        maps = x if i == 2 else maps
    i = 2 * len(shapes[kind]) + 1
    x = F.linear(x.flatten(1), w[f"{net}.{i}.weight"], w[f"{net}.{i}.bias"])
    for j in (i + 2, i + 4) if net == "predictor" else ():
        x = F.linear(F.elu(x), w[f"{net}.{j}.weight"], w[f"{net}.{j}.bias"])
    return x, maps


def test_networks_equal_plain_float64():
    torch.manual_seed(0)
    agent, obs = Agent(SHAPE, 5), torch.randint(0, 256, (3, *SHAPE), dtype=torch.uint8)
    for part in (agent.hidden_policy, agent.policy):
        part.weight.data *= 100
    expected = plain_agent({name: weight.double() for name, weight in agent.state_dict().items()}, obs)
    for ours, plain in zip(agent(obs), expected, strict=True):
        torch.testing.assert_close(ours.double(), plain, rtol=1e-4, atol=1e-5)
    for kind in ("elu4", "relu4", "elu"):
        snd, x = SND(44, Args(snd_net=kind, snd_features=6)), torch.randn(3, 1, 44, 44)
        w = {name: weight.double() for name, weight in snd.state_dict().items()}
        for name, net in (("target", snd.target), ("predictor", snd.predictor)):
            torch.testing.assert_close(net(x).double(), plain_snd(w, name, x.double(), kind)[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            snd.target[:6](x).double(), plain_snd(w, "target", x.double(), kind)[1], rtol=1e-4, atol=1e-5
        )


def numpy_contrastive(a, b, far):
    loss = 0.0
    for x, y, label in zip(a, b, far, strict=True):
        loss += (label - sum((p - q) ** 2 for p, q in zip(x, y, strict=True)) / len(x)) ** 2 / len(a)
    return loss + max(0.0, (a**2).mean() + (b**2).mean() - 200)


@pytest.mark.parametrize("scale", [1, 14])
def test_contrastive_matches_numpy(scale):
    """Once under and once over the limit of the norms."""
    rng = np.random.default_rng(0)
    (a, b), far = scale * rng.normal(size=(2, 7, 5)), rng.random(7) < 0.5
    ours = contrastive(torch.from_numpy(a), torch.from_numpy(b), torch.from_numpy(far).double()).item()
    assert ours == pytest.approx(numpy_contrastive(a, b, far)) and ((a**2).mean() + (b**2).mean() > 200) == (scale > 1)


def numpy_vicreg(a, b):
    n, d = a.shape
    loss = ((a - b) ** 2).sum() / (n * d)
    for z in (a, b):
        z = z - z.mean(0)
        for i in range(d):
            loss += max(0.0, 1 - np.sqrt((z[:, i] ** 2).sum() / (n - 1) + 1e-4)) / d
            for j in range(d):
                loss += (i != j) * ((z[:, i] * z[:, j]).sum() / (n - 1)) ** 2 / d / 25
    return loss


@pytest.mark.parametrize("scale", [0.3, 3])
def test_vicreg_matches_numpy(scale):
    a, b = scale * np.random.default_rng(1).normal(size=(2, 9, 4))
    assert vicreg(torch.from_numpy(a), torch.from_numpy(b)).item() == pytest.approx(numpy_vicreg(a, b))


def numpy_infonce(patches, whole, local, features):
    """A softmax over the batch for every patch of every row; patches: (P, B, K)."""
    P, B, _ = patches.shape
    loss = 0.0
    for question in (np.broadcast_to(whole, patches.shape), local):
        for p in range(P):
            for b in range(B):
                logits = np.array([question[p, b] @ patches[p, c] for c in range(B)])
                loss += (np.log(np.exp(logits).sum()) - logits[b]) / (P * B)
                loss += 1e-4 * np.sqrt((logits**2).sum()) / (P * B)
    return loss - 1e-4 * np.mean([row.std(ddof=1) for row in features])


def test_infonce_matches_numpy():
    rng = np.random.default_rng(2)
    parts = [rng.normal(size=shape) for shape in ((6, 5, 3), (5, 3), (6, 5, 3), (5, 7))]
    ours = infonce(*map(torch.from_numpy, parts)).item()
    assert ours == pytest.approx(numpy_infonce(*parts), rel=1e-9)
    parts[3] *= 2  # the regulariser is felt: a larger deviation is better
    assert infonce(*map(torch.from_numpy, parts)).item() < ours - 1e-5


def test_a_target_that_diverges_stops_the_run(tmp_path):
    """Even in the last step of an iteration, whose losses were still finite: one line that names what."""
    with pytest.raises(FloatingPointError, match="target/"):
        run(tmp_path, fake(learn=True), lr=("1e8",), minibatch_size=64)


def test_effective_rank():
    """Of k equal, orthogonal directions it is k; of one direction 1; of equal rows none is not a number."""
    for k in (1, 2, 5):
        basis = torch.cat([torch.eye(8)[:k], -torch.eye(8)[:k]])
        assert effective_rank(3 * basis + 7) == pytest.approx(k, rel=1e-4)
    assert effective_rank(torch.ones(6, 3)) == pytest.approx(1)


def test_tiles_hide_a_tenth_of_half_the_frames_and_noise_moves_half():
    torch.manual_seed(0)
    ppo_atari_snd.random.seed(0)
    hidden, noisy, sizes, noise = [], [], set(), []
    for _ in range(60):
        x = torch.full((64, 1, 96, 96), 5.0)
        y = distort(x, "tiles")
        assert y.shape == x.shape and ((y - 5).abs() <= 0.2).logical_or(y.abs() <= 0.2).all()
        black = (y.abs() <= 0.2).float().mean((1, 2, 3))
        noise.append((y - 5)[y > 4])
        hidden.append(black)
        noisy += [(row.frac() != 0).any().item() for row in y]
        row = (y[black.argmax(), 0].abs() <= 0.2).float()  # runs of hidden pixels are multiples of the tile
        edges = (row[:, 1:] != row[:, :-1]).any(0).nonzero().flatten() + 1
        sizes.add(int(np.gcd.reduce(edges.numpy())) if len(edges) else 96)
    hidden, noise = torch.cat(hidden), torch.cat(noise)
    assert noise.mean().abs() < 0.001 and noise.min() < -0.199 and noise.max() > 0.199
    assert hidden.mean().item() == pytest.approx(0.05, abs=0.006) and (hidden > 0).float().mean() == pytest.approx(
        0.5, abs=0.06
    )
    assert np.mean(noisy) == pytest.approx(0.5, abs=0.05) and {1, 2, 4, 8, 12, 16} <= sizes


def test_both_frames_of_a_pair_have_draws_of_their_own():
    """Else a frame would be told from itself without any distortion to see through."""
    torch.manual_seed(0)
    snd, frames = SND(44, Args(snd_features=8)), torch.randint(0, 256, (16, 1, 44, 44), dtype=torch.uint8)
    shown, preprocess = [], ppo_atari_snd.distort
    ppo_atari_snd.distort = lambda x, kind: shown.append(preprocess(x, kind)) or shown[-1]
    try:
        loss = snd.target_loss(frames, frames, torch.zeros(16))
    finally:
        ppo_atari_snd.distort = preprocess
    assert loss > 0 and len(shown) == 2
    differ = (shown[0] != shown[1]).flatten(1).any(1).float().mean()
    assert differ > 0.6  # all but those that neither draw touched


def test_pixelate():
    """Half at half the resolution, a quarter at a quarter, an eighth without a tenth of its pixels, all noisy."""
    torch.manual_seed(0)
    x = torch.randn(4000, 1, 12, 12) + 10
    y = distort(x, "pixelate")
    dark = y.abs() < 0.3
    assert dark.any((1, 2, 3)).float().mean() == pytest.approx(0.125, abs=0.02)
    assert dark[dark.any(3).any(2)[:, 0]].float().mean() == pytest.approx(0.1, abs=0.01)
    y = torch.where(dark, torch.nan, y)
    same = ((y - x).abs() <= 0.2001).logical_or(y.isnan()).all((1, 2, 3))  # neither: (1 - 1/2)(1 - 1/4)
    half = F.interpolate(F.avg_pool2d(x, 2), scale_factor=2.0)
    halved = ((y - half).abs() <= 0.2001).logical_or(y.isnan()).all((1, 2, 3))
    assert same.float().mean() == pytest.approx(0.375, abs=0.025)
    assert halved.float().mean() == pytest.approx(0.375, abs=0.025)
    assert 0.1 < (y - x)[same].nan_to_num().abs().max() <= 0.2001
    assert distort(torch.randn(3, 1, 45, 45), "pixelate").shape == (3, 1, 45, 45)  # sizes that do not divide


@pytest.mark.parametrize("kind", ["std", "mean", "none"])
def test_preprocess(kind):
    frames = torch.randint(0, 256, (50, 1, 44, 44), dtype=torch.uint8)
    snd = SND(44, Args(snd_preprocess=kind, snd_features=4))
    snd.frames.update(frames)
    x = frames.double()
    expected = dict(
        std=((x - x.mean(0)) / x.std(0, correction=0)).clamp(-1, 1), mean=(x - x.mean(0)) / 255, none=x / 255
    )
    torch.testing.assert_close(snd.preprocess(frames).double(), expected[kind], rtol=1e-3, atol=1e-3)


# ---------------------------------------------------------------------------------------------------- one whole update


def plain_loss(kind, w, x, y, far, net):
    """The target's loss of standardised frames, float64, from the formulas."""
    (a, maps), (b, next_maps) = (plain_snd(w, "target", z, net) for z in (x, y))
    if kind == "v":
        distance = (a - b).square().mean(1)
        return (far.double() - distance).square().mean() + (a.square().mean() + b.square().mean() - 200).clamp(min=0)
    if kind == "vic":
        loss, d = (a - b).square().mean(), a.shape[1]
        for z in (a, b):
            z = z - z.mean(0)
            covariance = z.T @ z / (len(z) - 1)
            loss = loss + (1 - (covariance.diagonal() + 1e-4).sqrt()).clamp(min=0).mean()
            loss = loss + (covariance * (1 - torch.eye(d))).square().sum() / d / 25
        return loss
    loss, size = 0, maps.shape[-1]
    for row in range(size):
        for column in range(size):
            patch, following = maps[:, :, row, column], next_maps[:, :, row, column]
            for asked in (
                F.linear(b, w["whole.weight"], w["whole.bias"]),
                F.linear(following, w["local.weight"], w["local.bias"]),
            ):
                logits = asked @ patch.T
                right = (logits.exp().sum(1).log() - logits.diagonal()).mean()
                loss = loss + (right + 1e-4 * logits.square().sum(1).sqrt().mean()) / size**2
    return loss - 1e-4 * a.std(1).mean()


CASES = {
    "v": dict(),
    "v, next frame, pieces, in order": dict(
        bonus_on="next",
        int_episodic=False,
        micro_batch=7,
        motivation_passes="one",
        predictor_share=0.5,
        pairs=9,
        eta=0.5,
    ),
    "std": dict(
        target="std",
        snd_net="relu4",
        target_gain=1.5,
        predictor_gain=1.2,
        predictor_sum=True,
        predictor_share=1,
        eta=1.2,
    ),
    "vic": dict(target="vic", snd_net="relu4", target_gain=1.2, minibatches="permuted", snd_preprocess="none", eta=4),
    "none": dict(target="none", snd_net="elu", minibatches="envs", snd_preprocess="mean", eta=2.5),
}


def clipped_standard(frames, shown, kind):
    if kind == "none":
        return frames.double() / 255
    return standardised(frames, shown, kind).clamp(-1, 1) if kind == "std" else standardised(frames, shown, kind)


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_update_equals_float64_reference(tmp_path, monkeypatch, changes):
    """Two iterations with terminations, truncations, lost lives and dummy rows, recomputed in float64 from the frames.

    Compared: weights of policy, predictor and target, frame statistics, metrics. Augmentation is a mirror here.
    """
    rands, ints, orders = [], [], []
    rand, randint, order = torch.rand, torch.randint, ppo_atari_snd.order
    monkeypatch.setattr(torch, "rand", lambda *size, **k: rands.append(rand(*size, **k)) or rands[-1])
    monkeypatch.setattr(torch, "randint", lambda *size, **k: ints.append(randint(*size, **k)) or ints[-1])
    monkeypatch.setattr(ppo_atari_snd, "order", lambda *x: orders.append(order(*x)) or orders[-1])
    monkeypatch.setattr(ppo_atari_snd, "distort", lambda x, kind: x.flip(3))
    init = Agent.__init__

    def with_large_values(self, *rest):  # so that it matters which frame a value is of
        init(self, *rest)
        for part in (self.hidden_policy, self.policy, self.value):
            part.weight.data *= 30

    monkeypatch.setattr(Agent, "__init__", with_large_values)
    envs = fake(learn=True)  # whose frames differ much
    options = dict(update_epochs=2, lr=("1e-3",), adam_eps=0.01, clip=1e-3, vf_coef=0.7, gamma=0.95, gamma_int=0.9)
    options |= dict(max_grad_norm=0.05, eta=0.3) | changes
    metrics, saved = run(tmp_path, envs, iterations=2, **options)
    args = Args(**(SMALL | options))
    monkeypatch.undo()
    rands, ints, kind = iter(rands), iter(part for part in ints if len(part) == 2 and part.shape[1] < 64), args.target
    monkeypatch.setattr(Agent, "__init__", with_large_values)
    torch.manual_seed(1)
    agent, snd = Agent(SHAPE, 4), SND(44, args)
    w = {name: x.double().requires_grad_() for name, x in agent.state_dict().items()}
    r = {name: x.double().requires_grad_() for name, x in snd.state_dict().items() if name != "frames.sums"}
    optimizer = torch.optim.Adam([*w.values(), *r.values()], lr=1e-3, eps=0.01)
    T, N, warmup, size, net = 16, 4, 3, args.minibatch_size, args.snd_net
    shown = [frame[:, -1:].astype(float) for frame in envs.seen[1 : warmup + 1]]  # all that the statistics saw
    for rollout in range(2):
        first = warmup + rollout * T
        obs = torch.from_numpy(np.stack(envs.seen[first : first + T + 1]))
        actions = torch.from_numpy(np.stack(envs.actions[first : first + T])).long()
        newest = obs[:, :, -1:]
        frames = newest[1:] if args.bonus_on == "next" else newest[:-1]
        with torch.no_grad():
            logits, values = (x.view(T + 1, N, -1) for x in plain_agent(w, obs.flatten(0, 1)))
            x = clipped_standard(frames.flatten(0, 1), shown, args.snd_preprocess)
            raw = (plain_snd(r, "predictor", x, net)[0] - plain_snd(r, "target", x, net)[0]).square().mean(1)
            raw = raw.view(T, N).numpy()
            bonus = np.minimum(args.eta * raw, 1)
        shown += [frame.numpy().astype(float) for frame in frames]
        x = clipped_standard(frames.flatten(0, 1), shown, args.snd_preprocess)
        everything = clipped_standard(newest.flatten(0, 1), shown, args.snd_preprocess)
        ext, internal, valid = streams(envs, args, values.numpy(), bonus, first)
        advantage = torch.from_numpy(2 * ext + internal).flatten()
        target = (torch.from_numpy(np.stack([ext, internal], -1)) + values[:T]).flatten(0, 1)
        old_logp = logits[:T].log_softmax(-1).gather(-1, actions[..., None])[..., 0].flatten()
        valid, losses = torch.from_numpy(valid).flatten(), []
        for epoch, rows_of_epoch in enumerate(orders[rollout]):
            for m, rows in enumerate(rows_of_epoch.split(size)):
                keep = rows[valid[rows]]
                logits, value = plain_agent(w, obs[:T].flatten(0, 1)[keep])
                logp = logits.log_softmax(-1).gather(1, actions.flatten()[keep][:, None])[:, 0]
                ratio, adv = (logp - old_logp[keep]).exp(), advantage[keep]
                clipped = torch.where(adv > 0, ratio.clamp(max=1 + args.clip), ratio.clamp(min=1 - args.clip))
                probabilities = logits.softmax(-1)
                entropy = -(probabilities * probabilities.log()).sum(1).mean()
                policy, goal = -(clipped * adv).mean(), target[keep]
                value = (value - goal).square().sum(1).mean() / 2
                taught = rows
                if args.motivation_passes == "one":
                    taught = torch.arange(m * size, (m + 1) * size) if epoch == 0 else rows[:0]
                optimizer.zero_grad()
                loss, learned = policy + 0.7 * value - 0.001 * entropy, [policy.item(), value.item(), entropy.item()]
                if len(taught):
                    mask = (next(rands) < (args.predictor_share or 1)).double()
                    error = (
                        plain_snd(r, "predictor", x[taught], net)[0]
                        - plain_snd(r, "target", x[taught], net)[0].detach()
                    )
                    predictor = (error**2 * mask).sum() / (1 if args.predictor_sum else mask.sum())
                    one = taught[valid[taught]]  # dummy rows' next frame is another game's
                    other, far = one + N, None
                    if kind == "v":
                        (one, other), near = next(ints), next(rands)
                        other = torch.where(near < 0.5, one, other)
                        far = one != other
                        assert len(one) == (args.pairs or 4)
                    frames_of = [everything[part].flip(3) if kind == "v" else everything[part] for part in (one, other)]
                    loss = loss + predictor
                    goal = 0.0 if kind == "none" else plain_loss(kind, r, *frames_of, far, net)
                    loss = loss + goal
                    losses.append([*learned, predictor.item(), float(torch.as_tensor(goal).detach())])
                else:
                    losses.append([*learned, np.nan, np.nan])
                loss.backward()
                norm = sum(weight.grad.square().sum() for weight in w.values()) ** 0.5
                for weight in w.values():
                    weight.grad *= min(1.0, 0.05 / norm.item())
                optimizer.step()
                outside = ((ratio - 1).abs() > args.clip).double().mean()
                losses[-1] += [(ratio - 1 - ratio.log()).mean().item(), outside.item(), norm.item()]
    assert next(rands, None) is None and next(ints, None) is None
    assert 0.02 < (bonus == 1).mean() < 0.98  # the limit was felt
    names = ("loss/policy", "loss/value", "loss/entropy", "loss/predictor", "loss/target")
    names += ("train/approx_kl", "train/clip_frac", "train/grad_norm")
    for name, mean in zip(names, np.nanmean(losses, axis=0), strict=True):
        if (name, kind) != ("loss/target", "none"):
            assert metrics[name] == pytest.approx(mean, rel=2e-3, abs=1e-7 if "kl" in name else 1e-4), (name, mean)
    assert ("loss/target" in metrics) == (kind != "none")
    assert metrics["int/reward_raw"] == pytest.approx(raw.mean(), rel=1e-3)
    assert metrics["int/reward_norm"] == pytest.approx(bonus.mean(), rel=1e-3)
    one = valid.nonzero()[:, 0]
    with torch.no_grad():
        now, then = (plain_snd(r, "target", everything[rows], net)[0] for rows in (one, one + N))
    far = now[(torch.arange(len(one)) - len(one) // 2) % len(one)]
    for name, mean in dict(near=(now - then).square().mean(), far=(now - far).square().mean()).items():
        assert metrics[f"target/{name}"] == pytest.approx(mean.item(), rel=2e-3), name
    assert metrics["target/feature_norm"] == pytest.approx(now.square().sum(1).sqrt().mean().item(), rel=1e-3)
    share = np.linalg.svd((now - now.mean(0)).numpy(), compute_uv=False)
    share = (share / share.sum())[share / share.sum() > 1e-9]
    assert metrics["target/rank"] == pytest.approx(np.exp(-(share * np.log(share)).sum()), rel=2e-3)
    assert metrics["int/return_std"] == pytest.approx(target[valid][:, 1].std().item(), rel=1e-3)
    assert metrics["train/valid_frac"] == pytest.approx(valid.double().mean().item())
    assert metrics["train/lr"] == pytest.approx(1e-3) and 0 < metrics["train/clip_frac"] < 1
    unexplained = np.array([part.flatten()[valid.numpy()].var(ddof=1) for part in (ext, internal)])
    explained = 1 - unexplained / target[valid].var(0).numpy()
    assert metrics["train/explained_variance"] == pytest.approx(explained[0], rel=1e-2, abs=1e-3)
    assert metrics["int/explained_variance"] == pytest.approx(explained[1], rel=1e-2, abs=1e-3)
    np.testing.assert_allclose(saved["snd"]["frames.sums"][1], np.concatenate(shown).sum(0), rtol=1e-9)
    for plain, ours in ((w, saved["agent"]), (r, saved["snd"])):
        for name, weight in plain.items():
            torch.testing.assert_close(ours[name].double(), weight, rtol=1e-3, atol=3e-5, msg=name)


def test_without_a_target_it_is_rnd(tmp_path):
    """--target none equals ppo_atari_rnd.py with the matching flags, weight for weight, over three iterations."""
    shared = dict(gamma=0.99, gamma_int=0.95, lr=("1e-3",), max_grad_norm=0.5, minibatches="drawn", update_epochs=2)
    shared |= dict(int_episodic=True, bonus_on="current", int_clip=1, predictor_share=0.25, micro_batch=32)
    flags = dict(target="none", snd_net="elu", snd_preprocess="mean", eta=4.0)  # half the sum of 8 features
    ours, saved = run(tmp_path, fake(learn=True), 3, "snd", **shared, **flags)
    flags = dict(net="c", rnd_net="elu", obs_norm="mean", int_reward="half_sum", int_norm="none")
    flags |= dict(predictor_mask="element", rnd_features=8)
    common = {name: value for name, value in SMALL.items() if name not in ("snd_features", "update_epochs")}
    args = ppo_atari_rnd.Args(**common, **shared, **flags, run_dir=str(tmp_path), run_name="rnd")
    args.total_timesteps = 3 * args.batch_size
    theirs = ppo_atari_rnd.train(args, fake(learn=True))
    expected = torch.load(tmp_path / "rnd" / "checkpoint.pt", weights_only=True)
    for name, weight in saved["agent"].items():
        torch.testing.assert_close(weight, expected["agent"][name], rtol=1e-5, atol=1e-6, msg=name)
    for name, weight in saved["snd"].items():
        torch.testing.assert_close(weight, expected["rnd"][name], rtol=1e-5, atol=1e-6, msg=name)
    start = SND(44, Args(**SMALL, target="none", snd_net="elu")).state_dict()  # another seed's: nothing is constant
    assert not any(torch.equal(start[name], weight) for name, weight in saved["snd"].items() if "weight" in name)
    for name, value in theirs.items():
        if not name.startswith(("time/", "run", "int/return_std")):  # whose raw bonus is not yet times eta
            scale = 4 if name == "int/reward_raw" else 1
            assert scale * ours[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("target", ["v", "std", "vic"])
def test_predictor_and_target_do_not_teach_each_other(tmp_path, monkeypatch, target):
    """Without rows for the predictor only the target moves; without a loss of its own only the predictor does."""
    start = {}
    init = SND.__init__

    def keep(self, *rest):
        init(self, *rest)
        start.update({name: weight.detach().clone() for name, weight in self.named_parameters()})

    monkeypatch.setattr(SND, "__init__", keep)

    def moved(saved):
        return {name.split(".")[0] for name, weight in start.items() if not torch.equal(weight, saved["snd"][name])}

    flags = dict(target=target, snd_net="relu4" if target != "v" else "elu4")
    learned = {"target", "whole", "local"} if target == "std" else {"target"}
    assert moved(run(tmp_path, fake(learn=True), name="target", predictor_share=1e-12, **flags)[1]) == learned
    loss = SND.target_loss
    monkeypatch.setattr(SND, "target_loss", lambda self, *x: 0 * loss(self, *x))
    assert moved(run(tmp_path, fake(learn=True), name="predictor", **flags)[1]) == {"predictor"}
    monkeypatch.setattr(SND, "target_loss", loss)
    assert moved(run(tmp_path, fake(learn=True), name="both", **flags)[1]) == {"predictor", *learned}


def test_the_last_row_of_a_rollout_is_learned(tmp_path, monkeypatch):
    """Both public codebases train it with advantage and return zero. Here its reward reaches its own advantage."""
    calls, seen, gae, terms = [], [], ppo_atari_snd.gae, ppo_atari_snd.ppo_terms
    monkeypatch.setattr(ppo_atari_snd, "gae", lambda *x: calls.append((x, gae(*x))) or calls[-1][1])
    monkeypatch.setattr(ppo_atari_snd, "ppo_terms", lambda *x: seen.append(x[3:5]) or terms(*x))
    run(tmp_path, fake(learn=True), minibatches="envs", minibatch_size=64, micro_batch=64)
    last = []
    for (reward, value, ended, _, gamma, _), advantage in calls:
        expected = reward[-1] + gamma * value[-1] * (1 - ended[-1]) - value[-2]
        torch.testing.assert_close(advantage[-1], expected)
        assert (expected.abs() > 1e-4).all()
        last.append((advantage[-1], advantage[-1] + value[-2]))
    advantages, targets = seen[0]
    torch.testing.assert_close(advantages.view(4, 16)[:, -1], 2 * last[0][0] + last[1][0])
    torch.testing.assert_close(targets.view(4, 16, 2)[:, -1], torch.stack([last[0][1], last[1][1]], -1))


@pytest.mark.parametrize("autoreset", [NEXT_STEP, SAME_STEP])
def test_a_reset_shows_in_its_own_row(tmp_path, monkeypatch, autoreset):
    """The paper's code writes a new game's frame to another environment's row when not all games end at once."""
    shown, forward = [], Agent.forward
    monkeypatch.setattr(Agent, "forward", lambda self, x: shown.append(x.clone()) or forward(self, x))
    envs = fake(autoreset, ends=("terminated", "truncated"))
    run(tmp_path, envs, 2, ext_coef=1)
    shown = [x for x in shown if len(x) == 4 and not x.requires_grad]
    acted = [x for x in shown if (x[:, 0, 0, 0] == torch.arange(4)).all()]
    assert len(acted) >= 34 and len({int(x[2, 0, 0, 1]) for x in acted}) > 3  # episodes of env 2
    assert any((x[:, 0, 0, 2] == 0).sum() == 1 for x in acted)  # one new game among running ones


def test_pairs_of_std_and_vic_are_of_one_game(tmp_path, monkeypatch):
    """Consecutive frames: the next step of the same game, never the next game's first frame; all rows but those."""
    pairs, loss = [], SND.target_loss
    for target in ("std", "vic"):
        for autoreset in (NEXT_STEP, SAME_STEP):
            pairs.clear()
            with monkeypatch.context() as patch:
                patch.setattr(SND, "target_loss", lambda self, x, y, far: pairs.append((x, y)) or loss(self, x, y, far))
                envs = fake(autoreset, ends=("terminated", "truncated"))
                flags = dict(target=target, snd_net="relu4", motivation_passes="one", update_epochs=3)
                run(tmp_path, envs, 1, f"{target} {autoreset}", **flags)
            x, y = (torch.cat(frames)[:, 0, 0, :3].int() for frames in zip(*pairs, strict=True))
            assert torch.equal(x[:, :2], y[:, :2]) and (y[:, 2] == x[:, 2] + 1).all()
            ends = sum(
                int((ended | cut).sum()) for _, ended, cut, _ in envs.log[2 if autoreset == NEXT_STEP else 3 : -1]
            )
            last = int((envs.log[-1][1] | envs.log[-1][2]).sum()) if autoreset == SAME_STEP else 0
            assert len(x) == 64 - ends - last and ends > 3


def test_pairs_of_v(tmp_path, monkeypatch):
    """Half are one frame twice, half two frames of the whole rollout, as many as asked, whatever the minibatch."""
    pairs, loss = [], SND.target_loss
    monkeypatch.setattr(SND, "target_loss", lambda self, x, y, far: pairs.append((x, y, far)) or loss(self, x, y, far))
    run(tmp_path, fake(), update_epochs=20, num_steps=16, minibatch_size=16, minibatches="envs", pairs=20)
    assert len(pairs) == 80 and all(len(x) == 20 for x, _, _ in pairs)
    x, y, far = (torch.cat(part) for part in zip(*pairs, strict=True))
    assert far.float().mean() == pytest.approx(0.5 * 63 / 64, abs=4 * 0.5 / 1600**0.5)
    assert (x == y)[~far].all() and not (x == y)[far].flatten(1).all(1).all()
    for frames in (x, y[far]):
        assert set(frames[:, 0, 0, 0].tolist()) == {0, 1, 2, 3}
    assert (x[far][:, 0, 0, 0] != y[far][:, 0, 0, 0]).float().mean() == pytest.approx(0.76, abs=0.08)


def test_one_pass_is_over_the_rollout_in_its_order(tmp_path, monkeypatch):
    shown, preprocess = [], SND.preprocess

    def spy(self, frames):
        if torch.is_grad_enabled() and len(frames) == 32:
            shown.append(frames.clone())
        return preprocess(self, frames)

    monkeypatch.setattr(SND, "preprocess", spy)
    envs = fake()
    run(tmp_path, envs, motivation_passes="one", update_epochs=3, target="none", snd_net="elu")
    assert np.array_equal(torch.cat(shown).numpy().reshape(16, 4, 1, 44, 44), np.stack(envs.seen[3:19])[:, :, -1:])


def test_order_of_rows():
    """envs: whole environments, in order, always; permuted: one permutation for all epochs; drawn: with replacement."""
    rows = ppo_atari_snd.order("envs", 3, 2, 2)
    assert rows.tolist() == [[0, 2, 4, 1, 3, 5]] * 2
    rows = ppo_atari_snd.order("permuted", 30, 2, 2)
    assert torch.equal(rows[0], rows[1]) and sorted(rows[0].tolist()) == list(range(60)) != rows[0].tolist()
    assert not torch.equal(rows[0], ppo_atari_snd.order("permuted", 30, 2, 2)[0])
    rows = ppo_atari_snd.order("drawn", 300, 2, 2)
    assert rows.shape == (2, 600) and not torch.equal(rows[0], rows[1])
    assert len(set(rows[0].tolist())) == pytest.approx(600 * (1 - np.exp(-1)), abs=40) and rows.max() < 600


# ---------------------------------------------------------------------------------------------------- SND with entropy


@pytest.mark.parametrize("autoreset", [NEXT_STEP, SAME_STEP])
def test_spread_is_of_the_games_recent_features(tmp_path, monkeypatch, autoreset):
    """Against a list of each game's features, through rollouts: the deviation over its last five rows."""
    calls, spread = [], SND.spread

    def spy(self, frames, over):
        features = self.target(self.preprocess(frames.flatten(0, 1))).view(16, 4, 8).detach().double().numpy()
        calls.append((features, frames[:, :, 0, 0, :3].int().numpy(), spread(self, frames, over)))
        return calls[-1][2]

    monkeypatch.setattr(SND, "spread", spy)
    envs = fake(autoreset, ends=("terminated", "truncated"))
    metrics, saved = run(tmp_path, envs, 3, entropy_bonus=True, entropy_window=5, target="none", snd_net="elu")
    games = [[] for _ in range(4)]
    playing = [None] * 4
    for features, shown, ours in calls:
        for t in range(16):
            for n in range(4):
                if playing[n] != shown[t, n, 1]:
                    playing[n], games[n] = shown[t, n, 1], []
                games[n].append(features[t, n])
                assert ours[t, n] == pytest.approx(np.std(games[n][-5:], axis=0).mean(), rel=1e-3, abs=1e-6)
    assert len({len(game) for game in games}) > 1 and metrics["int/spread"] == pytest.approx(calls[-1][2].mean().item())
    assert saved["snd"]["recent"].shape == (5, 4, 8)


def test_entropy_bonus_has_a_head_of_its_own(tmp_path, monkeypatch):
    """Its reward, limited to 1, its discount and its weight make a third stream of advantages and a third target."""
    calls, seen, gae, terms = [], [], ppo_atari_snd.gae, ppo_atari_snd.ppo_terms
    spread = torch.rand(16, 4) * 2
    monkeypatch.setattr(SND, "spread", lambda self, *x: spread)
    monkeypatch.setattr(ppo_atari_snd, "gae", lambda *x: calls.append((x, gae(*x))) or calls[-1][1])
    monkeypatch.setattr(ppo_atari_snd, "ppo_terms", lambda *x: seen.append((x[1], *x[3:5], x[6])) or terms(*x))
    flags = dict(entropy_bonus=True, gamma_entropy=0.7, entropy_eta=0.8, entropy_coef=3.0, minibatches="envs")
    _, saved = run(tmp_path, fake(), minibatch_size=64, micro_batch=64, ext_coef=0, **flags)
    torch.testing.assert_close(calls[2][0][0], (0.8 * spread).clamp(max=1))
    assert [call[0][4] for call in calls] == [0.998, 0.99, 0.7] and torch.equal(calls[2][0][2], calls[1][0][2])
    values, advantages, targets, heads = seen[0]
    torch.testing.assert_close(advantages, (calls[1][1] + 3 * calls[2][1]).T.flatten())
    torch.testing.assert_close(targets[:, 2], (calls[2][1] + calls[2][0][1][:16]).T.flatten())
    assert values.shape == (64, 3) and heads.tolist() == [0, 1, 1] and saved["agent"]["value.weight"].shape[0] == 3


# --------------------------------------------------------------------------------------------------------------- learns


def blobs(count):
    """Frames with a bright square somewhere, and the same ones a step later, two pixels on."""
    frames = torch.zeros(2, count, 1, 44, 44, dtype=torch.uint8)
    for i, (y, x) in enumerate(torch.randint(0, 34, (count, 2)).tolist()):
        frames[0, i, 0, y : y + 8, x : x + 8] = 255
        frames[1, i, 0, y : y + 8, x + 2 : x + 10] = 255
    return frames


@pytest.mark.parametrize("target", ["v", "std", "vic"])
def test_the_target_learns(target):
    """On frames that it has not seen: v tells pairs from strangers, std the step before, vic keeps features apart."""
    torch.manual_seed(0)
    snd = SND(44, Args(target=target, snd_features=32, snd_net="elu4" if target == "v" else "relu4", target_gain=0.5))
    snd.frames.update(blobs(1000)[0])
    fresh, optimizer, losses = blobs(64), torch.optim.Adam(snd.parameters(), lr=1e-3), []

    def judge():
        with torch.no_grad():
            a, b = (snd.target(snd.preprocess(x)) for x in fresh)
            far = (a - a.roll(1, 0)).square().mean()
            return far.item(), ((a - b).square().mean() / far).item(), a.std(0).mean().item(), effective_rank(a)

    before = judge()
    for _ in range(150):
        x, y = blobs(32)
        same = torch.rand(32) < 0.5
        y = torch.where(same[:, None, None, None], x, x.roll(1, 0)) if target == "v" else y
        optimizer.zero_grad()
        loss = snd.target_loss(x, y, ~same)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    after, fall = judge(), np.mean(losses[-20:]) / np.mean(losses[:5])
    assert fall < (0.9 if target == "std" else 0.5), fall  # std: no loss tells empty patches apart
    if target == "v":
        assert abs(after[0] - 1) < 0.4 and after[1] < 0.3
    elif target == "vic":
        assert after[2] > 0.8 and after[1] < 0.3 * before[1] and after[3] > 5


def test_it_learns_the_games_rewards(tmp_path):
    """Reward 1 for the action that the frame shows, one in four by chance, bonus and all: no term is upside down."""
    envs = FakeVecEnv([[([0.0] * 20, "terminated")]] * 8, NEXT_STEP, shape=SHAPE, learn=True)
    flags = dict(num_envs=8, num_steps=32, minibatch_size=64, update_epochs=4, lr=("3e-4",), gamma=0.5, eta=0.01)
    run(tmp_path, envs, 50, warmup_steps=16, **flags)
    rewards = np.stack([reward for reward, *_ in envs.log])
    assert rewards[:200].mean() < 0.4 and rewards[-200:].mean() > 0.6


@pytest.mark.slow
@pytest.mark.parametrize("target", ["v", "vic"])
def test_unseen_screens_are_novel(target):
    """Trained by the script's loop on frames of Pitfall's first screen, the bonus is larger on the next ones, by at
    least five standard errors over games, and more so than that of networks that learned nothing.

    Not std: after as many steps its target's features still outgrow the predictor (ratio 0.98, README).
    """
    sys.path.insert(0, str(ROOT / "benchmark"))
    import novelty

    result = novelty.measure(target, seed=1, iterations=6)
    assert result["ratio"] > 1.2 * result["untrained_ratio"] and result["ratio"] > 1, result
    assert result["errors_apart"] > 5, result
