"""Several servers under the same load, in turns, so that a drifting machine harms none of them more than another.

    python -m benchmarks.compare --runs 3 --row "one=http://127.0.0.1:8000" --row "other=http://127.0.0.1:8001" \
        --concurrency 8 --input-len 256 --output-len 64

All other options are those of `benchmarks.serve`. Every second round goes through the rows backwards. Each run has
its own seed, so no prefix cache has seen its prompts. The table's figures are medians over a row's runs.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

from benchmarks import serve


def parse_row(text: str) -> tuple[str, str]:
    label, found, url = text.partition("=")
    if not found or not label or not url:
        raise argparse.ArgumentTypeError("a row is label=URL")
    return label, url


def figures(report: serve.Report) -> dict[str, float | None]:
    summary = report.summary
    return {
        "ttft_p50_ms": summary.ttft_ms.p50,
        "itl_p50_ms": summary.itl_ms.p50,
        "output_tokens_per_s": summary.output_token_rate,
        "failed": summary.failed,
    }


def medians(reports: Sequence[serve.Report]) -> dict[str, float | None]:
    """Over the runs that have the figure; `failed` is the sum."""
    rows = [figures(report) for report in reports]
    middle: dict[str, float | None] = {}
    for name in rows[0]:
        values = [value for row in rows if (value := row[name]) is not None]
        middle[name] = sum(values) if name == "failed" else median(values) if values else None
    return middle


def markdown(rows: dict[str, dict[str, float | None]]) -> str:
    lines = ["| | TTFT p50, ms | ITL p50, ms | output tokens/s | failed |", "|---|---:|---:|---:|---:|"]
    for label, row in rows.items():
        cells = [
            "-" if value is None else f"{value:.0f}" if name == "failed" else f"{value:.1f}"
            for name, value in row.items()
        ]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


async def compare(rows: Sequence[tuple[str, str]], num_runs: int, rest: Sequence[str]) -> dict[str, list[serve.Report]]:
    """Raises as `serve.measure` does."""
    reports: dict[str, list[serve.Report]] = {label: [] for label, _ in rows}
    num_done = 0
    for run in range(num_runs):
        for label, url in rows if run % 2 == 0 else reversed(rows):
            options = serve.build_parser().parse_args([*rest, "--url", url, "--label", label])
            options.seed += num_done
            num_done += 1
            reports[label].append(await serve.measure(options))
            print(f"run {run + 1}/{num_runs} {label}: {figures(reports[label][-1])}", file=sys.stderr)
    return reports


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--row", type=parse_row, action="append", required=True, metavar="LABEL=URL")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="OUT")
    options, rest = parser.parse_known_args(arguments)
    serve.build_parser().parse_args(rest)
    if options.runs < 1:
        parser.error("--runs is less than 1")
    if len({label for label, _ in options.row}) < len(options.row):
        parser.error("two rows have one label")
    try:
        reports = asyncio.run(compare(options.row, options.runs, rest))
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        print(f"nothing compared: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    rows = {label: medians(runs) for label, runs in reports.items()}
    print(markdown(rows))
    if options.json is not None:
        whole = {"rows": rows, "runs": {label: [asdict(run) for run in runs] for label, runs in reports.items()}}
        options.json.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
    return 1 if any(row["failed"] for row in rows.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
