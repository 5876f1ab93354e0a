"""Arbitrary values into everything public: an error that says why, or a result.

Addresses are left out: they are trusted. The do-nothing driver would show a call
that should not have been made.
"""

import inspect
import uuid

import pytest
from hypothesis import given, strategies as st

from cuckpt import driver, errors, hints, structs, uuids

# Hypothesis takes a minute for what four threads draw at once.
pytestmark = pytest.mark.thread_unsafe(reason="hypothesis")

EXPECTED = (TypeError, ValueError, OverflowError, BufferError, driver.DriverError)
CLASSES = [getattr(structs, name) for name in structs.__all__]
ADDRESSES = {"gpu_pairs", "custom_storage_info_out", "ptr", "args", "handle"}

numbers = st.integers() | st.integers(-(2**33), 2**33) | st.booleans()
uuid_like = (
    st.binary(max_size=33)
    | st.text(max_size=40)
    | st.uuids()
    | st.uuids().map(lambda u: f"GPU-{u}")
    | st.uuids().map(lambda u: u.bytes)
)
not_integers = (
    st.none()
    | st.floats()
    | st.complex_numbers()
    | uuid_like
    | st.binary(min_size=60, max_size=70).map(bytearray)
    | st.lists(uuid_like, max_size=3)
    | st.lists(st.tuples(uuid_like, uuid_like), max_size=3)
    | st.dictionaries(st.text(max_size=2), st.none(), max_size=2)
    | st.sampled_from(CLASSES)
    | st.sampled_from(CLASSES).map(lambda cls: cls())
    | st.sampled_from([object(), type, len, NotImplemented, ...])
)
anything = not_integers | numbers


def tried(function, *arguments, **keywords):
    """Call; any error must be of an expected class and have a text."""
    try:
        return function(*arguments, **keywords)
    except EXPECTED as error:
        assert str(error)
        return None


FUNCTIONS = [
    (name, list(inspect.signature(getattr(driver, name)).parameters))
    for name in driver.__all__
    if inspect.isroutine(getattr(driver, name))
]


@pytest.mark.parametrize(
    ("name", "parameters"), FUNCTIONS, ids=[n for n, _ in FUNCTIONS]
)
@given(data=st.data())
def test_functions(name, parameters, data):
    values = {
        parameter: data.draw(not_integers if parameter in ADDRESSES else anything)
        for parameter in parameters
    }
    tried(getattr(driver, name), **values)
    tried(getattr(driver, name), *data.draw(st.lists(not_integers, max_size=3)))


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
@given(data=st.data())
def test_struct_classes(cls, data):
    parameters = list(inspect.signature(cls).parameters)
    keywords = {
        name: data.draw(not_integers if name in ADDRESSES else anything)
        for name in data.draw(
            st.lists(st.sampled_from([*parameters, "x"]), unique=True)
        )
    }
    made = tried(cls, **keywords) or cls()
    tried(cls, *data.draw(st.lists(not_integers, max_size=3)))
    tried(cls.from_buffer, data.draw(not_integers))
    tried(cls.from_data, data.draw(anything))
    tried(cls.from_ptr, data.draw(not_integers), data.draw(anything))
    size = len(bytes(made))
    view = cls.from_buffer(bytearray(size))
    for target in made, view, cls.from_buffer(bytes(size)):
        for name in dir(target):
            if not name.startswith("__"):
                strategy = not_integers if name in ADDRESSES else anything
                try:
                    setattr(target, name, data.draw(strategy))
                except (*EXPECTED, AttributeError) as error:
                    assert str(error)
        tried(target.__init__, **keywords)
        assert len(bytes(target)) == size
        assert target == target.__copy__()
        repr(target)


@given(anything)
def test_uuids(value):
    content = tried(uuids.to_bytes, value)
    assert content is None or len(content) == 16
    if isinstance(value, uuid.UUID):
        assert content == value.bytes


@given(
    st.integers(),
    st.none() | st.sampled_from(["cuCheckpointProcessLock", "cuInit", "x"]),
    st.none() | st.integers() | st.sampled_from([0, 1, -1]),
)
def test_errors_and_hints(status, call, pid):
    error = errors.driver_error(status, call, pid)
    assert isinstance(error, driver.DriverError)
    assert error.status == status
    assert str(error).startswith(error.args[0])
    assert hints.explain("text", status, call, pid).startswith("text")
