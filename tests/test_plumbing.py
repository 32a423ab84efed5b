"""What every script promises around its algorithm: command line, files, checkpoints, resuming, stopping, bad input.

The plumbing is one text in all five files (test_repo.py compares), so what is in it is tested with one of them.
"""

import importlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import tyro
from gymnasium.spaces import Box
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from conftest import NEXT_STEP, ROOT, SAME_STEP, FakeVecEnv, equal, random_episodes, rows, spy_on, timeless

COMMON = "--num-envs 4 --num-steps 16 --minibatch-size 32 --eval-episodes 2 --device cpu --torch-threads 1"
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

    def train(self, envs, **changes):
        options = dict(eval_episodes=0, quiet=True, run_name="a", total_timesteps=ITERATION) | changes
        args = tyro.cli(self.module.Args, args=KINDS[self.name].split())
        if hasattr(args, "num_groups"):
            options, envs = options | dict(num_groups=1), [envs]
        return self.module.train(replace(args, **options), envs)


@pytest.fixture(params=["ppo_procgen"])  # one for what is the same text in all five
def script(request, tmp_path, monkeypatch):
    def quick(weight, gain=1):  # the true one's QR would be most of these runs
        return torch.nn.init.normal_(weight, 0, gain * weight[0].numel() ** -0.5)

    monkeypatch.setattr(torch.nn.init, "orthogonal_", quick)
    monkeypatch.chdir(tmp_path)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield Script(request.param, tmp_path)
    for number, handler in handlers.items():  # `main` sets its own
        signal.signal(number, handler)


def load(folder, name="checkpoint.pt"):
    return torch.load(folder / name, weights_only=True)


COLUMNS = """step iteration episode/return episode/length episode/count loss/policy loss/value loss/entropy
train/approx_kl train/explained_variance train/grad_norm train/lr time/sps time/env_s time/policy_s time/learn_s"""


@each_script
def test_files_of_a_run(script, capfd):
    """Files and progress; a second run of the seed, without evaluations, has the same numbers; another seed others."""
    flags, folder, split = ("--total-timesteps", 3 * ITERATION + 7), script.folder, script.split
    assert script.main(*flags, "--run-name", "a", "--eval-every", 2 * ITERATION) == 0
    out, error = capfd.readouterr()
    assert not error and "Gym" not in out  # gym's banner
    assert out.count("\nstep ") == 3 and out.count(f"\n{split}: return ") == 2
    assert out.rpartition("\n")[0].splitlines()[-2] == "trained to step 192, evaluating; again: --resume runs/a"
    config = json.loads((folder / "config.json").read_text())
    assert config["script"] == script.name and config["args"]["num_envs"] == 4
    assert {"git", "cpu", "gpu", "torch", "ranks"} <= config.keys()
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
    assert script.main(*flags, "--run-name", "b", "--eval-episodes", 0, "--quiet") == 0
    assert capfd.readouterr() == ("", "")
    assert timeless(folder) == timeless(folder.parent / "b")
    assert equal(load(folder)["agent"], load(folder.parent / "b")["agent"])
    assert script.main("--total-timesteps", ITERATION, "--seed", 4, "--quiet") == 0
    (other,) = folder.parent.glob(f"{config['args']['env_id']}__{script.name}__4__20*")
    assert timeless(other) != timeless(folder)[:1]


@each_script
def test_environments_of_ones_own_and_switches(script, monkeypatch):
    """Their name is recorded, the agent comes back; autocast and the compiler change neither its kind nor much else."""
    norms, saved, compiled = [], [], []
    monkeypatch.setattr(torch, "compile", lambda network: compiled.append(network) or network)  # pytest --compile does
    for name, options in (("a", {}), ("b", dict(precision="bf16", compile=True))):
        result = script.train(script.fake(num_actions=1), run_name=name, **options)
        config = json.loads((script.folder.parent / name / "config.json").read_text())
        assert config["args"]["env_id"] == "FakeVecEnv"
        norms.append(result["train/grad_norm"])
        saved.append(dict(load(script.folder.parent / name)["agent"]))
        assert equal(dict(result["agent"].state_dict()), saved[-1])
    assert norms[1] == pytest.approx(norms[0], rel=0.1) and norms[1] != norms[0] and len(compiled) == 1
    torch.testing.assert_close(saved[1], saved[0], rtol=0.1, atol=0.01)  # dtypes and names too
    for wrong in (script.fake(num_envs=3), FakeVecEnv(random_episodes(4), script.other, shape=script.shape)):
        with pytest.raises(script.module.UsageError, match="--num-envs"):
            script.train(wrong, run_name="x")
    for flag in ("max_grad_norm", "env_threads", "torch_threads", "eval_every"):
        with pytest.raises(script.module.UsageError, match=f"--{flag.replace('_', '-')} -1: at least 0"):
            script.train(script.fake(), run_name="x", **{flag: -1})
    channels_last = script.fake()
    channels_last.single_observation_space = Box(0, 255, (64, 64, 12), np.uint8)
    with pytest.raises(script.module.UsageError, match="^observations .*64, 64, 12"):
        script.train(channels_last, run_name="x")
    floats = script.fake()
    floats.single_observation_space = Box(0, 1, script.shape, np.float32)  # cast to bytes they would be black
    with pytest.raises(script.module.UsageError, match="uint8"):
        script.train(floats, run_name="x")
    assert not (script.folder.parent / "x").exists()


