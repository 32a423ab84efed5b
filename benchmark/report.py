"""Tables, pictures and line numbers of the documentation, from the committed results.

    python benchmark/report.py                   # README.md, benchmark/README.md, docs/*.md and docs/images
    python benchmark/report.py --results FOLDER  # of run.py --results FOLDER: writes FOLDER/README.md
    python benchmark/report.py --check           # write nothing; exit code 1 if a text is out of date
    python benchmark/report.py --compare A B     # two folders or commits: differences of scores, B minus A
    python benchmark/report.py --export curves.parquet  # all curves in one file (or curves.csv)

Reads benchmark/results/<suite>/<script>/<game>/seed<k>.json and .csv (written by benchmark/run.py), the speed figures
in results/speed/*.json, and the published numbers in benchmark/reference/. An unreadable file is named and left out; a
failed job is shown with its error.
Published training returns are compared with training returns, published evaluations with evaluations. For OpenAI's and
michalnand's runs, reference/*.csv has the mean over the last tenth of the steps, as in the tables, and the mean at a
step, for the pictures. "stderr" is the standard error over runs of what the tables use.
reference/procgen16_1m.csv has the returns of OpenAI's three runs on all levels, one row per update up to 1M steps;
procgen16_1m_statistics.csv has the means of their other statistics over these 61 updates, under OpenAI's names.
Links to a line of ours, [`code`](../script.py#L1), get the number of the one line that contains the code.
"""

import argparse
import io
import re
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import scipy.stats

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
PUBLISHED = {  # (script, number of training levels, split): [(series, what it is, how its protocol differs)]
    ("ppo_procgen", "", "test"): [
        ("all_levels_PPO", "OpenAI's PPO", f"{OTHER}{OPENAI}"),
        ("competition_entry_PPO_wide", "the competition entry", "wide network, one run, evaluation"),
    ],
    ("impala_procgen", "", "test"): [("all_levels_PPO", "OpenAI's PPO", f"PPO, not IMPALA; {OPENAI}")],
    ("ppo_procgen", "200", "train"): [("train200_PPO", "OpenAI's PPO", OPENAI)],
    ("ppo_procgen", "200", "test"): [("test_full_PPO", "OpenAI's PPO", "on all levels, 3 runs")],
    ("ppo_atari_rnd", "", "game"): [
        ("RND", "RND paper", f"{TRAINING}, recurrent policy, no forced no-op, 3 seeds"),
        (RND_1, "michalnand's RND", f"{OTHER}{RUNNING}, 3 runs"),
    ],
    ("ppo_atari_snd", "", "game"): [(CND_21, "michalnand's SND-V", f"{RUNNING}, 4 runs")],
    ("snd_breakout", "", "game"): [
        (NO_REWARD, "michalnand's SND without reward", f"another policy network; {RUNNING}, one run")
    ],
    ("appo_atari", "", "game"): [
        ("CleanRL_ppo_atari_envpool", "CleanRL's PPO with EnvPool", f"another batch; {TRAINING}, 3 runs"),
        ("CleanRL_ppo_atari", "CleanRL's PPO without EnvPool", f"another batch; {TRAINING}, 3 runs"),
    ],
}


class Published(NamedTuple):
    """A number, what it is, how its protocol differs, its standard error over runs if published."""

    score: float
    what: str
    how: str
    error: float | None


@dataclass
class Row:
    """A game and setting of a suite: its first job, the results of its seeds, and the curves of the finished ones."""

    job: matrix.Job
    name: str  # script-setting/game
    done: list[dict]
    failed: list[dict]
    curves: dict[int, pd.DataFrame]  # by seed

    @property
    def steps(self) -> int:
        return self.done[0]["steps"] if self.done else 0

    @property
    def splits(self) -> dict[str, list[float]]:
        """The mean of each seed's evaluation, by split."""
        names = self.done[0]["eval"]["splits"] if self.done else ()
        return {name: [one["eval"]["splits"][name]["mean"] for one in self.done] for name in names}

    @property
    def seeds(self) -> str:
        done, failed = len(self.done), len(self.failed)
        return f"{done} seed" + "s" * (done != 1) + f", {failed} failed" * bool(failed)

    def evaluated(self, split: str) -> str:
        return number(self.splits[split], self.done[0]["eval"]["splits"][split]["stderr"])


