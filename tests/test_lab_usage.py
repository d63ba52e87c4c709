"""What the engines' counts become."""

from pdlab.lab.usage import Usage, usage_from

CORE = {"blocks": 363, "used_blocks": 5, "running": 1, "waiting": 0, "parked": 2, "kept": 1}


def test_of_one_engine_core() -> None:
    usage = usage_from([{**CORE, "sends": 4, "placeholders": 3}])
    assert (usage.blocks, usage.used_blocks, usage.under_way, usage.kept) == (363, 5, 3, 1)
    assert repr(usage) == "<uses 5 of 363 blocks, running 1, parked 2, kept 1, sends 4, placeholders 3>"


def test_of_data_parallel_ranks_together() -> None:
    usage = usage_from([{**CORE, "sends": 4, "placeholders": 3}, CORE])
    assert (usage.blocks, usage.used_blocks, usage.running, usage.sends) == (726, 10, 2, 4)


def test_of_one_that_does_nothing() -> None:
    assert repr(Usage(363, 0)) == "<uses 0 of 363 blocks>"
