"""Draw the learning rate of a run over its steps, from the options that train_gpt.py takes.

python examples/gpt/plot_schedule.py --config examples/configs/fineweb_edu_fp8.yaml
python examples/gpt/plot_schedule.py --steps 1000 --warmup-steps 50 --min-lr-ratio 0.1 --picture schedule.png
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script, it sees its own folder only

from fp8stack.errors import ConfigError
from gpt.config import Config, parse
from gpt.schedule import learning_rate


def draw(config: Config, picture: Path) -> list[float]:
    """Write the picture; return the learning rate of each step."""
    from matplotlib.figure import Figure

    rates = [learning_rate(config, step) for step in range(config.steps)]
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, config.steps + 1), rates)
    axes.axvline(config.warmup_steps, linestyle=":", color="gray", label="end of the warm-up")
    axes.set(xlabel="step", ylabel="learning rate", ylim=(0, None))
    axes.legend()
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture)
    return rates


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--picture", type=Path, default=Path("schedule.png"))
    own, rest = parser.parse_known_args(argv)
    try:
        config = parse(rest)
        rates = draw(config, own.picture)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{own.picture}: from {rates[0]:.2e} over {max(rates):.2e} to {rates[-1]:.2e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
