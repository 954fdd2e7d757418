"""Run simulations from the command line.

python tests/simulate.py --seeds 10000           # seeds 0 to 9999 on all cores
python tests/simulate.py --seed 1234 --trace     # one, with every message
python tests/simulate.py --brokers mesh5         # five brokers that are linked to one another, instead of one
"""

import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

import click
from simulation.scenario import Failed, Scenario
from simulation.simulation import Simulation
from simulation.topologies import TOPOLOGIES, LinkedSimulation


def made(brokers: str | None, seed: int, trace: Callable[[str], None] | None = None) -> Scenario:
    """Return the simulation of `seed`, of one broker or of several."""
    return Simulation(seed, trace) if brokers is None else LinkedSimulation(brokers, seed, trace)


def run(brokers: str | None, seed: int) -> Counter[str] | str:
    """Run the simulation of `seed`; return its events, or how it failed."""
    try:
        return made(brokers, seed).run()
    except Failed as failure:
        return str(failure)


def run_many(brokers: str | None, first: int, seeds: int) -> int:
    started, totals = time.monotonic(), Counter[str]()
    with multiprocessing.Pool() as pool:
        for done, outcome in enumerate(pool.imap(partial(run, brokers), range(first, first + seeds), chunksize=4), 1):
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
@click.option("--brokers", type=click.Choice(TOPOLOGIES), help="Simulate several brokers, linked like this.")
def main(seeds: int, first: int, seed: int | None, trace: bool, brokers: str | None) -> None:
    """Simulate brokers, workers and clients under every kind of fault."""
    if seed is None:
        sys.exit(run_many(brokers, first, seeds))
    try:
        show(made(brokers, seed, click.echo if trace else None).run())
    except Failed as failure:
        click.echo(failure, err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
