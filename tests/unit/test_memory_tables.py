"""docs/memory.md says what the code computes, and its tables' plans are plans that fit."""

import pytest

from megatron_gptoss.config.fit import fits
from megatron_gptoss.config.layout import world_size
from megatron_gptoss.config.load import Loaded, load
from megatron_gptoss.config.rules import broken_rules
from tools.plan_memory import BEGIN, DOCUMENT, END, LENGTHS, NODES, ROOM, search, tables


def test_the_committed_tables_are_those_of_the_code():
    text = DOCUMENT.read_text()
    written = text.split(BEGIN)[1].split(END)[0]
    assert written == tables(), "run: python tools/plan_memory.py --write"


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_plan_of_the_tables_uses_all_gpus_breaks_no_rule_and_leaves_room(nodes, length):
    found = search(nodes, length)
    assert found is not None and world_size(found.config) == 8 * nodes
    assert broken_rules(Loaded(found.config, load().origins)) == [] and fits(found.config)
    assert found.rank.total <= ROOM * 139.8 * 2**30
    assert found.config.trainer.tokens_per_microbatch >= length
