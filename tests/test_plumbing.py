"""What every script promises around its algorithm: command line, files, checkpoints, resuming, stopping, bad input.

The plumbing is one text in all five files (test_repo.py compares), so most of it is tested with one of them.
"""

import csv
import importlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from conftest import NEXT_STEP, ROOT, SAME_STEP, FakeVecEnv, random_episodes

COMMON = "--num-envs 4 --num-steps 16 --minibatch-size 32 --eval-episodes 2 --device cpu --torch-threads 1"
PROCGEN = dict(shape=(3, 16, 16), autoreset=SAME_STEP, splits=["test"], args=dict(channels=(4, 4, 4)))
ATARI = dict(shape=(4, 44, 44), autoreset=NEXT_STEP, splits=["game"])
KINDS = {  # what differs between the scripts; `tiny` are the flags of a real run of a second or two
    "ppo_procgen": PROCGEN | dict(tiny=f"--env-id leaper --channels 4 4 4 {COMMON}"),
    "impala_procgen": PROCGEN
    | dict(
        tiny=f"--env-id leaper --num-groups 2 --channels 4 4 4 --sync {COMMON} --minibatch-size 64",
        args=dict(num_groups=1, sync=True, channels=(4, 4, 4)),
    ),
    "ppo_atari_rnd": ATARI
    | dict(
        tiny=f"--env-id Breakout --warmup-steps 8 --rnd-features 8 --max-episode-steps 30 {COMMON}",
        args=dict(warmup_steps=2, rnd_features=4),
    ),
    "ppo_atari_snd": ATARI
    | dict(
        tiny=f"--env-id Breakout --warmup-steps 8 --snd-features 8 --max-episode-steps 30 --update-epochs 1 {COMMON}",
        args=dict(warmup_steps=2, snd_features=4),
    ),
    "appo_atari": ATARI
    | dict(
        tiny=f"--env-id Breakout --num-groups 2 --num-minibatches 2 --sync --max-episode-steps 30 {COMMON}",
        args=dict(num_groups=1, num_minibatches=1, sync=True),
    ),
}
SCRIPTS = list(KINDS)
ONE = ["ppo_procgen"]  # for what is the same text in all five
ITERATION = 64  # steps


class Script:
    """A script in an empty folder: `main` with its tiny flags, `train` on the fake environment."""

    def __init__(self, name, path):
        self.name, self.path, self.kind = name, path, KINDS[name]
        self.module = importlib.import_module(name)

    def main(self, *flags, tiny=True):
        words = [*(self.kind["tiny"].split() if tiny else []), *map(str, flags)]
        try:
            return self.module.main(words)
        except SystemExit as error:  # tyro's own
            return error.code

    def args(self, **changes):
        args = dict(num_envs=4, num_steps=16, minibatch_size=64, eval_episodes=0, quiet=True, torch_threads=1)
        args |= dict(run_dir=str(self.path / "runs"), device="cpu") | self.kind["args"] | changes
        return self.module.Args(**args)

    def fake(self, envs=FakeVecEnv, num_envs=4, **options):
        ends = ("terminated",) if self.kind["autoreset"] == SAME_STEP else ("terminated", "truncated")
        return envs(random_episodes(num_envs, ends=ends), self.kind["autoreset"], shape=self.kind["shape"], **options)

    def train(self, args, envs):
        return self.module.train(args, [envs] if hasattr(args, "num_groups") else envs)


@pytest.fixture
def script(request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield Script(request.param, tmp_path)
    for number, handler in handlers.items():  # `main` sets its own
        signal.signal(number, handler)


def each(names):
    return pytest.mark.parametrize("script", names, indirect=True)


def rows(folder):
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def timeless(folder):
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows(folder)]


def load(folder, name="checkpoint.pt"):
    return torch.load(folder / name, weights_only=True)


