"""Put the measured figures into the documents: `python -m tools.tables`. A test fails when the two disagree."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tools import cost_tables, doctor_tables, generation_tables, latent_tables, program_tables, vlm_tables
from tools.results import RESULTS

README = Path(__file__).parent.parent / "README.md"
ROWS = {
    "plain clip + step": "`clip_grad_norm_` + fused AdamW, nothing else",
    "nanproof guard.step": "**nanproof**, `guard.step`, all telemetry on",
    "nanproof guard.train_step": "**nanproof**, `guard.train_step`, all telemetry on",
    "isnan loop": "loop over `isnan(p.grad).any()`",
    "mean-and-std skip": "mean-and-std skip in the manner of OLMo-core",
    "stabilityguard": "stabilityguard 0.3.0",
    "arc-training": "arc-training 5.2.0",
    "DebugUnderflowOverflow": "transformers' DebugUnderflowOverflow",
    "detect_anomaly": "`torch.autograd.detect_anomaly`",
}


def load(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return data


def cell(part: dict[str, Any], name: str) -> str:
    row = part["rows"].get(name)
    return "" if row is None or "failed" in row else f"{row['ratio']:.2f}" if row["ratio"] >= 1.1 else f"{row['ratio']:.3f}"


def cost_table() -> str:
    gpu, cpu = load("gpu"), load("cpu")
    columns = [gpu["optimizer part"], gpu["whole step"], cpu["whole step"]]
    where = gpu["device"]
    heads = (f"{where}: optimizer's part, 1.1 B", f"{where}: whole step, 271 M Llama", "CPU: whole step, 7 M Llama")
    lines = [
        "| time as a ratio to the first row, in the same run | " + " | ".join(heads) + " |",
        "|---|---:|---:|---:|",
    ]
    rows = {name: [cell(part, name) for part in columns] for name in ROWS}
    lines += [f"| {ROWS[name]} | " + " | ".join(cells) + " |" for name, cells in rows.items() if any(cells)]
    first = [part["rows"]["plain clip + step"]["ms"] for part in columns]
    versions = [f"torch {part.get('torch', gpu['torch'])}, {part.get('date', gpu['date'])}" for part in columns[:2]]
    gpu_measured = " and ".join(dict.fromkeys(versions))
    lines.append("")
    lines.append(
        f"First row in milliseconds: {first[0]:.1f}, {first[1]:.1f} and {first[2]:.0f}. "
        f"{where} with {gpu_measured}; {cpu['device']}, torch {cpu['torch']}, {cpu['date']}. "
        "Medians of alternating rounds."
    )
    return "\n".join(lines)


OBSERVE_ROWS = {
    "plain clip + step": "`clip_grad_norm_` + fused AdamW, nothing else",
    "nanproof, not observing": "the guard, not observing",
    "nanproof, observe=True": "**`observe=True`**: the largest output of 48 modules at every step, full looks every 50",
    "nanproof, full looks": "**`Observe(every=1)`**: full looks at every step: outputs, gradients, weights, attention",
    "nanproof, everything": '**`Observe(modules="*", every=1)`**: the same for all 163 modules',
    "naive hooks": "forward hooks with a few torch reductions on every module, outputs only",
    "DebugUnderflowOverflow": "transformers' DebugUnderflowOverflow",
    "detect_anomaly": "`torch.autograd.detect_anomaly`",
}


def observe_table() -> str:
    """What observing costs."""
    gpu, cpu = load("observe_gpu"), load("observe_cpu")
    lines = [
        f"| time as a ratio to the first row, in the same run | {gpu['device']}: whole step (middle half of rounds) | "
        "its kernels alone | CPU: whole step |",
        "|---|---:|---:|---:|",
    ]
    for name, label in OBSERVE_ROWS.items():
        row = gpu["whole step"]["rows"][name]
        kernels = gpu["device time"]["rows"].get(name)
        spread = "" if name == "plain clip + step" else f" ({row['low']:.2f}-{row['high']:.2f})"
        device = "" if kernels is None else f"{kernels['ratio']:.3f}"
        lines.append(f"| {label} | {row['ratio']:.3f}{spread} | {device} | {cell(cpu['whole step'], name)} |")
    syncs = ", ".join(f"{name}: {found['syncs']}" for name, found in gpu["no host sync"].items())
    first = [data["whole step"]["rows"]["plain clip + step"]["ms"] for data in (gpu, cpu)]
    rate = gpu["bandwidth"]
    rows = {name: row["of_copy"] for name, row in rate["rows"].items() if "512 MiB" in name}
    speeds = "; ".join(f"{name.split('MiB ')[1]} {share:.2f}" for name, share in rows.items())
    lines += [
        "",
        f"First row: {first[0]:.1f} and {first[1]:.0f} ms. 271 M Llama, bf16 autocast, batch 8 × 1024; on the CPU 7 M, fp32, "
        f"batch 4 × 64. Host syncs in 100 steps: {syncs}. Bytes read a second over those of a device copy "
        f"({rate['copy_TBps']:.1f} TB/s): {speeds}. {gpu['device']}, torch {gpu['torch']}, {gpu['date']}; "
        f"{cpu['device']}, torch {cpu['torch']}, {cpu['date']}.",
        "",
        "On that machine host and device are about equally busy with a step, so what hooks cost the host shows: more where the "
        "model is smaller, not at all where the device is the bottleneck.",
    ]
    return "\n".join(lines)


def observe_line() -> str:
    """Both in a few words."""
    gpu, cpu, data = load("observe_gpu"), load("observe_cpu"), load("forecast")
    name = "nanproof, observe=True"
    held, fails = data["holdout"], data["holdout"]["fails"]
    fine = sum(data[part]["healthy"] for part in ("design", "holdout", "healthy", "zoo"))
    false = sum(data[part]["false"] for part in ("design", "holdout", "healthy", "zoo"))
    ratios = gpu["whole step"]["rows"][name]["ratio"], gpu["device time"]["rows"][name]["ratio"]
    return (
        f"`observe=True` takes {ratios[0]:.3f} of a plain step of a 271 M Llama on an {gpu['device']} (its kernels "
        f"{ratios[1]:.3f}), {cpu['whole step']['rows'][name]['ratio']:.3f} of a small one on two CPU cores, with no host "
        f"sync. On held-out runs it predicted {held['foreseen']} of {fails} failures, half of them at least "
        f"{held['median_lead']:g} steps ahead, with {false} false alarms in {fine} healthy runs."
    )


def forecast_table() -> str:
    """How good forecasts are."""
    data = load("forecast")
    parts = {
        "design": "runs the limits were set on",
        "holdout": "other families of runs, scored afterwards",
        "healthy": "`zoo/healthy.py`",
        "zoo": "the zoo and its twins, most of which fail at once",
    }
    lines = [
        "| | runs that fail | foreseen | median lead, steps (all) | healthy runs | with a false warning |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for part, label in parts.items():
        row = data[part]
        lead = f"{row['median_lead']:g} ({row['shortest_lead']}-{row['longest_lead']})" if row["foreseen"] else "-"
        foreseen = f"{row['foreseen']} ({row['recall']:.0%})" if row["fails"] else "-"
        lines.append(f"| {label} | {row['fails'] or '-'} | {foreseen} | {lead} | {row['healthy']} | {row['false']} |")
    both = [data["design"], data["holdout"]]
    true, false = sum(r["foreseen"] for r in both), sum(r["false"] for r in both)
    dated, hit, late = (sum(r[key] for r in both) for key in ("dated", "in_time", "too_early"))
    lines += [
        "",
        f"Of the runs of the first two rows that were warned of, {true} of {true + false} failed ({true / (true + false):.0%}). "
        f"Of {dated} forecasts that say when, the run failed within the margin in {hit}, later in {late}, earlier in "
        f"{dated - hit - late}. "
        f"`benchmarks/forecast.py`, torch {data['torch']}, {data['date']}.",
        "",
        "Lead by kind of failure, steps; runs it was said of, of all:",
        "",
        "| | foreseen | leads | said as |",
        "|---|---:|---|---|",
    ]
    for part in ("design", "holdout"):
        for family, row in data[part]["by_family"].items():
            if row["fails"]:
                leads = ", ".join(map(str, row["leads"])) or "-"
                kinds = ", ".join(f"`{kind}`" for kind in row["kinds"]) or "-"
                lines.append(f"| {family} | {row['warned']} of {row['runs']} | {leads} | {kinds} |")
    return "\n".join(lines)


def campaign_line() -> str:
    c = load("campaign")
    accepted = f"{c['harmless']} rightly accepted (they changed nothing that matters)"
    return (
        f"Campaign of {c['injected']} random faults: {c['caught']} refused, {accepted}, {c['reached']} reached the weights; "
        f"{c['false_alarms']} false alarms on {c['healthy']} healthy steps; {c['hangs']} hangs."
    )


TOOLS = ("nanproof", "detect_anomaly", "DebugUnderflowOverflow", "SpikeDetection")
COLUMNS = ("detected", "step", "operation", "sample", "cause", "fix verified")


def zoo_summary(results: dict[str, Any] | None = None) -> str:
    """How often each tool was right."""
    cases = (results or load("zoo"))["cases"]
    broken = [c for c in cases if c["cause"] != "benign"]
    lines = ["| | " + " | ".join(COLUMNS) + " | healthy twins left alone |", "|---|" + "---:|" * (len(COLUMNS) + 1)]
    for tool in TOOLS:
        cells = []
        for column in COLUMNS:
            asked = [m for c in broken if (m := c["marks"][tool][column]) is not None]
            cells.append(f"{sum(asked)} of {len(asked)}")
        quiet = [c["marks"][tool]["quiet"] for c in cases]
        name = f"**{tool}**" if tool == "nanproof" else tool
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {sum(quiet)} of {len(quiet)} |")
    return "\n".join(lines)


def zoo_cases() -> str:
    """Every case, and what each tool had right about it."""
    results = load("zoo")
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    lines = [
        f"{results['date']}, {versions}.",
        "",
        "| case | cause | " + " | ".join(TOOLS) + " |",
        "|---" * (len(TOOLS) + 2) + "|",
    ]
    for c in results["cases"]:
        cells = [marks(c["marks"][tool], c["cause"] == "benign") for tool in TOOLS]
        lines.append(f"| {c['name'].replace('_', ' ')} | {c['cause']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def marks(found: dict[str, Any], benign: bool) -> str:
    """What a tool had right about a case, in words."""
    alarm = "" if found["quiet"] else ", **false alarm**"
    if benign:
        return "quiet" if found["quiet"] else "**false alarm**"
    if not found["detected"]:
        return "-" + alarm
    short = {"step": "step", "operation": "op", "sample": "sample", "cause": "cause", "fix verified": "fix"}
    late = ["at another step"] if found["step"] is False else []
    return ", ".join(["detected", *late, *(text for key, text in short.items() if found[key])]) + alarm


def explain_table() -> str:
    lines = [
        "| where the trouble is born | | forward + backward | locate | whole diagnosis | in the guard, until it is told |",
        "|---|---|---:|---:|---:|---:|",
    ]
    facts = []
    for name, model in (("explain_gpu", "271 M Llama, bf16, 8 × 1024"), ("explain_cpu", "7 M Llama, 8 × 128")):
        data = load(name)
        short = "H200" if "H200" in data["device"] else "CPU"
        for fault, row in data["faults"].items():
            lines.append(
                f"| {fault} | {short}, {model} | {row['forward + backward, ms']:.0f} ms | {row['locate, ratio']:.1f} × | "
                f"{row['diagnosis, ratio']:.1f} × | {row['guard: bad step to report, ms'] / 1e3:.2f} s |"
            )
        idle, moving = data["recorder"].values()
        facts.append(f"{short} {idle:.0f} µs ({moving:.0f} where NumPy's generator is drawn from in every step)")
    lines += ["", f"Forward + backward of the same step is 1. The recorder, in every healthy step: {'; '.join(facts)}."]
    gpu, cpu = load("explain_gpu"), load("explain_cpu")
    lines.append(
        f"{gpu['device']}, torch {gpu['torch']}, {gpu['date']}; {cpu['device']}, torch {cpu['torch']}, {cpu['date']}. Medians."
    )
    return "\n".join(lines)


def bad_step_table() -> str:
    data = load("bad_step")
    lines = [
        f"| a bad step of {data['tensors']:,} tensors | healthy step | bad step, told and bundled | ratio |",
        "|---|---:|---:|---:|",
    ]
    for fault, row in data["faults"].items():
        normal = row["bad step, processor s"] / row["ratio of processor s"]
        lines.append(f"| {fault} | {normal:.2f} s | {row['bad step, processor s']:.2f} s | {row['ratio of processor s']:.1f} × |")
    right = sum(row["right"] for row in data["faults"].values())
    lines += ["", f"Processor time of the training thread; {right} of {len(data['faults'])} diagnoses are right."]
    lines.append(f"{data['device']}, torch {data['torch']}, {data['date']}. Medians.")
    return "\n".join(lines)


SCAN_ROWS = {
    "cat file > /dev/null": "`cat file > /dev/null`",
    "scan, safetensors": "**`nanproof.scan`**, safetensors",
    "scan, torch.save": "**the same**, file of `torch.save`",
    "any(isnan(p).any()), torch.load": "`any(torch.isnan(p).any() for p in torch.load(file).values())`",
    "any(isnan(p).any()), torch.load(mmap=True)": "the same with `mmap=True`",
    "crc32 of the file alone": "crc32 of the file, which `--checksums` adds",
    "nanproof scan, as a command": "`nanproof scan file`, with starting Python and importing torch",
}


def scan_table() -> str:
    data = load("scan")
    kinds = [data["float32"], data["bfloat16"]]
    size = kinds[0]["bytes"] / 1e9
    lines = [f"| {size:.1f} GB from the page cache, seconds (ratio to `cat`) | float32 | bfloat16 |", "|---|---:|---:|"]
    for name, label in SCAN_ROWS.items():
        cells = (f"{kind['rows'][name]['seconds']:.2f} ({kind['rows'][name]['ratio']:.2f})" for kind in kinds)
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    memory = max(kind["anonymous MiB above import"] for kind in kinds)
    lines += ["", f"Anonymous memory of a process that scans, above that of its imports: {memory:.0f} MiB."]
    lines.append(f"{data['device']}, torch {data['torch']}, {data['date']}. Medians of {kinds[0]['rounds']} alternating rounds.")
    lines.append(f"Load average at the end: {data['load average']:.1f}.")
    return "\n".join(lines)


def doctor_table() -> str:
    data = load("doctor")
    kinds = [(name, part) for name, part in data.items() if isinstance(part, dict) and "rows" in part]
    lines = [
        "| log of 200 MB | `nanproof doctor` | `grep -c nan` | memory, a tenth of it | memory, all |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, part in kinds:
        speeds = [f"{row['MB/s']:.0f} MB/s" for row in part["rows"].values()]
        peaks = [f"{part['peak MiB'][which]:.0f} MiB" for which in ("a tenth", "all")]
        lines.append(f"| {name} | {' | '.join([*speeds, *peaks])} |")
    load_then = f" Load average {data['load average']:.1f}." if data["load average"] > 1.5 else ""
    return "\n".join([*lines, "", f"The whole command, its start included. {data['device']}, {data['date']}.{load_then}"])


def causes_table() -> str:
    """The catalogue, from the classes themselves."""
    from tools.cause_pages import entries

    families: dict[str, list[str]] = {}
    for entry in entries():
        what, fix = (text.replace("|", "\\|") for text in (entry.what, entry.fix))
        families.setdefault(entry.family, []).append(f"| [`{entry.slug}`](causes/{entry.slug}.md) | {what} | {fix} |")
    parts = []
    for family, rows in families.items():
        parts.append(f"## {family}\n\n| cause | what happens | fix |\n|---|---|---|\n" + "\n".join(rows))
    return "\n\n".join(parts)


def heal_table() -> str:
    """One line a cause: how many of its runs end healthy, and what was applied."""
    data = load("heal")
    ways = ("plain", "guard", "heal", "all")
    causes = sorted({case["cause"] for case in data["cases"]})
    lines = [
        "| cause | runs | plain loop | guard | `heal=True` | and `snapshot_every=4, salvage=True` | what was applied |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for cause in causes:
        mine = [case for case in data["cases"] if case["cause"] == cause]
        counts = " | ".join(str(sum(case[way]["healthy"] for case in mine)) for way in ways)
        said = dict.fromkeys(text for case in mine for way in ("heal", "all") for text in case[way]["remedies"])
        lines.append(f"| {cause} | {len(mine)} | {counts} | {'; '.join(said) or '-'} |")
    totals = " | ".join(f"**{sum(case[way]['healthy'] for case in data['cases'])}**" for way in ways)
    lines += [f"| **all** | **{len(data['cases'])}** | {totals} | |", "", f"torch {data['torch']}, {data['date']}."]
    return "\n".join(lines)


def heal_line() -> str:
    cases = load("heal")["cases"]
    plain, guard, heal, everything = (sum(case[way]["healthy"] for case in cases) for way in ("plain", "guard", "heal", "all"))
    return (
        f"Of the {len(cases)} zoo runs that fail or appear to, {plain} end healthy in a plain loop, {guard} under the guard, "
        f"{heal} with `heal=True`, and {everything} with copies to roll back to as well. No code was edited."
    )


def recovery_table() -> str:
    """The extra time of one copy or save, and what that is of all steps at an interval."""
    lines = ["| | extra time of one | every 50 steps | every 100 | every 500 | every 1000 |", "|---|---:|---:|---:|---:|---:|"]
    notes = []
    for name, where in (("recovery_gpu", "271 M Llama, batch 8 x 1024"), ("recovery_cpu", "7 M Llama, batch 8 x 128")):
        data = load(name)
        small = {f"model of {row}": found for row, found in data.get("small", {}).items()}
        for row, found in {**data["rows"], **small}.items():
            steps = found["extra steps"]
            shares = " | ".join(f"{100 * steps / every:.2g} %" for every in (50, 100, 500, 1000))
            lines.append(f"| {data['device']}: {row} | {found['extra ms']:.0f} ms, {steps:.2g} steps | {shares} |")
        back, saving = data["seconds from a poisoned weight to training again"], data["seconds to save, training waiting"]
        notes.append(
            f"{data['device']}, {where}, a state of {data['state bytes'] / 1e9:.2g} GB, torch {data['torch']}, {data['date']}: "
            f"a step takes {data['rows']['copy to host memory']['step ms']:.0f} ms; a save with training waiting {saving:.2g} s; "
            f"from a poisoned weight to training again {back['memory']:.2g} s from memory, {back['disk']:.2g} s from the disk; "
            f"`resume` {data['seconds to resume']:.2g} s. {data.get('notes', '')}".rstrip()
        )
    return "\n".join([*lines, "", *(f"- {note}" for note in notes)])


def kills_table() -> str:
    data = load("kills")
    lines = [
        "| | trials | resumed from a good one | ended bit-identical | good checkpoints lost | bad ones loaded |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, part in data["parts"].items():
        resumed = f"{part['resumed_good']} of {part['resumes']}" if part["resumes"] else "-"
        ends = f"{part['identical']} of {part['ends']}" if part["ends"] else "-"
        lines.append(f"| {name} | {part['trials']} | {resumed} | {ends} | {part['lost']} | {part['bad_loads']} |")
    details = data["parts"]["killed"]["details"]
    inside, writer = (sum(n for what, n in details.items() if what.startswith(how)) for how in ("inside", "only the writer"))
    apart = f"{writer} more times only the process that writes was killed, and the run went on; " if writer else ""
    lines += [
        "",
        f"`make campaign`, {data['seconds']} s. SIGKILL at random moments and, {inside} times, inside an operation (resuming, "
        f"saving, promoting, rotating, deleting, going back); {apart}files cut, emptied, exchanged, with a flipped bit; a full "
        "tmpfs, a file-size limit, a folder that vanishes. The end is compared with an undisturbed run over the same data. "
        f"torch {data['torch']}, {data['date']}.",
    ]
    return "\n".join(lines)


def trainer_kills_table() -> str:
    data = load("trainer_kills")
    lines = [
        "| a Trainer that gets | times | newest folder left partial | resumed from the newest whole one | ended bit-identical "
        "| steps taken again |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, part in data["parts"].items():
        resumed, ends = f"{part['resumed_good']} of {part['resumes']}", f"{part['identical']} of {part['ends']}"
        lines.append(f"| {name} | {part['trials']} | {part['partial']} | {resumed} | {ends} | {part['steps_lost']} |")
    inside = sum(part["details"].get("inside a save", 0) for part in data["parts"].values())
    lines += [
        "",
        f"`python -m zoo.kills.trainer`, {data['seconds']} s. {inside} of the kills struck inside a save, after one of its files "
        "or in the middle of one. The end is compared with an undisturbed run: weights, optimizer and schedule. "
        f"transformers' Trainer on CPU, torch {data['torch']}, {data['date']}.",
    ]
    return "\n".join(lines)


def interrupts_table() -> str:
    data = load("interrupts")
    lines = ["| interrupted | whole afterwards |", "|---|---:|"]
    lines += [f"| {name} | {whole} of {struck} |" for name, (whole, struck) in data["by_kind"].items()]
    lines += [
        f"| **all** | **{data['whole']} of {data['interrupts']}** |",
        "",
        f"The longest an interrupt waited was {1000 * data['slowest_s']:.0f} ms. The version before this held for "
        f"{data['first']['whole']} of {data['first']['interrupts']}. torch {data['torch']}, {data['date']}.",
    ]
    return "\n".join(lines)


def poison_table() -> str:
    data = load("poison")
    lines = [
        "| overwritten mid-run with NaN or Inf | runs | found and gone back | final loss within the spread | bit-identical |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, row in data["rows"].items():
        lines.append(f"| {name} | {row['runs']} | {row['found']} | {row['within the spread']} | {row['bit-identical']} |")
    low, high = data["spread"]
    lines += [
        "",
        f"The spread is that of {data['seeds']} undisturbed seeds, {low:.4f} to {high:.4f}. "
        f"torch {data['torch']}, {data['date']}.",
    ]
    return "\n".join(lines)


def trainer_table() -> str:
    """The Trainer with and without protection."""
    lines = [
        "| | the Trainer's step as it comes | protected, ratio (middle half of rounds) | host waits in 10 steps, without, with |",
        "|---|---:|---:|---:|",
    ]
    facts = []
    for name in ("trainer_gpu", "trainer_cpu"):
        data = load(name)
        short = "H200, bf16" if "H200" in data["device"] else "CPU"
        for found in (data[job] for job in sorted(data) if isinstance(data[job], dict)):
            plain, ours = found["rows"]["Trainer as it comes"], found["rows"]["protected"]
            batch = " × ".join(map(str, found["batch"]))
            waits = "" if short == "CPU" else f"{plain['syncs in 10 steps']}, {ours['syncs in 10 steps']}"
            size = f"{found['parameters'] / 1e6:.0f} M Llama, {batch}, accumulation {found['accumulation']}"
            ratio = f"{ours['ratio']:.3f} ({ours['low']:.3f} to {ours['high']:.3f})"
            lines.append(f"| {short}, {size} | {plain['ms']:.0f} ms | {ratio} | {waits} |")
        facts.append(f"{data['device']}, torch {data['torch']}, {data['date']}")
    return "\n".join([*lines, "", "; ".join(facts) + ". Medians of alternating runs; `benchmarks/trainer.py`."])


def units_table() -> str:
    """The recipe's arms, as they were measured on the real model."""
    from nanproof_recipes.comparison.comparison import Comparison

    data = load("units_sft_h200")
    found = Comparison.from_json(data["comparison"])
    same = all(first == second for first, second in data["twice"].values())
    lines = [found.table(), ""]
    lines += [f"- {column.title}: {column.note}" for column in found.columns if column.note]
    lines += ["", "What this was to show:", ""]
    lines += [f"- {'Seen' if c.holds else '**Not seen**'}: {c.claim}. Measured: {c.measured}." for c in found.checks]
    lines += ["", f"{data['notes']} `fixed`, run twice with one seed: {'the same to the last digit' if same else 'different'}."]
    return "\n".join(lines)


