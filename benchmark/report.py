"""Tables, pictures and line numbers of the documentation, from the committed results.

    python benchmark/report.py                   # README.md, benchmark/README.md, docs/*.md and docs/images
    python benchmark/report.py --results FOLDER  # of run.py --results FOLDER: writes FOLDER/README.md
    python benchmark/report.py --check           # write nothing; exit code 1 if a text is out of date

Reads benchmark/results/<suite>/<script>/<game>/seed<k>.json and .csv (written by benchmark/run.py), the speed figures
in results/speed/*.json and results/floor/*.json, and the published numbers in benchmark/reference/. An unreadable file
is named and left out; a failed job is shown with its error.
Published training returns are compared with training returns, published evaluations with evaluations. For OpenAI's and
michalnand's runs, reference/*.csv has the mean over the last tenth of the steps, as in the tables, and the mean at a
step, for the pictures. "stderr" is the standard error over runs of what the tables use.
reference/procgen16_1m.csv has the returns of OpenAI's three runs on all levels, one row per update up to 1M steps;
procgen16_1m_statistics.csv has the means of their other statistics over these 61 updates, under OpenAI's names.
Links to a line of ours, [`code`](../script.py#L1), get the number of the one line that contains the code.
"""

import argparse
import csv
import re
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmark")]
import run as matrix  # noqa: E402

RESULTS, REFERENCE = ROOT / "benchmark" / "results", ROOT / "benchmark" / "reference"
SCRIPTS = ("ppo_procgen", "impala_procgen", "ppo_atari_rnd", "ppo_atari_snd", "appo_atari")
LONG = 400_000  # environment steps; shorter runs are not in the documentation's pages
HEADLINES = {  # the README's rows: (suite, row) -> game and setting
    ("two_cores", "ppo_procgen-openai/starpilot"): "starpilot, OpenAI's setting",
    ("two_cores", "ppo_procgen-openai/fruitbot"): "fruitbot, OpenAI's setting",
    ("two_cores", "ppo_procgen-narrow-8m/bigfish"): "bigfish",
    ("two_cores", "impala_procgen-narrow-sync/starpilot"): "starpilot",
    ("two_cores", "ppo_atari_rnd-no-reward/Breakout"): "Breakout, without its reward",
    ("two_cores", "ppo_atari_snd-no-reward-bf16/Breakout"): "Breakout, without its reward",
    ("two_cores", "appo_atari-two-cores/Breakout"): "Breakout",
}
CND_21 = "SND-V_michalnand_cnd21(paper Montezuma)(raw_score)"
RND_1 = "RND_michalnand_cfg1(raw_score)"
NO_REWARD = "SND-V_michalnand_no_reward(raw_score)"
TRAINING = "in training"
OTHER = "another network and batch; "
OPENAI = f"{TRAINING}, 3 runs"
RUNNING = f"{TRAINING}, running mean of one environment"
PUBLISHED = {  # (script, number of training levels, split): [(file, series, what it is, how its protocol differs)]
    ("ppo_procgen", "", "test"): [
        ("procgen", "all_levels_PPO", "OpenAI's PPO", f"{OTHER}{OPENAI}"),
        ("procgen", "competition_entry_PPO_wide", "the competition entry", "wide network, one run, evaluation"),
    ],
    ("impala_procgen", "", "test"): [("procgen", "all_levels_PPO", "OpenAI's PPO", f"PPO, not IMPALA; {OPENAI}")],
    ("ppo_procgen", "200", "train"): [("procgen", "train200_PPO", "OpenAI's PPO", OPENAI)],
    ("ppo_procgen", "200", "test"): [("procgen", "test_full_PPO", "OpenAI's PPO", "on all levels, 3 runs")],
    ("ppo_atari_rnd", "", "game"): [
        ("atari", "RND", "RND paper", f"{TRAINING}, recurrent policy, no forced no-op, 3 seeds"),
        ("atari", RND_1, "michalnand's RND", f"{OTHER}{RUNNING}, 3 runs"),
    ],
    ("ppo_atari_snd", "", "game"): [("atari", CND_21, "michalnand's SND-V", f"{RUNNING}, 4 runs")],
    ("snd_breakout", "", "game"): [
        ("atari", NO_REWARD, "michalnand's SND without reward", f"another policy network; {RUNNING}, one run")
    ],
    ("appo_atari", "", "game"): [
        ("atari", "CleanRL_ppo_atari_envpool", "CleanRL's PPO with EnvPool", f"another batch; {TRAINING}, 3 runs"),
        ("atari", "CleanRL_ppo_atari", "CleanRL's PPO without EnvPool", f"another batch; {TRAINING}, 3 runs"),
    ],
}


