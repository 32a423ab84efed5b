"""The tools under benchmark/."""

import os
import signal
import subprocess
import sys
import threading
import types

import numpy as np
import pytest
import torch
from conftest import ROOT
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(ROOT / "benchmark"))
import features  # noqa: E402
import floor  # noqa: E402
import live  # noqa: E402
import speed  # noqa: E402

import ppo_atari_rnd  # noqa: E402
import ppo_atari_snd  # noqa: E402


def table(path, values):
    path.mkdir(exist_ok=True)
    rows = "".join(f"{64 * i},{i},{'' if value is None else value}\n" for i, value in enumerate(values, 1))
    (path / "metrics.csv").write_text("step,iteration,episode/return\n" + rows)


def test_live_smooths_what_has_a_value(tmp_path):
    """Means and deviations over the last values; empty cells and a half-written row do not count."""
    table(tmp_path / "run", [1.0, None, 3.0, 5.0])
    with open(tmp_path / "run" / "metrics.csv", "a") as file:
        file.write("320,5")
    steps, values = live.read(tmp_path / "run" / "metrics.csv", "episode/return")
    assert steps.tolist() == [64, 192, 256] and values.tolist() == [1, 3, 5]
    mean, spread = live.smooth(values, 2)
    assert mean.tolist() == [1, 2, 4] and spread.tolist() == [0, 1, 1]