def read(path: Path) -> dict:
    """The content of a JSON file; empty if there is none or it is unreadable (which is printed)."""
    content = matrix.read_json(path)
    return content if isinstance(content, dict) else {}


def read_rows(results: Path) -> list[Row]:
    """The rows that have a result; one of earlier flags does not count."""
    rows = {}
    for suite in matrix.SUITES:
        for job in matrix.jobs_of(suite):
            path = results / suite / f"{job.name}.json"
            one = read(path)
            if one.get("command") != " ".join(job.command):
                continue
            row = rows.setdefault((suite, job.variant, job.game), Row(job, str(Path(job.name).parent), [], [], {}))
            if one["status"] == "failed":
                row.failed.append(one)
            elif one["status"] == "done":
                row.done.append(one)
                row.curves[job.seed] = pd.read_csv(path.with_suffix(".csv"))
    return list(rows.values())


def episodes(curve: pd.DataFrame) -> pd.DataFrame:
    """The rows in which episodes ended: step, mean return, number of episodes."""
    curve = curve[["step", "episode/return", "episode/count"]].dropna()
    return curve.set_axis(["step", "score", "count"], axis=1).reset_index(drop=True)


def weighted_mean(part: pd.DataFrame) -> float:
    """The mean over episodes."""
    return (part["score"] * part["count"]).sum() / part["count"].sum()


@cache
def reference() -> pd.DataFrame:
    """Published scores: game, series, step (an environment step), score, last_tenth, stderr."""
    procgen = pd.read_csv(REFERENCE / "procgen.csv")
    procgen = procgen.rename(columns={"env": "game", "split": "series", "mean_return": "score"})
    atari = pd.read_csv(REFERENCE / "atari.csv")
    atari = atari.rename(columns={"env": "game", "algo": "series", "frames": "step"})
    atari["step"] //= 4
    return pd.concat([procgen, atari], ignore_index=True)


def points_of(game: str, series: str) -> pd.DataFrame:
    points = reference()
    return points[(points["game"] == game) & (points["series"] == series)].sort_values("step")


def flag(flags: str, name: str, default: str) -> str:
    words = flags.split()
    return words[words.index(name) + 1] if name in words else default


def sources(job, split: str) -> list:
    """[(series, what it is, how its protocol differs)] to compare a job's split with."""
    levels = flag(job.flags, "--num-levels", "0").removeprefix("0")
    found = PUBLISHED.get((job.script, levels, split), [])
    if job.variant.endswith(":openai"):  # the published network and batch
        found = [(series, what, how.removeprefix(OTHER)) for series, what, how in found]
    return found


def published(job, split: str, steps: int) -> list[Published]:
    """Published numbers at the nearest step within 10 %: means over the last tenth where there are any."""
    found = []
    for series, what, how in sources(job, split):
        points = points_of(job.game, series)
        distance = (points["step"] - steps).abs()
        if (distance <= 0.1 * steps).any():
            point = points.loc[distance.idxmin()]
            score = point["score"] if pd.isna(point["last_tenth"]) else point["last_tenth"]
            error = None if pd.isna(point["stderr"]) else point["stderr"]
            found.append(Published(score, what, how, error))
    return found


def mean_and_error(scores: list[float], digits: int, error_digits: int) -> str:
    return f"{np.mean(scores):.{digits}f} ± {scipy.stats.sem(scores):.{error_digits}f}"


def number(scores: list[float], error: float | None = None) -> str:
    """Mean and standard error over seeds; two seeds: both; one: its standard error over episodes."""
    if len(scores) > 2:
        return mean_and_error(scores, 2, 2)
    if len(scores) == 2:
        return ", ".join(f"{score:.2f}" for score in scores)
    return f"{scores[0]:.2f}" + (f" (± {error:.2f} over episodes)" if error is not None else "")


def last_tenth(row: Row) -> list[float]:
    """Mean training return over the last tenth of the steps, of each seed in which episodes ended."""
    ends = [end_of(row, curve) for curve in row.curves.values()]
    return [weighted_mean(end) for end in ends if len(end)]


def end_of(row: Row, curve: pd.DataFrame) -> pd.DataFrame:
    return episodes(curve).query(f"step > {0.9 * row.steps}")


