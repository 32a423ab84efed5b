"""What every script promises around its algorithm: command line, files, checkpoints, resuming, stopping, bad input.

The plumbing is one text in all five files (test_repo.py compares), so what is in it is tested with one of them.
"""

import contextlib
import importlib
import json
import math
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import pydantic
import pytest
import torch
import tyro
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from conftest import NEXT_STEP, ROOT, SAME_STEP, FakeVecEnv, equal, giving, random_episodes, rows, spy_on, timeless

COMMON = "--num-envs 4 --num-steps 16 --minibatch-size 32 --eval-episodes 2 --device cpu --threads 1"
PROCGEN = f"{COMMON} --env-id leaper --channels 4 4 4"
ATARI = f"{COMMON} --env-id Breakout --max-episode-steps 30"
KINDS = {  # the flags of a real run of a second or two
    "ppo_procgen": f"{PROCGEN} --norm-reward 0.99",
    "impala_procgen": f"{PROCGEN} --num-groups 2 --sync --minibatch-size 64",
    "ppo_atari_rnd": f"{ATARI} --warmup-steps 8 --rnd-features 8",
    "ppo_atari_snd": f"{ATARI} --warmup-steps 8 --snd-features 8 --update-epochs 1 --frame-size 84",
    "appo_atari": f"{ATARI} --num-groups 2 --num-minibatches 2 --sync",
}
each_script = pytest.mark.parametrize("script", KINDS, indirect=True)
ITERATION = 64  # steps


class Script:
    """A script in an empty folder: `main` with its flags, `train` on the fake environment."""

    def __init__(self, name, path):
        self.name, self.folder = name, path / "runs" / "a"
        self.module = importlib.import_module(name)
        procgen = "procgen" in name
        self.shape = (3, 16, 16) if procgen else (4, 44, 44)
        self.split, self.evaluated = ("test", "eval/return_test") if procgen else ("game", "eval/return")
        self.autoreset, self.other = (SAME_STEP, NEXT_STEP) if procgen else (NEXT_STEP, SAME_STEP)

    def main(self, *flags, before=None):
        words = (KINDS[self.name] if before is None else before).split()
        try:
            return self.module.main([*words, *map(str, flags)])
        except SystemExit as error:  # tyro's own
            return error.code

    def resume(self, *flags):
        return self.main(*flags, before="--resume runs/a")

    def fake(self, cls=FakeVecEnv, num_envs=4, **options):
        ends = ("terminated",) if self.autoreset == SAME_STEP else ("terminated", "truncated")
        return cls(random_episodes(num_envs, ends=ends), self.autoreset, shape=self.shape, **options)

    def args(self, **changes):
        options = dict(eval_episodes=0, run_name="a", total_timesteps=ITERATION) | changes
        args = tyro.cli(self.module.Args, args=KINDS[self.name].split())
        if hasattr(args, "num_groups"):
            options.setdefault("num_groups", 1)
        return replace(args, **options)

    def train(self, envs, saved=None, **changes):
        return self.module.train(self.args(**changes), giving(envs), saved)

    def go_on(self, envs, iterations, **changes):
        saved = self.module.load("runs/a")
        flags = saved["args"] | dict(total_timesteps=iterations * ITERATION) | changes
        return self.module.train(self.module.Args(**flags), giving(envs), saved)


@pytest.fixture(params=["ppo_procgen"])  # one for what is the same text in all five
def script(request, tmp_path, monkeypatch):
    def quick(weight, gain=1):  # the true one's QR would be most of these runs
        return torch.nn.init.normal_(weight, 0, gain * weight[0].numel() ** -0.5)

    monkeypatch.setattr(torch.nn.init, "orthogonal_", quick)
    monkeypatch.chdir(tmp_path)
    return Script(request.param, tmp_path)


def load(folder, name="checkpoint.pt"):
    return torch.load(folder / name, weights_only=True)


def stop(*_):
    raise KeyboardInterrupt


COLUMNS = """step iteration episode/return episode/length episode/count loss/policy loss/value loss/entropy
train/approx_kl train/explained_variance train/grad_norm train/lr time/sps time/env_s time/policy_s time/learn_s"""

# ------------------------------------------------------------------------------------------------- a run and its files