@each_script
@pytest.mark.filterwarnings("ignore:.*FakeVecEnv")  # tyro's: no choice of --env-id
def test_a_run_on_ones_own_environment_needs_it_to_go_on(script, capfd):
    """The command line has no such game, and says so; procgen would abort the process."""
    script.train(script.fake())
    assert script.resume("--total-timesteps", 2 * ITERATION) == 2
    assert "--env-id FakeVecEnv" in capfd.readouterr().err


def test_a_log_file_has_each_line_at_once(script, monkeypatch):
    seen = []  # step lines, whenever an action is drawn
    spy_on(monkeypatch, script.module, "sample", lambda *_: seen.append(Path("log").read_text().count("\nstep ")))
    with open("log", "w") as log:
        monkeypatch.setattr(sys, "stdout", log)
        script.main("--total-timesteps", 2 * ITERATION, "--eval-episodes", 0)
    assert seen == [0] * 16 + [1] * 16


def test_best_checkpoint(script):
    """best.pt is the best mean of the last 100 games, the last 100 games."""
    games = [([paid], "terminated") for paid in 16 * [9.0] + 16 * [5.0] + 16 * [0.0]]
    script.train(FakeVecEnv([games] * 4, SAME_STEP), total_timesteps=3 * ITERATION)
    best = load(script.folder, "best.pt")
    assert best["step"] == 2 * ITERATION and best["best"] == pytest.approx((36 * 9 + 64 * 5) / 100)


def test_a_resumed_run_has_to_beat_the_best(script, monkeypatch):
    """A run that dies without saving (kill -9) and goes on does not overwrite best.pt with a worse agent."""

    def play(paid, *, dies=False, **args):
        envs = FakeVecEnv([[([paid], "terminated")] * 32] * 4, SAME_STEP)
        step = envs.step

        def count(action):
            if dies and (script.folder / "best.pt").exists():
                raise FloatingPointError  # after which nothing is saved
            return step(action)

        monkeypatch.setattr(envs, "step", count)
        return script.train(envs, **args)

    play(1.0, total_timesteps=ITERATION)
    resume = str(script.folder)
    with pytest.raises(FloatingPointError):
        play(9.0, dies=True, total_timesteps=9 * ITERATION, resume=resume)
    assert load(script.folder)["best"] == -np.inf and load(script.folder, "best.pt")["best"] == 9
    play(5.0, total_timesteps=9 * ITERATION, resume=resume)
    assert load(script.folder)["best"] == load(script.folder, "best.pt")["best"] == 9
    play(10.0, total_timesteps=18 * ITERATION, resume=resume)
    assert load(script.folder, "best.pt")["best"] == 10


def test_threads(script):
    for threads, expected in ((2, 2), (0, len(os.sched_getaffinity(0)))):
        script.module.set_up(script.module.Args(device="cpu", torch_threads=threads))
        assert torch.get_num_threads() == expected