def test_live_draws(tmp_path, capsys, monkeypatch):
    """The mean rises from the lower left to the upper right; each column holds its mean once, within its spread."""
    monkeypatch.setenv("COLUMNS", "72")
    monkeypatch.setenv("LINES", "24")
    table(tmp_path / "run", np.arange(100.0).tolist())
    assert live.main([str(tmp_path / "run"), "--once", "--average", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    canvas = np.array([list(line[11:].ljust(60)) for line in lines[1:-1]])
    heights = [np.flatnonzero(column == "#") for column in canvas.T if (column == "#").any()]
    assert all(len(height) == 1 for height in heights) and len(heights) == 60
    rows = [int(height[0]) for height in heights]
    assert rows == sorted(rows, reverse=True) and rows[0] >= len(canvas) - 2 and rows[-1] < len(canvas) / 2
    assert "now 97 +- 1.4" in lines[-1]


def test_live_png_and_bad_input(tmp_path, capsys):
    table(tmp_path / "run", [1.0, 2.0])
    assert live.main([str(tmp_path / "run"), "--once", "--png", str(tmp_path / "x.png")]) == 0
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert live.main([str(tmp_path / "nothing"), "--once"]) == 2 and "metrics.csv" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="episode/return"):
        live.main([str(tmp_path / "run"), "--once", "--metric", "score"])
    table(tmp_path / "run", [None])
    assert live.main([str(tmp_path / "run"), "--once"]) == 0 and "no value yet" in capsys.readouterr().out


def test_live_follows_a_growing_file(tmp_path):
    """It redraws what a run has added since, and Ctrl-C ends it with 130."""
    table(tmp_path / "run", [1.0])
    command = [sys.executable, ROOT / "benchmark" / "live.py", tmp_path / "run", "--every", "0.1"]
    default = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731 - a background job ignores it
    options = dict(stdout=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=default)
    process = subprocess.Popen(command, **options)
    timer = threading.Timer(120, process.kill)  # rather than wait for ever
    timer.start()
    for line in process.stdout:
        if "now 1 " in line:
            table(tmp_path / "run", [1.0, 7.0])
        if "now 4 " in line:
            break
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait() == 130
    timer.cancel()


@pytest.mark.parametrize("script, flags", [(ppo_atari_rnd, ["--memory", "gru"]), (ppo_atari_snd, ["--entropy-bonus"])])
def test_features_of_a_run(tmp_path, monkeypatch, capsys, script, flags):
    """A picture of a real run's target features, those of its checkpoint."""
    monkeypatch.chdir(tmp_path)
    size = "--snd-features" if script is ppo_atari_snd else "--rnd-features"
    tiny = "--num-envs 4 --num-steps 16 --minibatch-size 32 --eval-episodes 0 --quiet --device cpu --torch-threads 1"
    tiny = f"{tiny} --env-id MontezumaRevenge --warmup-steps 3 --total-timesteps 64 --run-name x {size} 8".split()
    assert script.main([*tiny, *flags]) == 0
    seen = []
    real = features.project
    monkeypatch.setattr(features, "project", lambda x: seen.append(x) or real(x))
    assert features.main(["runs/x", "--png", "x.png", "--steps", "5", "--envs", "3"]) == 0
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG") and seen[0].shape == (15, 8)
    assert "15 frames, 1 rooms" in capsys.readouterr().out
    assert features.main(["runs/none", "--png", "y.png"]) == 2


def test_projection():
    """Points in a plane keep their distances; the share of the variance is theirs."""
    torch.manual_seed(0)
    basis = torch.linalg.qr(torch.randn(6, 6))[0]
    plane = (torch.randn(50, 2) @ torch.diag(torch.tensor([5.0, 2.0])) @ basis[:2]).double()
    points, share = features.project(plane + 3)
    np.testing.assert_allclose(torch.cdist(*[torch.from_numpy(points)] * 2), torch.cdist(plane, plane), atol=1e-3)
    assert share == pytest.approx(1, abs=1e-5)
    third = plane + torch.randn(50, 1) @ basis[2:3]
    variances = np.linalg.eigvalsh(np.cov(third.numpy().T))[::-1]
    assert features.project(third)[1] == pytest.approx(variances[:2].sum() / variances.sum(), rel=1e-4)


def test_floor_counts_every_layer():
    """Arithmetic of a network by hand, in the order of its layers, each with the shape it sees."""
    network = torch.nn.Sequential(
        torch.nn.Conv2d(4, 32, 8, 4), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(32 * 20 * 20, 7)
    )
    found = floor.layers_of(network, torch.zeros(2, 4, 84, 84), lambda net, x: net(x))
    assert [tuple(shape) for _, shape, _ in found] == [(4, 84, 84), (12800,)]
    assert [floor.flops(*layer) for layer in found] == [2 * 4 * 8 * 8 * 32 * 20 * 20, 2 * 12800 * 7]
    assert 0 < floor.alone(found, 4, False) < floor.alone(found, 4, True) * 2


def test_floor_command(tmp_path, monkeypatch, capsys):
    """A learner is at most about as fast as its layers alone; the file holds what is printed."""
    import json

    flags = "--env-id leaper --num-envs 4 --num-steps 16 --minibatch-size 64 --channels 8 8 8 --torch-threads 1"
    monkeypatch.setattr(floor, "PIECES", (16, 64))
    monkeypatch.setattr(floor, "LEAST", 0.01)
    assert floor.main(["ppo_procgen", "--json", str(tmp_path / "x.json"), "--", *flags.split()]) == 0
    result = json.loads((tmp_path / "x.json").read_text())
    assert result == json.loads(capsys.readouterr().out) and len(result["learner_shares"]) == 3
    assert 0 < result["learner_share"] < 1.5 and 0 < result["acting_share"] < 1.5
    parts = result["update_shares"]  # pooling and activations are there too, but most of it are layers
    assert sum(parts.values()) == pytest.approx(1) and 0 < parts["pooling"] < parts["convolutions and products"] < 0.95
    convolutions = 2 * 9 * 64 * 64 * 6 * 8 + 2 * 9 * 8 * 8 * (4 * 32**2 + 32**2 + 4 * 16**2 + 16**2 + 4 * 8**2)
    first, heads = 2 * 9 * 64 * 64 * 6 * 8, 2 * (8 * 256 + 256 * 15 + 256)
    expected = 3 * (3 * (convolutions + heads) - first)
    assert result["update_gflop_per_row"] == pytest.approx(expected / 1e9)


def refused(tool, command, capsys):
    """(exit status, last line of stderr) of a command that ends before its work begins."""
    with pytest.raises(SystemExit) as stop:
        tool.main(command.split())
    return stop.value.code, capsys.readouterr().err.splitlines()[-1]


def test_floor_bad_input(capsys):
    """One clear line, before anything is measured."""
    for command, parts in {
        "ppo_x": ["ppo_x", "ppo_procgen"],
        "ppo_procgen --rounds 0": ["--rounds 0", "at least 1"],
        "appo_atari -- --env-id Pong": ["appo_atari", "--sync"],
        "ppo_procgen -- --env-id bigfsh": ["--env-id bigfsh", "bigfish"],
        "ppo_procgen -- --device cuda": ["--device cuda", "CPU"],
        "ppo_atari_rnd -- --net a": ["--net a", "not counted"],
        "impala_procgen -- --sync --replay-slots 4": ["--replay-slots 4", "not counted"],
    }.items():
        code, last = refused(floor, command, capsys)
        assert code == 2 and all(part in last for part in parts), last


def test_floor_kinds_of_operations():
    """Forward and backward, each operation is booked where it belongs, once."""
    x, weight = torch.rand(2, 4, 8, 8, requires_grad=True), torch.nn.Parameter(torch.rand(4, 4, 3, 3))
    cases = {
        "convolutions and products": (
            lambda: torch.nn.functional.conv2d(x, weight),
            lambda: weight[0, 0] @ weight[1, 0],
        ),
        "pooling": (lambda: torch.nn.functional.max_pool2d(x, 3, 2), lambda: torch.nn.functional.avg_pool2d(x, 2)),
        "activations": (lambda: x.relu(), lambda: torch.nn.functional.elu(x)),
    }
    for kind, works in cases.items():
        for work in works:
            with floor.Operations() as forward:
                y = work()
            with floor.Operations() as backward:
                y.backward(torch.ones_like(y))
            for spent in (forward.spent, backward.spent):
                rest = {name for name, time in spent.items() if time} - {kind, "other operations"}
                assert spent[kind] > 0 and not rest
            shares = forward.shares()
            assert sum(shares.values()) == pytest.approx(1) and shares[kind] > 0
    optimizer = torch.optim.Adam([weight], fused=True)
    with floor.Operations() as update:
        torch.nn.utils.clip_grad_norm_([weight], 0.1)
        optimizer.step()
    assert update.spent["Adam and norm"] > 0 and not update.spent["convolutions and products"]


def test_floor_pause_is_not_timed(monkeypatch):
    """The work's own time, whatever sleeps before it."""
    monkeypatch.setattr(floor, "LEAST", 0.1)
    assert floor.seconds(lambda: None, pause=0.02) < 0.005


SPEED = {  # tiny work of each script; the predictor sees every row, as in the baseline
    "ppo_procgen": "--env-id leaper --channels 4 4 4 --update-epochs 2",
    "ppo_atari_rnd": "--env-id Breakout --warmup-steps 4 --rnd-features 8 --predictor-share 1 --update-epochs 2",
    "ppo_atari_snd": "--env-id Breakout --warmup-steps 4 --snd-features 8 --predictor-share 1 --update-epochs 1",
    "impala_procgen": "--env-id leaper --channels 4 4 4 --update-epochs 2 --sync",
    "appo_atari": "--env-id Pong --num-minibatches 2 --update-epochs 2 --sync",
}


def measured(monkeypatch, name, variant):
    """(speed.child's result, SGD steps, arithmetic of all layers forward and backward) of a tiny run, one iteration."""
    tiny = f"{SPEED[name]} --num-envs 4 --num-steps 16 --minibatch-size 32 --device cpu --torch-threads 1"
    options, steps = types.SimpleNamespace(child=variant, against="eager", warmup=0, iterations=1), []
    monkeypatch.setitem(sys.modules, name, None)  # `child` loads a copy of its own
    hook = register_optimizer_step_post_hook(lambda *rest: steps.append(1))
    with FlopCounterMode(display=False) as counter:
        result = speed.child(name, options, tiny.split())
    hook.remove()
    return result, len(steps), counter.get_total_flops()


@pytest.mark.parametrize("name", SPEED)
def test_speed_baseline_does_the_same_work(name, monkeypatch):
    """As many SGD steps and as much arithmetic a step as the script; else the ratio of their speeds says nothing."""
    _, script_steps, script_flops = measured(monkeypatch, name, "script")
    result, steps, flops = measured(monkeypatch, name, "eager")
    assert steps == 2 * (1 + (name != "ppo_atari_snd"))
    more = dict(appo_atari=4, impala_procgen=2)  # asynchronous: 3 iterations more; IMPALA's are half as large
    assert script_steps == steps * more.get(name, 1)
    assert flops / steps == pytest.approx(script_flops / script_steps, rel=0.1)
    phases = {key: value for key, value in result["seconds_a_step"].items() if key != "cpu"}
    assert 0.5 < sum(phases.values()) * result["sps"] <= 1.001  # parts of the iteration's wall time


def test_speed_ppo_runs_as_many_iterations(monkeypatch):
    """--against ppo beside a script with another batch: `child` cuts the warm-up off both."""
    seen = []
    monkeypatch.setattr(speed, "measure_script", lambda script, args: seen.append(args) or speed.Stopwatch())
    args = speed.load("impala_procgen").Args(env_id="leaper", total_timesteps=5 * 1600)
    assert speed.ppo(None, args).batch_size == 9600 and seen[0].iterations == args.iterations == 5


def test_speed_in_float32(monkeypatch):
    """--against fp32 leaves out what the flags switch on, and nothing else."""
    seen = []
    monkeypatch.setattr(speed, "measure_script", lambda script, args: seen.append(args))
    args = types.SimpleNamespace(precision="bf16", compile=True, sync=False)
    speed.fp32(None, args)
    assert vars(seen[0]) == dict(precision="fp32", compile=False, sync=False)


def test_speed_bad_input(capsys):
    for command, parts in {
        "ppo_procgen --pairs 0": ["--pairs 0", "at least 1"],
        "ppo_procgen --iterations 0": ["--iterations 0", "at least 1"],
        "ppo_procgen --against sync": ["ppo_procgen", "eager, fp32"],
        "ppo_procgen --against cleanrl": ["cleanrl", "eager"],
    }.items():
        code, last = refused(speed, command, capsys)
        assert code == 2 and all(part in last for part in parts), last
    for command, ignored in {
        "impala_procgen --against eager -- --replay-slots 4 --augment flip": "--augment, --replay-slots",
        "ppo_atari_rnd --against eager -- --memory gru": "--memory",
        "ppo_atari_snd --against eager -- --target vic --lr 1e-3": "--target",
    }.items():  # else the ratio would be of unequal work
        assert speed.main(command.split()) == 1
        assert capsys.readouterr().err.strip().splitlines()[-1].endswith(f"the baseline does not follow {ignored}")
    assert speed.main("ppo_procgen -- --env-id bigfsh".split()) == 1
    assert "--env-id bigfsh: no Procgen game" in capsys.readouterr().err.strip().splitlines()[-1]