def training(row: Row) -> str:
    """`last_tenth` as text, with the number of episodes."""
    means = last_tenth(row)
    count = sum(end_of(row, curve)["count"].sum() for curve in row.curves.values())
    missing = f", {len(means)} of {len(row.curves)} seeds" * (len(means) < len(row.curves))
    return f"{number(means)} ({count:,.0f} episodes{missing})" if means else "-"


def differences(row: Row, split: str) -> str:
    """Our evaluation minus a published one, or our last tenth of training minus a published training return."""
    found = []
    for entry in published(row.job, split, row.steps):
        ours = last_tenth(row) if TRAINING in entry.how else row.splits[split]
        found.append(f"{np.mean(ours) - entry.score:+.2f}" if ours else "-")
    return ", ".join(found) or "-"


def machine(one: dict) -> str:
    """The GPU, or the CPU with its number of cores, of a result; the machines of its first steps come first."""
    text = ""
    for name, step in one.get("machines_before", {}).items():
        text += f"{name}, evaluated on " if step == one["steps"] else f"{name} up to step {step:,}, then "
    return text + (one["gpu"] or f"{one['cpu']}, {one['cores']} core" + "s" * (one["cores"] > 1))


def time_of(row: Row) -> str:
    """Training time, mean over the seeds of each kind of hardware."""
    seconds = pd.DataFrame([(machine(one), one["train_seconds"]) for one in row.done], columns=["machine", "seconds"])
    times = []
    for name, mean in seconds.groupby("machine", sort=False)["seconds"].mean().items():
        times.append((f"{mean / 3600:.1f} h" if mean >= 3600 else f"{mean / 60:.0f} min") + f" on {name}")
    return "; ".join(times)


def revision(git: str | None) -> str:
    """A commit, shortened, and whether the tree was changed."""
    return (git[:7] + "-dirty" * git.endswith("-dirty")) if git else "-"


def commits(row: Row) -> str:
    """All revisions that trained a row's runs, shortened."""
    found = (git for one in row.done for git in [*one.get("git_before", ()), one["git"]])
    return ", ".join(dict.fromkeys(map(revision, found)))


def markdown(head: str, lines: list[list[str]]) -> list[str]:
    """A table; `head` has its columns, separated by " | "."""
    texts = [" | ".join(cells) for cells in lines]
    lines = [f"| {text} |".replace("|  |", "| |") for text in texts]
    return [f"| {head} |", "|" + "---|" * len(head.split(" | ")), *lines]


def shown(theirs: list[Published]) -> str:
    errors = ["" if entry.error is None else f" ± {entry.error:.2f}" for entry in theirs]
    texts = (f"{one.score:.2f}{error}, {one.what} ({one.how})" for one, error in zip(theirs, errors, strict=True))
    return "; ".join(texts) or "none at these steps"


def finished(rows: list[Row]) -> list[str]:
    """All finished and failed rows: for benchmark/README.md and FOLDER/README.md."""
    head = "suite, row | steps | n | evaluation | training, last tenth | published | difference | hardware | commits"
    lines = []
    for row in rows:
        name = f"{row.job.suite}, `{row.name}`"
        if not row.done and row.failed:
            error = row.failed[0]["error"].splitlines()[-1].replace("|", "/")
            lines.append([name, "-", row.seeds, f"failed: {error}", *["-"] * 5])
        hardware = "; ".join(dict.fromkeys(map(machine, row.done)))
        for split in row.splits:
            theirs = published(row.job, split, row.steps)
            cells = [f"{name} ({split})", f"{row.steps:,}", row.seeds, row.evaluated(split), training(row)]
            lines.append([*cells, shown(theirs), differences(row, split), hardware, commits(row)])
    return markdown(head, lines)


def rounded(score: float) -> str:
    return f"{score:.1f}" if abs(score) < 100 else f"{score:.0f}"


