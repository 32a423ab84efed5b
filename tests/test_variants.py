"""The variants of the scripts, benchmark/variants/: each as a user runs it, and what is its own."""

import copy
import importlib
import json
import runpy
import shutil
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import ROOT, SAME_STEP, FakeVecEnv, giving, plain_deviation, random_episodes, rows, timeless

FOLDER = ROOT / "benchmark" / "variants"
STEMS = [path.stem for path in (*ROOT.glob("*.py"), *FOLDER.glob("*.py"))]
ITERATION = "--num-envs 4 --num-steps 16 --minibatch-size 32 --threads 1 --quiet"
LEAPER = "--env-id leaper --channels 4 4 4"
BONUS = "--warmup-steps 3 --update-epochs 1"
OWN = {
    "procgen_augment": f"{LEAPER} --augment flip translate crop rotate pad_crop",
    "impala_augment": f"{LEAPER} --num-groups 2 --sync --minibatch-size 64 --augment-draw anew",
    "procgen_rnd": LEAPER,
    "procgen_shaped": LEAPER,
    "snd_procgen": "--env-id jumper --target vic --snd-features 8 --update-epochs 1",
    "snd_paper": f"--env-id Breakout --target std --snd-features 8 --max-episode-steps 30 {BONUS}",
    "snd_entropy": f"--env-id Breakout --snd-features 8 --episodic-steps 5 --max-episode-steps 30 {BONUS}",
    "rnd_dnc": f"--env-id Breakout --dnc 4 3 2 --rnd-features 8 --max-episode-steps 30 {BONUS}",
    "snd_breakout": f"--env-id Breakout --snd-features 8 --max-episode-steps 30 {BONUS}",
    "rnd_michalnand": f"--config ppo_rnd_b2 --snd-features 8 --max-episode-steps 30 {BONUS}",
}


@pytest.fixture
def variant(monkeypatch):
    """variant(name): its module, imported anew with its script, which it finds itself; all others keep theirs."""
    before = {name: sys.modules.pop(name) for name in STEMS if name in sys.modules}
    monkeypatch.setattr(sys, "path", [str(FOLDER), *(path for path in sys.path if Path(path).resolve() != ROOT)])
    yield importlib.import_module
    for name in STEMS:
        sys.modules.pop(name, None)
    sys.modules.update(before)


@pytest.mark.parametrize("name", OWN)
def test_runs(variant, name, tmp_path, monkeypatch):
    """As typed, but small: two iterations and an evaluation; a variant with a state is resumed and played again."""
    module = variant(name)
    for part in {"Args", "Agent", "SND", "Run"} & vars(module).keys():
        assert getattr(module.script, part) is getattr(module, part)  # of the script, too
    monkeypatch.chdir(tmp_path)

    def run(file, *words):
        for stem in STEMS:
            sys.modules.pop(stem, None)
        monkeypatch.setattr(sys, "argv", [str(file), *map(str, words)])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(file), run_name="__main__")
        assert end.value.code == 0

    folder, file = tmp_path / "runs" / "x", FOLDER / f"{name}.py"
    run(file, *f"{ITERATION} {OWN[name]} --total-timesteps 128 --eval-episodes 2 --run-name x".split())
    own = json.loads((folder / "eval.json").read_text())
    assert json.loads((folder / "config.json").read_text())[-1]["script"] == name and own["step"] == 128
    if name == "procgen_rnd":
        run(ROOT / "benchmark" / "evaluate.py", folder, "--episodes", 2, "--out", tmp_path / "out.json")
        assert json.loads((tmp_path / "out.json").read_text()) == own
        run(file, "--resume", folder, "--total-timesteps", 192)
        assert json.loads((folder / "eval.json").read_text())["step"] == 192


def test_augmentations_by_hand(variant):
    """Each against NumPy, or where it must send a dot and a ramp; a row that draws no move stays."""
    augment = variant("procgen_augment").augment

    def moved(frames, name, *draws):
        draws = torch.tensor([[0.0, *draws, 0]]).repeat(len(frames), 1)
        return augment(torch.from_numpy(frames), (name,), 0.5, draws).numpy()

    frames = np.random.default_rng(0).integers(0, 256, (2, 6, 64, 64), np.uint8)
    shift = moved(frames, "translate", 11.5 / 17, 0.5 / 17)  # 3 to the left, 8 down
    assert (shift == np.roll(frames, (8, -3), (2, 3))).all()
    padded = np.pad(frames, [(0, 0), (0, 0), (10, 10), (10, 10)], "reflect")
    assert (moved(frames, "pad_crop", 0.5 / 21, 14.5 / 21) == padded[..., 14:78, 0:64]).all()
    ramp = np.zeros((1, 3, 64, 64), np.uint8) + 4 * np.arange(64, dtype=np.uint8)
    crop = moved(ramp, "crop", 0, 0)[0, 0]  # three quarters of the side, from the left
    np.testing.assert_allclose(crop, np.tile(3 * np.arange(64), (64, 1)), atol=0.51)
    dot = np.zeros((1, 3, 64, 64), np.uint8)
    dot[..., 31:33, 51:53] = 255  # 20 to the right of the centre
    turned = moved(dot, "rotate", 1, 0)[0, 0].astype(float)
    y, x = (np.indices((64, 64)) * turned).sum((1, 2)) / turned.sum() - 31.5
    np.testing.assert_allclose([x, y], 20 * np.array([np.cos(np.pi / 9), -np.sin(np.pi / 9)]), atol=0.2)
    draws = torch.tensor([[0.4, 0, 0.6, 0], [0.5, 0, 0, 0]])
    some = augment(torch.from_numpy(frames), ("flip",), 0.5, draws).numpy()
    assert (some[0] == frames[0, ..., ::-1]).all() and (some[1] == frames[1]).all()


