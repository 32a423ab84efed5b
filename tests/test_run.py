"""benchmark/run.py: finished jobs are not run again, killed ones continue, failures are recorded."""

import fcntl
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import envpool.procgen
import run
import torch
import tyro

from conftest import ROOT, read

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
    (stopped / "metrics.csv").write_text("step\n1\n")  # of a run that has no checkpoint yet
    assert bench(tmp_path, monkeypatch, rows) == 1 and "1 done, 1 failed" in capsys.readouterr().out
    failed = result(tmp_path, "ppo_procgen/nogame/seed1")
    assert failed["status"] == "failed" and failed["error"].startswith("ppo_procgen.py: --env-id nogame: ")
    found = result(tmp_path)
    assert found["status"] == "done" and found["steps"] == 128 and found["error"] is None and found["cores"]
    assert found["command"] == f"python ppo_procgen.py --env-id starpilot --seed 1 {TINY} --total-timesteps 150"
    assert found["versions"]["torch"] == torch.__version__ and found["versions"]["envpool"]
    assert found["git"] is not None and found["cpu"] and len(found["eval"]["splits"]["test"]["returns"]) >= 2
    monkeypatch.setattr(subprocess, "Popen", None)  # nothing is started again
    assert bench(tmp_path, monkeypatch, rows) == 0 and "nothing to do" in capsys.readouterr().out
    assert bench(tmp_path, monkeypatch, rows, "--retry") == 1  # tries to: an error of run.py itself
    assert "Traceback" in capsys.readouterr().err


def test_other_flags_begin_anew(tmp_path):
    """With other flags, an earlier result does not count and an earlier run is not continued."""
    changes = ["", "--gamma 0.5", "--precision bf16", "--total-timesteps 192"]
    assert len({cell(128, change).folder for change in changes}) == len(changes)
    run.record(cell(128), ("", {"status": "done", "command": " ".join(cell(128).command)}), tmp_path)
    assert [run.state(cell(128, change), tmp_path) for change in changes] == ["done", "open", "open", "open"]


def test_what_is_done(tmp_path, monkeypatch):
    """All iterations and an evaluation after the last one, not of an earlier step; all revisions and machines."""
    job, folder = run.Job("smoke", "ppo_procgen", "starpilot", 1, "--total-timesteps 150"), tmp_path / "run"
    folder.mkdir()
    said = {}
    monkeypatch.setattr(run.shutil, "which", lambda name: name)
    monkeypatch.setattr(run.subprocess, "run", lambda command, **_: SimpleNamespace(stdout=f"{said[command[0]]}\n"))
    parts = ((0, "old", "GPU"), (16, "new", "GPU"), (32, "", ""), (32, "old", ""), (128, "new", ""))
    for i, (step, git, gpu) in enumerate(parts):  # the third one was stopped before its first iteration had ended
        said.update({"git": git, sys.executable: gpu})
        run.note_start(job, folder)
        config = {"args": {"total_timesteps": 150, "threads": i}}
        (folder / f"config-{step}.json").write_text(json.dumps(config))
    for last, evaluated, status in ((2, 128, "done"), (1, 64, "open"), (2, 64, "open"), (0, 128, "open")):
        lines = [f"{64 * i},{i},32.0,1" for i in range(1, last + 1)]
        (folder / "metrics.csv").write_text("\n".join(["step,iteration,time/sps,episode/count", *lines, ""]))
        (folder / "eval.json").write_text(json.dumps({"step": evaluated, "splits": {}}))
        found = run.collect(job, folder)[1]
        assert found["status"] == status and found["train_seconds"] == 2 * last
        assert found["git"] == "new" and found["git_before"] == ["old"] and found["cores"] == 4
        assert found["gpu"] is None and found["cpu"] and found["machines_before"] == {"GPU": 32}