def headlines(rows: list[Row]) -> list[str]:
    """The README's rows: mean training return over the last tenth of the steps."""
    found = {(row.job.suite, row.name): row for row in rows if row.done}
    lines = []
    for key, what in HEADLINES.items():
        if key not in found:
            continue
        row = found[key]
        means = last_tenth(row)
        ours = ", ".join(map(rounded, means)) if len(means) < 3 else mean_and_error(means, 1, 1)
        known = []
        for split in row.splits:
            for one in published(row.job, split, row.steps):
                error = "" if one.error is None else f" ± {rounded(one.error)}"
                evaluated = rounded(np.mean(row.splits[split]))
                how = "" if TRAINING in one.how else f" ({one.how}; ours evaluated: {evaluated})"
                known.append(f"{rounded(one.score)}{error}, {one.what}{how}")
        blind = points_of(row.job.game, "random")
        if len(blind) and (not known or "without" in what):
            known.append(f"{rounded(blind['score'].iloc[0])}, random play")
        steps = f"{row.steps / 1e6:.0f}M"
        lines.append([f"`{row.job.file}`", what, steps, str(len(means)), ours, "; ".join(known)])
    return markdown("script | game | steps | seeds | ours | published", lines)


PAGES = {"snd_breakout": "ppo_atari_snd"}  # the page of a variant's results


def of_script(script: str, rows: list[Row]) -> list[Row]:
    """The finished rows of LONG steps of a script and of its variants."""
    return [row for row in rows if row.steps >= LONG and PAGES.get(row.job.script, row.job.script) == script]


def results_of(script: str, rows: list[Row]) -> list[str]:
    """A docs page's table, its picture and the commands of its rows."""
    lines, commands = [], {}
    for row in of_script(script, rows):
        name = row.job.variant.removeprefix(f"{script}:").replace(":", " ")
        commands.setdefault(name, row.job)
        for split in row.splits:
            cells = [name, row.job.game, f"{row.steps:,}", str(len(row.done)), number(last_tenth(row))]
            theirs = shown(published(row.job, split, row.steps))
            lines.append([*cells, row.evaluated(split), theirs, time_of(row)])
    text = [f"![Training curves of {script}.py](images/{script}.svg)", ""]
    text += markdown("setting | game | steps | seeds | in training | evaluated | published | time", lines)
    text += ["", "In training: mean over the episodes of the last tenth of the steps. Evaluated: 100 episodes.", ""]
    text += ["```sh"]
    for name, job in commands.items():
        text += [f"# {name}", " ".join(job.command)]
    return [*text, "```"]


# --- the sixteen games of Procgen ---

ONE_MILLION = 999_424  # environment steps of OpenAI's 61st update


def running_mean(curve: pd.DataFrame, least: int = 100) -> pd.Series:
    """The mean over the last rows with at least 100 episodes, by step, as in OpenAI's logs."""
    rows = episodes(curve)
    count = rows["count"].cumsum().to_numpy()
    total = (rows["score"] * rows["count"]).cumsum().to_numpy()
    before = np.searchsorted(count, count - least, side="right")  # rows that are not needed
    count_before, total_before = np.insert(count, 0, 0)[before], np.insert(total, 0, 0)[before]
    return pd.Series((total - total_before) / (count - count_before), index=rows["step"])


@dataclass
class Game:
    """Running means by step, normalized or not: a series per run of ours, a column per run of OpenAI's."""

    name: str
    low: float
    high: float
    ours: list[pd.Series]
    theirs: pd.DataFrame

    def normalized(self, returns):
        return (returns - self.low) / (self.high - self.low)


def sixteen(rows: list[Row]) -> list[Game]:
    """Our runs of 1M steps in OpenAI's setting and OpenAI's three runs, for every Procgen game."""
    logged = pd.read_csv(REFERENCE / "procgen16_1m.csv")
    curves = {}
    for row in rows:
        if row.job.suite in ("two_cores", "procgen16_1m") and row.job.variant == "ppo_procgen:openai" and row.done:
            curves[row.job.game] = [running_mean(curve) for curve in row.curves.values() if len(episodes(curve))]
    games = []
    for name in matrix.PROCGEN:
        low, high = (points_of(name, limit)["score"].iloc[0] for limit in ("R_min", "R_max"))
        theirs = logged[logged["env"] == name].set_index("step")[["run0", "run1", "run2"]]
        games.append(Game(name, low, high, curves.get(name, []), theirs))
    return games


def after(share: float, returns):
    """The mean after this share of 1M steps, of each run."""
    return returns[returns.index > share * ONE_MILLION].mean()


def interquartile_mean(*games, axis=-1):
    """The mean of the middle half of all runs of all games (Agarwal et al. 2021)."""
    return scipy.stats.trim_mean(np.concatenate(games, axis=axis), 0.25, axis=axis)


