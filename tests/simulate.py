"""Run simulations from the command line.

python tests/simulate.py --seeds 10000           # seeds 0 to 9999 on all cores
python tests/simulate.py --seed 1234 --trace     # one, with every message
"""

import multiprocessing
import sys
import time
from collections import Counter

import click
from simulation.simulation import Failed, Simulation


def run(seed: int) -> Counter[str] | str:
    """Run the simulation of `seed`; return its events, or how it failed."""
    try:
        return Simulation(seed).run()
    except Failed as failure:
        return str(failure)


def run_many(first: int, seeds: int) -> int:
    started, totals = time.monotonic(), Counter[str]()
    with multiprocessing.Pool() as pool:
        for done, outcome in enumerate(pool.imap(run, range(first, first + seeds), chunksize=4), 1):
            if isinstance(outcome, str):
                click.echo(f"\n{outcome}", err=True)
                return 1
            totals.update(outcome)
            if done % 20 == 0 or done == seeds:
                click.echo(f"\r{done} of {seeds} seeds, {time.monotonic() - started:.0f} s", nl=False, err=True)
    click.echo(err=True)
    show(totals)
    return 0


def show(events: Counter[str]) -> None:
    for name, number in sorted(events.items()):
        click.echo(f"{number:12,}  {name}")


@click.command()
@click.option("--seeds", default=300, show_default=True, help="Number of seeds.")
@click.option("--first", default=0, show_default=True, help="The first seed.")
@click.option("--seed", type=int, help="Run only this seed.")
@click.option("--trace", is_flag=True, help="With --seed: print every message and event.")
def main(seeds: int, first: int, seed: int | None, trace: bool) -> None:
    """Simulate brokers, workers and clients under every kind of fault."""
    if seed is None:
        sys.exit(run_many(first, seeds))
    try:
        show(Simulation(seed, click.echo if trace else None).run())
    except Failed as failure:
        click.echo(failure, err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