def units_search() -> str:
    data = load("units_sft_search")
    lines = ["| answer | digits | learning rate | batch | accuracy | answer rate |", "|---|---:|---:|---:|---:|---:|"]
    for row in data["rows"]:
        numbers = f"{row['digits']} | {row['lr']:g} | {row['batch']} | {row['accuracy']:.3f} | {row['answer_rate']:.3f}"
        lines.append(f"| {row['form']} | {numbers} |")
    return "\n".join([*lines, "", f"{data['notes']} {data['device']}, torch {data['torch']}, {data['date']}."])


def units_line() -> str:
    data = load("units_sft_h200")
    arms = {arm["name"]: arm["values"] for arm in data["comparison"]["arms"]}
    said = ", ".join(
        f"`{name}` {arms[name]['accuracy']:.3f}"
        for name in ("unmodified", "broken", "patched-000", "patched-002", "patched-001", "guarded-tuned", "fixed", "rft")
        if name in arms
    )
    return f"Accuracy on 1,000 held-out questions: {said}."


BLOCKS = {
    **latent_tables.BLOCKS,
    **generation_tables.BLOCKS,
    **vlm_tables.BLOCKS,
    "units-sft": units_table,
    "units-sft-search": units_search,
    "units-sft-line": units_line,
    "trainer": trainer_table,
    "observe-cost": observe_table,
    "forecast": forecast_table,
    "observe": observe_line,
    "cost": cost_table,
    "costs": cost_tables.costs,
    "campaign": campaign_line,
    "zoo": zoo_summary,
    "cases": zoo_cases,
    "explain": explain_table,
    "bad step": bad_step_table,
    "causes": causes_table,
    "scan": scan_table,
    "doctor": doctor_table,
    "doctor formats": doctor_tables.formats,
    "doctor findings": doctor_tables.findings,
    "doctor held out": doctor_tables.held_out,
    "heal": heal_table,
    "healed": heal_line,
    "recovery": recovery_table,
    "kills": kills_table,
    "trainer kills": trainer_kills_table,
    "interrupts": interrupts_table,
    "lines": program_tables.lines_cost,
    "script": program_tables.script_cost,
    "programs": program_tables.programs,
    "not explained": program_tables.not_explained,
    "poison": poison_table,
}


def filled(text: str) -> str:
    """A document with its measured blocks made anew."""
    for name, make in BLOCKS.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        if re.search(pattern, text, flags=re.DOTALL):
            text = re.sub(pattern, lambda match, make=make: match[1] + make() + "\n" + match[2], text, flags=re.DOTALL)
    return text


def generated() -> dict[Path, str]:
    """Documents that are made as a whole: the pages of causes, the references."""
    from tools import cause_pages, reference_api, reference_cli

    return {**cause_pages.pages(), reference_api.PAGE: reference_api.page(), reference_cli.PAGE: reference_cli.page()}


def fill_documents() -> None:
    documents = {path: filled(path.read_text()) for path in (README, *sorted((README.parent / "docs").rglob("*.md")))}
    for path, new in {**documents, **generated()}.items():
        if not path.exists() or path.read_text() != new:
            path.parent.mkdir(exist_ok=True)
            path.write_text(new)
            print(f"written to {path.relative_to(README.parent)}")


if __name__ == "__main__":
    fill_documents()