@each_script
def test_files_of_a_run(script, capfd):
    """Files and progress; a second run of the seed, without evaluations, has the same numbers; another seed others."""
    flags, folder, split = ("--total-timesteps", 3 * ITERATION + 7), script.folder, script.split
    assert script.main(*flags, "--run-name", "a", "--eval-every", 100) == 0  # first reached in iteration 2
    out, error = capfd.readouterr()
    assert not error and "Gym" not in out  # gym's banner
    assert out.count("\nstep ") == 3 and out.count(f"{split}: return ") == 2 and "runs/a: cpu, threads: 1" in out
    config = json.loads((folder / "config-0.json").read_text())
    assert config["args"]["num_envs"] == 4 and config["ranks"] == 1 and config["command"] == sys.argv
    assert config["versions"]["torch"] == torch.__version__ and "envpool" in config["versions"]
    assert (folder / f"{script.name}.py").read_text() == (ROOT / f"{script.name}.py").read_text()
    assert list(folder.glob("events.out.tfevents.*")) and not list(folder.glob("*.tmp"))
    table = rows(folder)
    assert set(COLUMNS.split()) <= table[0].keys()
    assert [row["step"] for row in table] == ["64", "128", "192"]  # the total is floored to whole iterations
    assert [bool(row[script.evaluated]) for row in table] == [False, True, False]
    assert not {"nan", "inf"} & {cell for row in table for cell in row.values()}
    result = json.loads((folder / "eval.json").read_text())
    assert result["step"] == load(folder)["step"] == 3 * ITERATION and list(result["splits"]) == [split]
    played = result["splits"][split]
    assert len(played["returns"]) == len(played["lengths"]) == 2
    assert played["mean"] == pytest.approx(np.mean(played["returns"]))
    assert played["stderr"] == pytest.approx(np.std(played["returns"], ddof=1) / math.sqrt(2))
    assert script.main(*flags, "--run-name", "b", "--eval-episodes", 0) == 0
    assert timeless(folder) == timeless(folder.parent / "b")
    assert equal(load(folder)["agent"], load(folder.parent / "b")["agent"])
    assert script.main("--total-timesteps", ITERATION, "--seed", 4, "--eval-episodes", 0) == 0
    (other,) = folder.parent.glob(f"{config['args']['env_id']}__{script.name}__4__20*")
    assert timeless(other) != timeless(folder)[:1]


@each_script
def test_own_environments_and_switches(script, monkeypatch):
    """The agent comes back; autocast and the compiler change neither its kind nor much else."""
    norms, saved, compiled = [], [], []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: compiled.append(self))
    for name, options in (("a", {}), ("b", dict(precision="bf16", compile=True))):
        result = script.train(script.fake(num_actions=1), run_name=name, **options)
        norms.append(result["train/grad_norm"])
        saved.append(dict(load(script.folder.parent / name)["agent"]))
        assert equal(dict(result["agent"].state_dict()), saved[-1]) and result["run"] == f"runs/{name}"
    assert norms[1] == pytest.approx(norms[0], rel=0.1) and norms[1] != norms[0] and len(compiled) == 1
    torch.testing.assert_close(saved[1], saved[0], rtol=0.1, atol=0.01)  # dtypes and names too


@each_script
def test_heads_stay_float32_under_bf16(script):
    """Their outputs are not rounded to bfloat16's numbers."""
    obs = torch.randint(0, 255, (64, *script.shape), dtype=torch.uint8)
    agent = script.module.Agent(script.shape, 4, script.module.Args(precision="bf16"))
    for output in agent(obs):
        assert output.dtype == torch.float32 and (output.bfloat16() == output).float().mean() < 0.1


def test_a_metric_may_be_a_tensor_or_new(script):
    """A tensor is a number in the table; a column that appears later, or after a resume, is empty before."""
    train, log, own = script.train, script.module.Run.log, [{}, {"mine/x": torch.tensor(1.5, requires_grad=True)}]

    def log_more(run, metrics):
        log(run, metrics | own[min(metrics["iteration"], len(own)) - 1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script.module.Run, "log", log_more)
        train(script.fake(), total_timesteps=3 * ITERATION)
        own += [{"mine/x": np.float32(2)}, {"mine/y": 7}]
        script.go_on(script.fake(), 5)
    table = rows(script.folder)
    assert [row["mine/x"] for row in table] == ["", "1.5", "1.5", "", ""]
    assert [row["mine/y"] for row in table] == ["", "", "", "7", "7"]
    assert [row["step"] for row in table] == ["64", "128", "192", "256", "320"]
    events = EventAccumulator(str(script.folder)).Reload()
    assert [event.value for event in events.Scalars("mine/x")] == [1.5, 1.5]


def test_the_bar_and_the_lines(script):
    """`> log` from a terminal: the terminal has the bar, the log has the lines."""
    terminal, child = pty.openpty()
    command = [sys.executable, ROOT / "ppo_procgen.py", *PROCGEN.split(), "--eval-episodes", "0"]
    with open("log", "w") as log:
        termios.tcsetwinsize(child, (24, 80))
        process = subprocess.Popen([*command, "--total-timesteps", "64"], stdout=log, stderr=child)
        os.close(child)
        seen = b""
        with contextlib.suppress(OSError):  # the terminal ends with the process
            while piece := os.read(terminal, 4096):
                seen += piece
        assert process.wait() == 0
    os.close(terminal)
    assert "step 64" in Path("log").read_text() and b"64.0/64.0" in seen


def test_a_log_file_has_each_line_at_once(script, monkeypatch):
    seen = []  # step lines, whenever an action is drawn
    spy_on(monkeypatch, script.module, "sample", lambda *_: seen.append(Path("log").read_text().count("\nstep ")))
    with open("log", "w") as log:
        monkeypatch.setattr(sys, "stdout", log)
        script.main("--total-timesteps", 2 * ITERATION, "--eval-episodes", 0)
    assert seen == [0] * 16 + [1] * 16


@each_script
def test_schedules_follow_the_steps(script):
    more = dict(anneal_lr=False) if script.name == "appo_atari" else {}
    tables = dict(lr=(0, 1e-3, 128, 3e-3), ent_coef=(0, 0.1, 128, 0.3))
    result = script.train(script.fake(), total_timesteps=2 * ITERATION, **tables, **more)
    assert (result["train/lr"], result["train/ent_coef"]) == pytest.approx((2e-3, 0.2))


def test_threads(script, monkeypatch):
    """All cores that the process may use: its affinity mask, its container's quota, its share of a machine."""
    cores = len(os.sched_getaffinity(0))
    for threads, expected in ((2, 2), (0, script.module.available_cores())):
        script.module.set_up(script.module.Args(device="cpu", threads=threads), None)
        assert torch.get_num_threads() == expected
    for text, expected in (("max 100000", cores), ("150000 100000", min(cores, 2)), ("50000 100000", 1)):
        monkeypatch.setattr(Path, "read_text", lambda self, text=text: text)
        assert script.module.available_cores() == expected
    monkeypatch.setattr(Path, "read_text", lambda self: "max 100000")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(6))
    assert script.module.available_cores() == 3


