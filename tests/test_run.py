"""benchmark/run.py: finished jobs are not run again, killed ones continue, failures are recorded."""

import fcntl
import importlib
import json
import os
import signal
import subprocess
import sys
import time

import envpool
import pytest
import torch
import tyro
from ppo_procgen import GAMES

from conftest import ROOT, read

sys.path.insert(0, str(ROOT / "benchmark"))
import run  # noqa: E402

TINY = "--num-envs 4 --num-steps 16 --minibatch-size 32 --channels 4 4 4 --eval-episodes 2 --device cpu"


def cell(total, extra=""):
    return run.Job("smoke", "ppo_procgen", "starpilot", 1, f"{TINY} --total-timesteps {total} {extra}".strip())


def result(tmp_path, name="ppo_procgen/starpilot/seed1"):
    return json.loads((tmp_path / "results" / "smoke" / f"{name}.json").read_text())


def flags_of(tmp_path):
    return ["--suite", "smoke", "--jobs", "2", "--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]


def bench(tmp_path, monkeypatch, rows, *flags):
    """The exit status of run.py on these jobs; files under tmp_path."""
    monkeypatch.setitem(run.SUITES, "smoke", rows)
    return run.main([*flags_of(tmp_path), *flags])


def test_cells_are_run_once_and_recorded(tmp_path, monkeypatch, capsys):
    """A failure does not stop the others and runs again on request only; a run without a checkpoint starts again."""
    job = cell(150)
    rows = [("ppo_procgen", ["nogame", "starpilot"], 1, job.flags)]
    assert bench(tmp_path, monkeypatch, rows, "--list") == 0
    assert capsys.readouterr().out.splitlines()[1] == f"open     {' '.join(job.command)}"
    stopped = tmp_path / "runs" / job.folder
    stopped.mkdir(parents=True)
    (stopped / "config.json").write_text("[")  # of a run that has no checkpoint yet
    assert bench(tmp_path, monkeypatch, rows) == 1 and "1 done, 1 failed" in capsys.readouterr().out
    failed = result(tmp_path, "ppo_procgen/nogame/seed1")
    assert (
        failed["status"] == "failed" and "--env-id nogame: no such game" in failed["error"] and failed["eval"] is None
    )
    found = result(tmp_path)
    assert found["status"] == "done" and found["steps"] == 128 and found["error"] is None and found["cores"]
    assert found["command"] == f"python ppo_procgen.py --env-id starpilot --seed 1 {TINY} --total-timesteps 150"
    assert found["versions"]["torch"] == torch.__version__ and found["versions"]["envpool"]
    assert found["git"] is not None and found["cpu"] and len(found["eval"]["splits"]["test"]["returns"]) >= 2
    monkeypatch.setattr(subprocess, "Popen", None)  # nothing is started again
    assert bench(tmp_path, monkeypatch, rows) == 0 and "nothing to do" in capsys.readouterr().out
    assert bench(tmp_path, monkeypatch, rows, "--retry") == 1  # tries to
    assert "TypeError" in capsys.readouterr().err


def test_other_flags_begin_anew(tmp_path):
    """With other flags, an earlier result does not count and an earlier run is not continued."""
    changes = ["", "--gamma 0.5", "--precision bf16", "--total-timesteps 192"]
    assert len({cell(128, change).folder for change in changes}) == len(changes)
    run.record(cell(128), ("", {"status": "done", "command": " ".join(cell(128).command)}), tmp_path)
    assert [run.state(cell(128, change), tmp_path) for change in changes] == ["done", "open", "open", "open"]


def test_what_is_done(tmp_path):
    """All iterations and an evaluation after the last one, not of an earlier step; all revisions are listed."""
    parts = [{"git": git, "args": {"total_timesteps": 150, "threads": 3}} for git in ("old", "new", None, "old", "new")]
    for part, step, gpu in zip(parts, (0, 16, 32, 48, 64), ("GPU", "GPU", None, None, None), strict=True):
        part.update(step=step, gpu=gpu, cpu="CPU")
    (tmp_path / "config.json").write_text(json.dumps(parts))
    for last, evaluated, status in ((2, 128, "done"), (1, 64, "open"), (2, 64, "open"), (0, 128, "open")):
        lines = [f"{64 * i},{i},32.0,1" for i in range(1, last + 1)]
        (tmp_path / "metrics.csv").write_text("\n".join(["step,iteration,time/sps,episode/count", *lines, ""]))
        (tmp_path / "eval.json").write_text(json.dumps({"step": evaluated, "splits": {}}))
        found = run.collect(cell(150), tmp_path)[1]
        assert found["status"] == status and found["train_seconds"] == 2 * last
        assert found["git"] == "new" and found["git_before"] == ["old"] and found["cores"] == 3
        assert (found["gpu"], found["cpu"], found["machines_before"]) == (None, "CPU", {"GPU": 32})
    parts[-1]["args"]["target_return"] = 9.0  # reached in the first iteration
    (tmp_path / "config.json").write_text(json.dumps(parts))
    for steps, status in ((64, "done"), (0, "open")):
        lines = ["step,iteration,time/sps,episode/count", "64,1,32.0,1", ""]
        (tmp_path / "metrics.csv").write_text("\n".join(lines))
        (tmp_path / "eval.json").write_text(json.dumps({"step": steps, "splits": {}}))
        assert run.collect(cell(150), tmp_path)[1]["status"] == status
    first_edition = {"git": "x", "args": {"total_timesteps": 150, "torch_threads": 2}}
    (tmp_path / "config.json").write_text(json.dumps(first_edition))
    found = run.collect(cell(150), tmp_path)[1]
    assert (found["git"], found["git_before"], found["cores"]) == ("x", [], 2)


@pytest.mark.parametrize("content", ["", '{"step": 128, "spl', "[1", "null"])
def test_damaged_files_are_named(tmp_path, capsys, content):
    """An empty or half JSON, a NUL or half row: the file is named, what is left counts, and the job is open."""
    header = "step,iteration,time/sps,episode/count"
    (tmp_path / "metrics.csv").write_text(f"\ufeff{header}\n64,1,32.0,1\n\0\0\n128,2,32.0,1\n192,3,\n256")
    for name in ("config.json", "eval.json"):
        (tmp_path / name).write_text(content)
    text, found = run.collect(cell(150), tmp_path)
    assert found["status"] == "open" and found["steps"] == 128 and len(text.splitlines()) == 3
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[0] for line in lines] == [f"{tmp_path}/{name}" for name in ("config.json", "eval.json")]
    path = tmp_path / "smoke" / "ppo_procgen" / "starpilot" / "seed1.json"
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert run.state(cell(150), tmp_path) == "open" and str(path) in capsys.readouterr().err