@each_script
def test_resume_goes_on_with_the_learner(script, monkeypatch):
    """It begins with what was saved, weights, moments, statistics, counters, flags; its games are others."""
    names, seed = [], script.module.stream_seed
    monkeypatch.setattr(script.module, "stream_seed", lambda number, name: names[-1].add(name) or seed(number, name))

    def run(main, *flags):
        names.append(set())
        return main(*flags), load(script.folder)

    def stop(*args):
        raise KeyboardInterrupt

    flags = ("--run-name", "a", "--lr", 1e-3, "--gamma", 0.5, "--quiet", "--eval-episodes", 0)
    code, first = run(script.main, "--total-timesteps", ITERATION, *flags)
    assert code == 0
    first["best"] = 12.5
    first.get("rooms_ever", torch.zeros(8))[7] = True
    torch.save(first, script.folder / "checkpoint.pt")
    torch.save(first, script.folder / "best.pt")
    flags = ("--total-timesteps", 2 * ITERATION, "--gamma", 0.7)
    with monkeypatch.context() as patch:
        where = (script.module.Actors, "dataset") if hasattr(script.module, "Actors") else (script.module, "sample")
        patch.setattr(*where, stop)  # before anything is learned
        code, again = run(script.resume, *flags)
    assert code == 130 and equal(again | dict(args=0), first | dict(args=0))
    assert again["args"] == first["args"] | dict(total_timesteps=2 * ITERATION, gamma=0.7, resume="runs/a")
    code, last = run(script.resume, *flags)
    assert code == 0 and last["step"] == 2 * ITERATION and not equal(last["agent"], first["agent"])
    assert names[1] == names[2] and not names[0] & names[1] and 0 < len(names[0]) == len(names[1])
    assert run(script.resume)[0] == 0  # it is finished


def test_resume_writes_no_step_twice(script):
    """Rows beyond the checkpoint go, half a row too, columns are kept by name; TensorBoard is told with a purge."""
    folder = script.folder
    script.main("--total-timesteps", ITERATION, "--run-name", "a", "--eval-episodes", 0)
    old = (folder / "checkpoint.pt").read_bytes()
    time.sleep(1.1)  # event files are read in the order of the second in their names
    script.resume("--total-timesteps", 3 * ITERATION)
    (folder / "checkpoint.pt").write_bytes(old)  # as if killed before the next one was written
    lines = [line.split(",") for line in (folder / "metrics.csv").read_text().splitlines()]
    moved = [",".join([line[0], "x" if i == 0 else "7", *line[1:]]) for i, line in enumerate(lines)]
    (folder / "metrics.csv").write_text("\n".join(moved) + "\n6")  # cut short: of step 64
    time.sleep(1.1)
    assert script.resume("--total-timesteps", 2 * ITERATION) == 0
    table = rows(folder)
    assert [(row["iteration"], row["x"]) for row in table] == [("1", "7"), ("2", "")]
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
def test_a_failure_keeps_what_was_learned(script, error, capfd):
    """The last whole iteration is on disk, whatever --checkpoint-every says; weights of a loss that is NaN are not."""
    envs = script.fake(Failing)
    envs.at, envs.error = 16 + 5 + 8 * ("--warmup-steps" in KINDS[script.name]), error
    with pytest.raises(type(error) if error else FloatingPointError, match=None if error else "after step 64"):
        script.train(envs, total_timesteps=3 * ITERATION, checkpoint_every=300 if error else 0)
    saved = load(script.folder)
    assert saved["step"] == ITERATION and len(rows(script.folder)) == 1
    assert all(torch.isfinite(weight).all() for weight in saved["agent"].values())
    message = "stopped, saved at step 64: --resume runs/a\n" if error else ""
    assert capfd.readouterr().err == message
    assert not any(thread.name.startswith("ThreadPoolExecutor") for thread in threading.enumerate())  # actors


def test_a_second_signal_does_not_cut_the_saving_short(script, monkeypatch, capfd):
    def signals(*_):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)

    spy_on(monkeypatch, script.module, "sample", signals)
    spy_on(monkeypatch, torch, "save", signals)  # which is not yet on disk
    assert script.main("--total-timesteps", ITERATION, "--run-name", "a") == 130
    assert load(script.folder)["step"] == 0 and "saved at step 0" in capfd.readouterr().err


def test_a_signal_does_not_cut_the_saving_of_a_failed_run_short(script, monkeypatch, capfd):
    """torchrun sends SIGTERM to a rank that is just saving because it has lost another one."""

    def fail(*_):
        raise RuntimeError("a lost rank")

    spy_on(monkeypatch, script.module, "sample", fail)
    spy_on(monkeypatch, torch, "save", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(RuntimeError, match="a lost rank"):
        script.main("--total-timesteps", ITERATION, "--run-name", "a")
    assert load(script.folder)["step"] == 0 and "saved at step 0" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["ppo_procgen", "ppo_atari_rnd", "impala_procgen", "appo_atari"])