def equal(a, b):
    """Bit-equality of nested states."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def scalars(folder, name):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload().Scalars(name)


# ------------------------------------------------------------------------------------------------------ files of a run

COLUMNS = """step iteration episode/return episode/length episode/count loss/policy loss/value loss/entropy
train/approx_kl train/clip_frac train/explained_variance train/grad_norm train/lr time/sps time/env_s time/policy_s
time/learn_s""".split()


@each(SCRIPTS)
def test_files_of_a_run(script, capfd):
    """Every file of the contract and what is in it; gym's banner is nowhere; TensorBoard has the same numbers."""
    flags = ("--total-timesteps", 3 * ITERATION + 7, "--eval-every", 2 * ITERATION, "--run-name", "a")
    assert script.main(*flags, "--checkpoint-every", 0) == 0
    folder, (out, err) = script.path / "runs" / "a", capfd.readouterr()
    assert not err and "Gym" not in out
    config = json.loads((folder / "config.json").read_text())
    assert config["script"] == script.name and config["args"]["num_envs"] == 4 and config["ranks"] == 1
    assert {"git", "cpu", "gpu", "torch"} <= config.keys() and config["torch"] == torch.__version__
    table = rows(folder)
    missing = {"train/approx_kl", "train/clip_frac"} if script.name == "impala_procgen" else set()
    assert set(COLUMNS) - missing <= table[0].keys() and list(table[0])[:2] == ["step", "iteration"]
    assert [row["step"] for row in table] == ["64", "128", "192"]  # the total is floored to whole iterations
    column = "eval/return_test" if script.kind["splits"] == ["test"] else "eval/return"
    assert [bool(row[column]) for row in table] == [False, True, False]
    assert not {"nan", "inf"} & {cell for row in table for cell in row.values()}
    result = json.loads((folder / "eval.json").read_text())
    assert result["step"] == load(folder)["step"] == 3 * ITERATION and list(result["splits"]) == script.kind["splits"]
    for split in result["splits"].values():
        assert len(split["returns"]) == len(split["lengths"]) == 2 and split["stderr"] is not None
        assert split["mean"] == pytest.approx(np.mean(split["returns"]))
    for name in ("loss/value", "train/lr", "episode/count"):
        events = scalars(folder, name)
        assert [event.step for event in events] == [int(row["step"]) for row in table]
        assert [event.value for event in events] == pytest.approx([float(row[name]) for row in table], rel=1e-4)


@each(SCRIPTS)
def test_same_seed_same_metrics(script):
    """Two runs of one seed are equal byte for byte outside the time columns; another seed differs."""
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        flags = ("--total-timesteps", 3 * ITERATION, "--run-name", name, "--seed", seed, "--eval-episodes", 0)
        assert script.main(*flags, "--quiet") == 0
    runs = script.path / "runs"
    assert timeless(runs / "a") == timeless(runs / "b") != timeless(runs / "c")
    assert equal(load(runs / "a")["agent"], load(runs / "b")["agent"])


@each(SCRIPTS)
def test_train_with_environments_of_ones_own(script):
    """Their name is recorded, not the default game's; the agent comes back."""
    result = script.train(script.args(run_name="own", total_timesteps=2 * ITERATION), script.fake())
    config = json.loads((script.path / "runs" / "own" / "config.json").read_text())
    assert config["args"]["env_id"] == "FakeVecEnv"
    assert isinstance(result["agent"], script.module.Agent) and result["step"] == 2 * ITERATION
    saved = load(script.path / "runs" / "own")["agent"]
    assert equal(dict(result["agent"].state_dict()), dict(saved))
    other = SAME_STEP if script.kind["autoreset"] == NEXT_STEP else NEXT_STEP
    for wrong in (script.fake(num_envs=3), FakeVecEnv(random_episodes(4), other, shape=script.kind["shape"])):
        with pytest.raises(script.module.UsageError, match="--num-envs"):
            script.train(script.args(run_name="x", total_timesteps=ITERATION), wrong)
    assert not (script.path / "runs" / "x").exists()


