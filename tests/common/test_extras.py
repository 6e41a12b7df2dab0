"""Optional dependencies: imported in one place, with an error that names the extra."""

import pytest

from sparsify.common.extras import MissingExtraError, require


def test_a_missing_module_is_an_error_that_names_the_extra():
    with pytest.raises(MissingExtraError, match=r"`no_such_thing` is not .* 'sparsify-ft\[plot\]'") as error:
        require("no_such_thing.inside", extra="plot")
    assert error.value.name == "no_such_thing"


def test_what_a_module_itself_lacks_is_not_blamed_on_the_extra(tmp_path, monkeypatch):
    (tmp_path / "module_with_a_broken_import.py").write_text("import no_such_thing\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_thing") as error:
        require("module_with_a_broken_import", extra="demo")
    assert not isinstance(error.value, MissingExtraError)
