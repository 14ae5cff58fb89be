"""The tests' own limits must hold, or tests under them prove nothing."""


def test_a_call_returns_its_value(limits):
    outcome = limits.call("os.path:join", "a", "b")
    assert outcome.value == "a/b" and outcome.error == ""


def test_an_exception_is_reported(limits):
    assert limits.call("json:loads", "{").error.startswith("JSONDecodeError")


def test_a_call_that_hangs_is_ended(limits):
    assert limits.call("time:sleep", 60, seconds=0.3).error == "took more than 0.3 seconds"


def test_memory_is_measured(limits):
    outcome = limits.call("builtins:bytearray", 40 << 20, mebibytes=20)
    assert outcome.error.startswith("took") and "MiB" in outcome.error
    outcome = limits.call("test_limits:touched", 40 << 20)
    assert outcome.error == "" and 30 < outcome.mebibytes < 60


def touched(count):
    return len(b"x" * count)