def interval(games: list, resamples: int = 2000):
    """95 % stratified bootstrap interval of `interquartile_mean`: runs are drawn within each game.

    games: the normalized scores of each game, runs on the last axis. None if a game has only one run.
    """
    if min(np.shape(game)[-1] for game in games) < 2:
        return None
    options = dict(vectorized=True, axis=-1, method="percentile", n_resamples=resamples, batch=100, rng=0)
    found = scipy.stats.bootstrap(games, interquartile_mean, **options).confidence_interval
    return found.low, found.high


def sixteen_table(rows: list[Row]) -> list[str]:
    """Ours and OpenAI's at the end of 1M steps, z-scores, normalized returns.

    All are means over the updates of the last tenth, each of about 100 episodes (`running_mean`).
    """
    lines, games = [], [game for game in sixteen(rows) if game.ours]
    for game in games:
        point = points_of(game.name, "all_levels_PPO").set_index("step").loc[ONE_MILLION]
        deviation = point["stderr"] * 3**0.5  # of OpenAI's three runs
        means = [after(0.9, run) for run in game.ours]
        z = (np.mean(means) - point["last_tenth"]) / deviation
        ours = ", ".join(f"{score:.2f}" for score in means)
        lines.append([game.name, str(len(means)), ours, f"{point['last_tenth']:.2f} ({deviation:.2f})", f"{z:+.1f}"])
    for title, share in (("last tenth", 0.9), ("all updates", 0.0)):
        ours, theirs, deviation = mean_normalized(games, share)
        title = f"**mean normalized return of {len(games)} games, {title}**"
        z = (ours - theirs) / deviation
        lines.append([title, "", f"{ours:.3f}", f"{theirs:.3f} ({deviation:.3f})", f"{z:+.1f}"])
    for title, share in (("last tenth", 0.9), ("all updates", 0.0)):
        ours = [game.normalized(np.array([after(share, run) for run in game.ours])) for game in games]
        theirs = [game.normalized(after(share, game.theirs)).to_numpy() for game in games]
        texts = [f"{interquartile_mean(*each):.3f}{bounds(interval(each))}" for each in (ours, theirs)]
        lines.append([f"**interquartile mean of these returns, {title}**", "", *texts, ""])
    return markdown("game | seeds | ours | OpenAI's PPO (std of 3 runs) | z", lines)


def bounds(limits) -> str:
    return "" if limits is None else f" [{limits[0]:.3f}, {limits[1]:.3f}]"


def mean_normalized(games: list[Game], share: float) -> tuple[float, float, float]:
    """After this share of 1M steps: our mean normalized return, OpenAI's, and the std of one such mean.

    The std follows from those of the games, which are independent.
    """
    ours = [game.normalized(np.mean([after(share, run) for run in game.ours])) for game in games]
    theirs = [game.normalized(after(share, game.theirs)) for game in games]
    deviation = np.sum([runs.var() for runs in theirs]) ** 0.5 / len(games)
    return np.mean(ours), np.mean([runs.mean() for runs in theirs]), deviation


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


def statistics_table(rows: list[Row]) -> list[str]:
    """Statistics of training, each a mean over the updates of 1M steps: our runs compared with OpenAI's three."""
    theirs = pd.read_csv(REFERENCE / "procgen16_1m_statistics.csv").set_index(["env", "statistic"])
    runs = []
    for row in rows:
        if row.job.suite in ("two_cores", "procgen16_1m") and row.job.variant == "ppo_procgen:openai":
            runs += [(row.job.game, curve) for curve in row.curves.values()]
    lines = []
    for name, (original, factor) in STATISTICS.items():
        ours = np.array([factor * curve[name].mean() for _, curve in runs])
        published = theirs.loc[[(game, original) for game, _ in runs]]
        mean, deviation = published.mean(axis=1).to_numpy(), published.std(axis=1).to_numpy()
        ratios = ours / mean
        outside = int((np.abs(ours - mean) > OUTSIDE * deviation).sum())
        limits = f"{ratios.min():.2f} to {ratios.max():.2f}"
        lines.append([f"`{name}`", f"{np.median(ratios):.2f}", limits, str(outside)])
    return markdown(f"statistic | ours / OpenAI's, median of {len(runs)} runs | range | runs outside", lines)