def reference(column: str = "") -> dict:
    """(file, game, series) -> {environment steps: score}, or another column of the rows that have it."""
    found = {}
    for name, game, series, steps, score, frames in (
        ("procgen", "env", "split", "step", "mean_return", 1),
        ("atari", "env", "algo", "frames", "score", 4),
    ):
        with open(REFERENCE / f"{name}.csv", newline="") as file:
            for row in csv.DictReader(file):
                points = found.setdefault((name, row[game], row[series]), {})
                value = row.get(column or score)
                if value:
                    points[int(row[steps]) // frames] = float(value)
    return found


class Published(NamedTuple):
    """A number, what it is, how its protocol differs, its standard error over runs if published."""

    score: float
    what: str
    how: str
    error: float | None


def levels(flags: str) -> str:
    """The number of training levels in a command; "" for all."""
    return flag(flags, "--num-levels", "0").removeprefix("0")


def flag(flags: str, name: str, default: str) -> str:
    words = flags.split()
    return words[words.index(name) + 1] if name in words else default


def sources(job, split: str) -> list:
    """[(file, series, what it is, how its protocol differs)] to compare a job's split with."""
    found = PUBLISHED.get((job.script, levels(job.flags), split), [])
    if job.variant.endswith(":openai"):  # the published network and batch
        found = [(file, series, what, how.removeprefix(OTHER)) for file, series, what, how in found]
    return found


def published(job, split: str, steps: int, points: dict) -> list[Published]:
    """Published numbers at the nearest step within 10 %: means over the last tenth where there are any."""
    found, tenths, errors = [], reference("last_tenth"), reference("stderr")
    for file, name, what, how in sources(job, split):
        series = points.get((file, job.game, name), {})
        near = [step for step in series if abs(step - steps) <= 0.1 * steps]
        if near:
            step = min(near, key=lambda step: abs(step - steps))
            key = file, job.game, name
            found.append(Published(tenths[key].get(step, series[step]), what, how, errors[key].get(step)))
    return found


def checkpoints(job, steps: int, points: dict) -> list:
    """(what, [(step, score)]) of published training returns up to our number of steps."""
    found = sources(job, "train") or sources(job, "game") or sources(job, "test")
    curves = []
    for file, name, what, how in [source for source in found if TRAINING in source[3]]:
        series = sorted(points.get((file, job.game, name), {}).items())
        curves.append((f"{what} ({how})", [point for point in series if point[0] <= 1.1 * steps]))
    return [(what, known) for what, known in curves if known]


def curve(path: Path) -> list[tuple[int, float, float]]:
    """(step, mean return, number of episodes) of the rows in which episodes ended."""
    if not path.exists():
        return []
    with open(path, newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get("episode/return") and row.get("episode/count")]
    return [(int(row["step"]), float(row["episode/return"]), float(row["episode/count"])) for row in rows]


def read(path: Path) -> dict:
    """The content of a JSON file; empty if there is none or it is unreadable (which is printed)."""
    content = matrix.read_json(path)
    return content if isinstance(content, dict) else {}


def cells(results: Path = RESULTS, suites=None) -> list[dict]:
    """One entry per row of a suite and game with a result: its jobs, their results, the published numbers."""
    points, found = reference(), []
    for suite in suites or matrix.SUITES:
        groups = {}
        for job in matrix.jobs_of(suite):
            groups.setdefault((job.variant, job.game), []).append(job)
        for jobs in groups.values():
            done = {}
            for job in jobs:
                one = read(results / suite / f"{job.name}.json")
                if one.get("command") == " ".join(job.command):  # otherwise of earlier flags
                    done[job.seed] = one
            if not done:
                continue
            job, finished = jobs[0], [d for d in done.values() if d["status"] == "done"]
            cell = dict(job=job, done=finished, row=job.name.rpartition("/")[0])
            cell["failed"] = [d["error"] for d in done.values() if d["status"] == "failed"]
            cell["steps"] = finished[0]["steps"] if finished else 0
            cell["curves"] = {
                d["seed"]: curve(results / suite / cell["row"] / f"seed{d['seed']}.csv") for d in finished
            }
            cell["splits"], cell["published"] = {}, {}
            for split in finished[0]["eval"]["splits"] if finished else ():
                cell["splits"][split] = [d["eval"]["splits"][split]["mean"] for d in finished]
                cell["published"][split] = published(job, split, cell["steps"], points)
            cell["checkpoints"] = checkpoints(job, cell["steps"], points)
            found.append(cell)
    return found


def number(scores: list[float], evaluation: dict | None = None) -> str:
    """Mean and standard error over seeds; two seeds: both; one: its standard error over episodes."""
    if len(scores) > 2:
        return f"{statistics.mean(scores):.2f} ± {statistics.stdev(scores) / len(scores) ** 0.5:.2f}"
    if len(scores) == 2:
        return ", ".join(f"{score:.2f}" for score in scores)
    error = evaluation["stderr"] if evaluation else None
    return f"{scores[0]:.2f}" + (f" (± {error:.2f} over episodes)" if error is not None else "")


def last_tenth(cell: dict) -> tuple[list[float], str]:
    """Mean training return over the last tenth of the steps, of each seed in which episodes ended; and as text."""
    ends = [[row[1:] for row in curve if row[0] > 0.9 * cell["steps"]] for curve in cell["curves"].values()]
    means = [sum(value * count for value, count in end) / sum(count for _, count in end) for end in ends if end]
    episodes = sum(count for end in ends for _, count in end)
    missing = f", {len(means)} of {len(ends)} seeds" * (len(means) < len(ends))
    return means, f"{number(means)} ({episodes:,.0f} episodes{missing})" if means else "-"


def differences(cell: dict, scores: list[float], theirs: list[Published]) -> str:
    """Our evaluation minus a published one, or our last tenth of training minus a published training return."""
    ours = [last_tenth(cell)[0] if TRAINING in entry.how else scores for entry in theirs]
    pairs = zip(ours, theirs, strict=True)
    return ", ".join(f"{statistics.mean(of) - entry.score:+.2f}" if of else "-" for of, entry in pairs) or "-"


def seeds_of(cell: dict) -> str:
    done, failed = len(cell["done"]), len(cell["failed"])
    return f"{done} seed" + "s" * (done != 1) + f", {failed} failed" * bool(failed)


def failure(cell: dict) -> str:
    return f"failed: {cell['failed'][0].splitlines()[-1].replace('|', '/')}"


def time_of(cell: dict) -> str:
    """Training time, mean over the seeds of each kind of hardware."""
    seconds = {}
    for one in cell["done"]:
        seconds.setdefault(machine(one), []).append(one["train_seconds"])
    times = []
    for name, values in seconds.items():
        minutes = statistics.mean(values) / 60
        times.append((f"{minutes / 60:.1f} h" if minutes >= 60 else f"{minutes:.0f} min") + f" on {name}")
    return "; ".join(times)


def hardware(cell: dict) -> str:
    return "; ".join(dict.fromkeys(map(machine, cell["done"])))


def machine(one: dict) -> str:
    """The GPU, or the CPU with its number of cores, of a result; the machines of its first steps come first."""
    text = ""
    for name, step in one.get("machines_before", {}).items():
        text += f"{name}, evaluated on " if step == one["steps"] else f"{name} up to step {step:,}, then "
    return text + (one["gpu"] or f"{one['cpu']}, {one['cores']} core" + "s" * (one["cores"] > 1))


def commits(cell: dict) -> str:
    """All revisions that trained a row's runs, shortened."""
    found = (git for one in cell["done"] for git in [*one.get("git_before", ()), one["git"]])
    return ", ".join(dict.fromkeys(map(revision, found)))


def table(entries: list[dict]) -> list[str]:
    """All finished and failed rows: for benchmark/README.md and FOLDER/README.md."""
    head = "suite, row | steps | n | evaluation | training, last tenth | published | difference | hardware | commits"
    lines = [f"| {head} |", "|" + "---|" * 9]
    for cell in entries:
        job, steps = cell["job"], f"{cell['steps']:,}"
        if not cell["done"]:
            lines.append(f"| {job.suite}, `{cell['row']}` | - | {seeds_of(cell)} | {failure(cell)} |" + " - |" * 5)
        for split, scores in cell["splits"].items():
            theirs = cell["published"][split]
            row = [f"{job.suite}, `{cell['row']}` ({split})", steps, seeds_of(cell)]
            row += [number(scores, cell["done"][0]["eval"]["splits"][split]), last_tenth(cell)[1], shown(theirs)]
            row += [differences(cell, scores, theirs), hardware(cell), commits(cell)]
            lines.append("| " + " | ".join(row) + " |")
    return lines


def shown(theirs: list) -> str:
    errors = ["" if entry.error is None else f" ± {entry.error:.2f}" for entry in theirs]
    texts = (f"{one.score:.2f}{error}, {one.what} ({one.how})" for one, error in zip(theirs, errors, strict=True))
    return "; ".join(texts) or "none at these steps"


def rounded(score: float) -> str:
    return f"{score:.1f}" if abs(score) < 100 else f"{score:.0f}"


def headlines(results: Path = RESULTS) -> list[str]:
    """The README's rows: mean training return over the last tenth of the steps."""
    entries = {(cell["job"].suite, cell["row"]): cell for cell in cells(results)}
    lines = ["| script | game | steps | seeds | ours | published |", "|" + "---|" * 6]
    random = reference()
    for key, what in HEADLINES.items():
        if key not in entries or not entries[key]["done"]:
            continue
        cell = entries[key]
        means = last_tenth(cell)[0]
        ours = ", ".join(map(rounded, means))
        if len(means) > 2:
            ours = f"{rounded(statistics.mean(means))} ± {statistics.stdev(means) / len(means) ** 0.5:.1f}"
        known = []
        for split, one in [(split, one) for split, found in cell["published"].items() for one in found]:
            error = "" if one.error is None else f" ± {rounded(one.error)}"
            evaluated = rounded(statistics.mean(cell["splits"][split]))
            how = "" if TRAINING in one.how else f" ({one.how}; ours evaluated: {evaluated})"
            known.append(f"{rounded(one.score)}{error}, {one.what}{how}")
        blind = random.get(("atari", cell["job"].game, "random"), {}).get(0)
        if blind is not None and (not known or "without" in what):
            known.append(f"{rounded(blind)}, random play")
        steps = f"{cell['steps'] / 1e6:.0f}M"
        script = cell["job"].file
        lines.append(f"| `{script}` | {what} | {steps} | {len(means)} | {ours} | {'; '.join(known)} |")
    return lines


PAGES = {"snd_breakout": "ppo_atari_snd"}  # the page of a variant's results


def of_script(script: str, results: Path = RESULTS) -> list[dict]:
    """The finished rows of LONG steps of a script and of its variants."""
    found = [cell for cell in cells(results) if cell["done"] and cell["steps"] >= LONG]
    return [cell for cell in found if PAGES.get(cell["job"].script, cell["job"].script) == script]


def results_of(script: str, results: Path = RESULTS) -> list[str]:
    """A docs page's table, its picture and the commands of its rows."""
    entries = of_script(script, results)
    lines = [f"![Training curves of {script}.py](images/{script}.svg)", ""]
    lines += ["| setting | game | steps | seeds | in training | evaluated | published | time |", "|" + "---|" * 8]
    commands = {}
    for cell in entries:
        job = cell["job"]
        name = job.variant.removeprefix(f"{script}:").replace(":", " ")
        commands.setdefault(name, job)
        for split, scores in cell["splits"].items():
            value = number(scores, cell["done"][0]["eval"]["splits"][split])
            row = [name, job.game, f"{cell['steps']:,}", str(len(cell["done"])), number(last_tenth(cell)[0])]
            lines.append("| " + " | ".join([*row, value, shown(cell["published"][split]), time_of(cell)]) + " |")
    lines += [
        "",
        "In training: mean over the episodes of the last tenth of the steps. Evaluated: 100 episodes.",
        "",
        "```sh",
    ]
    for name, job in commands.items():
        lines += [f"# {name}", " ".join(job.command)]
    return [*lines, "```"]


def sixteen(results: Path = RESULTS) -> list[dict]:
    """Our runs of 1M steps in OpenAI's setting, one entry per Procgen game, and OpenAI's PPO at the same step."""
    points, tenths, errors = reference(), reference("last_tenth"), reference("stderr")
    with open(REFERENCE / "procgen16_1m.csv", newline="") as file:
        logged = list(csv.DictReader(file))
    ours = {}
    for cell in cells(results, ["two_cores", "procgen16_1m"]):
        if cell["job"].variant == "ppo_procgen:openai" and cell["done"]:
            ours[cell["job"].game] = cell
    found = []
    for game in matrix.PROCGEN:
        key = ("procgen", game, "all_levels_PPO")
        low, high = (points["procgen", game, name][0] for name in ("R_min", "R_max"))
        one = dict(game=game, low=low, high=high, theirs=tenths[key][ONE_MILLION])
        one["deviation"] = errors[key][ONE_MILLION] * 3**0.5  # of OpenAI's three runs
        curves = ours[game]["curves"].values() if game in ours else []
        one["curves"] = [running_mean(rows) for rows in curves if rows]
        one["means"] = [mean_after(0.9, *curve) for curve in one["curves"]]
        rows = [row for row in logged if row["env"] == game]
        one["steps"] = [int(row["step"]) for row in rows]
        one["runs"] = [[float(row[name]) for row in rows] for name in ("run0", "run1", "run2")]
        found.append(one)
    return found


ONE_MILLION = 999_424  # environment steps of OpenAI's 61st update


def mean_after(share: float, steps: list, values: list) -> float:
    """The mean of the values after this share of 1M steps."""
    return statistics.mean(value for step, value in zip(steps, values, strict=True) if step > share * ONE_MILLION)


def sixteen_table(results: Path = RESULTS) -> list[str]:
    """Ours and OpenAI's at the end of 1M steps, z-scores, mean normalized returns.

    Both are means over the updates of the last tenth, each of about 100 episodes (`running_mean`).
    """
    lines = ["| game | seeds | ours | OpenAI's PPO (std of 3 runs) | z |", "|" + "---|" * 5]
    found = [one for one in sixteen(results) if one["means"]]
    for one in found:
        z = (statistics.mean(one["means"]) - one["theirs"]) / one["deviation"]
        ours = ", ".join(f"{score:.2f}" for score in one["means"])
        theirs = f"{one['theirs']:.2f} ({one['deviation']:.2f})"
        lines.append(f"| {one['game']} | {len(one['means'])} | {ours} | {theirs} | {z:+.1f} |")
    for title, share in (("last tenth", 0.9), ("all updates", 0.0)):
        ours, theirs, deviation = mean_normalized(found, share)
        title = f"**mean normalized return of {len(found)} games, {title}**"
        z = (ours - theirs) / deviation
        lines.append(f"| {title} | | {ours:.3f} | {theirs:.3f} ({deviation:.3f}) | {z:+.1f} |")
    return lines


def mean_normalized(games: list[dict], share: float) -> tuple[float, float, float]:
    """After this share of 1M steps: our mean normalized return, OpenAI's, and the std of one such mean.

    The std follows from those of the games, which are independent.
    """
    ours, theirs, variances = [], [], []
    for one in games:
        scale = one["high"] - one["low"]
        mine = statistics.mean(mean_after(share, *curve) for curve in one["curves"])
        runs = [mean_after(share, one["steps"], run) for run in one["runs"]]
        ours.append((mine - one["low"]) / scale)
        theirs.append((statistics.mean(runs) - one["low"]) / scale)
        variances.append(statistics.variance(runs) / scale**2)
    return statistics.mean(ours), statistics.mean(theirs), sum(variances) ** 0.5 / len(games)


STATISTICS = {  # of training: our column -> OpenAI's, and the factor from ours to OpenAI's
    "loss/entropy": ("loss/policy_entropy", 1),
    "train/approx_kl": ("loss/approxkl", 1),
    "train/clip_frac": ("loss/clipfrac", 1),
    "loss/policy": ("loss/policy_loss", 1),
    "loss/value": ("loss/value_loss", 0.5),
    "train/explained_variance": ("misc/explained_variance", 1),
    "episode/length": ("eplenmean", 1),
}
OUTSIDE = 4.97  # |z| of one more run of the same code is below this in 95 % of cases: Student's t of three runs


def statistics_table(results: Path = RESULTS) -> list[str]:
    """Statistics of training, each a mean over the updates of 1M steps: our runs compared with OpenAI's three."""
    theirs = {}
    with open(REFERENCE / "procgen16_1m_statistics.csv", newline="") as file:
        for row in csv.DictReader(file):
            theirs[row["env"], row["statistic"]] = [float(row[name]) for name in ("run0", "run1", "run2")]
    runs = []
    for cell in cells(results, ["two_cores", "procgen16_1m"]):
        if cell["job"].variant == "ppo_procgen:openai":
            for seed in cell["curves"]:
                with open(results / cell["job"].suite / cell["row"] / f"seed{seed}.csv", newline="") as file:
                    runs.append((cell["job"].game, list(csv.DictReader(file))))
    lines = [f"| statistic | ours / OpenAI's, median of {len(runs)} runs | range | runs outside |", "|" + "---|" * 4]
    for name, (original, factor) in STATISTICS.items():
        ratios, outside = [], 0
        for game, rows in runs:
            ours = factor * statistics.mean(float(row[name]) for row in rows if row[name])
            published = theirs[game, original]
            mean = statistics.mean(published)
            ratios.append(ours / mean)
            outside += abs(ours - mean) > OUTSIDE * statistics.stdev(published)
        limits = f"{min(ratios):.2f} to {max(ratios):.2f}"
        lines.append(f"| `{name}` | {statistics.median(ratios):.2f} | {limits} | {outside} |")
    return lines


def speeds(results: Path = RESULTS) -> list[dict]:
    """The files of results/speed except comparisons of revisions: CleanRL first, then other libraries."""
    first = ["cleanrl", "sb3"]
    found = [read(path) for path in sorted((results / "speed").glob("*.json"))]
    found = [one for one in found if "results" in one]  # without comparisons of revisions
    for one in found:
        command, _, flags = one["command"].partition(" -- ")
        one["script"] = command.split()[2]
        one["work"] = f"{one['script']} {flags}".strip()
        one["beside"] = [*one["results"]][-1]
    return sorted(found, key=lambda one: [*first, one["beside"]].index(one["beside"]))


def processors(hardware: str) -> str:
    """CPU, cores and GPU, without PyTorch's version: what `hardware` of speed.py says."""
    parts = hardware.split(", ")
    return ", ".join(part for part in parts if not part.startswith(("no GPU", "torch ")))


def revision(git: str | None) -> str:
    """A commit, shortened, and whether the tree was changed."""
    return (git[:7] + "-dirty" * git.endswith("-dirty")) if git else "-"


def speed_table(results: Path = RESULTS) -> list[str]:
    """One line per file of results/speed: steps/s of both, their ratio in wall and CPU time, hardware, commit."""
    head = ["script and flags", "steps/s", "compared with, its steps/s", "ratio, wall time", "per CPU second"]
    head += ["memory", "processor", "commit"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for found in speeds(results):
        ours, name, theirs = found["results"]["script"], found["beside"], [*found["results"].values()][-1]
        row = [f"`{found['work']}`", ", ".join(f"{r['sps']:,.0f}" for r in ours)]
        if name != "script":
            wall, cpu = found["wall_ratios"], [ratio for ratio in found["cpu_ratios"] if ratio == ratio]
            of = f" {revision(found['source'])}" if "source" in found else ""
            row += [f"{name}{of}: " + ", ".join(f"{r['sps']:,.0f}" for r in theirs)]
            row += [f"**{statistics.median(wall):.2f}** ({min(wall):.2f} to {max(wall):.2f})"]
            row += [f"{statistics.median(cpu):.2f}" if cpu else "-"]
        else:
            row += ["-", "-", "-"]
        row += [f"{max(r['peak_gib'] for r in ours):.2f} GiB"]
        row += [processors(found["hardware"]), revision(found["git"])]
        lines.append("| " + " | ".join(row) + " |")
    return lines


SHARES = ("learner", "acting")


def floor_table(results: Path = RESULTS) -> list[str]:
    """One line per file of results/floor: learner and acting compared with their layers alone."""
    head = ["script and flags", "matrix product", "layers alone", "learner", "share", "forward only", "acting", "share"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * 8]
    for path in sorted((results / "floor").glob("*.json")):
        one = read(path)
        if not one:
            continue
        layers = f"{one['layers_alone_rows_per_s']:,.0f} rows/s, {one['layers_alone_gflops']:.0f} GFLOP/s"
        row = [f"`{one['script']} {one['flags']}`".replace(" `", "`"), f"{one['matrix_product_gflops']:.0f} GFLOP/s"]
        spans = {name: "{:.2f} to {:.2f}".format(*(f(one[f"{name}_shares"]) for f in (min, max))) for name in SHARES}
        row += [layers, f"{one['learner_rows_per_s']:,.0f}", f"**{one['learner_share']:.2f}** ({spans['learner']})"]
        row += [f"{one['forward_rows_per_s']:,.0f} (batch {one['acting_batch']})", f"{one['acting_rows_per_s']:,.0f}"]
        row += [f"**{one['acting_share']:.2f}** ({spans['acting']})"]
        lines.append("| " + " | ".join(row) + " |")
    return lines


def speed_headlines(results: Path = RESULTS) -> list[str]:
    """The README's rows: those compared with CleanRL, a column for each machine."""
    rows = {}
    for found in speeds(results):
        if found["beside"] == "cleanrl":
            wall = found["wall_ratios"]
            _, cores, *gpu = processors(found["hardware"]).split(", ")
            ratio = f"**{statistics.median(wall):.2f}** ({min(wall):.2f} to {max(wall):.2f})"
            rows.setdefault(found["work"], {})[", ".join([*gpu, cores])] = ratio
    machines = dict.fromkeys(machine for ratios in rows.values() for machine in ratios)
    lines = ["| script and flags | " + " | ".join(machines) + " |", "|" + "---|" * (1 + len(machines))]
    for work, ratios in rows.items():
        lines.append(" | ".join([f"| `{work}`", *(ratios.get(machine, "-") for machine in machines)]) + " |")
    return lines


def finished(results: Path = RESULTS) -> list[str]:
    return table(cells(results))


PER_FILE = {  # the tables between marks, by file
    "README.md": dict(results=headlines, speed=speed_headlines),
    "benchmark/README.md": dict(results=finished),
    "docs/performance.md": dict(speed=speed_table, floor=floor_table),
    **{f"docs/{name}.md": dict(results=lambda results, name=name: results_of(name, results)) for name in SCRIPTS},
}
PER_FILE["docs/ppo_procgen.md"] |= dict(procgen16=sixteen_table, statistics=statistics_table)


def filled(text: str, tables: dict, results: Path = RESULTS) -> str:
    """The text with the present tables between <!-- NAME --> and <!-- end of NAME -->."""
    for name, lines in tables.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        if begin in text:
            head, _, rest = text.partition(begin)
            tail = rest.split(end, 1)[1]  # an IndexError rather than a cut page
            text = "\n".join([head + begin, *lines(results), end + tail])
    return text


LINK = re.compile(r"\[`([^`]+)`\]\((\.\./)?((?:benchmark/variants/)?\w+\.py)#L(\d+)\)")


def relinked(text: str) -> str:
    """Links [`code`](../script.py#L1) with the number of the one line of the script that contains the code."""

    def link(match):
        code, up, file, _ = match.groups()
        lines = (ROOT / file).read_text().splitlines()
        found = [i for i, line in enumerate(lines, 1) if code in line]
        if len(found) != 1:
            raise ValueError(f"{file}: {len(found)} lines contain `{code}`")
        return f"[`{code}`]({up or ''}{file}#L{found[0]})"

    return LINK.sub(link, text)


def draw_sixteen(path: Path, pyplot, results: Path = RESULTS):
    """All Procgen games: our curves in OpenAI's setting and those of OpenAI's three runs, both running means."""
    figure, axes = pyplot.subplots(4, 4, figsize=(8.4, 7.2), sharex=True, layout="constrained")
    for panel, one in zip(axes.flat, sixteen(results), strict=True):
        for means in one["runs"]:
            panel.plot([step / 1e6 for step in one["steps"]], means, "0.6", linewidth=0.8)
        for steps, means in one["curves"]:
            panel.plot([step / 1e6 for step in steps], means, "C0", linewidth=1.2)
        panel.axhline(one["low"], color="grey", linestyle=":", linewidth=1)
        panel.set_title(one["game"], fontsize=10)
        panel.tick_params(labelsize=8)
        panel.set_xlim(0, 1.05)
        panel.set_xticks([0, 0.5, 1])
    lines = [
        pyplot.Line2D([], [], color="C0", label="ppo_procgen.py, one line per seed"),
        pyplot.Line2D([], [], color="0.6", label="OpenAI's PPO, one line per run"),
        pyplot.Line2D([], [], color="grey", linestyle=":", label="lower end of the normalized range"),
    ]
    figure.legend(handles=lines, loc="outside upper center", ncols=3, fontsize=8, frameon=False)
    figure.supxlabel("million environment steps", fontsize=10)
    figure.supylabel("training return", fontsize=10)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def draw_script(path: Path, script: str, pyplot, results: Path = RESULTS):
    """A docs page's picture: a panel per game, a color per setting, a line per seed, published points.

    A game whose only runs are in procgen16.svg has no panel here.
    """
    games, colors = {}, {}
    for cell in of_script(script, results):
        games.setdefault(cell["job"].game, []).append(cell)
    for game, group in list(games.items()):
        if all(cell["job"].suite == "procgen16_1m" for cell in group):
            del games[game]
    columns = min(len(games), 3)
    rows = -(-len(games) // columns)
    size = (max(4.2, 2.8 * columns), 2.9 * rows)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for panel, (game, group) in zip(axes.flat, games.items(), strict=False):
        points = {}
        for cell in group:
            setting = cell["job"].variant.removeprefix(f"{script}:").replace(":", " ")
            color = colors.setdefault(setting, f"C{len(colors)}")
            for i, values in enumerate(filter(None, cell["curves"].values())):
                steps, means = smooth(values, values[-1][0] / 50)
                steps = [step / 1e6 for step in steps]
                panel.plot(steps, means, color, linewidth=1.2, label=setting if i == 0 else None)
            for what, known in cell["checkpoints"]:
                what = what.split(" (")[0]
                points[what] = max(points.get(what, []), known, key=len)  # up to our longest run's end
        for marker, (what, known) in zip("o^v", points.items(), strict=False):
            steps, scores = zip(*known, strict=True)
            panel.plot([step / 1e6 for step in steps], scores, f"k{marker}", markersize=4, label=what)
        panel.set_title(game, fontsize=10)
        panel.tick_params(labelsize=8)
        panel.legend(fontsize=7, frameon=False)
    for panel in axes.flat[len(games) :]:
        panel.remove()
    figure.supxlabel("million environment steps", fontsize=9)
    figure.supylabel("training return", fontsize=9)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def draw(folder: Path = ROOT / "docs" / "images"):
    """All pictures, as SVG without a date."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(exist_ok=True)
    pyplot.rcParams |= {"svg.hashsalt": "0", "axes.spines.top": False, "axes.spines.right": False}
    pyplot.rcParams["savefig.format"] = "svg"
    draw_sixteen(folder / "procgen16.svg", pyplot)
    for script in SCRIPTS:
        if of_script(script):
            draw_script(folder / f"{script}.svg", script, pyplot)


def smooth(values: list, window: float) -> tuple[list, list]:
    """Rows (step, mean return, episodes) -> last steps and mean returns of the windows of steps."""
    windows = {}
    for step, score, episodes in values:
        windows.setdefault(int((step - 1) // window), []).append((step, score, episodes))
    steps = [part[-1][0] for part in windows.values()]
    means = [sum(score * n for _, score, n in part) / sum(n for *_, n in part) for part in windows.values()]
    return steps, means


def running_mean(values: list, episodes: int = 100) -> tuple[list, list]:
    """Rows (step, mean return, episodes) -> steps, and the mean over the last rows with at least 100 episodes.

    OpenAI's logs have the mean of the last 100 episodes.
    """
    means = []
    for i in range(len(values)):
        total = count = 0
        for _, score, n in reversed(values[: i + 1]):
            total += score * n
            count += n
            if count >= episodes:
                break
        means.append(total / count)
    return [step for step, *_ in values], means


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a text is out of date")
    parser.add_argument("--results", type=Path, help="another folder of results; writes README.md there")
    options = parser.parse_args(argv)
    if options.results and not options.results.is_dir():
        parser.error(f"--results {options.results}: no such folder")
    files = {}
    if options.results:
        files[options.results / "README.md"] = "\n".join(["# Results", "", *finished(options.results), ""])
    else:
        for name in (*PER_FILE, "docs/metrics.md"):
            text = (ROOT / name).read_text()
            files[ROOT / name] = relinked(filled(text, PER_FILE.get(name, {})))
    if options.check:
        old = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
        print("\n".join(f"{path}: out of date, run benchmark/report.py" for path in old) or "up to date")
        return int(bool(old))
    for path, text in files.items():
        matrix.write_atomically(path, text)
    if not options.results:
        draw()
    return 0


if __name__ == "__main__":
    sys.exit(main())