def test_shaped_rewards(variant, monkeypatch):
    """Rewards by hand; reports and so evaluations keep the game's."""
    module = variant("procgen_shaped")
    np.testing.assert_allclose(module.shape(np.array([0, 3, -3, 8, 0.5])), [0, 1.003, -1.003, 2.008, 1.5**0.5 - 0.9995])

    def plain(args, num_envs, stream):
        envs = FakeVecEnv([[([3.0] * 5, "terminated")]] * num_envs, SAME_STEP, shape=(3, 64, 64))
        return module.script.RecordEpisodeStatistics(envs)

    monkeypatch.setattr(module, "plain_envs", plain)
    envs = module.make_envs(module.Args(), 2, "training")
    envs.reset()
    for _ in range(5):
        _, reward, *_, info = envs.step(np.zeros(2, int))
        np.testing.assert_allclose(reward, 1.003)
    assert info["episode"]["r"].tolist() == [15, 15]


@pytest.mark.parametrize("name", ["procgen_augment", "impala_augment"])
def test_augmentation_is_in_updates_only(variant, monkeypatch, name):
    """Acting sees unchanged frames; a row's two frames move alike; `once` moves a row as before, `anew` does not."""
    module = variant(name)
    monkeypatch.setattr(module.Agent.__mro__[2], "forward", lambda self, obs: obs)  # the script's own network
    obs = torch.randint(256, (32, 3, 64, 64), dtype=torch.uint8).repeat(1, 2, 1, 1)
    for draw in ("once", "anew"):
        args = module.Args(channels=(4, 4, 4), augment=("translate", "rotate"), augment_chance=0.9, augment_draw=draw)
        agent = module.Agent((6, 64, 64), 15, args)
        with torch.no_grad():
            assert agent(obs) is obs
        first, second = agent(obs), agent(obs.flip(0)).flip(0)
        assert torch.equal(first[:, :3], first[:, 3:])
        assert (first != obs).flatten(1).any(1).sum() > 24
        assert torch.equal(first, second) == (draw == "once")


def test_rnd_pays_the_bonus_of_the_observation_acted_on(variant, monkeypatch):
    """Divided by the std of its discounted sums, through ends; then the predictor learns; all of it is resumed."""
    module = variant("procgen_rnd")
    games = FakeVecEnv(random_episodes(2, ends=("terminated",)), SAME_STEP, shape=(6, 16, 16), learn=True)
    monkeypatch.setattr(module, "plain_envs", lambda *args: games)
    args = dict(num_envs=2, num_steps=20, channels=(8, 8, 8), minibatch_size=8, gamma=0.9, device="cpu")
    args = module.Args(**args, rnd_coef=0.5, rnd_clip=1)
    assert module.make_envs(args, 2, "test") is games
    envs = module.make_envs(args, 2, "training")
    target, predictor = copy.deepcopy([envs.target, envs.predictor])
    obs, _ = envs.reset()
    errors, sums, history, paid = [], np.zeros(2), [], set()
    for _ in range(20):
        x = torch.from_numpy(obs)
        features = target.hidden(target.features((x.float() - 128) / 255))
        errors.append((predictor(x)[0] - features).square().mean(1).detach().numpy())
        obs, reward, *_ = envs.step(np.zeros(2, int))
        sums = 0.9 * sums + errors[-1]
        history += sums.tolist()
        bonus = 0.5 * np.minimum(errors[-1] / plain_deviation(history), 1)
        np.testing.assert_allclose(reward - games.log[-1][0], bonus, rtol=1e-3, atol=1e-6)
        paid.update(bonus.tolist())
    assert max(paid) == 0.5 and len(paid) > 20 and games.episode.min() > 1
    assert torch.equal(target.hidden.weight, envs.target.hidden.weight)
    with torch.no_grad():
        assert np.mean([envs.errors(frames).mean() for frames in games.seen[:20]]) < np.mean(errors)
    written = []
    monkeypatch.setattr(module.Run.__mro__[1], "save", lambda self, name, state, outputs: written.append(state))
    object.__new__(module.Run).save("checkpoint.pt", {}, [])
    written = copy.deepcopy(written)
    monkeypatch.setattr(module.script, "load_checkpoint", lambda run: copy.deepcopy(written[0]))
    args.seed, args.resume = 2, "run"
    again = module.make_envs(args, 2, "training from 40")
    assert torch.equal(again.errors(obs), envs.errors(obs)) and again is not envs
    assert torch.equal(again.normalizer.sums, envs.normalizer.sums) and again.optimizer.state_dict()["state"]
    # In one go or resumed, the divisor is the same: the discounted sums are saved, too.
    bonus, done = torch.rand(30, 2), torch.zeros(2)
    for x in bonus:
        assert torch.equal(envs.normalizer(x, done), again.normalizer(x, done))
    written[0] = {"agent": {}}
    with pytest.raises(module.script.UsageError, match="not a run of procgen_rnd"):
        module.make_envs(args, 2, "training from 40")