# --- speed ---


def speeds(results: Path) -> list[dict]:
    """The files of results/speed except comparisons of revisions: CleanRL first, then other libraries."""
    found = [read(path) for path in sorted((results / "speed").glob("*.json"))]
    found = [one for one in found if "results" in one]  # without comparisons of revisions
    for one in found:
        command, _, flags = one["command"].partition(" -- ")
        one["script"] = command.split()[2]
        one["work"] = f"{one['script']} {flags}".strip()
        one["beside"] = [*one["results"]][-1]
    return sorted(found, key=lambda one: ["cleanrl", "sb3", one["beside"]].index(one["beside"]))


def processors(hardware: str) -> str:
    """CPU, cores and GPU, without PyTorch's version: what `hardware` of speed.py says."""
    parts = hardware.split(", ")
    return ", ".join(part for part in parts if not part.startswith(("no GPU", "torch ")))


def ratio_of(found: dict) -> str:
    wall = found["wall_ratios"]
    return f"**{np.median(wall):.2f}** ({min(wall):.2f} to {max(wall):.2f})"


def speed_table(results: Path) -> list[str]:
    """One line per file of results/speed: steps/s of both, their ratio in wall and CPU time, hardware, commit."""
    head = "script and flags | steps/s | compared with, its steps/s | ratio, wall time | per CPU second"
    lines = []
    for found in speeds(results):
        ours, name, theirs = found["results"]["script"], found["beside"], [*found["results"].values()][-1]
        cells = [f"`{found['work']}`", ", ".join(f"{r['sps']:,.0f}" for r in ours)]
        if name != "script":
            cpu = [ratio for ratio in found["cpu_ratios"] if ratio == ratio]
            of = f" {revision(found['source'])}" if "source" in found else ""
            cells += [f"{name}{of}: " + ", ".join(f"{r['sps']:,.0f}" for r in theirs), ratio_of(found)]
            cells += [f"{np.median(cpu):.2f}" if cpu else "-"]
        else:
            cells += ["-", "-", "-"]
        peak = f"{max(r['peak_gib'] for r in ours):.2f} GiB"
        lines.append([*cells, peak, processors(found["hardware"]), revision(found["git"])])
    return markdown(f"{head} | memory | processor | commit", lines)


def speed_headlines(results: Path) -> list[str]:
    """The README's rows: those compared with CleanRL, a column for each machine."""
    rows = {}
    for found in speeds(results):
        if found["beside"] == "cleanrl":
            _, cores, *gpu = processors(found["hardware"]).split(", ")
            rows.setdefault(f"`{found['work']}`", {})[", ".join([*gpu, cores])] = ratio_of(found)
    table = pd.DataFrame.from_dict(rows, orient="index").fillna("-")
    lines = [[work, *ratios] for work, ratios in zip(table.index, table.to_numpy(), strict=True)]
    return markdown(" | ".join(["script and flags", *table.columns]), lines)


# --- pages and pictures ---

PER_FILE = {  # the tables between marks, by file
    "README.md": dict(results=headlines, speed=speed_headlines),
    "benchmark/README.md": dict(results=finished),
    "docs/performance.md": dict(speed=speed_table),
    **{f"docs/{name}.md": dict(results=lambda rows, name=name: results_of(name, rows)) for name in SCRIPTS},
}
PER_FILE["docs/ppo_procgen.md"] |= dict(procgen16=sixteen_table, statistics=statistics_table)


def filled(text: str, tables: dict, rows: list[Row], results: Path) -> str:
    """The text with the present tables between <!-- NAME --> and <!-- end of NAME -->."""
    for name, lines in tables.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        if begin in text:
            head, _, rest = text.partition(begin)
            tail = rest.split(end, 1)[1]  # an IndexError rather than a cut page
            text = "\n".join([head + begin, *lines(results if name == "speed" else rows), end + tail])
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


