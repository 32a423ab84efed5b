"""What several scripts have in common besides the plumbing: flags, Atari's environments, bonuses of frames."""

import re

import appo_atari
import impala_procgen
import numpy as np
import ppo_atari_rnd
import ppo_atari_snd
import ppo_procgen
import pytest
import torch

import conftest
import test_appo_atari
import test_impala_procgen
import test_ppo_atari_rnd
import test_ppo_atari_snd
from conftest import NEXT_STEP, ROOT, SAME_STEP, FakeVecEnv, Games, giving, random_episodes, random_play, spy_on

SHAPE, WARMUP, T, N = (4, 44, 44), 3, 8, 4
SCRIPTS = [appo_atari, impala_procgen, ppo_atari_rnd, ppo_atari_snd, ppo_procgen]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_defaults_match_reference_table(script):
    """The numbers in the second column of the docs' table, next to those of paper and reference code."""
    page = (ROOT / f"docs/{script.__name__}.md").read_text()
    table = page.split("## Hyperparameters")[1].split("\n## ")[0]
    compared = 0
    for flags, cell in re.findall(r"(?m)^\| (`--[^|]+) \| ([^|]+) \|", table):
        values = re.split(", | × ", cell.replace("*", ""))
        for flag, value in zip(re.findall("`--([a-z-]+)`", flags), values, strict=False):
            if number := re.match(r"([\d.,]+(?:e-?\d+)?)(M?)(?![\w:]| \d)", value):
                default = getattr(script.Args(), flag.replace("-", "_"))
                shown = float(number[1].replace(",", "")) * (1e6 if number[2] else 1)
                assert default in (shown, (0, shown)), flag
                compared += 1
    assert compared > 8


REFUSED = {  # flags, of which the message names the first; the smallest frames
    test_appo_atari: ([dict(num_groups=3), dict(minibatch_size=24), dict(num_minibatches=3, num_envs=5)], 36),
    test_impala_procgen: ([dict(minibatch_size=96), dict(num_groups=3)], 8),
    test_ppo_atari_rnd: ([dict(minibatch_size=4), dict(minibatch_size=24)], 44),
    test_ppo_atari_snd: ([dict(minibatch_size=24)], 4),
}


@pytest.mark.parametrize("module", REFUSED, ids=lambda module: module.__name__)
def test_what_is_refused(module, tmp_path):
    """Parts of rollouts or environments, groups that do not divide; nothing is written."""
    changes, smallest = REFUSED[module]
    for change in changes:
        with pytest.raises(ValueError, match=next(iter(change)).replace("_", "[-_]")):
            module.run(tmp_path, None, **change)
    autoreset = SAME_STEP if module is test_impala_procgen else NEXT_STEP
    envs = FakeVecEnv(random_episodes(4), autoreset, shape=(3, smallest - 1, 60))
    with pytest.raises(ValueError, match=f"needs {autoreset}.*H, W >= {smallest}"):
        module.run(tmp_path, [envs])
    assert not list(tmp_path.iterdir())


IMPALA = dict(num_steps=32, lr=1e-3, sync=True, num_groups=2, update_epochs=3, ent_coef=0.01)
IMPALA |= dict(replay_slots=0, replay_proportion=0, vtrace_lambda=1, max_grad_norm=0.5 / 1600)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "threshold", "flags"), [(ppo_procgen, 3.0, dict(num_steps=64, lr=1e-3)), (impala_procgen, 1.0, IMPALA)]
)
def test_learns_a_real_game(script, threshold, flags, tmp_path):
    """One level of starpilot, narrow network, 61,440 steps: random play 0.3, PPO 5.8, IMPALA 1.7 and 4.4 (2 seeds)."""
    options = dict(env_id="starpilot", num_levels=1, stack="none", channels=(8, 16, 16), num_envs=32)
    options |= dict(minibatch_size=512, total_timesteps=61_440, run_dir=str(tmp_path), run_name="run")
    args = script.Args(**options, **flags)
    random_play = script.evaluate(script.Agent((3, 64, 64), 15, args), args)["train"]
    assert random_play["mean"] + 5 * random_play["stderr"] < threshold
    split = script.train(args)["eval"]["splits"]["train"]
    assert split["mean"] - 2 * split["stderr"] > threshold


# ------------------------------------------------------------------------------------------------------ the environment

both = pytest.mark.parametrize("script", [ppo_atari_rnd, appo_atari], ids=["rnd", "appo"])  # SND has RND's