def test_exploration_envs_reset_in_the_next_step(variant):
    """An end's row shows the frame before it; the row after it plays a no-op, has no reward and begins an episode."""
    module = variant("snd_procgen")
    first = [([3.0, -2.0, 5.0], "truncated"), ([7.0], "terminated"), ([0.0, 2.0], "terminated")]
    games = FakeVecEnv([first, [([1.0] * 9, "terminated")]], SAME_STEP, num_actions=15, shape=(6, 64, 64))
    envs = module.ExplorationEnvs(games, 0, seed=1)
    older, newest = module.unpack(torch.from_numpy(envs.reset()[0]))[1].split(3)
    assert newest.any() and not older.any()
    rows, alone = [], []
    for _ in range(6):
        obs, reward, terminated, truncated, _ = envs.step(np.full(2, 9))
        older, newest = module.unpack(torch.from_numpy(obs))[0].split(3)
        alone.append(not older.any())
        _, game, step = newest[0, 0, :3].tolist()
        assert not truncated.any()
        rows.append((game, step, reward[0], terminated[0]))
    expected = [(0, 1, 3, False), (0, 2, -2, False), (0, 2, 5, True), (2, 0, 0, False)]
    assert rows == [*expected, (2, 1, 0, False), (2, 1, 2, True)]  # game 1 was over in its no-op
    assert [actions.tolist() for actions in games.actions] == [[9, 9]] * 3 + [[4, 9], [9, 9], [9, 9]]
    assert alone == [False, False, False, True, False, False]  # episode 2's first row has one frame and zeros
    envs.random_action = 1
    for _ in range(60):
        envs.step(np.full(2, 9))
    assert len(np.unique(games.actions)) == 15


def test_snd_sees_the_colors_of_the_newest_frame(variant, monkeypatch):
    """Packing loses nothing. The policy sees two frames, SND the last; both have the layers of the paper's SND-V."""
    module = variant("snd_procgen")
    frames = np.random.default_rng(0).integers(0, 256, (3, 6, 64, 64), np.uint8)
    games = FakeVecEnv(random_episodes(3), SAME_STEP, shape=(6, 64, 64), learn=True)
    envs = module.ExplorationEnvs(games, 0, seed=1)
    monkeypatch.syspath_prepend(ROOT / "benchmark")
    film = importlib.import_module("evaluate").Film(envs, 3, module.unpack)
    film.reset()
    film.step(np.zeros(3, int))
    assert (film.frames == np.stack(games.seen)[:2, 0, 3:].transpose(0, 2, 3, 1)).all()
    envs.steps = np.array([0, 1, 9])
    packed = torch.from_numpy(envs.pack(frames))
    frames[0, :3] = 0  # before an episode's first frame
    assert (module.unpack(packed).numpy() == frames).all()
    args = module.Args(snd_features=8)
    agent, snd = module.Agent((2, 128, 128), 15, args), module.SND((1, 128, 128), args)
    values = module.script.Agent.__mro__[1].forward(agent, torch.from_numpy(frames))[1]
    assert torch.equal(agent(packed)[1], values) and agent.trunk[9].in_features == 64 * 8 * 8
    x = torch.from_numpy(frames[:, 3:]).float() / 255
    error = (snd.predictor(x) - snd.target(x)).square()
    np.testing.assert_allclose(snd.errors(packed[:, -1:]).detach(), error.detach(), rtol=1e-5)
    snd.frames.update(packed[:, -1:])  # as the script does in every iteration
    with pytest.raises(module.script.UsageError, match="--noop-max"):
        module.make_envs(module.Args(noop_max=5), 1, "game")


def test_convolutions_and_tiles_of_the_paper_on_procgen(variant):
    """64 channels in the last convolution, 128 in SND-VIC's predictor; tiles that divide 64 pixels."""
    module = variant("snd_procgen")
    for target, expected in dict(v=(64, 64), std=(64, 64), vic=(64, 128)).items():
        snd = module.SND((1, 128, 128), module.Args(snd_features=8, target=target))
        assert (snd.target[6].out_channels, snd.predictor[6].out_channels) == expected
        frames = torch.randint(256, (2, 1, 128, 128), dtype=torch.uint8)
        assert snd.errors(frames).shape == (2, 8)
    assert module.script.TILES == [1, 2, 4, 8, 16] and module.script.POLICY_CONVS[3][0] == 64


def test_pixelated_frames(variant, monkeypatch):
    """Half of the frames have half the resolution, a quarter a quarter; then lost pixels and noise."""
    module = variant("snd_breakout")
    shares = []
    monkeypatch.setattr(module, "chance", lambda share, x, *size: shares.append(share) or torch.tensor(share > 0.2))
    monkeypatch.setattr(torch, "rand_like", torch.zeros_like)
    x = torch.rand(2, 1, 8, 8)
    half = x.reshape(2, 1, 4, 2, 4, 2).mean((3, 5)).reshape(2, 1, 2, 2, 2, 2).mean((3, 5))
    expected = half.repeat_interleave(4, 2).repeat_interleave(4, 3) - 0.2
    np.testing.assert_allclose(module.script.augment(x), expected, atol=1e-6)
    assert shares == [0.5, 0.25, 0.1, 0.125]
    assert module.script.SND((1, 84, 84), module.script.Args()).target[0].weight.shape == (32, 1, 8, 8)