def draw_sixteen(path: Path, pyplot, rows: list[Row]):
    """All Procgen games in OpenAI's setting, our runs and OpenAI's three, and the interquartile mean of all."""
    games = sixteen(rows)
    figure = pyplot.figure(figsize=(8.4, 9), layout="constrained")
    panels = figure.subplot_mosaic([*np.arange(16).reshape(4, 4).tolist(), ["all"] * 4], sharex=True)
    for i, game in enumerate(games):
        panel = panels[i]
        panel.plot(game.theirs.index / 1e6, game.theirs, "0.6", linewidth=0.8)
        for run in game.ours:
            panel.plot(run.index / 1e6, run, "C0", linewidth=1.2)
        panel.axhline(game.low, color="grey", linestyle=":", linewidth=1)
        panel.set_title(game.name, fontsize=10)
    draw_interquartile_mean(panels["all"], games)
    for panel in panels.values():
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


def draw_interquartile_mean(panel, games: list[Game]):
    """Of normalized returns after each update, with the bootstrap interval where each game has several runs."""
    games = [game for game in games if game.ours]
    steps = games[0].theirs.index
    ours = [[game.normalized(np.interp(steps, run.index, run)) for run in game.ours] for game in games]
    for name, color, scores in (
        ("OpenAI's PPO", "0.6", [game.normalized(game.theirs.to_numpy()) for game in games]),
        ("ppo_procgen.py", "C0", [np.array(runs).T for runs in ours]),
    ):
        panel.plot(steps / 1e6, interquartile_mean(*scores), color, label=name)
        limits = interval(scores)
        if limits is not None:
            panel.fill_between(steps / 1e6, *limits, color=color, alpha=0.3, linewidth=0)
    panel.set_title("interquartile mean of the normalized returns; band: 95 % bootstrap interval", fontsize=10)
    panel.legend(fontsize=8, frameon=False)