def test_an_error_of_one_job_does_not_stop_the_others(tmp_path, monkeypatch, capsys):
    """Even one of run.py itself; its traceback is printed."""

    def execute(job, *rest):
        if job.seed == 1:
            raise OSError("the disk is gone")
        return "", {"status": "done"}

    monkeypatch.setattr(run, "execute", execute)
    assert bench(tmp_path, monkeypatch, [("ppo_procgen", ["starpilot"], 3, "")]) == 1
    printed = capsys.readouterr()
    assert "2 done, 1 failed" in printed.out and "the disk is gone" in printed.err and "Traceback" in printed.err


def test_threads(tmp_path, monkeypatch):
    """One job at a time: the script chooses; several: they share the cores; --threads: this many."""
    used = []
    monkeypatch.setattr(run, "available_cores", lambda: 9)
    monkeypatch.setattr(run, "execute", lambda job, runs, threads, *rest: used.append(threads))
    for games, flags in ((1, []), (3, []), (3, ["--threads", "3"]), (3, ["--jobs", "1"])):
        assert bench(tmp_path, monkeypatch, [("ppo_procgen", ["starpilot"], games, "")], *flags) == 0
    assert used == [0, *[4] * 3, *[3] * 3, *[0] * 3]


def test_a_killed_process_says_so(tmp_path, monkeypatch):
    """The recorded error has the exit status, not only the last lines."""
    script = tmp_path / "killed.py"
    script.write_text("import os; print('training', flush=True); os.kill(os.getpid(), 9)")
    monkeypatch.setattr(run.Job, "file", str(script))
    _, found = run.execute(cell(150), tmp_path / "runs", 0)
    assert found["status"] == "failed" and found["error"] == "exit status -9, 0 steps\ntraining"


def test_killed_it_goes_on(tmp_path, monkeypatch):
    """Training ends with run.py, however that ends, leaves a checkpoint of its last iteration, and continues there."""
    job, saved, history = cell(640_000), 0, []  # more than it could do in the meantime
    folder = tmp_path / "runs" / job.folder
    metrics = folder / "metrics.csv"
    rows = [("ppo_procgen", ["starpilot"], 1, job.flags)]
    code = f"import run, sys; run.SUITES['smoke'] = {rows}; sys.exit(run.main({flags_of(tmp_path)}))"
    for number in (signal.SIGTERM, signal.SIGKILL):
        process, done = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT / "benchmark"), 0
        while done < saved + 2:
            assert process.poll() is None
            time.sleep(0.05)
            done = len(read(folder)) if metrics.exists() else 0
        process.send_signal(number)
        assert process.wait() in (143, -signal.SIGKILL)
        with open(folder.with_name(folder.name + ".lock")) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # free once training has ended, too
        saved = torch.load(folder / "checkpoint.pt", weights_only=True)["step"] // 64
        assert done - 1 <= saved < 9_000  # no more than the iteration under way is lost
        assert metrics.read_text().splitlines()[: len(history)] == history  # not started again
        history = metrics.read_text().splitlines()[: saved + 1]
        assert not (tmp_path / "results").exists()
    short = cell(64 * (saved + 2))
    folder.rename(tmp_path / "runs" / short.folder)
    assert bench(tmp_path, monkeypatch, [("ppo_procgen", ["starpilot"], 1, short.flags)]) == 0
    assert result(tmp_path)["status"] == "done" and result(tmp_path)["steps"] == 64 * (saved + 2)
    lines = (tmp_path / "results/smoke/ppo_procgen/starpilot/seed1.csv").read_text().splitlines()
    assert [line.split(",")[1] for line in lines[1:]] == [str(i) for i in range(1, saved + 3)]