def atari(script, num_envs=N, stream="training", **changes):
    args = script.Args(**dict(env_id="Breakout", threads=1) | changes)
    return script.make_envs(args, num_envs, script.stream_seed(args.seed, stream))


def config_of(envs):
    """EnvPool's options."""
    envs = envs.unwrapped
    pool = envs.pool if hasattr(envs, "pool") else envs.envs
    return pool.spec.config


@both
def test_true_returns_of_berzerk(script):
    """Whole games, unclipped, over lost lives and time limits, against books kept from lives and step counts.

    The limit is in environment steps, the training reward is the sign of the score, an observation's newest frame is
    last. A lost life ends an episode of APPO's training, but no game.
    """
    envs, books, before = atari(script, env_id="Berzerk-v5", max_episode_steps=150), np.zeros((N, 2)), None
    games, lost, lengths, rewards, scores = 0, 0, [], set(), set()
    for obs, reward, ended, cut, info, valid in random_play(envs, 450):
        assert before is None or (obs[valid, :3] == before[valid, 1:]).all()
        before = obs
        rewards |= set(reward.tolist())
        scores |= set(info["reward"].tolist())
        lengths += info["elapsed_step"][cut].tolist()
        lost += (ended & (info["lives"] > 0)).sum()
        over = ended & (info["lives"] == 0) | cut
        assert (info.get("_episode", np.zeros(N, bool)) == over).all()
        books += np.where(valid[:, None], np.stack([info["reward"], np.ones(N)], 1), 0)
        for env in np.flatnonzero(over):
            assert [info["episode"]["r"][env], info["episode"]["l"][env]] == books[env].tolist()
        games += over.sum()
        books[over] = 0
    assert games > len(lengths) > 3 and (lost > 10 if script is appo_atari else lost == 0)
    assert set(lengths) == {150} and rewards == {0.0, 1.0} and max(scores) >= 5


@both
def test_a_game_over_at_the_time_limit_is_a_termination(script):
    """EnvPool reports only the truncation, so the value of the last frame would count."""
    lengths = []
    whole_games = dict(episodic_life=False) if script is appo_atari else {}
    for limit in (4500, None):
        envs = atari(script, 1, max_episode_steps=limit or lengths[0], **whole_games)
        rows = ((bool(ended), bool(cut)) for _, _, ended, cut, _, _ in random_play(envs, 500))
        length, ends = next((number, row) for number, row in enumerate(rows, 1) if any(row))
        lengths.append(length)
        assert ends == (True, limit is None)
    assert lengths[0] == lengths[1]


@both
def test_options_reach_the_emulator(script):
    is_appo = script is appo_atari
    options = dict(repeat_action_probability=0.3, noop_max=5, frame_size=96, stack=2, max_episode_steps=99)
    envs = atari(script, 1, **options, fire_reset=not is_appo)
    config = config_of(envs)
    assert config.repeat_action_probability == pytest.approx(0.3) and config.frame_skip == 4 and config.noop_max == 5
    assert config.img_height == config.img_width == 96 and config.max_episode_steps == 99
    assert config.use_fire_reset != is_appo and config.reward_clip == config.episodic_life == is_appo
    assert envs.single_observation_space.shape == (2, 96, 96)
    with pytest.raises(script.UsageError, match="Ant"):
        atari(script, env_id="Ant")  # of EnvPool, too, but not Atari's


@both
def test_seed_streams_disjoint(script):
    """No two envs of neighbouring runs, nor of training and evaluation, share a seed."""
    streams = [(1, "training"), (2, "training"), (1, "game")]
    seeds = [config_of(atari(script, 2, stream, seed=seed)).env_seed for seed, stream in streams]
    assert len({seed for one in seeds for seed in one}) == 3 * 2


# ------------------------------------------------------------------------------------------------------------- bonuses


class Bonus:
    """RND or SND, in small."""

    def __init__(self, name):
        self.name = name
        self.script = {"rnd": ppo_atari_rnd, "snd": ppo_atari_snd}[name]
        self.flags = {"rnd": test_ppo_atari_rnd.SMALL, "snd": test_ppo_atari_snd.SMALL}[name]
        self.run = conftest.runner(self.script, self.flags)

    def load(self, tmp_path):
        return self.script.load(str(tmp_path / "run"))

    def resume(self, tmp_path, envs, iterations):
        saved = self.load(tmp_path)
        args = self.script.Args(**saved["args"] | dict(total_timesteps=iterations * T * N))
        return self.script.train(args, giving(envs), saved)

    def frames_seen(self, tmp_path):
        """By the statistics of frames."""
        return round(self.load(tmp_path)[self.name]["frames.sums"][0].max().item())


