"""Draw the learning rate of a run over its steps, from the options that train_gpt.py takes.

python examples/gpt/plot_schedule.py --config examples/configs/fineweb_edu_fp8.yaml
python examples/gpt/plot_schedule.py --steps 1000 --warmup-steps 50 --min-lr-ratio 0.1 --picture schedule.png
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script, it sees its own folder only

from fp8stack.errors import ConfigError, Fp8StackError, reason_of
from gpt.config import Config, parse
from gpt.options import Parser
from gpt.schedule import learning_rate


def draw(config: Config, picture: Path) -> list[float]:
    """Write the picture; return the learning rate of each step.

    Raises:
        ConfigError: without matplotlib, for a format that it does not write, or where no file can be written.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("matplotlib"):
            raise
        raise ConfigError(
            'a picture needs the package matplotlib, which is not installed: pip install -e ".[plot]"'
        ) from error
    rates = [learning_rate(config, step) for step in range(config.steps)]
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, config.steps + 1), rates)
    axes.axvline(config.warmup_steps, linestyle=":", color="gray", label="end of the warm-up")
    axes.set(xlabel="step", ylabel="learning rate", ylim=(0, None))
    axes.legend()
    known = figure.canvas.get_supported_filetypes().keys() - {"pgf"}  # which needs TeX
    if picture.suffix.lower().removeprefix(".") not in known:
        endings = ", ".join(f".{kind}" for kind in sorted(known))
        raise ConfigError(f"--picture {picture}: its name must end in one of {endings}.")
    try:
        picture.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(picture)
    except OSError as error:
        in_file = isinstance(error, (FileExistsError, NotADirectoryError))
        reason = f"{picture.parent} is no folder." if in_file else reason_of(error)
        raise ConfigError(
            f"--picture {picture}: cannot be written: {reason} Give a path in a folder that can be written to."
        ) from error
    return rates


def main(argv: list[str] | None = None) -> int:
    parser = Parser(
        usage="plot_schedule.py [-h] [--picture FILE] [options of train_gpt.py]",
        description="Draw the learning rate of a run over its steps.",
        epilog="All other options are those of the run, of which --steps, --max-lr, --min-lr-ratio and --warmup-steps "
        "decide on the rate: python examples/train_gpt.py --help. --out is the run's, too, and not the picture's.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--picture",
        metavar="FILE",
        type=Path,
        default=Path("schedule.png"),
        help="to write, in the format that its name ends in (%(default)s)",
    )
    try:
        own, rest = parser.parse_known_args(argv)
        with warnings.catch_warnings():
            warnings.showwarning = lambda text, *_: print(f"warning: {text}", file=sys.stderr)
            rates = draw(parse(rest), own.picture)
    except Fp8StackError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{own.picture}: from {rates[0]:.2e} over {max(rates):.2e} to {rates[-1]:.2e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