def test_told_to_stop_it_begins_nothing(tmp_path, monkeypatch, capsys):
    """A signal while a job waits for its lock, one before it starts, a deadline: no training is left running."""
    job, processes = cell(64_000), []
    lock = tmp_path / f"{job.folder}.lock"
    lock.parent.mkdir(parents=True)
    with open(lock, "w") as held, monkeypatch.context() as patch:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert run.execute(job, tmp_path, 1, stopping=[15], processes=processes) is None
        clock = iter(range(0, 1000, 30))
        patch.setattr(run.time, "monotonic", lambda: next(clock))
        patch.setattr(run.time, "sleep", lambda seconds: None)
        assert run.execute(job, tmp_path, 1, processes=processes) is None
    assert f"{job.folder}: another process is training it" in capsys.readouterr().err
    assert not processes and not (tmp_path / job.folder).exists()
    assert run.execute(job, tmp_path, 1, stopping=[15], processes=processes) is None  # ended at once
    assert run.execute(job, tmp_path, 1, deadline=time.time() + 0.5, processes=processes) is None
    assert len(processes) == 2 and all(process.poll() is not None for process in processes)


def test_thin():
    """Last step, number of episodes, means over episodes or rows; empty cells do not count; at most 500 rows."""
    names = ("step", "iteration", "episode/count", "episode/return", "loss/value", "episode/rooms_ever")
    table = ["64,1,2,1,4,1", "128,2,0,,5,2", "192,3,1,4,,2", "256,4,0,,1,3", "320,5,0,,3,3"]
    rows = [dict(zip(names, row.split(","), strict=True)) for row in table]
    merged = [",".join(row.values()) for row in run.thin(rows, 2)]
    assert merged == ["192,3,3,2,4.5,2", "320,5,0,,2,3"]
    assert run.thin(rows, 5) == rows and run.thin([]) == [] and len(run.thin(rows * 201)) == 335


def test_every_command_parses():
    """Each command of every suite has flags that its script knows, and a game that exists."""
    atari = {name[:-3] for name in envpool.list_all_envs()}
    for suite, rows in run.SUITES.items():
        jobs = run.jobs_of(suite)
        assert len({job.name for job in jobs}) == len(jobs) == sum(len(games) * n for _, games, n, _ in rows)
        for job in {job.variant: job for job in jobs}.values():
            # Importing a variant would change its script for the tests to come.
            module = importlib.import_module(job.script.replace("snd_breakout", "ppo_atari_snd"))
            module.prepare(tyro.cli(module.Args, args=job.command[2:]), None)
        for job in jobs:
            assert job.game in (GAMES if "procgen" in job.script else atari)


def test_slurm_prints_an_array(tmp_path, capsys):
    """One task per job, valid shell, and each task's command names its job only."""
    assert run.main(["--suite", "gpu", "--launcher", "slurm", "--results", str(tmp_path)]) == 0
    script = capsys.readouterr().out
    cells = run.jobs_of("gpu")
    assert f"--array=0-{len(cells) - 1}\n" in script
    (tmp_path / "python").write_text('#!/bin/bash\necho "$@"; exit 7\n')
    (tmp_path / "python").chmod(0o755)
    environment = os.environ | dict(PATH=f"{tmp_path}:{os.environ['PATH']}", SLURM_ARRAY_TASK_ID="3")
    done = subprocess.run(["bash"], input=script, text=True, capture_output=True, env=environment, cwd=tmp_path)
    folders = f"--runs {tmp_path}/runs --results {tmp_path}"
    expected = f"benchmark/run.py --suite gpu --max-minutes 0 {folders} --exactly --only"
    assert done.stdout.strip() == f"{expected} {cells[3].name}" and not done.stderr
    assert done.returncode == 7  # Slurm sees the failure
    assert run.main(["--suite", "gpu", "--exactly", "--only", cells[3].name, "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
