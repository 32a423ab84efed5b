"""benchmark/report.py: the tables agree with the results."""

import json

import numpy as np
import pytest
import report
import run

from conftest import ROOT

RUNS = ("run0", "run1", "run2")
CURVE = ((4_000_000, 1.0, 2), (7_996_800, 3.0, 1))


def write(results, name, mean, suite="gpu", steps=7_996_800, error=None, curve=CURVE, **more):
    (job,) = run.jobs_of(suite, name)
    found = dict(command=" ".join(job.command), status="failed" if error else "done", error=error, steps=steps)
    found |= dict(gpu=None, cpu="CPU", cores=2, train_seconds=5400.0, git="abc", seed=int(name[-1])) | more
    split = dict(returns=[mean], mean=mean, stderr=0.5)
    found["eval"] = None if error else dict(splits=dict(test=split))
    path = results / suite / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found))
    rows = "".join(f"{step},{value},{games}\n" for step, value, games in curve)
    path.with_suffix(".csv").write_text("step,episode/return,episode/count\n" + rows)


def write_seed(results, seed, mean, **more):
    write(results, f"ppo_procgen/starpilot/seed{seed}", mean, "cpu", 61_440, **more)


def rows(text, start):
    return [[x.strip() for x in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith(f"| {start}")]


def starpilot(results):
    """The row of the seeds of `write_seed`."""
    (row,) = rows("\n".join(report.finished(results)), "cpu, `ppo_procgen/starpilot` (test)")
    return row


def test_committed_tables_are_generated():
    """The committed tables are what the committed results generate."""
    assert report.main(["--check"]) == 0


def test_folder_of_results(tmp_path, capsys):
    """One seed says so, a failure has its error, a job without a result has no row."""
    write(tmp_path, "ppo_procgen/bigfish/seed1", 12.0)
    write(tmp_path, "ppo_procgen/coinrun/seed1", 0.0, error="Traceback\nppo_procgen.py: no memory | left")
    before = (ROOT / "benchmark" / "README.md").read_text()
    assert report.main(["--results", str(tmp_path)]) == 0
    assert (ROOT / "benchmark" / "README.md").read_text() == before
    text = (tmp_path / "README.md").read_text()
    (bigfish,), (coinrun,) = (rows(text, f"gpu, `ppo_procgen/{game}`") for game in ("bigfish", "coinrun"))
    assert bigfish[:4] == ["gpu, `ppo_procgen/bigfish` (test)", "7,996,800", "1 seed", "12.00 (± 0.50 over episodes)"]
    assert bigfish[5].startswith("10.33 ± 0.48, OpenAI's PPO (") and "; 26.28, the competition entry (" in bigfish[5]
    assert bigfish[6] == "-7.33, -14.28" and "starpilot" not in text  # of training, 3.0, and of the evaluation
    assert coinrun[2:4] == ["0 seeds, 1 failed", "failed: ppo_procgen.py: no memory / left"]
    with pytest.raises(SystemExit):
        report.main(["--results", str(tmp_path / "nowhere")])
    assert "no such folder" in capsys.readouterr().err


def test_sixteen_games(tmp_path):
    """z and normalized returns by hand: of means of 100 episodes, over the updates of the last tenth, of each run."""
    # At 916,000 the last 100 episodes have a mean of 0.6 * 6 + 0.4 * 11 = 8.
    curve = ((890_000, 11.0, 40), (916_000, 6.0, 60), (999_424, 8.4, 100))
    write(tmp_path, "ppo_procgen-openai/starpilot/seed1", 1.0, "two_cores", 999_424, curve=curve)
    write(tmp_path, "ppo_procgen-openai/starpilot/seed2", 1.0, "two_cores", 999_424, curve=((999_424, 7.8, 3),))
    write(tmp_path, "ppo_procgen-openai/coinrun/seed1", 1.0, "procgen16_1m", 999_424, curve=((999_424, 7.5, 3),))
    text = "\n".join(report.sixteen_table(tmp_path))
    (row,) = rows(text, "starpilot")
    published, deviation = 8.0605, 0.2260 * 3**0.5
    assert row == ["starpilot", "2", "8.20, 7.80", "8.06 (0.39)", f"{(8.0 - published) / deviation:+.1f}"]
    logs = np.genfromtxt(report.REFERENCE / "procgen16_1m.csv", delimiter=",", dtype=None, names=True, encoding="utf-8")
    # The means of 100 episodes at the three steps are 11, 8 and 8.4.
    for part, first, starpilot in (("last tenth", 900_000, 8.0), ("all updates", 0, (27.4 / 3 + 7.8) / 2)):
        runs = {}
        for game, low, high in (("starpilot", 2.5, 64), ("coinrun", 5, 10)):
            part_of_log = logs[(logs["env"] == game) & (logs["step"] > first)]
            runs[game] = [(part_of_log[k].mean() - low) / (high - low) for k in RUNS]
        ours = ((starpilot - 2.5) / 61.5 + (7.5 - 5) / 5) / 2
        theirs = np.mean(list(runs.values()))
        spread = np.sqrt(np.var(runs["starpilot"], ddof=1) + np.var(runs["coinrun"], ddof=1)) / 2
        (row,) = rows(text, f"**mean normalized return of 2 games, {part}")
        assert row[2:] == [f"{ours:.3f}", f"{theirs:.3f} ({spread:.3f})", f"{(ours - theirs) / spread:+.1f}"]


def test_logs_of_sixteen_games():
    """The curves of OpenAI's three runs have the last tenth and the standard error that the tables use."""
    for one in report.sixteen():
        assert len(one["steps"]) == 61 and one["steps"][-1] == report.ONE_MILLION
        tenths = [[x for step, x in zip(one["steps"], run, strict=True) if step > 900_000] for run in one["runs"]]
        means = [np.mean(tenth) for tenth in tenths]
        assert np.mean(means) == pytest.approx(one["theirs"], abs=1e-4)
        assert np.std(means, ddof=1) == pytest.approx(one["deviation"], abs=2e-4)


def test_statistics_of_updates(tmp_path):
    """Ratios to OpenAI's mean by hand, the value loss halved; a run is outside beyond 4.97 standard deviations."""
    entropies = [2.56377, 2.56829, 2.57586]  # of bigfish, in reference/procgen16_1m_statistics.csv
    value_losses = [0.151545, 0.137697, 0.14914]
    mean, deviation = np.mean(entropies), np.std(entropies, ddof=1)
    write(tmp_path, "ppo_procgen-openai/bigfish/seed1", 1.0, "procgen16_1m", 999_424)
    path = tmp_path / "procgen16_1m/ppo_procgen-openai/bigfish/seed1.csv"
    for z, outside in ((4.96, "0"), (-4.96, "0"), (4.98, "1"), (-4.98, "1")):
        ours = dict.fromkeys(report.STATISTICS, 1.0) | {"loss/entropy": mean + z * deviation}
        table = [["step", "episode/return", "episode/count", *ours]]
        for value_loss in (0.2, 0.4):  # of two updates
            ours["loss/value"] = value_loss
            table.append([1, 2, 3, *ours.values()])
        path.write_text("".join(",".join(map(str, row)) + "\n" for row in table))
        text = "\n".join(report.statistics_table(tmp_path))
        (entropy,), (value,) = rows(text, "`loss/entropy`"), rows(text, "`loss/value`")
        ratio = f"{ours['loss/entropy'] / mean:.2f}"
        assert entropy == ["`loss/entropy`", ratio, f"{ratio} to {ratio}", outside]
        assert value[1] == f"{0.15 / np.mean(value_losses):.2f}"


def test_line_numbers_follow_the_code(monkeypatch, tmp_path):
    """A link gets the number of the line with its code; code that is gone or not unique is an error."""
    (tmp_path / "a.py").write_text("x = 1\ny = 2\ny = 2\nz = 3\n")
    monkeypatch.setattr(report, "ROOT", tmp_path)
    assert report.relinked("see [`z = 3`](../a.py#L1).") == "see [`z = 3`](../a.py#L4)."
    for code in ("gone", "y = 2"):
        with pytest.raises(ValueError, match=code):
            report.relinked(f"[`{code}`](../a.py#L1)")


def test_pictures(tmp_path):
    """Each picture is drawn; without a date, so that equal results make equal files."""
    report.draw(tmp_path)
    files = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert files.keys() == {f"{name}.svg" for name in (*report.SCRIPTS, "procgen16")}
    assert not any("date>" in text for text in files.values())


def test_picture_has_all_settings(tmp_path, monkeypatch):
    """Six settings of a game are six lines of different colors; a game of procgen16.svg alone has no panel."""
    from matplotlib import pyplot

    settings = ["norm-reward", "discounts", "constant-lr", "input"]
    rows = [("two_cores", "openai"), ("two_cores", "narrow-1m"), *(("fruitbot_parts", name) for name in settings)]
    curve = ((500_000, 1, 3), (999_424, 2, 3))
    for suite, setting in rows:
        write(tmp_path, f"ppo_procgen-{setting}/fruitbot/seed1", 1.0, suite, 999_424, curve=curve)
    write(tmp_path, "ppo_procgen-openai/heist/seed1", 1.0, "procgen16_1m", 999_424, curve=curve)
    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    report.draw_script(tmp_path / "a.svg", "ppo_procgen", pyplot, tmp_path)
    (panel,) = pyplot.gcf().axes
    ours = [line for line in panel.lines if line.get_linestyle() != "None"]
    assert [line.get_label() for line in ours] == ["openai", "narrow-1m", *settings]
    assert len({line.get_color() for line in ours}) == 6


def test_damaged_files_are_named(tmp_path, capsys):
    """An empty or half JSON or one of no object is named and left out, and the rest is reported."""
    write(tmp_path, "ppo_procgen/bigfish/seed1", 12.0)
    damaged = {"gpu/ppo_procgen/coinrun/seed1.json": "", "speed/x.json": '{"command": "pyth', "floor/x.json": "null"}
    for name, content in damaged.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert report.main(["--results", str(tmp_path)]) == 0
    assert "12.00" in (tmp_path / "README.md").read_text()
    assert len(report.speed_table(tmp_path)) == len(report.floor_table(tmp_path)) == 2
    printed = capsys.readouterr().err
    assert all(str(tmp_path / name) in printed for name in damaged) and "bigfish" not in printed


def test_seeds(tmp_path):
    """Mean and standard error over three seeds, the values of two; all revisions and machines."""
    scores, hashes = [1.0, 2.0, 6.0], ["1" * 40, "1" * 40, "1" * 40 + "-dirty"]
    for seed, (score, git) in enumerate(zip(scores, hashes, strict=True), 1):
        curve = ((100, 0.0, 5), (61_000, score, 1), (61_440, score + 1, 3))  # three of four episodes have one more
        before = dict(git_before=["2" * 40], machines_before={"GPU": 1024}) if seed == 1 else {}
        write_seed(tmp_path, seed, score, curve=curve, git=git, cpu="Other" if seed == 2 else "CPU", **before)
    error = np.std(scores, ddof=1) / 3**0.5
    row = starpilot(tmp_path)
    assert row[2:4] == ["3 seeds", f"3.00 ± {error:.2f}"]
    assert row[4:7] == [f"3.75 ± {error:.2f} (12 episodes)", "none at these steps", "-"]
    assert row[7] == "GPU up to step 1,024, then CPU, 2 cores; Other, 2 cores; CPU, 2 cores"
    assert row[8] == "2222222, 1111111, 1111111-dirty"
    write_seed(tmp_path, 1, 1.0)
    write_seed(tmp_path, 2, 2.0, machines_before={"GPU": 61_440})
    write_seed(tmp_path, 3, 6.0, train_seconds=1800.0)
    (cell,) = report.cells(tmp_path, ["cpu"])  # seeds 1 to 3: 1.5, 1.5 and 0.5 hours
    assert report.time_of(cell) == "1.0 h on CPU, 2 cores; 1.5 h on GPU, evaluated on CPU, 2 cores"
    for seed, score in ((1, 1.0), (2, 2.0)):
        write_seed(tmp_path, seed, score, curve=((100, 0.0, 5), (61_000, score, 1), (61_440, score + 1, 3)))
    write_seed(tmp_path, 3, 99.0, error="gone", curve=((61_440, 99.0, 1),))
    row = starpilot(tmp_path)  # nothing of a failed seed
    assert row[2:4] == ["2 seeds, 1 failed", "1.00, 2.00"] and row[4] == "1.75, 2.75 (8 episodes)"
    write_seed(tmp_path, 3, 99.0, command="python ppo_procgen.py --env-id starpilot --lr 1e-1")
    assert starpilot(tmp_path)[2:4] == ["2 seeds", "1.00, 2.00"]  # nor of one with earlier flags


def test_speed_has_a_column_for_each_machine(tmp_path):
    """Medians and ranges by hand; a row that a machine lacks; no other comparison."""
    for name, beside, hardware, ratios in (
        ("a", "cleanrl", "CPU (AVX2), 2 cores, no GPU, torch 2", [1.0, 4.0, 2.0]),
        ("b", "cleanrl", "CPU, 16 cores, GPU X, torch 2", [3.0, 5.0]),
        ("c", "fp32", "CPU, 2 cores, no GPU, torch 2", [9.0]),
    ):
        figures = [dict(sps=10.0, peak_gib=1.0) for _ in ratios]
        found = dict(command=f"python benchmark/speed.py appo_atari -- --seed {name}", git="1" * 40, hardware=hardware)
        found |= dict(results=dict(script=figures) | {beside: figures}, wall_ratios=ratios, cpu_ratios=ratios)
        (tmp_path / "speed").mkdir(exist_ok=True)
        (tmp_path / "speed" / f"{name}.json").write_text(json.dumps(found))
    head, _, first, second = report.speed_headlines(tmp_path)
    assert head == "| script and flags | 2 cores | GPU X, 16 cores |"
    assert first == "| `appo_atari --seed a` | **2.00** (1.00 to 4.00) | - |"
    assert second == "| `appo_atari --seed b` | - | **4.00** (3.00 to 5.00) |"
    text = "\n".join(report.speed_table(tmp_path))
    assert "| CPU (AVX2), 2 cores | 1111111 |" in text and "| CPU, 16 cores, GPU X | 1111111 |" in text


def test_smooth():
    """Each window has its last step and the mean over its episodes."""
    rows = [(10, 1.0, 3), (90, 5.0, 1), (110, 7.0, 2)]
    assert report.smooth(rows, 100) == ([90, 110], [2.0, 7.0])


def test_published_numbers():
    """The nearest step within 10 %, its last tenth and standard error; four frames are a step; splits differ."""
    points, (openai,) = report.reference(), run.jobs_of("gpu", "ppo_procgen-openai")
    (bigfish,), (montezuma,) = run.jobs_of("gpu", "ppo_procgen/bigfish"), run.jobs_of("gpu", "ppo_atari_snd")
    tenths, errors = (report.reference(column) for column in ("last_tenth", "stderr"))
    key = "procgen", "bigfish", "all_levels_PPO"
    (first, entry) = report.published(bigfish, "test", 8_400_000, points)
    assert (first.score, first.error) == (tenths[key][7_995_392], errors[key][7_995_392])
    assert first.score != points[key][7_995_392] and entry.error is None
    assert report.published(bigfish, "test", 6_000_000, points) == []
    assert report.published(montezuma, "game", 128_000_000, points)[0][0] == pytest.approx(11_822, abs=1)
    for split, name in (("train", "train200_PPO"), ("test", "test_full_PPO")):
        (found,) = report.published(openai, split, 25_000_000, points)
        assert found.score == tenths["procgen", "coinrun", name][25_001_984]
    (one_million,) = run.jobs_of("two_cores", "ppo_procgen-openai/starpilot/seed1")  # --num-levels 0: all of them
    assert report.published(one_million, "test", 1_000_000, points)[0].how == "in training, 3 runs"
