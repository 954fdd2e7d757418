"""`mdworker`, what it does within a signal's handler."""

from zmdp.workers import cli


class Stopped:
    def __init__(self):
        self.stops = 0

    def stop(self):
        self.stops += 1


def test_a_signal_that_comes_while_the_log_is_written_ends_the_worker(monkeypatch):
    def reentrant(*_):
        raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stderr>'>")

    monkeypatch.setattr(cli.log, "info", reentrant)
    worker = Stopped()
    cli._Stopper(worker, alone=True).stop()
    assert worker.stops == 1