def draw_script(path: Path, script: str, pyplot, rows: list[Row]):
    """A docs page's picture: a panel per game, a color per setting, a line per seed, published points.

    A game whose only runs are in procgen16.svg has no panel here.
    """
    games, colors = {}, {}
    for row in of_script(script, rows):
        games.setdefault(row.job.game, []).append(row)
    games = {game: group for game, group in games.items() if {row.job.suite for row in group} != {"procgen16_1m"}}
    columns = min(len(games), 3)
    lines = -(-len(games) // columns)
    size = (max(4.2, 2.8 * columns), 2.9 * lines)
    figure, axes = pyplot.subplots(lines, columns, figsize=size, layout="constrained", squeeze=False)
    for panel, (game, group) in zip(axes.flat, games.items(), strict=False):
        longest = max(row.steps for row in group)
        for row in group:
            setting = row.job.variant.removeprefix(f"{script}:").replace(":", " ")
            color = colors.setdefault(setting, f"C{len(colors)}")
            curves = [smooth(episodes(curve)) for curve in row.curves.values() if len(episodes(curve))]
            for i, curve in enumerate(curves):
                panel.plot(curve.index / 1e6, curve, color, linewidth=1.2, label=setting if i == 0 else None)
        known = [points for row in group for points in checkpoints(row.job, longest).items()]
        for marker, (what, points) in zip("o^v", dict(known).items(), strict=False):
            panel.plot(points["step"] / 1e6, points["score"], f"k{marker}", markersize=4, label=what)
        panel.set_title(game, fontsize=10)
        panel.tick_params(labelsize=8)
        panel.legend(fontsize=7, frameon=False)
    for panel in axes.flat[len(games) :]:
        panel.remove()
    figure.supxlabel("million environment steps", fontsize=9)
    figure.supylabel("training return", fontsize=9)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def checkpoints(job, steps: int) -> dict:
    """What it is -> published training returns up to this number of steps."""
    found = sources(job, "train") or sources(job, "game") or sources(job, "test")
    points = {what: points_of(job.game, series) for series, what, how in found if TRAINING in how}
    points = {what: each[each["step"] <= 1.1 * steps] for what, each in points.items()}
    return {what: each for what, each in points.items() if len(each)}


def smooth(rows: pd.DataFrame, windows: int = 50) -> pd.Series:
    """Mean returns of the windows of steps, by the last step of each."""
    window = (rows["step"] - 1) // (rows["step"].iloc[-1] / windows)
    return pd.Series({part["step"].iloc[-1]: weighted_mean(part) for _, part in rows.groupby(window)})


def draw(rows: list[Row], folder: Path = ROOT / "docs" / "images"):
    """All pictures, as SVG without a date."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(exist_ok=True)
    pyplot.rcParams |= {"svg.hashsalt": "0", "axes.spines.top": False, "axes.spines.right": False}
    pyplot.rcParams["savefig.format"] = "svg"
    draw_sixteen(folder / "procgen16.svg", pyplot, rows)
    for script in SCRIPTS:
        if of_script(script, rows):
            draw_script(folder / f"{script}.svg", script, pyplot, rows)


# --- other people's tools, other commits ---


def export(rows: list[Row], path: Path):
    """All curves as one table: script (with suite and setting), game, seed, step, metric, value."""
    tables = []
    for row in rows:
        for seed, curve in row.curves.items():
            table = curve.drop(columns="iteration").melt("step", var_name="metric").dropna()
            script = f"{row.job.suite}/{row.job.variant.replace(':', '-')}"
            tables.append(table.assign(script=script, game=row.job.game, seed=seed))
    curves = pd.concat(tables)[["script", "game", "seed", "step", "metric", "value"]]
    if path.suffix == ".parquet":
        curves.to_parquet(path, index=False)
    else:
        curves.to_csv(path, index=False)


def scores_of(place: str) -> dict:
    """(row, split) -> scores of its seeds, or of the episodes of the only one, in a folder or a commit's results."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(place)
        if not folder.is_dir():
            git = ["git", "-C", str(ROOT), "archive", place, "benchmark/results"]
            done = subprocess.run(git, capture_output=True)
            if done.returncode:
                raise ValueError(f"{place}: neither a folder nor a commit with results")
            tarfile.open(fileobj=io.BytesIO(done.stdout)).extractall(temporary, filter="data")
            folder = Path(temporary, "benchmark", "results")
        found = {}
        for path in sorted(folder.glob("*/*/*/seed*.json")):
            one = read(path)
            for split, evaluation in ((one.get("eval") or {}).get("splits", {})).items():
                found.setdefault((str(path.parent.relative_to(folder)), split), []).append(evaluation["returns"])
        return found


def compare(before: str, after: str) -> list[str]:
    """For each row that both have: evaluations, the difference and its 95 % interval (Welch's t)."""
    old, new, lines = scores_of(before), scores_of(after), []
    for key in [key for key in new if key in old]:
        over = "episodes" if min(len(old[key]), len(new[key])) == 1 else "seeds"
        if over == "seeds":
            a, b = ([np.mean(returns) for returns in found[key]] for found in (old, new))
        else:
            a, b = (np.concatenate(found[key]) for found in (old, new))
        low, high = scipy.stats.ttest_ind(b, a, equal_var=False).confidence_interval(0.95)
        row, split = key
        cells = [f"`{row}` ({split})", f"{np.mean(a):.2f}", f"{np.mean(b):.2f}", f"{np.mean(b) - np.mean(a):+.2f}"]
        lines.append([*cells, f"{low:+.2f} to {high:+.2f}", f"{len(old[key])}, {len(new[key])}", over])
    return markdown("row | A | B | B - A | 95 % interval | seeds of A, B | interval over", lines)


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a text is out of date")
    parser.add_argument("--results", type=Path, help="another folder of results; writes README.md there")
    parser.add_argument("--compare", nargs=2, metavar=("A", "B"), help="folders of results, or commits")
    parser.add_argument("--export", type=Path, metavar="FILE", help="write all curves to a .parquet or .csv file")
    options = parser.parse_args(argv)
    if options.results and not options.results.is_dir():
        parser.error(f"--results {options.results}: no such folder")
    if options.compare:
        try:
            print("\n".join(compare(*options.compare)))
        except ValueError as error:
            parser.error(f"--compare {error}")
        return 0
    results = options.results or RESULTS
    rows = read_rows(results)
    if options.export:
        export(rows, options.export)
        return 0
    files = {}
    if options.results:
        files[results / "README.md"] = "\n".join(["# Results", "", *finished(rows), ""])
    else:
        for name in (*PER_FILE, "docs/metrics.md"):
            text = (ROOT / name).read_text()
            files[ROOT / name] = relinked(filled(text, PER_FILE.get(name, {}), rows, results))
    if options.check:
        old = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
        print("\n".join(f"{path}: out of date, run benchmark/report.py" for path in old) or "up to date")
        return int(bool(old))
    for path, text in files.items():
        path.write_text(text)
    if not options.results:
        draw(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