@pytest.fixture(params=["rnd", "snd"])
def bonus(request):
    return Bonus(request.param)


def fake(num_envs=N):
    return Games(random_episodes(num_envs), shape=SHAPE)


def test_games_begin_after_the_warm_up(bonus, tmp_path):
    """The statistics begin with the warm-up's frames; then all environments are reset, as in the authors' code."""

    class Fresh(Games):
        def reset(self, **options):  # as RecordEpisodeStatistics
            self.returns[:], self.lengths[:] = 0, 0
            return super().reset()

    envs = Fresh([[([1.0] * 10, "terminated")]] * N, shape=SHAPE)
    metrics, _ = bonus.run(tmp_path, envs, warmup_steps=7, num_steps=16)
    assert metrics["step"] == 64 and metrics["episode/return"] == metrics["episode/length"] == 10
    assert metrics["episode/count"] == N and len(envs.actions) == 7 + 16  # cut off at 7, then 10 steps and a row
    assert bonus.frames_seen(tmp_path) == 7 * N + 64


def test_a_resumed_run_warms_up_once(bonus, tmp_path):
    """Stopped in the warm-up, it does the rest; stopped in its first iteration, none; nor later."""

    class Stopping(Games):
        left = 0

        def step(self, actions):
            if self.left == 0:
                raise KeyboardInterrupt
            self.left -= 1
            return super().step(actions)

    envs = Stopping(random_episodes(N), shape=SHAPE)
    seen = []
    for steps in (2, 1 + 5, 5):
        envs.left = steps
        with pytest.raises(KeyboardInterrupt):
            bonus.resume(tmp_path, envs, 2) if seen else bonus.run(tmp_path, envs, 2)
        seen.append(bonus.frames_seen(tmp_path))
    assert seen == [2 * N, WARMUP * N, WARMUP * N]
    for iterations, steps in ((2, 2 * T), (3, T)):
        envs = fake()
        assert bonus.resume(tmp_path, envs, iterations)["iteration"] == iterations and len(envs.actions) == steps
    assert bonus.frames_seen(tmp_path) == (WARMUP + 3 * T) * N


def test_predictor_learns_as_much_as_with_32_environments(bonus, tmp_path, monkeypatch):
    """The default --predictor-share: with two ranks of 64 environments a quarter of the errors."""
    kept, learn = [], bonus.script.learn

    def note(means, model, loss, minibatch, micro_batch, weight=None):
        if "loss/predictor" in means:  # RND draws rows, SND weighs them
            kept.append(len(minibatch["frame"]) if weight is None else weight.sum().item())

    def learn_on_one_of_two(*args):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bonus.script, "WORLD", 2)
            patch.setattr(bonus.script, "sum_over_ranks", lambda x: 2 * x)
            spy_on(patch, bonus.script, "gradient", note)
            return learn(*args)

    monkeypatch.setattr(bonus.script, "learn", learn_on_one_of_two)
    bonus.run(tmp_path, fake(64), num_envs=64, num_steps=1, minibatch_size=64, update_epochs=10)
    errors = {"rnd": 64, "snd": 64 * 8}[bonus.name]  # of each row, of each feature of each row
    assert len(kept) == 10 and np.mean(kept) / errors == pytest.approx(0.25, abs=0.07)  # std 0.017, 0.006


def test_bonus_and_loss_have_one_precision(bonus):
    """Under bf16 both are differences of float32: in bf16 what is left of two near features would be noise."""
    network = {"rnd": "RND", "snd": "SND"}[bonus.name]
    args = bonus.script.Args(**bonus.flags, precision="bf16")
    nets = getattr(bonus.script, network)((1, 44, 44), args)
    frames, outputs = torch.randint(0, 256, (32, 1, 44, 44), dtype=torch.uint8), {}
    nets.frames.update(frames)
    for name in ("predictor", "target"):
        note = lambda net, inputs, output, name=name: outputs.update({name: output})  # noqa: E731
        getattr(nets, name).register_forward_hook(note)
    with torch.no_grad():
        if bonus.name == "snd":
            error = nets.errors(frames).mean(1)
        else:
            error = nets.error(frames, nets.features(nets.target, frames))
    predicted, features = outputs["predictor"], outputs["target"]
    assert predicted.dtype == features.dtype == torch.bfloat16
    assert torch.equal(error, (predicted.float() - features.float()).square().mean(1))
    assert not torch.equal(error, (predicted - features).square().mean(1).float())
