"""Names: the .pxd, the function table, the stubs' subject and the docs agree."""

import inspect
import re
from importlib.resources import files

import pytest

import cuckpt
from cuckpt import driver, errors, structs

SOURCE = files(cuckpt)
FUNCTIONS = [
    name for name in driver.__all__ if inspect.isroutine(getattr(driver, name))
]
STRUCTS = [getattr(structs, name) for name in structs.__all__]


def declared_functions():
    text = (SOURCE / "_driver.pxd").read_text()
    return set(re.findall(r"CUresult (cu\w+)\(", text))


@pytest.mark.parametrize("module", [driver, structs])
def test_dir_shows_the_public_names(module):
    dtypes = {name for name in dir(module) if name.endswith("_dtype")}
    assert len(dtypes) == 8
    assert set(dir(module)) == {*module.__all__, *dtypes}
    for name in dir(module):
        assert getattr(module, name) is not None


def test_every_c_function_has_a_python_function():
    documented = {
        re.search(r"See Also\n-+\n(cu\w+)", getattr(driver, name).__doc__)[1]
        for name in FUNCTIONS
        if name != "library_path"
    }
    assert {name.removesuffix("_v2") for name in documented} == declared_functions()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_documents_its_parameters(name):
    function = getattr(driver, name)
    for parameter in inspect.signature(function).parameters:
        assert re.search(rf"^{parameter} : ", function.__doc__, re.MULTILINE)


@pytest.mark.parametrize("name", [n for n in FUNCTIONS if n.startswith("checkpoint_")])
def test_checkpoint_function_documents_its_errors(name):
    documentation = getattr(driver, name).__doc__
    raised = re.search(r"Raises\n-+\n(.*?)\n\nSee", documentation, re.DOTALL)[1]
    for line in re.findall(r"^\w.*$", raised, re.MULTILINE):
        for error in line.split(", "):
            assert error in errors.__all__ or error in ("ValueError", "RuntimeError")


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_struct_documents_its_parameters(struct):
    for parameter in inspect.signature(struct).parameters:
        assert re.search(rf"^ +(\w+, )?{parameter}(, \w+)? : ", struct.__doc__, re.M)
    assert f"`CU{struct.__name__[0].lower()}{struct.__name__[1:]}`" in struct.__doc__


def test_driver_module_holds_every_name():
    for module in (errors, structs):
        for name in module.__all__:
            assert getattr(driver, name) is getattr(module, name)
            assert name in driver.__all__


def test_package_lists_its_modules():
    assert cuckpt.driver is driver
    assert set(cuckpt.__all__) <= set(dir(cuckpt))
    with pytest.raises(AttributeError, match="nonsense"):
        cuckpt.nonsense  # noqa: B018
    with pytest.raises(AttributeError, match=r"cuckpt\.driver.*nonsense"):
        driver.nonsense  # noqa: B018


def test_import_loads_no_driver_and_no_third_party_package(python):
    program = """
import sys
before = set(sys.modules)
import cuckpt.driver
own = {name.partition(".")[0] for name in set(sys.modules) - before}
print(own - sys.stdlib_module_names - {"cuckpt", "cython_runtime"})
print("libcuda" in open("/proc/self/maps").read())
"""
    new, loaded = python(program).stdout.split("\n")[:2]
    assert {name for name in eval(new) if not name.startswith("_cython")} == set()
    assert loaded == "False"