WEIGHTS = {  # of the trunks, by hand; width of the critic and gain of its weights
    "ppo_rnd_a0": (32 * 4 * 64 + 64 * 32 * 9 + 64 * 64 * 9 + 2304 * 448 + 448**2, 448, 0.1),
    "ppo_rnd_b1": (64 * 4 * 64 + 64 * 64 * 9 + 128 * 64 * 9 + 4608 * 800, 800, 2**0.5),
    "rnd_1": (32 * 4 * 9 + 64 * 32 * 9 + 64 * 64 * 9 + 128 * 64 * 9 + 4608 * 512, 512, 0.1),
    "ppo_rnd_d0": (128 * 4 * 64 + 2 * 4 * 128**2 + 4608 * 512, 512, 0.1),
}


@pytest.mark.parametrize("config", WEIGHTS)
def test_policies_of_michalnand(variant, config):
    """Weights of the trunk, gain of the critic, the residual critic of A, the attention of D, by hand."""
    weights, width, gain = WEIGHTS[config]
    module = variant("rnd_michalnand")
    agent = module.Agent((4, 48, 48), 18, module.Args(config=config))
    assert sum(weight.numel() for weight in agent.trunk.parameters() if weight.dim() > 1) == weights
    critic = agent.hidden_value.weight
    np.testing.assert_allclose((critic @ critic.T).detach(), gain**2 * np.eye(width), atol=1e-4)
    obs = torch.randint(256, (2, 4, 48, 48), dtype=torch.uint8)
    with torch.no_grad():
        x = agent.trunk(obs / 255)
        hidden = (x @ critic.T).relu() + (x if config == "ppo_rnd_a0" else 0)
        np.testing.assert_allclose(agent(obs)[1], hidden @ agent.value.weight.T, atol=1e-5)
        if config == "ppo_rnd_d0":
            attention, x = agent.trunk[2], torch.randn(1, 128, 3, 3)
            query, key, value = [linear.weight @ x.flatten(2)[0] for linear in attention.qkv]  # (128, 9)
            mixed = (query.T @ key).softmax(1) @ value.T  # of each position, from all
            mixed = mixed.T + (attention.mix.weight[:, :, 0, 0] @ mixed.T).relu()
            np.testing.assert_allclose(attention(x)[0], mixed.view(128, 3, 3), atol=1e-4)


def test_bonus_of_michalnand(variant):
    """Half the sum of squared errors of frames less their mean; b2: divided by its std; rnd_1: coupled weights."""
    module = variant("rnd_michalnand")
    assert "config" in module.script.FIXED
    rollout = torch.randint(
        256, (4, 8, 3, 32, 32), dtype=torch.uint8
    )  # 3 steps of 8 environments, one observation more
    frames = rollout[:3, :, -1:].flatten(0, 1)
    for config in ("ppo_rnd_b0", "ppo_rnd_b2", "rnd_1"):
        torch.manual_seed(1)
        rnd = module.RND((1, 32, 32), module.Args(config=config, int_clip=0))
        rnd.frames.update(frames[:8])
        with torch.no_grad():
            x = (frames - frames[:8].double().mean(0)).float() / 255
            error = (rnd.predictor(x) - rnd.target(x)).square()
        first, second = [rnd.bonus({"obs": rollout}, 5)[1].flatten() for _ in range(2)]
        half = error.sum(1) / 2
        if config == "ppo_rnd_b2":  # the first std is 1
            np.testing.assert_allclose(first, error.mean(1), rtol=1e-3)
            np.testing.assert_allclose(second, half / half.std(correction=0), rtol=0.02)
        else:
            np.testing.assert_allclose(first, half, rtol=1e-3)
            np.testing.assert_allclose(second, half, rtol=1e-3)
        # The loss is not divided.
        np.testing.assert_allclose(rnd.errors(frames).detach(), error, rtol=1e-2, atol=1e-6)
    assert module.RND((1, 32, 32), module.Args(config="ppo_rnd_b0")).bonus({"obs": rollout}, 24)[1].max() == 1
    last = torch.cat([rnd.target[9].weight, rnd.predictor[9].weight]).detach()  # of rnd_1
    np.testing.assert_allclose(last @ last.T, 2 * np.eye(1024), atol=1e-3)


def test_spread_within_an_episode_is_the_second_bonus(variant):
    """NumPy's, of the last three observations; an episode's first one stands in for those before it."""
    module = variant("snd_entropy")
    args = module.Args(snd_features=8, num_envs=2, episodic_steps=3, eta=0.1, eta_episodic=2.0, int_clip=50)
    snd = module.SND((1, 32, 32), args)
    obs = torch.randint(256, (8, 2, 4, 32, 32), dtype=torch.uint8)
    valid = torch.ones(7, 2)
    valid[2, 0] = 0  # environment 0: row 2 shows the last observation of an episode
    parts = [snd.bonus({"obs": obs[:4], "valid": valid[:3]}, 4), snd.bonus({"obs": obs[3:], "valid": valid[3:]}, 5)]
    errors, bonus = map(torch.cat, zip(*parts, strict=True))
    with torch.no_grad():
        x = obs[:7, :, -1:].flatten(0, 1).float() / 255
        features = snd.encoder(x).view(7, 2, 256).numpy()
        frames = obs[:7, :, -1:].flatten(0, 1)
        np.testing.assert_allclose(errors.flatten(), snd.errors(frames).mean(1), rtol=1e-4)
    np.testing.assert_allclose(bonus[..., 0], 0.1 * errors, rtol=1e-5)
    for env, row in np.ndindex(2, 7):
        start = 3 if env == 0 and row >= 3 else 0
        window = features[[max(i, start) for i in (row - 2, row - 1, row)], env]
        expected = 2 * np.std(window, 0, ddof=1).mean()
        np.testing.assert_allclose(bonus[row, env, 1], expected, rtol=1e-3, atol=1e-6)
        assert (expected < 1e-5) == (row == start)
    snd.int_clip = 1e-3
    clipped = snd.bonus({"obs": obs[3:], "valid": valid[3:]}, 5)[1]
    assert clipped.flatten(0, 1).amax(0).tolist() == pytest.approx([1e-3, 1e-3])
    for change in (dict(episodic_steps=1), dict(gamma_episodic=1.5)):
        with pytest.raises(module.script.UsageError, match="episodic"):
            module.script.prepare(module.Args(**change), None)


