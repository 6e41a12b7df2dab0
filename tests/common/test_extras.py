"""Optional dependencies: imported in one place, with an error that names the extra."""

import importlib.util
import sys

import pytest

from sparsify.common.extras import import_after, require
from sparsify.errors import SparsifyError


def test_a_missing_module_is_an_error_that_names_the_extra():
    with pytest.raises(SparsifyError, match=r"`no_such_thing` is not .* 'sparsify-ft\[plot\]'"):
        require("no_such_thing.inside", extra="plot")


def test_what_a_module_itself_lacks_is_not_blamed_on_the_extra(tmp_path, monkeypatch):
    (tmp_path / "module_with_a_broken_import.py").write_text("import no_such_thing\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_thing"):
        require("module_with_a_broken_import", extra="demo")


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Writes modules that can be imported; a finder that waits for one is gone after the test."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    return lambda **sources: [(tmp_path / f"{name}.py").write_text(source) for name, source in sources.items()]


def test_a_module_is_imported_right_after_another_one_and_not_when_that_is_looked_for(modules):
    modules(
        first_of_two="import sys\nassert 'second_of_two' not in sys.modules\nvalue = 3\n",
        second_of_two="import first_of_two\nassert first_of_two.value == 3\n",
    )
    import_after("first_of_two", "second_of_two")
    assert importlib.util.find_spec("first_of_two") is not None
    assert "second_of_two" not in sys.modules
    importlib.import_module("first_of_two")
    assert "second_of_two" in sys.modules


def test_a_module_is_imported_though_what_follows_it_cannot_be(modules):
    modules(before_a_broken_one="", a_broken_one="1 / 0\n")
    import_after("before_a_broken_one", "a_broken_one")
    importlib.import_module("before_a_broken_one")
    assert "a_broken_one" not in sys.modules
    with pytest.raises(ZeroDivisionError):
        importlib.import_module("a_broken_one")