def test_command_line_alone_in_an_empty_folder(name, tmp_path):
    """The file copied to an empty folder runs, and stops on a signal with 130 and a checkpoint to resume from."""
    shutil.copy(ROOT / f"{name}.py", tmp_path)
    command = [sys.executable, f"{name}.py", *KINDS[name].replace("--sync", "--no-sync").split(), "--run-name", "a"]
    pipes = dict(cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen([*command, "--total-timesteps", "1000000"], **pipes)
    lines = (line for line in process.stdout if line.startswith("step "))
    next(lines), next(lines)
    process.send_signal(signal.SIGINT if "--num-groups" in command else signal.SIGTERM)
    _, error = process.communicate(timeout=120)
    message = r"stopped, saved at step [\d,]+: --resume runs/a\n"
    assert process.returncode == 130 and re.fullmatch(message, error), error
    assert load(tmp_path / "runs/a")["step"] >= ITERATION


BAD = {}  # flags, and what the one line must hold
BAD["ppo_procgen"] = [
    ("--minibatch-size 1", "--minibatch-size 1 2 64"),
    ("--minibatch-size 65", "--minibatch-size 65 64"),
    ("--total-timesteps 63", "--total-timesteps 63 64"),
    ("--seed -1", "--seed"),
    ("--num-steps -3", "--num-steps"),
    ("--lr 5 1e-4 1 1e-4", "--lr"),
    ("--ent-coef 5 1e-4 1", "--ent-coef"),
    ("--device cuda:99", "--device cuda:99 auto"),
    ("--max-grad-norm -1", "--max-grad-norm"),
    ("--run-dir file", "file"),
    ("--run-name b", "--run-name --resume runs/b"),
]
BAD["ppo_atari_rnd"] = [
    ("--env-id Montezuma", "--env-id MontezumaRevenge"),
    ("--noop-max 0", "--noop-max"),
    ("--stack 0", "--stack"),
]


@pytest.mark.parametrize("script", BAD, indirect=True)
def test_bad_input(script, capfd, tmp_path, monkeypatch):
    """Exit code 2, or 1 for the machine's no; one line that names the flag and what is allowed; nothing is written."""
    (tmp_path / "file").write_text("")
    (tmp_path / "runs/b").mkdir(parents=True)
    package = "procgen" if script.name == "ppo_procgen" else "envpool"
    for flags, words in [*BAD[script.name], ("", package)]:
        if not flags:
            monkeypatch.setitem(sys.modules, package, None)  # not installed
        assert script.main(*flags.split()) == (2 if flags not in ("", "--run-dir file") else 1), flags
        error = capfd.readouterr().err
        assert error.count("\n") == 1 and all(word in error for word in words.split()), error
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["b", "file", "runs"]


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("harm",)


def test_bad_checkpoints(script, capfd):
    """One line, exit code 2, nothing changed, and a hostile file runs no code."""
    script.main("--total-timesteps", ITERATION, "--run-name", "a", "--eval-episodes", 0)
    path, saved = script.folder / "checkpoint.pt", load(script.folder)
    whole = path.read_bytes()
    other_version = saved | dict(args=saved["args"] | dict(new_flag=1))
    for bad in (b"", whole[:3000], saved | dict(args=Bomb()), saved | dict(script="no"), other_version, [1, 2]):
        if isinstance(bad, bytes):
            path.write_bytes(bad)
        else:
            torch.save(bad, path)
        before = {file.name: file.read_bytes() for file in script.folder.iterdir()}
        capfd.readouterr()
        assert script.resume("--total-timesteps", 2 * ITERATION) == 2
        error = capfd.readouterr().err
        assert error.count("\n") == 1 and "--resume runs/a" in error, error
        assert before == {file.name: file.read_bytes() for file in script.folder.iterdir()}
        assert not os.path.exists("harm")


def test_a_full_disk(script, capfd, monkeypatch):
    """Exit code 1, one line, the last good checkpoint untouched; later the run goes on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(metrics, *_):
        if metrics["step"] == 2 * ITERATION:  # beyond this size an OSError in mid-write, as of a full disk
            resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))

    flags = ("--total-timesteps", 3 * ITERATION, "--eval-episodes", 0, "--checkpoint-every", 0, "--quiet")
    with monkeypatch.context() as patch:
        spy_on(patch, script.module.Logger, "log", fill)
        try:
            assert script.main(*flags, "--run-name", "a") == 1
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    error = capfd.readouterr().err
    assert error.count("\n") == 1 and load(script.folder)["step"] == ITERATION, error
    assert script.resume() == 0 and len(rows(script.folder)) == 3


def test_a_closed_stderr(script, monkeypatch):
    """`2>&-` ends as any other run."""
    monkeypatch.setattr(sys, "stderr", None)
    assert script.main("--total-timesteps", ITERATION, "--eval-episodes", 0) == 0