def test_the_second_bonus_has_a_head_of_its_own(variant, monkeypatch, tmp_path):
    """GAE of the game's rewards, SND's bonus and the second one, each with its discount; all enter the advantage."""
    module, calls, advantages = variant("snd_entropy"), [], []
    script = module.script
    gae, learn = script.gae, script.learn
    monkeypatch.setattr(script, "gae", lambda *args: calls.append((args, gae(*args))) or calls[-1][1])
    monkeypatch.setattr(script, "learn", lambda *args: advantages.append(args[2]["advantage"].clone()) or learn(*args))
    args = dict(num_envs=2, num_steps=16, minibatch_size=16, total_timesteps=32, snd_features=8, warmup_steps=1)
    args |= dict(eval_episodes=0, quiet=True, threads=1, device="cpu", run_dir=str(tmp_path), run_name="x")
    args = module.Args(**args, gamma_episodic=0.5, episodic_coef=7, eta_episodic=0.3)
    script.train(args, giving(FakeVecEnv(random_episodes(2), shape=(4, 32, 32))))
    assert [args[4] for args, _ in calls] == [0.998, 0.99, 0.5]
    spread = float(rows(tmp_path / "x")[0]["int/episodic_raw"])
    assert calls[2][0][0].mean().item() == pytest.approx(0.3 * spread, rel=1e-4) and spread > 0
    expected = sum(weight * result for weight, (_, result) in zip((2, 1, 7), calls, strict=True))
    torch.testing.assert_close(advantages[0].view(16, 2), expected)


def test_the_encoder_learns_as_the_target(variant, monkeypatch):
    """Its loss is SND-V's for pixels / 255; the policy has three value heads, each with discount and weight."""
    module = variant("snd_entropy")
    noise = torch.rand(4, 6, 1, 32, 32)
    draws = iter(noise)
    monkeypatch.setattr(module.script, "augment", lambda x: x + next(draws))
    args = module.Args(snd_features=8, num_envs=2, gamma_episodic=0.5, episodic_coef=7)
    snd = module.SND((1, 32, 32), args)
    one, other = torch.randint(256, (2, 6, 1, 32, 32), dtype=torch.uint8)
    far = torch.tensor([0.0, 1, 1, 0, 1, 0])
    with torch.no_grad():
        pairs = [(snd.encoder(one / 255 + noise[0]), snd.encoder(other / 255 + noise[1]))]
        pairs += [(snd.target(snd.preprocess(one) + noise[2]), snd.target(snd.preprocess(other) + noise[3]))]
        expected = sum((far - (a - b).square().mean(1)).square().mean() for a, b in pairs)  # no feature is large
    loss = snd.target_loss(one, other, far)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    loss.backward()
    assert snd.encoder[0].weight.grad.any() and snd.target[0].weight.grad.any()
    agent = module.Agent((4, 32, 32), 5, args)
    assert agent(torch.zeros(2, 4, 32, 32, dtype=torch.uint8))[1].shape == (2, 3)
    np.testing.assert_allclose([*agent.gammas, *agent.coefs], [0.998, 0.99, 0.5, 2, 1, 7])