@each(ONE)
def test_best_checkpoint(script, monkeypatch):
    """best.pt is the best mean of the last 100 games, the last 100 games."""

    class Paying(FakeVecEnv):
        """Games of one step that pay 5, then 7, then nothing."""

        def step(self, actions):
            self.paid = [5, 7, 0][min(len(self.actions) // 16, 2)]
            return super().step(actions)

    class Pay(list):
        def __getitem__(self, t):
            return envs.paid

    envs = Paying([[(Pay([0]), "terminated")]] * 4, SAME_STEP)
    script.train(script.args(run_name="b", total_timesteps=4 * ITERATION), envs)
    best = load(script.path / "runs" / "b", "best.pt")
    assert best["step"] == 2 * ITERATION and best["best"] == pytest.approx((36 * 5 + 64 * 7) / 100)


@each(ONE)
def test_progress(script, capfd):
    """Off a terminal: what was chosen, one plain line an iteration, one a split; with --quiet the last only."""
    flags = ("--total-timesteps", 2 * ITERATION)
    assert script.main(*flags, "--run-name", "a") == 0
    first, *lines, last = capfd.readouterr().out.splitlines()
    assert "runs/a" in first and "128 steps" in first.replace("to 128", "128 steps") and "1 torch" in first
    assert len(lines) == 2 and lines[1].startswith("step 128  return") and lines[1].endswith("min left")
    assert last.startswith("test: return") and "2 games" in last
    assert script.main(*flags, "--quiet") == 0
    assert len(capfd.readouterr().out.splitlines()) == 1


@each(ONE)
def test_threads(script):
    for threads, expected in ((2, 2), (0, len(os.sched_getaffinity(0)))):
        script.main("--total-timesteps", ITERATION, "--eval-episodes", 0, "--torch-threads", threads)
        assert torch.get_num_threads() == expected
        time.sleep(1.1)  # a run's name holds its second


@each(ONE)
def test_clocks_add_up(script, monkeypatch):
    """The phases are the iteration, within 5 %. A busy machine comes between two clocks: one iteration must agree."""
    marks, log = [time.perf_counter()], script.module.Logger.log

    def timed(logger, metrics):
        marks.append(time.perf_counter())
        return log(logger, metrics)

    monkeypatch.setattr(script.module.Logger, "log", timed)
    script.train(script.args(run_name="t", num_steps=64, total_timesteps=6 * 256), script.fake())
    off = []
    for row, took in list(zip(rows(script.path / "runs" / "t"), np.diff(marks), strict=True))[1:]:
        parts = [float(row[f"time/{phase}_s"]) for phase in ("env", "policy", "learn")]
        off.append(max(abs(sum(parts) / took - 1), abs(float(row["time/sps"]) * took / 256 - 1)))
    assert min(off) < 0.05, off


@each(SCRIPTS)
def test_bf16_keeps_weights_and_losses(script):
    """Under autocast weights, optimiser and checkpoint stay float32, and gradients close to float32's."""
    losses = {}
    for precision in ("fp32", "bf16"):
        args = script.args(run_name=precision, precision=precision, total_timesteps=ITERATION)
        losses[precision] = script.train(args, script.fake(num_actions=1))["train/grad_norm"]
        kinds = {weight.dtype for weight in load(script.path / "runs" / precision)["agent"].values()}
        assert torch.bfloat16 not in kinds
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.1) and losses["bf16"] != losses["fp32"]


@pytest.mark.slow
@each(SCRIPTS)
def test_compile_matches_eager(script):
    """Same weights within float tolerance, and a compiled run's checkpoint loads without it."""
    weights = []
    for compiled in (False, True):
        args = script.args(run_name=str(compiled), compile=compiled, total_timesteps=3 * ITERATION)
        script.train(args, script.fake(num_actions=1))
        weights.append(load(script.path / "runs" / str(compiled))["agent"])
    assert weights[0].keys() == weights[1].keys()
    for name in weights[0]:
        torch.testing.assert_close(weights[0][name], weights[1][name], rtol=1e-3, atol=1e-4)


# ------------------------------------------------------------------------------------------------- stopping, resuming


@each(SCRIPTS)
def test_resume_goes_on_with_the_learner(script, monkeypatch):
    """A resumed run begins with what was saved: weights, moments, statistics, counters; its games are others."""
    streams, make = [], script.module.make_envs

    def note(args, num_envs, stream):
        streams.append(stream)
        return make(args, num_envs, stream)

    monkeypatch.setattr(script.module, "make_envs", note)
    flags = ("--quiet", "--eval-episodes", 0)
    assert script.main("--total-timesteps", 2 * ITERATION, "--run-name", "a", *flags) == 0
    folder = script.path / "runs" / "a"
    first, states, save = load(folder), [], script.module.Logger.save

    def keep(logger, name, state):
        save(logger, name, state)
        states.append(load(folder, name))

    class Stop(KeyboardInterrupt):
        pass

    def stop(*args):
        raise Stop

    monkeypatch.setattr(script.module.Logger, "save", keep)
    with monkeypatch.context() as patch:
        where = (script.module.Actors, "dataset") if hasattr(script.module, "Actors") else (script.module, "sample")
        patch.setattr(*where, stop)  # before anything is learned
        assert script.main("--resume", "runs/a", "--total-timesteps", 4 * ITERATION, tiny=False) == 130
    without = {key: value for key, value in first.items() if key not in ("args", "recent")}
    again = {key: value for key, value in states[-1].items() if key in without}
    assert equal(without, again)
    assert script.main("--resume", "runs/a", "--total-timesteps", 4 * ITERATION, tiny=False) == 0
    assert [row["iteration"] for row in rows(folder)] == list("1234") and load(folder)["step"] == 4 * ITERATION
    assert not equal(load(folder)["agent"], first["agent"])
    playing = [stream for stream in streams if stream.startswith("training")]
    assert len(set(playing)) == len(set(playing[: len(playing) // 3])) * 2  # the second resume plays as the first
    assert json.loads((folder / "config.json").read_text())["args"]["total_timesteps"] == 4 * ITERATION


@each(ONE)
def test_resume_writes_no_step_twice(script):
    """Rows beyond the checkpoint go, half a row too; TensorBoard is told with a purge; columns are kept by name."""
    folder = script.path / "runs" / "a"
    script.main("--total-timesteps", 2 * ITERATION, "--run-name", "a", "--eval-episodes", 0)
    old = (folder / "checkpoint.pt").read_bytes()
    time.sleep(1.1)  # event files are read in the order of the second in their names
    script.main("--resume", "runs/a", "--total-timesteps", 4 * ITERATION, tiny=False)
    (folder / "checkpoint.pt").write_bytes(old)  # as if killed before the next one was written
    lines = [line.split(",") for line in (folder / "metrics.csv").read_text().splitlines()]
    moved = [",".join([line[0], "x" if i == 0 else "7", *line[1:]]) for i, line in enumerate(lines)]
    (folder / "metrics.csv").write_text("\n".join(moved) + "\n999,4")
    time.sleep(1.1)
    assert script.main("--resume", "runs/a", "--total-timesteps", 3 * ITERATION, tiny=False) == 0
    table = rows(folder)
    assert [row["iteration"] for row in table] == list("123") and [row["x"] for row in table] == ["7", "7", ""]
    assert all(float(row["loss/value"]) >= 0 for row in table)
    assert [event.step for event in scalars(folder, "loss/value")] == [64, 128, 192]
    (folder / "metrics.csv").unlink()
    assert script.main("--resume", "runs/a", "--total-timesteps", 4 * ITERATION, tiny=False) == 0
    assert [row["iteration"] for row in rows(folder)] == ["4"]


@each(ONE)
def test_resume_takes_the_runs_flags_where_none_is_given(script, capfd):
    assert script.main("--total-timesteps", 2 * ITERATION, "--run-name", "a", "--lr", 1e-3, "--gamma", 0.5) == 0
    assert script.main("--resume", "runs/a", "--total-timesteps", 3 * ITERATION, "--gamma", 0.7, tiny=False) == 0
    saved = load(script.path / "runs" / "a")["args"]
    assert saved["lr"] == (1e-3,) and saved["gamma"] == 0.7 and saved["env_id"] == "leaper"
    capfd.readouterr()
    assert script.main("--resume", "runs/a", tiny=False) == 0  # it is finished
    assert "steps 192 to 192" in capfd.readouterr().out
    with pytest.raises(RuntimeError, match="convs.0.weight"):
        script.main("--resume", "runs/a", "--channels", 8, 8, 8, "--total-timesteps", 4 * ITERATION, tiny=False)


class Failing(FakeVecEnv):
    """Raises `error` at the given step call."""

    at, error = None, None

    def step(self, actions):
        if len(self.actions) == self.at:
            raise self.error
        return super().step(actions)


@each(SCRIPTS)
@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("a broken game")])
def test_a_stop_or_a_failure_keeps_what_was_learned(script, error, capfd):
    """The learner's state of the last whole iteration is on disk, whatever --checkpoint-every says, and it is said."""
    args, envs = script.args(run_name="i", total_timesteps=6 * ITERATION), script.fake(Failing)
    envs.at, envs.error = getattr(args, "warmup_steps", 0) + 3 * 16 + 5, error
    with pytest.raises(type(error)):
        script.train(args, envs)
    folder, message = script.path / "runs" / "i", capfd.readouterr().err
    step = load(folder)["step"]
    assert step == 3 * ITERATION and len(rows(folder)) == 3
    assert f"saved at step {step:,}" in message and f"--resume {folder}" in message and message.count("\n") == 1


@each(SCRIPTS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_loss_that_is_not_finite(script, bad):
    """It is said where, and the good checkpoint before it stays."""
    args = script.args(run_name="n", total_timesteps=4 * ITERATION, checkpoint_every=0)
    poisoned = getattr(args, "warmup_steps", 0) + 40

    class Poisoned(FakeVecEnv):
        def step(self, actions):
            obs, reward, *rest = super().step(actions)
            return obs, np.where(len(self.actions) == poisoned, bad, reward).astype(np.float32), *rest

    with pytest.raises(FloatingPointError, match="after step 128"):
        script.train(args, script.fake(Poisoned))
    saved = load(script.path / "runs" / "n")
    assert saved["step"] == 128 and all(torch.isfinite(weight).all() for weight in saved["agent"].values())


@each(ONE)
def test_a_second_signal_does_not_cut_the_saving_short(script, monkeypatch, capfd):
    save, sample = torch.save, script.module.sample
    calls = []

    def slow(state, file):
        save(state, file)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)

    def signalled(*args):
        calls.append(args)
        if len(calls) == 40:
            monkeypatch.setattr(torch, "save", slow)
            os.kill(os.getpid(), signal.SIGTERM)
        return sample(*args)

    monkeypatch.setattr(script.module, "sample", signalled)
    assert script.main("--total-timesteps", 9 * ITERATION, "--run-name", "a") == 130
    assert load(script.path / "runs" / "a")["step"] == 128 and "saved at step 128" in capfd.readouterr().err


@pytest.mark.slow
@each(ONE)
def test_kill_9_at_random_moments(script):
    """Killed and resumed ten times, a run reaches its end; its checkpoint is always whole; no step stands twice."""
    total, rng, folder = 100 * ITERATION, np.random.default_rng(0), script.path / "runs" / "a"
    start = [sys.executable, ROOT / f"{script.name}.py"]
    new = [*start, *script.kind["tiny"].split(), "--run-name", "a", "--checkpoint-every", "0"]
    for _ in range(10):
        begun = (folder / "checkpoint.pt").exists()
        command = [*start, "--resume", "runs/a"] if begun else new
        process = subprocess.Popen([*command, "--total-timesteps", str(total)], stdout=subprocess.PIPE, text=True)
        while "step" not in process.stdout.readline().split("steps")[0]:
            assert process.poll() is None
        time.sleep(rng.uniform(0, 1))
        process.kill()
        process.wait()
        assert load(folder)["step"] % ITERATION == 0
    assert script.main("--resume", "runs/a", "--total-timesteps", total, tiny=False) == 0
    assert [int(row["iteration"]) for row in rows(folder)] == list(range(1, 101))


@pytest.mark.parametrize("name", SCRIPTS)
def test_command_line_alone_in_an_empty_folder(name, tmp_path):
    """The file copied to an empty folder: runs, stops on SIGTERM with 130 and a checkpoint, resumes, ends with 0."""
    shutil.copy(ROOT / f"{name}.py", tmp_path)
    command = [sys.executable, f"{name}.py", *KINDS[name]["tiny"].split(), "--run-name", "a"]
    pipes = dict(cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen([*command, "--total-timesteps", "1000000"], **pipes)
    lines = (line for line in process.stdout if line.startswith("step "))
    next(lines), next(lines)
    process.terminate()
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130 and "stopped, saved at step" in error and "Traceback" not in error, error
    step = load(tmp_path / "runs/a")["step"]
    flags = ["--resume", "runs/a", "--total-timesteps", str(step + 2 * ITERATION)]
    done = subprocess.run([sys.executable, f"{name}.py", *flags], **pipes)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert json.loads((tmp_path / "runs/a/eval.json").read_text())["step"] == step + 2 * ITERATION


# ----------------------------------------------------------------------------------------------------------- bad input

BAD = {  # flags, and what the one line must hold
    "ppo_procgen": [
        ("--minibatch-size 1", "--minibatch-size 1 2 64"),
        ("--minibatch-size 65", "--minibatch-size 65 64"),
        ("--total-timesteps 63", "--total-timesteps 63 64"),
        ("--num-envs 0", "--num-envs"),
        ("--num-steps -3", "--num-steps"),
        ("--update-epochs 0", "--update-epochs"),
        ("--lr 5 1e-4 1 1e-4", "--lr"),
        ("--ent-coef 5 1e-4 1", "--ent-coef"),
        ("--device cuda:99", "--device cuda:99 auto"),
        ("--device toaster", "--device toaster auto"),
        ("--resume nowhere", "--resume nowhere checkpoint.pt"),
    ],
    "impala_procgen": [("--minibatch-size 48", "--minibatch-size 48"), ("--num-groups 3", "--num-groups 3")],
    "ppo_atari_rnd": [("--env-id Montezuma", "--env-id MontezumaRevenge"), ("--noop-max 0", "--noop-max")],
    "ppo_atari_snd": [("--env-id bigfish", "--env-id bigfish"), ("--minibatch-size 24", "--minibatch-size 24")],
    "appo_atari": [("--env-id Brekout", "--env-id Breakout"), ("--num-groups 3", "--num-groups 3")],
}


@each(SCRIPTS)
def test_bad_input(script, capfd):
    """Exit code 2, one line that names the flag, the value and what is allowed, and nothing is written."""
    for flags, words in BAD[script.name]:
        assert script.main(*flags.split()) == 2, flags
        error = capfd.readouterr().err
        assert error.count("\n") == 1 and all(word in error for word in words.split()), error
        assert not (script.path / "runs").exists()
    for flags in ("--num-envs many", "--no-such-flag", "--precision fp8"):  # tyro's own box
        assert script.main(*flags.split()) == 2
        assert flags.split()[0] in capfd.readouterr().err and not (script.path / "runs").exists()


@each(SCRIPTS)
def test_help(script, capsys):
    """--help shows every flag."""
    assert script.main("--help", tiny=False) == 0
    text = capsys.readouterr().out
    for field in script.module.Args.__dataclass_fields__:
        assert f"--{field.replace('_', '-')}" in text


@each(ONE)
def test_an_unknown_game(script, capfd):
    assert script.main("--env-id", "bigfsh") == 2
    assert "bigfish" in capfd.readouterr().err and not (script.path / "runs").exists()


@each(["ppo_procgen", "ppo_atari_rnd"])
def test_missing_package(script, capfd, monkeypatch):
    package = "procgen" if script.name == "ppo_procgen" else "envpool"
    monkeypatch.setitem(sys.modules, package, None)
    assert script.main("--total-timesteps", ITERATION) == 1
    error = capfd.readouterr().err
    assert package in error and error.count("\n") == 1 and not (script.path / "runs").exists()


@each(ONE)
def test_existing_and_unwritable_folders(script, capfd):
    folder = script.path / "runs" / "a"
    folder.mkdir(parents=True)
    assert script.main("--total-timesteps", ITERATION, "--run-name", "a") == 2
    error = capfd.readouterr().err
    assert "--run-name" in error and "--resume runs/a" in error and not list(folder.iterdir())
    (script.path / "file").write_text("")
    for place in ("file", "/proc/nowhere"):
        assert script.main("--total-timesteps", ITERATION, "--run-dir", place) == 1
        error = capfd.readouterr().err
        assert place in error and error.count("\n") == 1


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("harm",)


@each(ONE)
@pytest.mark.parametrize("kind", ["truncated", "empty", "hostile", "other script", "other version", "not a dict"])
def test_bad_checkpoint(script, capfd, kind):
    """One line, exit code 2, nothing changed, and a hostile file runs no code."""
    folder = script.path / "runs" / "a"
    script.main("--total-timesteps", ITERATION, "--run-name", "a", "--eval-episodes", 0)
    path, saved = folder / "checkpoint.pt", load(folder)
    if kind in ("truncated", "empty"):
        path.write_bytes(path.read_bytes()[: 3000 * (kind == "truncated")])
    elif kind == "other version":
        torch.save(saved | dict(args=saved["args"] | dict(new_flag=1)), path)
    else:
        other = {"hostile": dict(args=Bomb()), "other script": dict(script="no_script"), "not a dict": {}}
        torch.save(saved | other[kind] if other[kind] else [1, 2], path)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    capfd.readouterr()
    assert script.main("--resume", "runs/a", "--total-timesteps", 2 * ITERATION, tiny=False) == 2
    error = capfd.readouterr().err
    assert error.count("\n") == 1 and "--resume runs/a" in error, error
    assert before == {file.name: file.read_bytes() for file in folder.iterdir()} and not os.path.exists("harm")


def limit_file_size(size):
    """Writing beyond `size` bytes fails like a full disk does: an OSError in mid-write."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@each(ONE)
def test_a_full_disk(script, capfd, monkeypatch):
    """Exit code 1, one line, the last good checkpoint untouched; later the run goes on."""
    log = script.module.Logger.log

    def filling(logger, metrics):
        result = log(logger, metrics)
        if metrics["step"] == 2 * ITERATION:
            limit_file_size(5000)
        return result

    monkeypatch.setattr(script.module.Logger, "log", filling)
    total = ("--total-timesteps", 4 * ITERATION, "--eval-episodes", 0, "--checkpoint-every", 0, "--quiet")
    try:
        assert script.main(*total, "--run-name", "a") == 1
    finally:
        limit_file_size(resource.RLIM_INFINITY)
    error, folder = capfd.readouterr().err, script.path / "runs" / "a"
    assert error.count("\n") == 1 and load(folder)["step"] == ITERATION, error
    monkeypatch.setattr(script.module.Logger, "log", log)
    assert script.main("--resume", "runs/a", tiny=False) == 0 and len(rows(folder)) == 4


def test_a_closed_stderr(tmp_path):
    """`2>&-` ends as any other run."""
    command = f"'{sys.executable}' '{ROOT}/ppo_procgen.py' {KINDS['ppo_procgen']['tiny']} --total-timesteps 64 2>&-"
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "test: return" in done.stdout
