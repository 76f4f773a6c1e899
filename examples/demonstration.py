"""Tokenize, plan and train; find a loss spike, skip its cause, prove it, and lock the run.

``python demonstration.py`` trains on text of the Python installation, in some minutes of one core.
It writes into the folder ``demonstration``, and stops with an error if a claim does not hold.
"""

import argparse
import json
import math
import os
import random
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from pydoc_data.topics import topics
from textwrap import wrap

import numpy as np
import torch
from torch import nn

import megaindex
from megaindex.audit import (
    LossBySource,
    Origin,
    Run,
    documents_of,
    documents_of_rows,
    origins,
    runs_of,
)
from megaindex.loader import NumpyDataset, SampleOptions

SOURCES, PASSES, LENGTH, SAVED_EVERY = ["code", "prose"], 5, 128, 50
LOCK_JS = Path(__file__).parents[1] / "tests" / "independent" / "lock.js"


def title(words: str) -> None:
    """Print the title of a part."""
    print(f"\n\n== {words} ==", flush=True)


def claim(text: str, holds: bool) -> None:
    """Print a claim, and stop if it does not hold."""
    print(f"\n[{'holds' if holds else 'does not hold'}] {text}")
    if not holds:
        raise SystemExit(1)


def run_command(*words: str) -> None:
    """Run a command, print it and its output, and stop if it fails."""
    print(f"\n$ {' '.join(words)}")
    program = [sys.executable, "-m", "megaindex"] if words[0] == "megaindex" else [words[0]]
    done = subprocess.run(
        [*program, *words[1:]],
        env={**os.environ, "COLUMNS": "80"},
        capture_output=True,
        text=True,
        check=False,
    )
    for line in done.stdout.rstrip().splitlines():
        print("\n".join(wrap(line, 80)) if len(line) > 80 else line)
    if done.returncode:
        raise SystemExit(f"{done.stderr}{words[0]} ended with {done.returncode}")


# ---- corpus and recipe -----------------------------------------------------------------------


def write_texts(prose_bytes: int) -> str:
    """Write files of a document a line; return the planted one, as FILE:LINE."""
    prose = [text for _, text in sorted(topics.items()) if not _is_repeated(text)]
    trained = _first(prose, prose_bytes)
    _write("prose.jsonl", trained)
    _write("heldout.jsonl", [text for text in prose if text not in trained][:8])
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [path.read_text("utf-8") for path in modules if path.stat().st_size < 20_000]
    code = _first(texts, 6 * prose_bytes)
    middle = len(code) // 2
    code.insert(middle, random.Random(0).randbytes(1400).decode("latin-1"))
    _write("code.jsonl", code)
    return f"code.jsonl:{middle + 1}"