def test_an_end_empties_the_dnc(variant):
    """The row after a row that shows an episode's last observation is played as if it was the first."""
    module = variant("rnd_dnc")
    agent = module.Agent((4, 44, 44), 5, module.Args(dnc=(4, 3, 2)))
    obs = torch.randint(256, (6, 4, 44, 44), dtype=torch.uint8)  # two environments, three rows each
    empty, size = torch.zeros(1, agent.memory_size), agent.memory_size
    with torch.no_grad():
        logits, _, after = agent(obs, empty.repeat(2, 1), torch.tensor([1.0, 0, 1, 1, 1, 1]))
        both, _, ended = agent(obs[:2], empty, torch.tensor([1.0, 0]))
        last, _, memory = agent(obs[2:3], empty, torch.ones(1))
        other, _, other_memory = agent(obs[3:], empty, torch.ones(3))
        alone = agent(obs[4:5], empty, torch.ones(1))[0]
    assert size == 2 * 256 + 4 * 3 + 3 * 4 + 4 * 4 + 2 * 4 + 2 * 3 and not ended.any() and memory.any()
    torch.testing.assert_close(logits, torch.cat([both, last, other]))
    torch.testing.assert_close(after, torch.cat([memory, other_memory]))
    assert not torch.allclose(other[1], alone[0])  # within an episode it remembers
    assert "dnc" in module.script.FIXED
    with pytest.raises(module.script.UsageError, match="--dnc 0"):
        module.script.prepare(module.Args(dnc=(4, 0, 2)), None)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_dnc_learns_to_copy(variant, seed):
    """Three rows of three bits, asked for after the last one; without a memory the bits can only be guessed."""
    module = variant("rnd_dnc")
    torch.manual_seed(seed)
    dnc, plain, head = module.DNC(4, 32, 8, 6, 1), torch.nn.Linear(4, 32), torch.nn.Linear(32, 3)
    for memory, updates in ((True, 1500), (False, 300)):
        weights = [*dnc.parameters(), *plain.parameters(), *head.parameters()]
        optimizer = torch.optim.Adam(weights, lr=3e-3)
        for _ in range(updates):
            bits = torch.randint(2, (32, 3, 3)).float()
            x = torch.cat([torch.cat([bits, torch.ones(32, 3, 1)], 2), torch.zeros(32, 3, 4)], 1)
            state, outputs = torch.zeros(32, dnc.size), []
            for t in range(6):
                output, state = dnc(x[:, t], state) if memory else (plain(x[:, t]).tanh(), state)
                outputs.append(head(output))
            logits = torch.stack(outputs[3:], 1)
            optimizer.zero_grad()
            torch.nn.functional.binary_cross_entropy_with_logits(logits, bits).backward()
            torch.nn.utils.clip_grad_norm_(weights, 1)
            optimizer.step()
        errors = ((logits > 0) != bits.bool()).float().mean().item()
        assert errors < 0.05 if memory else errors > 0.35


def plain_dnc(dnc, x, state):
    """A step of one environment in NumPy, slot by slot (Graves et al. 2016, Methods)."""
    w = {name: weight.detach().double().numpy() for name, weight in dnc.named_parameters()}
    hidden, cell, memory, usage, precedence, links, write, reads, last = state
    R, N = reads.shape

    def sigmoid(z):
        return 1 / (1 + np.exp(-z))

    def content(key, strength):
        norms = np.linalg.norm(memory, axis=1) * np.linalg.norm(key)
        scores = np.exp(
            (1 + np.log1p(np.exp(strength))) * np.divide(memory @ key, norms, out=norms * 0, where=norms > 0)
        )
        return scores / scores.sum()

    gates = w["controller.weight_ih"] @ np.concatenate([x, last.ravel()]) + w["controller.bias_ih"]
    i, f, g, o = np.split(gates + w["controller.weight_hh"] @ hidden + w["controller.bias_hh"], 4)
    cell = sigmoid(f) * cell + sigmoid(i) * np.tanh(g)
    hidden = sigmoid(o) * np.tanh(cell)
    parts = np.split(w["interface.weight"] @ hidden + w["interface.bias"], np.cumsum(dnc.parts)[:-1])
    keys, strengths, free, modes, key, strength, erase, vector, allocation_gate, write_gate = parts
    usage = np.array(
        [
            (usage[n] + write[n] - usage[n] * write[n])
            * np.prod([1 - sigmoid(free[r]) * reads[r, n] for r in range(R)])
            for n in range(N)
        ]
    )
    allocation, product = np.zeros(N), 1.0
    for n in np.argsort(usage, kind="stable"):
        allocation[n] = (1 - usage[n]) * product
        product *= usage[n]
    a, similar = sigmoid(allocation_gate), content(key, strength[0])
    write = sigmoid(write_gate) * (a * allocation + (1 - a) * similar)
    memory = memory * (1 - np.outer(write, sigmoid(erase))) + np.outer(write, vector)
    new = np.zeros((N, N))
    for n, m in np.ndindex(N, N):
        if n != m:
            new[n, m] = (1 - write[n] - write[m]) * links[n, m] + write[n] * precedence[m]
    precedence = (1 - write.sum()) * precedence + write
    for r in range(R):
        mode = np.exp(modes.reshape(R, 3)[r])
        backward, forward = new.T @ reads[r], new @ reads[r]
        similar = content(keys.reshape(R, -1)[r], strengths[r])
        reads[r] = (mode[0] * backward + mode[1] * similar + mode[2] * forward) / mode.sum()
    last = reads @ memory
    output = w["output.weight"] @ np.concatenate([hidden, last.ravel()]) + w["output.bias"]
    return output, [hidden, cell, memory, usage, precedence, new, write, reads, last]


def test_dnc_equals_its_equations(variant):
    """Eight steps in float64, with weights large enough that every gate and mode matters."""
    module = variant("rnd_dnc")
    torch.manual_seed(0)
    dnc = module.DNC(3, 5, 4, 3, 2).double()
    for weight in dnc.parameters():
        torch.nn.init.normal_(weight, std=0.7)
    x, state = torch.randn(8, 1, 3, dtype=torch.float64), torch.zeros(1, dnc.size, dtype=torch.float64)
    plain = [np.zeros(shape) for shape in dnc.shapes]
    for t in range(8):
        output, state = dnc(x[t], state)
        expected, plain = plain_dnc(dnc, x[t, 0].numpy(), plain)
        np.testing.assert_allclose(output[0].detach(), expected, rtol=1e-9, atol=1e-9)
        flat = np.concatenate([part.ravel() for part in plain])
        np.testing.assert_allclose(state[0].detach(), flat, rtol=1e-9, atol=1e-9)
        state = state.detach()


