"""Ctrl-C waits while the shield is down; a request to stop is noted."""

import os
import signal
import threading

import pytest

from nanproof.core.support._signals import INSISTED, Preemption, shield, shielded


@pytest.fixture(autouse=True)
def _handlers():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def interrupt():
    signal.raise_signal(signal.SIGINT)


def test_an_interrupt_waits_for_the_end():
    done = []
    with pytest.raises(KeyboardInterrupt), shield:
        interrupt()
        assert shield.pending
        done.append(1)
    assert done == [1] and not shield.pending
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_waits_for_the_outermost_end():
    done = []
    with pytest.raises(KeyboardInterrupt), shield:
        with shield:
            interrupt()
        done.append(1)
    assert done == [1]


def test_a_lifted_shield_lets_an_interrupt_through_at_once():
    done = []
    with pytest.raises(KeyboardInterrupt), shield:
        with shield.lifted():
            interrupt()
            done.append(1)
    assert done == []


def test_an_interrupt_that_waits_is_raised_where_the_shield_is_lifted():
    done = []
    with pytest.raises(KeyboardInterrupt), shield:
        interrupt()
        with shield.lifted():
            done.append(1)
    assert done == []


def test_what_undoes_an_interrupted_step_is_not_interrupted():
    undone = []
    with pytest.raises(KeyboardInterrupt), shield:
        try:
            with shield.lifted():
                interrupt()
        finally:
            interrupt()
            undone.append(1)
    assert undone == [1]


def test_a_second_interrupt_does_not_break_off_the_users_own_cleaning_up():
    cleaned = []
    with pytest.raises(KeyboardInterrupt), shield:
        with shield.lifted():
            try:
                interrupt()
            finally:
                interrupt()
                cleaned.append(1)
    assert cleaned == [1]


def test_a_shield_inside_user_code_holds():
    done = []
    with pytest.raises(KeyboardInterrupt), shield, shield.lifted():
        with shield:
            interrupt()
            done.append(1)
        done.append(2)
    assert done == [1]


def test_somebody_who_insists_is_heard():
    count = 0
    with pytest.raises(KeyboardInterrupt), shield:
        while count < 10:
            count += 1
            interrupt()
    assert count == INSISTED


def test_an_earlier_interrupt_is_not_raised_twice():
    with pytest.raises(KeyboardInterrupt), shield:
        interrupt()
    with shield, shield.lifted():
        pass


def test_the_programs_own_handler_is_called():
    calls = []
    signal.signal(signal.SIGINT, lambda number, frame: calls.append(frame.f_code.co_name))
    with shield:
        with shield.lifted():
            interrupt()
            interrupt()  # the handler did not raise: the shield is lifted still
        assert len(calls) == 2
        interrupt()
        assert len(calls) == 2
    assert len(calls) == 3 and calls[2] == "test_the_programs_own_handler_is_called"


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_an_ignored_signal_stays_ignored(handler):
    signal.signal(signal.SIGINT, handler)
    with shield:
        assert signal.getsignal(signal.SIGINT) == handler


def test_other_threads_change_no_handler():
    seen = []

    @shielded
    def work():
        with shield.lifted():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


def test_a_request_is_noted_and_the_handlers_come_back():
    preemption = Preemption(7)
    signal.raise_signal(signal.SIGUSR1)
    assert preemption.requested == "SIGUSR1" and preemption.listens
    with pytest.raises(SystemExit) as left:
        preemption.leave()
    assert left.value.code == 7
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGUSR1])
def test_a_second_request_ends_the_process_at_once(second):
    child = os.fork()
    if not child:
        Preemption()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), second)
        os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -second


def test_a_forked_worker_ends_at_sigterm_and_serves_on_at_sigusr1():
    preemption = Preemption()
    for number, expected in ((signal.SIGUSR1, 5), (signal.SIGTERM, -signal.SIGTERM)):
        child = os.fork()
        if not child:
            os.kill(os.getpid(), number)
            os._exit(5)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == expected
    assert preemption.requested == ""
    preemption.close()