def _is_repeated(text: str) -> bool:
    """Return True for a topic that is also a part of another, or long."""
    middle = text[len(text) // 2 :][:120]
    return len(text) > 12_000 or sum(middle in other for other in topics.values()) > 1


def _first(texts: list[str], size: int) -> list[str]:
    ends = np.cumsum([len(text) for text in texts])
    return texts[: int(np.searchsorted(ends, size)) + 1]


def _write(name: str, texts: list[str]) -> None:
    lines = (json.dumps({"text": text}) + "\n" for text in texts)
    Path(name).write_text("".join(lines), "utf-8")


def write_recipe(planted: str, rows: int) -> None:
    """Write run.yaml, with the first seed that serves the planted document late."""
    for seed in count(1):
        Path("run.yaml").write_text(
            f"sequence_length: {LENGTH}\n"
            f"batch: {{micro_batch_size: {rows}, data_parallel_size: 1}}\n"
            f"seed: {seed}\n"
            "tail: pad\n"
            "sources: {code: {path: code, order: blocks, block_tokens: 2048}, prose: prose}\n"
            "stages:\n"
            f"  main: {{mix: {{code: {{repeat: 1}}, prose: {{repeat: {PASSES}}}}}}}\n"
        )
        run = megaindex.open_run("run.yaml").run
        if 0.62 < steps_of_line(run, planted)[0] / run.num_steps < 0.75:
            return


def steps_of_line(run: Run, line: str) -> np.ndarray:
    """Return the steps that serve a line of a file."""
    ((source, documents),) = documents_of_rows(run, line).items()
    return np.unique(run.step_of(runs_of(run, documents, source).sample))


# ---- model and training ----------------------------------------------------------------------


class Model(nn.Module):
    """A transformer on bytes, which also looks up the last 2, 3, 4 and 5 bytes by their hash."""

    def __init__(self, width: int = 128, ngrams: int = 4, entries: int = 2**15) -> None:
        super().__init__()
        self.byte, self.place = nn.Embedding(257, width), nn.Embedding(LENGTH, width)
        self.ngrams = nn.ModuleList(nn.Embedding(entries, width // ngrams) for _ in range(ngrams))
        for table in (self.byte, self.place, *self.ngrams):
            nn.init.normal_(table.weight, std=0.02)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, 257)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        key, found = tokens, []
        for back, table in enumerate(self.ngrams, 1):
            before = nn.functional.pad(tokens, (back, 0))[:, :-back]
            key = (key * 1_000_003 + before + 1) % (2**31 - 1)
            found.append(table(key % table.num_embeddings))
        hidden = self.byte(tokens) + self.place.weight + torch.cat(found, -1)
        return self.out(self.norm(self.layers(hidden, mask=self.mask, is_causal=True)))

    def losses(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the loss of each token."""
        logits = self(batch["tokens"])
        return nn.functional.cross_entropy(logits.mT, batch["labels"], reduction="none")


def heldout_rows() -> dict[str, torch.Tensor]:
    """Return rows of the text that is not trained on."""
    index = megaindex.build_index("heldout", sequence_length=LENGTH, order="epoch")
    rows = NumpyDataset(index)[0:64]
    return {name: torch.as_tensor(rows[name]).long() for name in ("tokens", "labels")}


@dataclass
class Step:
    """Losses of a step: of all its tokens, of each source, of each row by its place in the run.

    Of the rows of prose, the number of the pass that each is from, and its key.
    """

    loss: float
    means: np.ndarray
    rows: dict[int, float]
    passes: list[int]
    keys: list[int]
    heldout: float | None = None


def train(name: str, checkpoint: str | None = None) -> tuple[dict[int, Step], dict]:
    """Train to the end of a run, and write checkpoints; return its steps, and the data's state."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, heldout = Model(), heldout_rows()
    rest = [each for key, each in model.named_parameters() if not key.startswith("ngrams")]
    groups = [{"params": rest}, {"params": model.ngrams.parameters(), "lr": 5e-3}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99))
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / 20, total_iters=19)
    loader = megaindex.open_run(name).loader(options=SampleOptions(keys=True))
    trained, first = {"model": model, "optimizer": optimizer, "warmup": warmup, "data": loader}, 0
    if checkpoint:
        first, states = torch.load(checkpoint)
        for key, each in trained.items():
            each.load_state_dict(states[key])
    log, by_source = {}, LossBySource(SOURCES)
    print("\n step   loss of code   of prose   of text held out   passes of prose before\n")
    for step, batch in enumerate(loader, first):
        losses, mask = model.losses(batch), batch["loss_mask"]
        loss = (losses * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        warmup.step()
        by_source.update(losses, batch["source"], mask)
        rows = dict(zip(batch["sample"].tolist(), losses.mean(1).tolist(), strict=True))
        is_prose = batch["source"] == SOURCES.index("prose")
        passes, keys = (batch[field][is_prose].tolist() for field in ("exposure", "key"))
        log[step] = Step(loss.item(), by_source.means, rows, passes, keys)
        by_source.reset()
        if step % 20 == 19:
            with torch.no_grad():
                log[step].heldout = model.losses(heldout).mean().item()
            code, prose = means(log, step - 19, step + 1)
            before = max(number for each in log.values() for number in each.passes)
            text = f"{step:5} {code:14.2f} {prose:10.2f} {log[step].heldout:18.2f}"
            print(f"{text} {before:24}", flush=True)
        if (step + 1) % SAVED_EVERY == 0:
            states = {key: each.state_dict() for key, each in trained.items()}
            torch.save((step + 1, states), f"checkpoint-{step + 1}.pt")
    return log, loader.state_dict()


# ---- what the losses show --------------------------------------------------------------------


def means(log: dict[int, Step], begin: int, end: int) -> np.ndarray:
    """Return the mean losses of code and prose in some steps."""
    return np.nanmean([log[step].means for step in range(begin, end) if step in log], axis=0)


def check_passes(log: dict[int, Step]) -> None:
    """Check that the run was the planned one, and each pass over prose complete."""
    keys = [each for step in log.values() for each in step.keys]
    counts = np.bincount([each for step in log.values() for each in step.passes]).tolist()
    claim(
        f"{len(log)} steps were planned and made; prose was read in {len(counts)} passes of\n"
        f"        {counts[0]} rows each, no row twice in a pass",
        len(log) == megaindex.open_run("run.yaml").plan().train_iters
        and counts == [counts[0]] * PASSES
        and len(set(keys)) == len(keys),
    )


def show_falls(log: dict[int, Step], around: int = 10) -> list[int]:
    """Print how the loss changes where a pass over prose begins; return these steps."""
    begins = [min(step for step, each in log.items() if k in each.passes) for k in range(1, PASSES)]
    print(f"\nLoss of prose, means of {around} steps:\n")
    print(" pass   from step   the 10 before the last   the last 10   the first 10   change\n")
    changes = []
    for number, begin in enumerate(begins, 2):
        parts = [means(log, begin + k * around, begin + (k + 1) * around)[1] for k in (-2, -1, 0)]
        changes.append(np.diff(parts))
        columns = f"{parts[0]:24.2f} {parts[1]:13.2f} {parts[2]:14.2f}"
        print(f"{number:5} {begin:11} {columns} {changes[-1][1]:+8.2f}")
    trend, change = np.mean(changes[-2:], axis=0)
    claim(
        f"where the last two passes begin, the loss of prose changes by {change:+.2f},\n"
        f"        in the steps before by {trend:+.2f}",
        change < min(-0.05, 3 * trend),
    )
    return begins


def excess(log: dict[int, Step], step: int) -> float:
    """Return how many times the median loss of the 20 steps before it the loss of a step is."""
    return log[step].loss / float(np.median([log[k].loss for k in range(step - 20, step)]))


def cause_of(step: int, rows: dict[int, float]) -> Origin:
    """Print the origins of a step's rows, the highest losses first; return the first."""
    run = megaindex.open_run("run.yaml").run
    found = list(origins(run, documents_of(run, step), text=True))
    found.sort(key=lambda each: -rows[each.serving.sample])
    print(f"\nThe rows of step {step}, by loss:\n")
    for each in (*found[:3], *found[-3:]):
        place = f"{Path(each.file).name}:{each.row}"
        print(f"{rows[each.serving.sample]:6.2f}  {place:14} {ascii(each.text[:52])[1:53]}")
    return found[0]


# ---- pictures --------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 560, 280, 26, 550, 44, 250
STYLE = """\
svg { --back: #ffffff; --text: #5c5c5c; --grid: #e2e2e2; --blue: #0072b2; --red: #d55e00;
  --grey: #8a8a8a; font: 14px system-ui, sans-serif }
@media (prefers-color-scheme: dark) { svg { --back: #0d1117; --text: #9aa4af; --grid: #2d333b;
  --blue: #58a6ff; --red: #ff9b57; --grey: #a5a5a5 } }
text { fill: var(--text) } line { stroke: var(--grid) }
path { fill: none; stroke-width: 1.6; stroke-linejoin: round }"""


def draw(name: str, curves: dict[tuple[str, str], dict[int, float]], marks: dict[int, str]) -> None:
    """Write curves over steps, by their words and colours, with marked steps, as SVG."""
    steps = sorted({step for curve in curves.values() for step in curve})
    losses = [loss for curve in curves.values() for loss in curve.values()]
    lowest, highest = 0.95 * min(losses), 1.05 * max(losses)

    def x(step: int) -> float:
        return round(LEFT + (RIGHT - LEFT) * (step - steps[0]) / (steps[-1] - steps[0]), 1)

    def y(loss: float) -> float:
        height = (BOTTOM - TOP) / math.log(highest / lowest)
        return round(BOTTOM - height * math.log(loss / lowest), 1)

    parts = [f"<title>Loss: {', '.join(words for words, _ in curves)}</title>"]
    parts += [f"<style>{STYLE}</style>", '<rect width="100%" height="100%" fill="var(--back)"/>']
    for loss in range(math.ceil(lowest), int(highest) + 1):
        parts.append(f'<line x1="{LEFT}" x2="{RIGHT}" y1="{y(loss)}" y2="{y(loss)}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(loss) + 4}" text-anchor="end">{loss}</text>')
    for step, words in marks.items():
        parts.append(f'<line x1="{x(step)}" x2="{x(step)}" y1="{TOP - 8}" y2="{BOTTOM}"/>')
        parts.append(f'<text x="{x(step) + 4}" y="{TOP + 2}">{words}</text>')
    below = f'y="{BOTTOM + 20}" text-anchor'
    for step in range(steps[0] + -steps[0] % 50, steps[-1] - 20, 50):
        parts += [f'<text x="{x(step)}" {below}="middle">{step}</text>']
    parts.append(f'<text x="{RIGHT}" {below}="end">step</text>')
    parts.append('<text x="2" y="18">loss:</text>')
    at = 46
    for (words, colour), curve in curves.items():
        points = " ".join(f"{x(step):g} {y(loss):g}" for step, loss in sorted(curve.items()))
        parts.append(f'<path stroke="var(--{colour})" d="M{points}"/>')
        parts.append(f'<text x="{at}" y="18" style="fill: var(--{colour})">{words}</text>')
        at += 8 * len(words) + 14
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size}>'
    Path(name).write_text("\n".join((svg, *parts, "</svg>\n")))


def draw_passes(log: dict[int, Step], begins: list[int], every: int = 4) -> None:
    """Draw the losses of the sources, means of some steps, and of the text that is held out."""
    both = {step: means(log, step, step + every) for step in range(0, max(log) + 1, every)}
    heldout = {step: each.heldout for step, each in log.items() if each.heldout}
    draw(
        "passes.svg",
        {
            ("held out", "grey"): heldout,
            ("code, read once", "red"): {step: each[0] for step, each in both.items()},
            (f"prose, read {PASSES} times", "blue"): {step: each[1] for step, each in both.items()},
        },
        {step: f"pass {number}" for number, step in enumerate(begins, 2)},
    )


# ---- the demonstration -----------------------------------------------------------------------


def prepare(prose_bytes: int, rows: int) -> str:
    """Tokenize and plan; return the planted document, as FILE:LINE."""
    title("Text that every Python has, and a planted document")
    planted = write_texts(prose_bytes)
    print("\nprose.jsonl     topics of Python's help()")
    print("heldout.jsonl   other topics, which are not trained on")
    print(f"code.jsonl      modules of the standard library, and planted at {planted}")
    print("                1,400 random bytes, read as Latin-1")
    for name in (*SOURCES, "heldout"):
        run_command(
            "megaindex", "tokenize", name, f"{name}.jsonl", "--tokenizer", "bytes", "--append-eod"
        )
    title(f"Plan: code once, prose {PASSES} times, each pass complete")
    write_recipe(planted, rows)
    print("\nrun.yaml, whose seed is the first to serve the planted document late:\n")
    print(Path("run.yaml").read_text().rstrip())
    run_command("megaindex", "plan", "run.yaml")
    return planted


def demonstrate(planted: str) -> None:
    """Train, find the spike and its cause, skip it, prove it, and lock the run."""
    title("Train, as if nothing was planted")
    log, before = train("run.yaml")
    check_passes(log)
    title("The loss falls where prose comes again")
    draw_passes(log, show_falls(log))

    title("A spike, and its cause")
    step = max(sorted(log)[20:], key=lambda each: excess(log, each))
    times = excess(log, step)
    claim(f"the loss of step {step} is {times:.1f} times that of the 20 steps before", times > 1.5)
    cause = cause_of(step, log[step].rows)
    found = f"{Path(cause.file).name}:{cause.row}"
    claim(f"the row of the highest loss is from {found}, the planted document", found == planted)
    run_command("megaindex", "trace", "run.yaml", "--rows", found)

    title("Skip its loss, from a checkpoint before it")
    steps = steps_of_line(megaindex.open_run("run.yaml").run, found).tolist()
    resumed, last = steps[0] - steps[0] % SAVED_EVERY, steps[-1]
    Path("bad.txt").write_text(f"{cause.serving.document}\n")
    skip = f"skip: [{{documents: bad.txt, source: code, from_step: {resumed}}}]\n"
    Path("skipped.yaml").write_text(Path("run.yaml").read_text() + skip)
    print(f"\nskipped.yaml is run.yaml and\n\n{skip}")
    print(f"Resumed from the checkpoint after {resumed} steps:")
    again, after = train("skipped.yaml", f"checkpoint-{resumed}.pt")
    draw(
        "spike.svg",
        {
            ("run.yaml", "red"): {k: each.loss for k, each in log.items() if k >= resumed},
            ("skipped.yaml", "blue"): {k: each.loss for k, each in again.items()},
        },
        {step: f"step {step}"},
    )
    now = excess({**log, **again}, step)
    claim(f"the loss of step {step} is now {now:.1f} times that of those steps", now < times / 2)
    behind = [log[k].loss for k in range(last + 1, last + 11)]
    again_behind = [again[k].loss for k in range(last + 1, last + 11)]
    claim(
        f"the 10 steps after the document have a loss of {np.mean(again_behind):.2f} in place of\n"
        f"        {np.mean(behind):.2f}, of the same rows",
        np.mean(again_behind) < np.mean(behind)
        and all(log[k].rows.keys() == again[k].rows.keys() for k in again),
    )

    title("Prove, from both checkpoints, that the runs differ by the skip alone")
    for name, state in (("before", before), ("after", after)):
        Path(f"{name}.json").write_text(json.dumps(state))
    run_command("megaindex", "prove", "before.json", "after.json")

    title("Lock; verify by Python, and by JavaScript written from the specification")
    run_command("megaindex", "lock", "skipped.yaml", "--tokens", "--out", "run.lock")
    run_command("megaindex", "verify", "run.lock", "--all", "--tokens")
    if shutil.which("node") and LOCK_JS.exists():
        shutil.copy(LOCK_JS, "lock.js")
        run_command("node", "lock.js", "verify", "run.lock")
    else:
        print(f"\nnot verified by JavaScript, which needs node and {LOCK_JS.name} of a clone")


def main() -> None:
    """Read the options, and demonstrate in an empty folder."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--dir", default="demonstration", help="folder of all files, which is replaced")
    add("--bytes", type=int, default=50_000, help="bytes of prose, and six times as many of code")
    add("--rows", type=int, default=16, help="rows of a step")
    options = parser.parse_args()
    shutil.rmtree(options.dir, ignore_errors=True)
    os.makedirs(options.dir)
    os.chdir(options.dir)
    demonstrate(prepare(options.bytes, options.rows))


if __name__ == "__main__":
    main()