def weights(run):
    saved = torch.load(run / "checkpoint.pt", weights_only=True)
    return torch.cat([x.flatten().double() for x in saved["agent"].values()])


def test_pbt_trial_continues_the_copy_of_a_better_one(variant, tmp_path):
    """The whole run is copied; then its own seed, number of steps and present numbers count, not the other's."""
    pbt, trials = variant("pbt"), []
    args = variant("ppo_procgen").Args(env_id="leaper", num_envs=4, num_steps=16, minibatch_size=64, channels=(4, 4, 4))
    args.run_dir, args.update_epochs, args.eval_episodes, args.quiet = str(tmp_path), 1, 0, True
    for number in range(2):
        trial = object.__new__(type("Alone", (pbt.Trial,), {"trial_id": f"x_0000{number}", "iteration": 0}))
        trial.setup({}, {"script": "ppo_procgen", "slice_steps": 150}, vars(args))
        trial.config = {"lr": np.float64(1e-3 * (number + 1)), "ent_coef": np.float64(0.01)}
        assert trial.step()["step"] == 128  # whole iterations
        trials.append(trial)
    worse, better = trials  # the worse one's seed is the default, the copied run's is not
    assert not torch.equal(weights(better.run), weights(worse.run))
    better.save_checkpoint(tmp_path / "copy")
    worse.load_checkpoint(tmp_path / "copy")
    assert torch.equal(weights(better.run), weights(worse.run))
    for trial in trials:
        trial.config = {"lr": 8e-4, "ent_coef": 0.02}
        type(trial).iteration = 1
        assert trial.step()["step"] == 256
    copied, own = [timeless(trial.run) for trial in trials]
    assert copied[:2] == own[:2] and copied[2] != own[2]  # the same past, other episodes since
    assert [float(row["train/lr"]) for row in copied] == [2e-3, 2e-3, 8e-4, 8e-4]
    flags = json.loads((worse.run / "config.json").read_text())[-1]["args"]
    assert flags["seed"] == args.seed and flags["ent_coef"] == [0.02]
    (tmp_path / "metrics.csv").write_text("step,episode/return,episode/count\n10,100,5\n20,1,3\n30,,0\n40,5,1\n")
    assert pbt.mean_return(tmp_path, 10) == 2.0 and pbt.mean_return(tmp_path, 40) == -np.inf


PBT = f"{LEAPER} --num-envs 16 --num-steps 32 --minibatch-size 64 --threads 1".split()


@pytest.mark.slow
def test_pbt_exploits_and_explores(tmp_path):
    """As typed, by Ray. Hardly learning, trials of two seeds end with equal weights only if one copied the other."""
    command = [sys.executable, FOLDER / "pbt.py", "ppo_procgen", tmp_path / "pbt"]
    command += "--population 2 --slices 2 --slice-steps 1024 --lr 1e-9 1e-8 --".split()
    subprocess.run([*command, *PBT], check=True, capture_output=True, timeout=1800)
    (line,) = (tmp_path / "pbt" / "tune" / "pbt_global.txt").read_text().splitlines()
    *_, before, after = json.loads(line)
    assert after["lr"] != before["lr"] and after["ent_coef"] != before["ent_coef"]
    runs = [tmp_path / "pbt" / f"trial_{number}" for number in range(2)]
    assert (weights(runs[0]) - weights(runs[1])).abs().max() < 1e-5


@pytest.mark.slow
def test_pbt_ends_when_a_trial_fails(tmp_path):
    """Ray's scheduler would let the others wait for it forever."""
    command = [sys.executable, FOLDER / "pbt.py", "ppo_procgen", tmp_path / "pbt"]
    command += "--population 2 --slices 2 --slice-steps 1024 --lr 1e-9 1e31 --".split()  # drawn: 5e7 and 1e-9
    assert subprocess.run([*command, *PBT, "--seed", "1"], capture_output=True, timeout=600).returncode == 1
    (error,) = (tmp_path / "pbt" / "tune").glob("*/error.txt")
    assert "a loss is not finite" in error.read_text()