def test_damaged_files_are_named(tmp_path, capsys):
    """An empty or half JSON or one of no object, a NUL or half row: the file is named, what is left counts."""
    folder, path = tmp_path / "run", tmp_path / "smoke" / "ppo_procgen" / "starpilot" / "seed1.json"
    folder.mkdir()
    path.parent.mkdir(parents=True)
    header = "step,iteration,time/sps,episode/count"
    (folder / "metrics.csv").write_text(f"\ufeff{header}\n64,1,32.0,1\n\0\0\n128,2,32.0,1\n192,3,\n256")
    damaged = {folder / "config-0.json": "[1", tmp_path / "run.json": "null", folder / "eval.json": "", path: ""}
    for file, content in damaged.items():
        file.write_text(content)
    text, found = run.collect(cell(150), folder)
    assert found["status"] == "open" and found["steps"] == 128 and len(text.splitlines()) == 3
    assert run.state(cell(150), tmp_path) == "open"
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[0] for line in lines] == [str(file) for file in damaged]


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
    folder, metrics = tmp_path / "runs" / job.folder, tmp_path / "runs" / job.folder / "metrics.csv"
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
    short = cell(64 * (saved + 2))
    folder.rename(tmp_path / "runs" / short.folder)
    assert bench(tmp_path, monkeypatch, [("ppo_procgen", ["starpilot"], 1, short.flags)]) == 0
    assert result(tmp_path)["status"] == "done" and result(tmp_path)["steps"] == 64 * (saved + 2)
    lines = (tmp_path / "results/smoke/ppo_procgen/starpilot/seed1.csv").read_text().splitlines()
    iterations = [int(line.split(",")[1]) for line in lines[1:]]
    assert iterations == sorted({*iterations}) and iterations[-1] == saved + 2


def test_told_to_stop_it_begins_nothing(tmp_path):
    """A signal while a job waits for its lock, one before it starts, a deadline: no training is left running."""
    job, processes = cell(64_000), []
    lock = tmp_path / f"{job.folder}.lock"
    lock.parent.mkdir(parents=True)
    with open(lock, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert run.execute(job, tmp_path, 1, stopping=[15], processes=processes) is None
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
    known = set(envpool.list_all_envs())
    changed = {"snd_breakout": "ppo_atari_snd", "procgen_tf_adam": "ppo_procgen"}  # importing a variant changes these
    for suite, rows in run.SUITES.items():
        jobs = run.jobs_of(suite)
        assert len({job.name for job in jobs}) == len(jobs)
        assert len(jobs) == sum(len(games) * (n if isinstance(n, int) else len(n)) for _, games, n, _ in rows)
        for job in {job.variant: job for job in jobs}.values():
            tyro.cli(importlib.import_module(changed.get(job.script, job.script)).Args, args=job.command[2:])
        assert all({f"{job.game.title()}Easy-v0", f"{job.game}-v5"} & known for job in jobs)


def test_slurm_prints_an_array(tmp_path, capsys):
    """One task per job, valid shell, and each task's command names its job only."""
    assert run.main(["--suite", "gpu", "--launcher", "slurm", "--results", str(tmp_path)]) == 0
    script, cells = capsys.readouterr().out, run.jobs_of("gpu")
    assert f"--array=0-{len(cells) - 1}\n" in script
    (tmp_path / "python").write_text('#!/bin/bash\necho "$@"; exit 7\n')
    (tmp_path / "python").chmod(0o755)
    environment = os.environ | dict(PATH=f"{tmp_path}:{os.environ['PATH']}", SLURM_ARRAY_TASK_ID="3")
    done = subprocess.run(["bash"], input=script, text=True, capture_output=True, env=environment, cwd=tmp_path)
    flags = f"--max-minutes 0 --runs {tmp_path}/runs --results {tmp_path} --exactly --only {cells[3].name}"
    assert done.stdout.strip() == f"benchmark/run.py --suite gpu {flags}" and not done.stderr
    assert done.returncode == 7  # Slurm sees the failure
    assert run.main(["--suite", "gpu", "--exactly", "--only", cells[3].name, "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