def test_each_process_has_its_gpu(script, monkeypatch):
    """torchrun's LOCAL_RANK, else (srun) the rank modulo the number of GPUs; one process may choose."""
    monkeypatch.setattr(script.module, "WORLD", 2)
    monkeypatch.setattr(script.module, "RANK", 5)
    monkeypatch.setattr(script.module.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(script.module.dist, "broadcast_object_list", lambda objects, device: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", "3")
    for device in ("cuda", "cuda:1"):
        with pytest.raises(script.module.UsageError, match="--device cuda:3: "):
            script.module.set_up(script.module.Args(device=device), None)
    monkeypatch.delenv("LOCAL_RANK")
    with pytest.raises(script.module.UsageError, match="--device cuda:1: "):
        script.module.set_up(script.module.Args(device="cuda"), None)


# ---------------------------------------------------------------------------------------------- environments, episodes


@each_script
def test_wrong_environments_are_refused(script, monkeypatch):
    """Before the run's folder exists."""

    def refuse(envs):
        with pytest.raises(script.module.UsageError, match="make_envs: "):
            script.train(envs)
        assert not script.folder.exists()

    refuse(script.fake(num_envs=3))
    refuse(FakeVecEnv(random_episodes(4), script.other, shape=script.shape))
    for space in gym.spaces.MultiBinary(4), gym.spaces.Discrete(4, start=1), gym.spaces.Box(-1, 1, (2,)):
        envs = script.fake()
        envs.single_action_space = space
        refuse(envs)
    for frames in (lambda x: x.transpose(0, 2, 3, 1), lambda x: np.float32(x / 255), lambda x: x[..., 0]):
        envs = script.fake()
        reset = envs.reset
        monkeypatch.setattr(envs, "reset", lambda frames=frames, reset=reset, **k: (frames(reset()[0]), {}))
        refuse(envs)


def test_an_old_gymnasium_is_refused(script, monkeypatch):
    """1.2.3 drops the last reward of an episode in same-step vectors."""
    monkeypatch.setattr(gym, "__version__", "1.2.3")
    with pytest.raises(script.module.UsageError, match="gymnasium 1.4"):
        script.train(script.fake())


@each_script
def test_own_environments_are_evaluated_and_resumed(script):
    """With a make_envs for all of it; each run trains on own seeds, and all evaluations play the same episodes."""
    args = script.args(env_id="toy", eval_episodes=2, eval_every=ITERATION)
    seeds, tests = [], []

    def make_envs(args, num_envs, seed, test=False):
        (tests if num_envs == 2 else seeds).append((seed, test))
        return FakeVecEnv([[([2.0] * 7, "terminated")]] * num_envs, script.autoreset, shape=script.shape)

    result = script.module.train(args, make_envs)
    played = result["eval"]["splits"][script.split]
    assert set(played["returns"]) == {14} and set(played["lengths"]) == {7}
    assert result[script.evaluated] == result["episode/return"] == 14 and result["episode/length"] == 7
    words = ["--resume", "runs/a", "--total-timesteps", str(2 * ITERATION)]
    assert script.module.main(words, make_envs) == 0
    assert load(script.folder)["step"] == 2 * ITERATION and len(rows(script.folder)) == 2
    assert len(set(seeds)) == len(seeds) == 2 and not set(seeds) & set(tests)
    assert len(tests) == 4 and len(set(tests)) == 1 and tests[0][1]


class Toy(gym.Env):
    """Seven steps with a reward of 2 each."""

    action_space = gym.spaces.Discrete(4)

    def __init__(self, shape):
        self.observation_space = gym.spaces.Box(0, 255, shape, np.uint8)

    def frame(self):
        return np.full(self.observation_space.shape, 9 * self.t, np.uint8)

    def reset(self, seed=None, options=None):
        self.t = 0
        return self.frame(), {}

    def step(self, action):
        self.t += 1
        return self.frame(), 2.0, self.t >= 7, False, {}


@each_script
def test_statistics_inside_or_outside_of_a_wrapper(script):
    """Whole episodes, unshaped; also those of a same-step SyncVectorEnv, which reports them in final_info."""

    def shaped():
        return gym.wrappers.TransformReward(gym.wrappers.RecordEpisodeStatistics(Toy(script.shape)), lambda x: 9 * x)

    inside = gym.vector.SyncVectorEnv([shaped] * 4, autoreset_mode=script.autoreset)
    plain = gym.vector.SyncVectorEnv([lambda: Toy(script.shape)] * 4, autoreset_mode=script.autoreset)
    for name, envs in ("a", RecordEpisodeStatistics(plain)), ("b", inside):
        result = script.train(envs, run_name=name)
        assert (result["episode/return"], result["episode/length"]) == (14, 7)


def test_reports_without_a_mask_are_explained(script):
    with pytest.raises(script.module.UsageError, match="RecordEpisodeStatistics"):
        script.module.ended_episodes({"episode": {"r": np.zeros(2), "l": np.zeros(2)}})
    report = {"episode": {"r": np.array([3.0, 7.0]), "l": np.array([3, 9])}, "_episode": np.array([False, True])}
    assert script.module.ended_episodes(report) == script.module.ended_episodes({"final_info": report}) == [(1, 7, 9)]


def test_play_plays_the_same_number_of_episodes_everywhere(script):
    """Short ones do not crowd out long ones: the true mean of these two envs is (2 + 40) / 2."""
    games = [[(2 * np.ones(steps, np.float32), "terminated")] for steps in (1, 20)]
    agent = script.module.Agent(script.shape, 4, script.module.Args())
    before = torch.get_rng_state()
    episodes = script.module.play(agent, FakeVecEnv(games, SAME_STEP, shape=script.shape), 3, seed=0)
    assert sorted(episodes) == [(0, 2, 1)] * 3 + [(1, 40, 20)] * 3
    assert torch.equal(before, torch.get_rng_state())


def test_play_evaluates_without_dropout(script, capfd):
    """And goes back to training mode; episodes that do not end are mentioned once."""
    agent, modes = script.module.Agent(script.shape, 4, script.module.Args()), []
    agent.register_forward_hook(lambda *_: modes.append(agent.training))
    envs = FakeVecEnv([[(np.zeros(2100, np.float32), "terminated")]], SAME_STEP, shape=script.shape)
    script.module.play(agent, envs, 1, seed=0)
    assert set(modes) == {False} and agent.training
    assert capfd.readouterr().out.count("no episode has ended in 1,000 steps") == 1


# ----------------------------------------------------------------------------------------- checkpoints, resuming, ends


@each_script
def test_best_and_timed_checkpoints(script, monkeypatch):
    """best.pt has the best mean of 100 episodes, and does not postpone checkpoint.pt, due after 300 seconds."""
    Run, saved = script.module.Run, []

    def age(_, run, metrics):
        run.last_save = time.monotonic() - 301 * (metrics["step"] % 128 == 0)

    spy_on(monkeypatch, Run, "log", age)
    monkeypatch.setattr(Run, "save", note_saves(Run.save, saved))
    games = [([paid], "terminated") for paid in 40 * [9.0] + 200 * [0.0]]
    script.train(FakeVecEnv([games] * 4, script.autoreset, shape=script.shape), total_timesteps=8 * ITERATION)
    assert [step for name, step in saved if name == "checkpoint.pt"] == [0, 128, 256, 384, 512]
    assert [step for name, step in saved if name == "best.pt"] == [128 if script.autoreset == SAME_STEP else 256]
    assert load(script.folder, "best.pt")["best"] == load(script.folder)["best"] == 9


def note_saves(save, saved):
    def note(run, name, parts, **counters):
        saved.append((name, counters["step"]))
        save(run, name, parts, **counters)

    return note


def test_a_resumed_run_has_to_beat_the_best(script, monkeypatch):
    """A run that dies without saving (kill -9) and is resumed does not overwrite best.pt with a worse agent."""

    def play(paid, iterations, dies=False):
        envs = FakeVecEnv([[([paid], "terminated")] * 32] * 4, SAME_STEP)
        step = envs.step

        def count(action):
            if dies and (script.folder / "best.pt").exists():
                raise FloatingPointError  # after which nothing is saved
            return step(action)

        monkeypatch.setattr(envs, "step", count)
        return script.go_on(envs, iterations) if script.folder.exists() else script.train(envs)

    play(1.0, 1)
    with pytest.raises(FloatingPointError):
        play(9.0, 9, dies=True)
    assert load(script.folder)["best"] == -np.inf and load(script.folder, "best.pt")["best"] == 9
    play(5.0, 9)
    assert load(script.folder)["best"] == load(script.folder, "best.pt")["best"] == 9
    play(10.0, 18)
    assert load(script.folder, "best.pt")["best"] == 10


@each_script
def test_resume_continues_the_learner(script, monkeypatch):
    """It begins with what was saved, weights, moments, statistics, counters, flags; its episodes are others."""
    names, seed = [], script.module.stream_seed
    monkeypatch.setattr(script.module, "stream_seed", lambda number, name: names[-1].add(name) or seed(number, name))

    def run(main, *flags):
        names.append(set())
        return main(*flags), load(script.folder)

    flags = ("--run-name", "a", "--lr", 1e-3, "--gamma", 0.5, "--eval-episodes", 0)
    code, first = run(script.main, "--total-timesteps", ITERATION, *flags)
    assert code == 0
    first["best"] = 12.5
    if "rooms_ever" in first:
        first["rooms_ever"][7] = True
    torch.save(first, script.folder / "checkpoint.pt")
    torch.save(first, script.folder / "best.pt")
    flags = ("--total-timesteps", 2 * ITERATION, "--gamma", 0.7, "--adam-eps", 1e-3)
    with monkeypatch.context() as patch:
        patch.setattr(script.module, "sample", stop)  # before anything is learned
        if hasattr(script.module, "Actors"):
            patch.setattr(script.module.Actors, "datasets", lambda *_: (stop() for _ in range(1)))
        code, again = run(script.resume, *flags)
    assert code == 130 and again["optimizer"]["param_groups"][0]["eps"] == 1e-3
    for part in first.keys() - {"args"}:
        kept = [x[part]["state"] if "optimizer" in part else x[part] for x in (again, first)]
        assert equal(*kept), part
    assert again["args"] == first["args"] | dict(total_timesteps=2 * ITERATION, gamma=0.7, adam_eps=1e-3)
    code, last = run(script.resume, *flags)
    assert code == 0 and last["step"] == 2 * ITERATION and not equal(last["agent"], first["agent"])
    assert names[1] == names[2] and not names[0] & names[1] and 0 < len(names[0]) == len(names[1])
    assert run(script.resume)[0] == 0  # it is finished
    assert (script.folder / f"config-{ITERATION}.json").exists()


def test_resume_writes_no_step_twice(script):
    """Rows beyond the checkpoint go; TensorBoard is told with a purge."""
    folder = script.folder
    script.main("--total-timesteps", ITERATION, "--run-name", "a", "--eval-episodes", 0)
    old = (folder / "checkpoint.pt").read_bytes()
    time.sleep(1.1)  # event files are read in the order of the second in their names
    script.resume("--total-timesteps", 3 * ITERATION)
    (folder / "checkpoint.pt").write_bytes(old)  # as if killed before the next one was written
    assert [row["step"] for row in rows(folder)] == ["64", "128", "192"]
    time.sleep(1.1)
    assert script.resume("--total-timesteps", 2 * ITERATION) == 0
    table = rows(folder)
    assert [row["iteration"] for row in table] == ["1", "2"]
    events = EventAccumulator(str(folder)).Reload().Scalars("loss/value")
    assert [event.step for event in events] == [64, 128]
    assert [event.value for event in events] == pytest.approx([float(row["loss/value"]) for row in table], rel=1e-4)


class Failing(FakeVecEnv):
    """At step call `at` it raises `error`, or pays NaN if that is None."""

    def step(self, actions):
        obs, reward, *rest = super().step(actions)
        if len(self.actions) == self.at and self.error:
            raise self.error
        return obs, reward + np.float32(np.nan if len(self.actions) == self.at else 0), *rest


@each_script
@pytest.mark.parametrize("error", [ValueError("a broken game"), None])
def test_a_failure_keeps_the_last_checkpoint(script, error):
    """An error in an environment or a loss that is NaN does not touch it; nothing is left running."""
    envs, threads = script.fake(Failing), threading.active_count()
    envs.at, envs.error = 16 + 5 + 8 * ("--warmup-steps" in KINDS[script.name]), error
    with pytest.raises(type(error) if error else FloatingPointError):
        script.train(envs, total_timesteps=3 * ITERATION, checkpoint_every=0)
    saved = load(script.folder)
    assert saved["step"] == ITERATION and len(rows(script.folder)) == 1
    assert all(torch.isfinite(weight).all() for weight in saved["agent"].values())
    end = time.monotonic() + 10
    while threading.active_count() > threads + 1 and time.monotonic() < end:
        time.sleep(0.1)  # an actor's thread may end a moment later
    assert threading.active_count() <= threads + 1  # PyTorch's autograd may have started its own


@each_script
def test_weights_that_are_not_finite_are_not_saved(script, monkeypatch):
    """Neither at the last iteration nor after Ctrl-C: the bytes of checkpoint.pt do not change."""
    script.train(script.fake())
    before = (script.folder / "checkpoint.pt").read_bytes()

    learn = script.module.learn

    def learn_and_spoil(net, *rest):
        means = learn(net, *rest)
        next(net.parameters()).data[0] = torch.nan
        return means

    monkeypatch.setattr(script.module, "learn", learn_and_spoil)
    with pytest.raises(FloatingPointError):
        script.go_on(script.fake(), 2)
    monkeypatch.setattr(script.module.Run, "log", stop)
    with pytest.raises(FloatingPointError):
        script.go_on(script.fake(), 3)
    assert (script.folder / "checkpoint.pt").read_bytes() == before


def test_a_log_that_cannot_be_written_saves_first(script, monkeypatch):
    """A full quota or a lost network drive, in the fourth iteration: its weights are saved, then the traceback."""
    calls = []

    def flush(self):
        calls.append(self)
        if len(calls) == 4:
            raise OSError(122, "Disk quota exceeded")

    monkeypatch.setattr(script.module.SummaryWriter, "flush", flush)
    with pytest.raises(OSError, match="quota"):
        script.train(script.fake(), total_timesteps=9 * ITERATION)
    assert load(script.folder)["step"] == 4 * ITERATION


def test_a_second_signal_does_not_cut_the_saving_short(script, monkeypatch, capfd):
    def signals(*_):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)

    sampled = []
    spy_on(monkeypatch, torch, "save", lambda *_: sampled and signals())  # which is not yet on disk
    spy_on(monkeypatch, script.module, "sample", lambda *_: sampled.append(signals()))
    before = {number: signal.signal(number, script.module.interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        assert script.main("--total-timesteps", ITERATION, "--run-name", "a") == 130
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert load(script.folder)["step"] == 0 and "--resume runs/a" in capfd.readouterr().out


@pytest.mark.parametrize(
    "name, number",
    [
        ("ppo_procgen", signal.SIGTERM),
        ("ppo_procgen", signal.SIGKILL),
        ("ppo_atari_rnd", signal.SIGTERM),
        ("impala_procgen", signal.SIGINT),
        ("appo_atari", signal.SIGINT),
    ],
)
def test_a_copy_in_an_empty_folder_is_stopped_and_resumed(name, number, tmp_path):
    """Under another name, one without docstrings: 130 and the command to continue; kill -9: the last checkpoint."""
    shutil.copy(ROOT / f"{name}.py", tmp_path / "mine.py")
    flags = KINDS[name].replace("--sync", "--no-sync").split()
    command = [sys.executable, *["-OO"] * (name == "ppo_atari_rnd"), "mine.py"]
    pipes = dict(cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    endless = [*flags, "--run-name", "a", "--total-timesteps", "1000000", "--checkpoint-every", "0"]
    process = subprocess.Popen([*command, *endless], **pipes)
    lines = (line for line in process.stdout if line.startswith("step "))
    next(lines), next(lines)
    process.send_signal(number)
    out, error = process.communicate(timeout=120)
    saved = load(tmp_path / "runs/a")
    assert saved["step"] >= ITERATION
    if number == signal.SIGKILL:
        assert process.returncode == -number
    else:
        message = rf"stopped at step {saved['step']:,}: python mine.py --resume runs/a continues\n"
        assert process.returncode == 130 and re.search(message, out) and not error, out + error
    total = ["--total-timesteps", str(saved["step"] + ITERATION), "--eval-episodes", "0"]
    assert subprocess.run([*command, "--resume", "runs/a", *total], **pipes).returncode == 0
    steps = [int(row["step"]) for row in rows(tmp_path / "runs/a")]
    assert steps == list(range(ITERATION, saved["step"] + ITERATION + 1, ITERATION))


WORKERS = """
import sys
import termios
import gymnasium as gym
from gymnasium.wrappers.vector import RecordEpisodeStatistics
import ppo_procgen
from test_plumbing import Toy

def toy():
    return Toy((3, 16, 16))

def make_envs(args, num_envs, seed, test=False):
    mode = gym.vector.AutoresetMode.SAME_STEP
    return RecordEpisodeStatistics(gym.vector.AsyncVectorEnv([toy] * num_envs, autoreset_mode=mode))

if __name__ == "__main__":
    import signal
    signal.signal(signal.SIGINT, ppo_procgen.interrupt)
    signal.signal(signal.SIGTERM, ppo_procgen.interrupt)
    sys.exit(ppo_procgen.main(make_envs=make_envs))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_worker_processes_that_a_signal_reaches_too(number, tmp_path):
    """Ctrl-C goes to the whole group: gymnasium's workers end first, and the run still ends with 130."""
    (tmp_path / "own.py").write_text(WORKERS)
    flags = [*PROCGEN.split(), "--run-name", "a", "--total-timesteps", "1000000"]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    pipes = dict(cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0)
    process = subprocess.Popen([sys.executable, "own.py", *flags], env=os.environ | {"PYTHONPATH": paths}, **pipes)
    lines = (line for line in process.stdout if line.startswith("step "))
    next(lines), next(lines)
    os.killpg(process.pid, number)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 130, error
    assert load(tmp_path / "runs/a")["step"] >= ITERATION


def test_main_in_a_thread(script):
    codes = []
    flags = ("--total-timesteps", ITERATION, "--eval-episodes", 0)
    thread = threading.Thread(target=lambda: codes.append(script.main(*flags)))
    thread.start()
    thread.join()
    assert codes == [0]


@each_script
def test_train_leaves_no_threads_or_files(script):
    """A sweep in one process: TensorBoard's writer, the table and the actors are closed."""
    counts = []
    for i in range(4):
        script.train(script.fake(), run_name=f"run{i}")
        end = time.monotonic() + 10
        while i > 1 and threading.active_count() > counts[1][0] and time.monotonic() < end:
            time.sleep(0.1)  # an actor's thread may end a moment later
        counts.append((threading.active_count(), len(os.listdir("/proc/self/fd"))))
    assert counts[3][0] <= counts[1][0] and counts[3][1] <= counts[1][1]


def test_two_runs_never_share_a_folder(script):
    """Runs of one second get a folder each; of one name exactly one wins."""
    for _ in range(4):
        script.train(script.fake(), run_name="")
    assert len(list(Path("runs").iterdir())) == 4
    assert script.main("--run-name", "b", "--total-timesteps", ITERATION, "--eval-episodes", 0) == 0
    before = (script.folder.parent / "b" / "metrics.csv").read_bytes()
    assert script.main("--run-name", "b", "--total-timesteps", ITERATION) == 2
    assert (script.folder.parent / "b" / "metrics.csv").read_bytes() == before


@each_script
def test_a_run_that_is_killed_at_once_can_be_resumed(script, monkeypatch):
    """Its first checkpoint is written before its first step."""

    def kill(*_):
        raise SystemError  # nothing is saved after it, as after kill -9

    with monkeypatch.context() as patch:
        patch.setattr(FakeVecEnv, "step", kill)
        with pytest.raises(SystemError):
            script.train(script.fake())
    assert load(script.folder)["step"] == 0
    script.go_on(script.fake(), 1)
    assert [row["step"] for row in rows(script.folder)] == [str(ITERATION)]


# ------------------------------------------------------------------------------------------- flags and bad input


def test_flags_built_in_python_become_plain(script):
    """NumPy's numbers, a single rate, YAML's text: the checkpoint has Python's own types and can be read."""
    options = dict(gamma=np.float64(0.98), num_steps=np.int64(16), clip=np.float32(0.25), lr=[0, "1e-4", 1000, 0.0])
    script.train(script.fake(), **options, ent_coef=3e-4, total_timesteps=np.float64(ITERATION))
    saved = load(script.folder)["args"]
    assert saved["lr"] == [0, 1e-4, 1000, 0] and saved["ent_coef"] == [0, 3e-4] and saved["clip"] == 0.25
    for value in saved.values():
        assert type(value) in (bool, int, float, str, list)


@each_script
def test_every_flag_is_checked(script, capfd):
    """nan, inf and -1 for each number, other choices, from Python and on the command line; unknown names too."""
    module = script.module
    wrong = {int: (-1, 1.5), float: (-1.0, math.nan, math.inf), bool: ("maybe",), tuple: ((-1.0,), (math.nan,), "x")}
    tried, defaults = 0, module.Args()
    for name, default in vars(defaults).items():
        free = isinstance(default, str) and name in ("env_id", "run_dir", "run_name")
        for value in () if free else wrong.get(type(default), ("x", 3)):
            tried += 1
            with pytest.raises(pydantic.ValidationError, match=name):
                module.Args(**{name: value})
    shares = [name for name in ("gamma", "gae_lambda", "repeat_action_probability") if hasattr(defaults, name)]
    for name, value in [*((name, 1.5) for name in shares), ("num_envs", 0), ("num_steps", 0), ("surplus", 1)]:
        with pytest.raises(pydantic.ValidationError, match=name):
            module.Args(**{name: value})
    assert tried > 50
    for flags in ("--gamma 2", "--num-envs 0", "--lr 1e-3 0", "--lr nan", "--surplus 1", "--total-timesteps 1"):
        assert script.main(*flags.split()) == 2
        assert flags.split()[0].strip("-").replace("-", "_") in capfd.readouterr().err.replace("-", "_"), flags
    assert not script.folder.parent.exists()


OWN_FIELDS = """    target_kl: float | None = None  # stop early
    data: Path = Path("x")
    sizes: list[int] = Field(default_factory=lambda: [1])
    offset: float = -1.5
    seed: NonNegative"""


def test_fields_as_people_add_them(tmp_path):
    """A copied file with new fields trains and resumes; CleanRL's `float = None` gets one sentence."""
    text = (ROOT / "ppo_procgen.py").read_text()
    (tmp_path / "more.py").write_text(text.replace("    seed: NonNegative", OWN_FIELDS))
    (tmp_path / "none.py").write_text(text.replace("    seed: NonNeg", "    target_kl: float = None\n    seed: NonNeg"))

    def run(*words):
        command = [sys.executable, *map(str, words)]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)

    flags = [*PROCGEN.split(), "--eval-episodes", 0, "--run-name", "a", "--total-timesteps", 64]
    done = run("more.py", *flags, "--target-kl", 0.5, "--data", "y", "--sizes", 1, 2, "--offset", -2)
    assert done.returncode == 0, done.stderr
    assert run("more.py", "--resume", "runs/a", "--total-timesteps", 128).returncode == 0
    saved = load(tmp_path / "runs/a")["args"]
    assert (saved["target_kl"], saved["data"], saved["sizes"], saved["offset"]) == (0.5, "y", [1, 2], -2)
    for script, word in ("none.py", "target_kl"), (ROOT / "ppo_procgen.py", "f996cf0"):
        last = run(script, "--resume", "runs/a") if word == "f996cf0" else run(script, *flags)
        assert last.returncode == 2 and word in last.stderr and last.stderr.count("\n") == 1, last.stderr


BAD = {  # flags, and what the message must hold
    "ppo_procgen": [
        ("--minibatch-size 1", "minibatch_size"),
        ("--minibatch-size 65", "--minibatch-size 65 64"),
        ("--total-timesteps 63", "--total-timesteps 63 64"),
        ("--kl-target 0", "kl_target"),
        ("--start-level 5", "--start-level --num-levels"),
        ("--env-id bigfis", "--env-id bigfis"),
        ("--eval-every 64 --eval-episodes 0", "--eval-every --eval-episodes"),
        ("--ent-coef 5 1e-4 1", "ent_coef"),
        ("--device cuda:99", "--device cuda:99"),
        ("--device gpu", "device"),
        ("--run-name b", "runs/b"),
        ("--resume runs/none", "runs/none"),
        ("--preset openai --resume runs/b", "--resume --preset"),
    ],
    "ppo_atari_rnd": [
        ("--env-id Montezuma", "--env-id Montezuma"),
        ("--noop-max 0", "noop_max"),
        ("--stack 0", "stack"),
    ],
}


@pytest.mark.parametrize("script", BAD, indirect=True)
def test_bad_input(script, capfd, tmp_path):
    """Exit code 2 and a message that names the flag; nothing is written."""
    (tmp_path / "runs/b").mkdir(parents=True)
    for flags, words in BAD[script.name]:
        assert script.main(*flags.split()) == 2, flags
        error = capfd.readouterr().err
        assert "Traceback" not in error and all(word in error for word in words.split()), error
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["b", "runs"]


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("harm",)


def test_bad_checkpoints(script, capfd):
    """One line, exit code 2, nothing changed, and a hostile file runs no code."""
    script.main("--total-timesteps", ITERATION, "--run-name", "a", "--eval-episodes", 0)
    path, saved = script.folder / "checkpoint.pt", load(script.folder)
    whole = path.read_bytes()
    older = saved | dict(args=saved["args"] | dict(quiet=False))
    for bad in (b"", whole[:3000], saved | dict(args=Bomb()), older, [1, 2]):
        if isinstance(bad, bytes):
            path.write_bytes(bad)
        else:
            torch.save(bad, path)
        before = {file.name: file.read_bytes() for file in script.folder.iterdir()}
        capfd.readouterr()
        assert script.resume("--total-timesteps", 2 * ITERATION) == 2
        error = capfd.readouterr().err
        assert error.count("\n") == 1 and "--resume runs/a" in error and "f996cf0" in error, error
        assert before == {file.name: file.read_bytes() for file in script.folder.iterdir()}
        assert not os.path.exists("harm")


def test_a_rank_without_a_world(tmp_path):
    """RANK alone, which a sweep may export, does not make a run that writes nothing."""
    command = [sys.executable, ROOT / "ppo_procgen.py", *PROCGEN.split(), "--eval-episodes", "0", "--run-name", "a"]
    command = [*map(str, command), "--total-timesteps", "64"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | {"RANK": "1"}, capture_output=True, text=True)
    assert done.returncode == 0 and (tmp_path / "runs/a/checkpoint.pt").exists(), done.stderr