def test_pbt_refuses_in_one_line(variant, tmp_path, monkeypatch, capsys):
    """Before Ray starts, or what Ray says when it cannot; no folder is left."""
    pbt, new, flags = variant("pbt"), str(tmp_path / "a" / "b"), ["--", *PBT]

    def init(address, **options):  # as with a TMPDIR of 110 characters
        raise OSError("AF_UNIX path length\ncannot exceed 107 bytes")

    monkeypatch.setattr(pbt.ray, "init", init)
    for words, part in {
        (new, "--slice-steps", "100", *flags): "--total-timesteps 100",
        (str(tmp_path), "--slice-steps", "512", *flags): "exists",
        (new, "--ent-coef", "0", "0.03", *flags): "--ent-coef 0.0 0.03",
        (new, "--lr", "nan", "0.1", *flags): "--lr nan",
        (new, "--population", "1", *flags): "--population 1",
        (new, *flags, "--resume", new): "--resume",
        (new, "--slice-steps", "512", *flags): "AF_UNIX path length cannot exceed",
    }.items():
        assert pbt.main(["ppo_procgen", *words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert part in line, line
    assert not list(tmp_path.iterdir())


def test_pbt_workers_find_the_script(variant, tmp_path):
    """Ray unpickles a trial's arguments in a worker that was started in another folder."""
    pbt = variant("pbt")
    code = """if True:
        import pickle, sys
        setup, options, flags, trial = pickle.load(sys.stdin.buffer)
        setup(trial, {}, options, flags)
        print(trial.args.env_id, trial.args.seed)
    """
    from ray import cloudpickle

    trial = types.SimpleNamespace(trial_id="x_00003")
    setup = types.FunctionType(pbt.Trial.setup.__code__, {"ROOT": pbt.ROOT, "Path": Path, "sys": sys})
    setup.__globals__["importlib"] = importlib
    flags = vars(variant("ppo_procgen").Args(env_id="leaper", run_dir=str(tmp_path)))
    data = cloudpickle.dumps((setup, {"script": "ppo_procgen", "slice_steps": 1}, flags, trial))
    done = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, cwd=tmp_path)
    assert done.stdout == b"leaper 4\n", done.stderr.decode()


def test_hub_without_docstrings(tmp_path):
    """`python -OO` removes them."""
    command = [sys.executable, "-OO", FOLDER / "hub.py", tmp_path / "run", "user/name", "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "eval.json" in done.stderr and "Traceback" not in done.stderr


def test_hub_card_has_the_runs_figures(variant, tmp_path, monkeypatch, capsys):
    """Its figures, command and files; a run without an evaluation of its last step is refused in one line."""
    hub, run, folder = variant("hub"), tmp_path / "run", tmp_path / "run-hub"
    run.mkdir()
    arguments = [str(run), "user/name", "--dry-run"]
    assert hub.main(arguments) == 2 and not folder.exists()
    assert "eval.json" in capsys.readouterr().err
    flags = vars(variant("appo_atari").Args()) | {"env_id": "Pong", "run_dir": "x"}
    flags |= {"vtrace": True, "anneal_lr": False, "lr": [0, 5e-4, 1e6, 1e-4]}
    part = {"script": "appo_atari", "args": flags, "git": "abc123", "cpu": "EPYC", "gpu": None, "ranks": 1}
    first_edition = part | {"git": "old1", "torch": "2.12.0"}
    part["packages"] = {"torch": "2.13.0", "envpool": "1.0.1"}
    (run / "config.json").write_text(json.dumps([part | {"git": "fed987"}, part]))
    scores = {"mean": 16.561, "stderr": 2.567, "returns": [14.0, 19.122]}
    (run / "eval.json").write_text(json.dumps({"step": 499712, "splits": {"game": scores}}))
    (run / "metrics.csv").write_text("step\n499712\n")
    torch.save({"step": 499712}, run / "checkpoint.pt")
    (run / "film.mp4").write_text("film")
    assert hub.main(arguments) == 0 and "huggingface_hub" not in sys.modules  # the dry run did not need it
    card = (folder / "README.md").read_text()
    assert json.loads(card.split("---\n")[1])["model-index"][0]["results"]
    command = "    python appo_atari.py --env-id Pong --lr 0 0.0005 1000000.0 0.0001 --no-anneal-lr --vtrace\n"
    revisions = "revision fed987, then abc123. Packages: torch 2.13.0, envpool 1.0.1."
    for text in ("| game | 16.56 ± 2.57 | 2 |", "499,712", revisions, "EPYC", "(replay.mp4)", command):
        assert text in card
    assert "revision old1. Packages: torch 2.12.0." in hub.card([first_edition], {"step": 1, "splits": {}}, None)
    assert hub.command_of("appo_atari", flags, ranks=2).startswith("torchrun --nproc-per-node 2 appo_atari.py --env-id")
    snd_flags = json.loads(json.dumps(vars(variant("ppo_atari_snd").Args()) | {"seed": 3}))
    command = hub.command_of("snd_breakout", snd_flags, ranks=1)
    assert command == "python benchmark/variants/snd_breakout.py --seed 3"  # which has the Args of its script
    files = ["README.md", "checkpoint.pt", "config.json", "eval.json", "metrics.csv", "replay.mp4"]
    assert sorted(path.name for path in folder.iterdir()) == files
    api, sent = types.SimpleNamespace(), []
    api.create_repo = lambda name, exist_ok: types.SimpleNamespace(repo_id=name)
    api.upload_folder = lambda repo_id, folder_path: sent.append((repo_id, folder_path))
    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(HfApi=lambda: api))
    assert hub.main(arguments[:2]) == 0 and sent == [("user/name", folder)]
    torch.save({"step": 500000}, run / "checkpoint.pt")
    assert hub.main(arguments) == 2 and "checkpoint.pt of 500000" in capsys.readouterr().err
    shutil.rmtree(folder)
    assert hub.main([*arguments, "--film", str(tmp_path / "x.mp4")]) == 2 and not folder.exists()
    assert "--film" in capsys.readouterr().err
    (run / "config.json").write_text('[{"script"')
    assert hub.main(arguments) == 2 and len(capsys.readouterr().err.splitlines()) == 1

    def broken(*rest):
        raise OSError("a bug")

    (run / "config.json").write_text(json.dumps([part]))
    monkeypatch.setattr(hub, "card", broken)
    torch.save({"step": 499712}, run / "checkpoint.pt")
    with pytest.raises(OSError, match="a bug"):  # no one-line message for unexpected errors
        hub.main(arguments)
