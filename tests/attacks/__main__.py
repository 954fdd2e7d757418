"""Attack a broker, a gateway and a dashboard in every way there is: do they live, serve and keep to their limits?

cd tests && python -m attacks                              # all attacks
cd tests && python -m attacks --amount 1000 tiny-frames    # one of them, small
"""

import json
import sys

import click

from .harness import Outcome, carry_out
from .suite import ATTACKS

HEAD = f"{'attack':30}{'messages':>10}{'seconds':>9}{'peak MB':>9}{'bound':>7}{'calls':>8}{'worst ms':>10}"


def row(outcome: Outcome) -> str:
    """Return a line of the table."""
    text = (
        f"{outcome.attack:30}{outcome.messages:10,}{outcome.seconds:9.1f}{outcome.peak_mb:9.0f}{outcome.bound_mb:7.0f}"
        f"{outcome.calls:8,}{outcome.worst_ms:10.0f}"
    )
    if outcome.exit_seconds is not None:
        text += f"  ended {outcome.exit_seconds:g} s after SIGTERM"
    if outcome.cut_short is not None:
        text += f"  cut short: {outcome.cut_short}"
    return "\n".join([text, *(f"    FAILED: {each}" for each in outcome.failures)])


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(ATTACKS)), metavar="[ATTACK]...")
@click.option("--amount", default=50_000, show_default=True, help="Messages of an attack, roughly.")
@click.option("--seed", default=1, show_default=True, help="Seed of what is random.")
@click.option("--json", "as_json", is_flag=True, help="Print the outcomes as JSON.")
def main(names: tuple[str, ...], amount: int, seed: int, as_json: bool) -> None:
    """Attack a broker with each ATTACK, by default with all of them."""
    outcomes = []
    click.echo(HEAD, err=as_json)
    for name in names or ATTACKS:
        outcomes.append(carry_out(ATTACKS[name], amount, seed))
        click.echo(row(outcomes[-1]), err=as_json)
    failed = [each.attack for each in outcomes if each.failures]
    total, calls = sum(each.messages for each in outcomes), sum(each.calls for each in outcomes)
    click.echo(f"{total:,} messages, {calls:,} calls of the canary; failed: {', '.join(failed) or 'none'}", err=as_json)
    if as_json:
        click.echo(json.dumps([outcome.as_dict() for outcome in outcomes], indent=1, ensure_ascii=False))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
