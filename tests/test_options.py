"""The table of options: a row each, with a default that may be given, and a refusal for the rest"""
import pytest

from cpkv.laws import InputError
from cpkv.options import MOST, OPTIONS, check_together, check_value

IDS = [f"{o.command} {o.said}" for o in OPTIONS]

def test_no_option_stands_twice_and_each_says_what_it_is():
    keys = [(o.command, o.key) for o in OPTIONS]
    assert len(set(keys)) == len(keys) and all(o.help and (o.unset or o.default is not None) for o in OPTIONS)

@pytest.mark.parametrize("o", OPTIONS, ids=IDS)
def test_defaults_and_choices_are_taken_and_what_comes_later_is_not(o):
    for value in (o.default, *o.choices): check_value(o, value)
    for value in o.later if isinstance(o.later, dict) else ("1",) if o.later else ():
        with pytest.raises(InputError, match="comes with"): check_value(o, value)

@pytest.mark.parametrize("o", [o for o in OPTIONS if o.kind is int and not o.later], ids=str)
def test_numbers_have_two_ends(o):
    for value in (o.least, MOST): check_value(o, value)
    for value in (o.least - 1, MOST + 1):
        with pytest.raises(InputError, match="must be at"): check_value(o, value)

@pytest.mark.parametrize("given,config,path", [({"seed", "model"}, {}, None), (set(), {"file": "a/../b"}, "b")])
def test_options_that_contradict_each_other(given, config, path):
    with pytest.raises(InputError): check_together(given, config, path)
    check_together(given - {"seed"}, config, path and path + "2")
